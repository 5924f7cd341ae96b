"""Serve a policy by OpenAI's HTTP API.

    dapo-jax serve FOLDER --http_port=8000
    dapo-jax serve runs/arithmetic_dapo
    dapo-jax serve --tinker --model=FOLDER

serves a model folder, or the newest checkpoint of a run, which it exports into the run once. The
server uses the engine that samples in training. With --tinker it also trains: it answers Tinker's
SDK. After SIGTERM or Ctrl-C, running requests finish, and the exit code is 0.
"""

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from dapo_jax.commands import command_line
from dapo_jax.config.experiment import Compute
from dapo_jax.extras.serve.access import Access, bind, exposure_warning
from dapo_jax.extras.serve.settings import ServeConfig
from dapo_jax.run import checks
from dapo_jax.runtime import processes
from dapo_jax.runtime.keys import read_key
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.models import model_path


class Limits(NamedTuple):
    """Maximum tokens of a prompt, of a response, and of both together."""

    longest_prompt: int
    max_response_tokens: int
    context: int


class ServedPolicy(NamedTuple):
    """Engine, decoding weights and tokenizer of a model folder."""

    engine: Any
    params: Any
    tokenizer: Any
    limits: Limits

    def scheduler(self, config: ServeConfig) -> Any:
        """Return a scheduler that has begun, with the config's rule as the default."""
        from dapo_jax.rollout.sampling import SAMPLE_FOR_SERVING
        from dapo_jax.rollout.scheduler import Scheduler
        from dapo_jax.types.structs import RolloutKey

        scheduler = Scheduler(self.engine, self.tokenizer, config.seed)
        key = RolloutKey(SAMPLE_FOR_SERVING)
        scheduler.open(self.params, key, rule_of(config), rule_per_slot=True)
        return scheduler


def rule_of(config: ServeConfig) -> Any:
    """Return the sampling rule of requests that bring none."""
    from dapo_jax.types.structs import SamplingRule

    return SamplingRule(config.temperature, config.top_p, config.top_k)


class ModelFolder(NamedTuple):
    """Model folder without its weights, and the config with numeric budgets for it.

    Attributes:
        context: maximum tokens of a prompt and its response together.
    """

    config: ServeConfig
    mesh: Any
    decoder: Any
    tokenizer: Any
    context: int


def open_folder(config: ServeConfig, row_tokens: int | None = None) -> ModelFolder:
    """Read a model folder. Raise `ConfigError` if it can't be served, or trained in such rows."""
    from dapo_jax.data.prompts.tokenizer import Tokenizer
    from dapo_jax.extras.serve import budgets
    from dapo_jax.model import load_huggingface
    from dapo_jax.run.build import check_divisible, mesh_sizes, numerics
    from dapo_jax.runtime.sharding import make_mesh

    mesh = make_mesh(**mesh_sizes(config.mesh), devices=None)
    compute = Compute(dtype=config.dtype)
    numbers = numerics(compute, mesh, row_tokens)
    decoder = load_huggingface.read_config(config.model, field="model", **numbers)
    check_divisible(decoder, mesh)
    tokenizer = Tokenizer.from_folder(config.model, "model")
    tokenizer.check_fits(decoder.vocab, "model", config.model)
    config, context = budgets.resolve(config, decoder, mesh)
    budgets.check_slots_fit(config, decoder, mesh)
    return ModelFolder(config, mesh, decoder, tokenizer, context)


def load_served(config: ServeConfig) -> ServedPolicy:
    """Load a model folder. Raise `ConfigError` if it can't be served."""
    from dapo_jax.extras.serve import budgets
    from dapo_jax.model import load_huggingface
    from dapo_jax.rollout.engine import PolicyEngine

    config, mesh, decoder, tokenizer, context = open_folder(config)
    engine = PolicyEngine(
        decoder,
        mesh,
        budgets.sampler_settings(config),
        max_prompt_tokens=budgets.prefill_tokens(config.max_prompt_tokens),
        end_ids=tokenizer.end_ids,
    )
    limits = Limits(config.max_prompt_tokens, config.max_response_tokens, context)
    params = load_huggingface.load_params(config.model, decoder, mesh, field="model", cast=True)
    return ServedPolicy(engine, engine.load_params(params), tokenizer, limits)


def warm_up(policy: ServedPolicy, config: ServeConfig) -> None:
    """Compile the programs for prompts up to `FIRST_TOKENS`."""
    import numpy as np

    from dapo_jax.extras.serve.budgets import FIRST_TOKENS, PREFILL_TOKENS
    from dapo_jax.types.structs import Prompt

    scheduler = policy.scheduler(config)
    longest = min(policy.engine.max_prefill_length, FIRST_TOKENS)
    for length in (tokens for tokens in PREFILL_TOKENS if tokens <= longest):
        prompt = Prompt(0, "", "", np.zeros(length, np.int32), "", "")
        scheduler.submit(prompt, [0], budget=1)
        while not scheduler.idle:
            scheduler.step()


def served_name(config: ServeConfig) -> str:
    """Return the model's name for clients."""
    folder = os.path.abspath(model_path(config.model, "model"))
    return config.served_name or os.path.basename(folder)


async def _answer_requests(
    config: ServeConfig,
    policy: ServedPolicy,
    key: str,
    should_stop: Callable[[], bool],
    ready: Callable[[int], None],
) -> str:
    """Answer requests until `should_stop()`; return the failure of the generator, or empty."""
    from dapo_jax.extras.serve.app import HttpApi, run_app
    from dapo_jax.extras.serve.generator import Generator
    from dapo_jax.extras.serve.logprobs import Scorer
    from dapo_jax.extras.serve.requests import ServedModel

    engine, params, tokenizer, limits = policy
    model = ServedModel(served_name(config), config, limits, tokenizer, rule_of(config))
    slots = engine.max_concurrent_decodes
    generator = Generator(lambda: policy.scheduler(config), slots, config.waiting)
    api = HttpApi(generator, Scorer(engine.config, params), model, Access(config, key))
    return await run_app(api, generator, config, should_stop, ready)


def serve(
    config: ServeConfig, *, should_stop: Callable[[], bool], ready: Callable[[int], None]
) -> str:
    """Serve until `should_stop()`; call `ready` with the HTTP port once it answers.

    Returns the failure of the thread that samples, or empty.
    """
    bind(config).close()  # report a taken port before the model is loaded
    key = read_key(config.api_key_file, "api_key_file")
    if warning := exposure_warning(config, key):
        processes.print_error(warning)
    from dapo_jax.run.export import newest_export

    folder = newest_export(config.model, "model")
    config = dataclasses.replace(config, model=folder, served_name=served_name(config))
    if config.tinker:
        from dapo_jax.extras.tinker.app import serve_tinker

        return serve_tinker(config, key, should_stop, ready)
    policy = load_served(config)
    slots = policy[0].max_concurrent_decodes
    processes.print_error(f"compiling for {slots} slots: seconds for a small model, else minutes")
    warm_up(policy, config)
    return asyncio.run(_answer_requests(config, policy, key, should_stop, ready))


def main() -> int:
    """Run the command; exit code 0: stopped by a signal, 1: it failed, 2: wrong settings."""
    config = command_line.load(ServeConfig, __doc__)
    started = time.time()

    def ready(port: int) -> None:
        url = f"http://{config.host}:{port}"
        api = f"Tinker's API on {url}" if config.tinker else f"HTTP on {url}/v1"
        print(f"serving {served_name(config)}: {api} ({time.time() - started:.0f} s)", flush=True)

    def work() -> int:
        if failure := serve(config, should_stop=signals, ready=ready):
            processes.print_error(f"stopped: {failure}")
        return int(bool(failure))

    with processes.as_command(), Signals() as signals:
        return checks.guarded(work)

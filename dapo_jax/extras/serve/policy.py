"""The served policy: a model folder's token budgets, engine, decoding weights and tokenizer."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config.experiment import Compute, Sampler
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.extras.serve.settings import AUTO, ServeConfig
from dapo_jax.model import load_huggingface
from dapo_jax.model.config_json import text_part
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.requests import MIN_BUCKET_TOKENS
from dapo_jax.rollout.sampling import SAMPLE_FOR_SERVING
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.run import memory
from dapo_jax.run.build import check_divisible, mesh_sizes, numerics
from dapo_jax.runtime.sharding import make_mesh
from dapo_jax.runtime.storage.models import model_path
from dapo_jax.runtime.text_files import read_json
from dapo_jax.types.errors import require
from dapo_jax.types.structs import Prompt, RolloutKey, SamplingRule

BUDGETS = ("max_prompt_tokens", "max_response_tokens")
DEFAULT_CONTEXT = 2048  # if config.json does not give the context
MAX_CONTEXT = 32_768  # that 'auto' budgets fill
# Initial size of a cache window, doubled if a request needs more. Longer prompts are prefilled in
# chunks of this size, and compile when the first one arrives.
FIRST_TOKENS = 512
BURST_TOKENS = 4  # decode steps between two looks at the queue
AUTO_MEMORY_FRACTION = 0.5  # of device memory that 'auto' fills with weights and caches


class Limits(NamedTuple):
    """Maximum tokens of a prompt, of a response, and of both together."""

    longest_prompt: int
    max_response_tokens: int
    context: int


class ModelFolder(NamedTuple):
    """Model folder without its weights, and the config with numeric budgets for it."""

    config: ServeConfig
    mesh: Any
    decoder: Any
    tokenizer: Tokenizer
    limits: Limits


class ServedPolicy(NamedTuple):
    """Engine, decoding weights and tokenizer of a model folder."""

    engine: PolicyEngine
    params: Any
    tokenizer: Tokenizer
    limits: Limits

    def scheduler(self, config: ServeConfig) -> Scheduler:
        """Return a scheduler that has begun, with the config's rule as the default."""
        scheduler = Scheduler(self.engine, self.tokenizer, config.seed)
        rule = SamplingRule(config.temperature, config.top_p, config.top_k)
        scheduler.open(self.params, RolloutKey(SAMPLE_FOR_SERVING), rule, rule_per_slot=True)
        return scheduler


def open_folder(config: ServeConfig, row_tokens: int | None = None) -> ModelFolder:
    """Read a model folder. Raise `ConfigError` if it can't be served, or trained in such rows."""
    mesh = make_mesh(**mesh_sizes(config.mesh), devices=None)
    numbers = numerics(Compute(dtype=config.dtype), mesh, row_tokens)
    decoder = load_huggingface.read_config(config.model, field="model", **numbers)
    check_divisible(decoder, mesh)
    tokenizer = Tokenizer.from_folder(config.model, "model")
    tokenizer.check_fits(decoder.vocab, "model", config.model)
    config, limits = resolve(config, decoder, mesh)
    slots = f"slots = {config.slots} with max_response_tokens = {config.max_response_tokens}"
    settings = {"cache": slots, "weights": f"model = {config.model!r}"}
    memory.check_fits("serving", memory_needs(config, decoder, mesh), mesh, settings)
    return ModelFolder(config, mesh, decoder, tokenizer, limits)


def load_served(config: ServeConfig) -> ServedPolicy:
    """Load a model folder. Raise `ConfigError` if it can't be served."""
    config, mesh, decoder, tokenizer, limits = open_folder(config)
    engine = PolicyEngine(
        decoder,
        mesh,
        sampler_settings(config),
        max_prompt_tokens=config.max_prompt_tokens,
        end_ids=tokenizer.end_ids,
    )
    params = load_huggingface.load_params(config.model, decoder, mesh, field="model", cast=True)
    return ServedPolicy(engine, engine.load_params(params), tokenizer, limits)


def warm_up(policy: ServedPolicy, config: ServeConfig) -> None:
    """Compile the programs for prompts up to `FIRST_TOKENS`."""
    scheduler, length = policy.scheduler(config), MIN_BUCKET_TOKENS
    while length <= FIRST_TOKENS:
        tokens = np.zeros(min(length, policy.limits.longest_prompt), np.int32)
        scheduler.submit(Prompt(0, "", "", tokens, "", ""), [0], budget=1)
        while not scheduler.idle:
            scheduler.step()
        length *= 2


# --- token budgets --------------------------------------------------------------------------------


def sampler_settings(config: ServeConfig) -> Sampler:
    """Return the engine's settings for a config with numeric budgets."""
    longest = config.max_prompt_tokens + config.max_response_tokens
    return Sampler(
        slots=config.slots,
        burst_tokens=BURST_TOKENS,
        prefill_prompts=1,
        max_response_tokens=config.max_response_tokens,
        first_window_tokens=min(longest, FIRST_TOKENS),
        prefill_chunk_tokens=FIRST_TOKENS,
        cache=config.cache,
        weights_dtype=config.weights_dtype,
    )


def memory_needs(config: ServeConfig, decoder: Any, mesh: Any) -> dict[str, float]:
    """Return bytes per device of the weights and of the full caches of all slots."""
    sampler, budgets = sampler_settings(config), [getattr(config, name) for name in BUDGETS]
    cache = memory.cache_bytes(decoder, sampler, mesh, config.slots, *budgets)
    return {"weights": memory.decoding_bytes(decoder, sampler, mesh), "cache": cache}


def resolve(config: ServeConfig, decoder: Any, mesh: Any) -> tuple[ServeConfig, Limits]:
    """Return the config with numeric budgets, and the limits of requests.

    Those that are 'auto' share the model's context, halved until all slots fit into memory.
    """
    budgets = {name: getattr(config, name) for name in BUDGETS}
    if AUTO not in budgets.values():
        return config, Limits._make([*budgets.values(), sum(budgets.values())])
    model_config = read_json(model_path(config.model, "model") / "config.json", "model")
    context = text_part(model_config).get("max_position_embeddings")
    if type(context) is not int or context < 2:
        context = DEFAULT_CONTEXT
    context = min(context, MAX_CONTEXT)
    for name, budget in budgets.items():
        allowed = f"below the context, {context}, if the other budget is 'auto'"
        require(budget < context, name, budget, allowed)
    available = AUTO_MEMORY_FRACTION * memory.available_bytes(mesh)
    smallest = max(FIRST_TOKENS, *budgets.values()) + 1
    while True:
        filled = {name: context - 1 if n == AUTO else n for name, n in budgets.items()}
        resolved = dataclasses.replace(config, **filled)
        needed = sum(memory_needs(resolved, decoder, mesh).values())
        if needed <= available or context // 2 < smallest:
            return resolved, Limits._make([*filled.values(), context])
        context //= 2

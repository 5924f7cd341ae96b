"""The served policy: a model folder's token budgets, engine, decoding weights and tokenizer."""

import dataclasses
import reprlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config.experiment import Compute, Sampler
from dapo_jax.config.settings import AUTO
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.extras.serve.fields import RequestError, need
from dapo_jax.extras.serve.settings import ServeConfig
from dapo_jax.model import load_huggingface
from dapo_jax.model.config_json import text_part
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.requests import MIN_BUCKET_TOKENS
from dapo_jax.rollout.sampling import SAMPLE_FOR_SERVING
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.run import memory
from dapo_jax.run.build import check_divisible, mesh_sizes, numerics
from dapo_jax.runtime.sharding import make_mesh
from dapo_jax.runtime.storage.models import model_path
from dapo_jax.runtime.text_files import read_json
from dapo_jax.types.errors import ConfigError, require
from dapo_jax.types.structs import Prompt, RolloutKey, SamplingRule

BUDGETS = ("max_prompt_tokens", "max_response_tokens")
DEFAULT_CONTEXT = 2048  # if config.json does not give the context
MAX_CONTEXT = 32_768  # that 'auto' budgets fill
# Initial size of a cache window, doubled if a request needs more. Longer prompts are prefilled in
# chunks of this size, and compile when the first one arrives.
FIRST_TOKENS = 512
BURST_TOKENS = 4  # decode steps between two looks at the queue
TOO_LONG = "context_length_exceeded"
AUTO_MEMORY_FRACTION = 0.5  # of device memory that 'auto' fills with weights and caches


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """Model folder without its weights; the budgets of `config` are numbers.

    Attributes:
        context: maximum tokens of a prompt and its response together.
    """

    config: ServeConfig
    context: int
    mesh: Any
    decoder: DecoderConfig
    tokenizer: Tokenizer

    def check_name(self, name: Any) -> None:
        """Raise `RequestError` for the name of another model."""
        if name != self.config.served_name:
            message = f"model = {reprlib.repr(name)}: there is only {self.config.served_name!r}"
            raise RequestError(message, "model", 404, "model_not_found")

    def budget(self, field: str, budget: int | None, prompt: int, default: int = AUTO) -> int:
        """Return the maximum tokens of a response to a prompt of so many tokens.

        Raise `RequestError` for a wrong budget; None stands for the default, AUTO for the largest.
        """
        largest = min(self.config.max_response_tokens, self.context - prompt)
        if budget is None:
            return largest if default == AUTO else min(default, largest)
        allowed = f"from 1 to {largest} after a prompt of {prompt} tokens"
        code = TOO_LONG if budget > largest else None
        need(0 < budget <= largest, field, budget, allowed, code)
        return budget

    def check_tokens(self, field: str, tokens: Sequence[int], limit: int) -> None:
        """Raise `RequestError` for ids outside the vocabulary, too many, or none."""
        if not 0 < len(tokens) <= limit:
            message = f"{field} has {len(tokens)} tokens: must have from 1 to {limit}"
            raise RequestError(message, field, code=TOO_LONG if len(tokens) else None)
        vocab = self.decoder.vocab
        for index in (i for i, token in enumerate(tokens) if not 0 <= token < vocab):
            need(False, f"{field}[{index}]", tokens[index], f"from 0 to {vocab - 1}")

    def prompt_ids(self, field: str, prompt: str | list[int]) -> list[int]:
        """Return the token ids of a prompt. Raise `RequestError` if it is too long or wrong."""
        if isinstance(prompt, str):
            try:
                prompt = self.tokenizer.encode_prompt(prompt)
            except ConfigError as error:
                raise RequestError(f"{field}: {error}", field) from None
        self.check_tokens(field, prompt, self.config.max_prompt_tokens)
        return prompt


class ServedPolicy(NamedTuple):
    """A model with its engine and decoding weights."""

    model: ServedModel
    engine: PolicyEngine
    params: Any

    def scheduler(self) -> Scheduler:
        """Return a scheduler that has begun, with the config's rule as the default."""
        config = self.model.config
        scheduler = Scheduler(self.engine, self.model.tokenizer, config.seed)
        rule = SamplingRule(config.temperature, config.top_p, config.top_k)
        scheduler.open(self.params, RolloutKey(SAMPLE_FOR_SERVING), rule, rule_per_slot=True)
        return scheduler


def open_folder(config: ServeConfig, row_tokens: int | None = None) -> ServedModel:
    """Read a model folder. Raise `ConfigError` if it can't be served, or trained in such rows."""
    mesh = make_mesh(**mesh_sizes(config.mesh), devices=None)
    numbers = numerics(Compute(dtype=config.dtype), mesh, row_tokens)
    decoder = load_huggingface.read_config(config.model, field="model", **numbers)
    check_divisible(decoder, mesh)
    tokenizer = Tokenizer.from_folder(config.model, "model")
    tokenizer.check_fits(decoder.vocab, "model", config.model)
    config, context = resolve(config, decoder, mesh)
    slots = f"slots = {config.slots} with max_response_tokens = {config.max_response_tokens}"
    settings = {"cache": slots, "weights": f"model = {config.model!r}"}
    memory.check_fits("serving", memory_needs(config, decoder, mesh), mesh, settings)
    return ServedModel(config, context, mesh, decoder, tokenizer)


def load_served(config: ServeConfig) -> ServedPolicy:
    """Load a model folder. Raise `ConfigError` if it can't be served."""
    model = open_folder(config)
    config, decoder, mesh = model.config, model.decoder, model.mesh
    engine = PolicyEngine(
        decoder,
        mesh,
        sampler_settings(config),
        max_prompt_tokens=config.max_prompt_tokens,
        end_ids=model.tokenizer.end_ids,
    )
    params = load_huggingface.load_params(config.model, decoder, mesh, field="model", cast=True)
    return ServedPolicy(model, engine, engine.load_params(params))


def warm_up(policy: ServedPolicy) -> None:
    """Compile the programs for prompts up to `FIRST_TOKENS`."""
    scheduler, length = policy.scheduler(), MIN_BUCKET_TOKENS
    while length <= FIRST_TOKENS:
        tokens = np.zeros(min(length, policy.model.config.max_prompt_tokens), np.int32)
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


def resolve(config: ServeConfig, decoder: Any, mesh: Any) -> tuple[ServeConfig, int]:
    """Return the config with numeric budgets, and the maximum tokens of a prompt and response.

    Those that are 'auto' share the model's context, halved until all slots fit into memory.
    """
    budgets = {name: getattr(config, name) for name in BUDGETS}
    if AUTO not in budgets.values():
        return config, sum(budgets.values())
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
            return resolved, context
        context //= 2

"""Budgets of prompts and responses: from the settings, else from the model's context and memory."""

import dataclasses
from typing import Any

from dapo_jax.config.experiment import Sampler, ServeConfig
from dapo_jax.data.policies import model_path
from dapo_jax.run import memory
from dapo_jax.runtime.settings import read_json, require

AUTO = -1
PREFILL_TOKENS = [2**i for i in range(4, 16)]  # of a padded prompt; JetStream knows no others
UNKNOWN_CONTEXT = 2048  # of a config.json that does not say it
# A window of a cache begins so long and is doubled where a request needs it; longer prompts are
# prefilled in pieces of so many tokens, and compile when the first one comes.
FIRST_TOKENS = 512
SHARE = 0.5  # of the memory that 'auto' takes for weights and caches


def prefill_tokens(prompt: int) -> int:
    """Length to which the longest prompt is padded, with room for JetStream's first token."""
    return min(length for length in PREFILL_TOKENS if length > prompt)


def sampler_of(config: ServeConfig) -> Sampler:
    """Sizes of the engine for budgets that are numbers."""
    longest = prefill_tokens(config.max_prompt_tokens) + config.max_response_tokens
    return Sampler(
        slots=config.slots,
        burst_tokens=1,  # of several, JetStream drops those beside the one that ends a response
        max_response_tokens=config.max_response_tokens,
        first_window_tokens=min(longest, FIRST_TOKENS),
        prefill_chunk_tokens=FIRST_TOKENS,
        cache=config.cache,
        weights_dtype=config.weights_dtype,
    )


def needs(config: ServeConfig, decoder: Any, mesh: Any) -> dict[str, float]:
    """Bytes on one device of the weights and of the caches of all slots, where they are full."""
    sampler, prompt = sampler_of(config), prefill_tokens(config.max_prompt_tokens)
    response = config.max_response_tokens
    cache = memory.cache_bytes(decoder, sampler, mesh, config.slots, prompt, response)
    return {"weights": memory.decoding_bytes(decoder, sampler, mesh), "cache": cache}


def check_slots_fit(config: ServeConfig, decoder: Any, mesh: Any) -> None:
    """Raises `ConfigError` where the cache of all slots can't fit into the devices' memory."""
    blamed = f"slots = {config.slots} with max_response_tokens = {config.max_response_tokens}"
    settings = {"cache": blamed, "weights": f"model = {config.model!r}"}
    memory.check_fits("serving", needs(config, decoder, mesh), mesh, settings)


def _with_context(config: ServeConfig, context: int) -> ServeConfig:
    """Config whose budgets on 'auto' are those of a context."""
    auto = {
        name: min(context - 1, PREFILL_TOKENS[-1] - 1)
        for name in ("max_prompt_tokens", "max_response_tokens")
        if getattr(config, name) == AUTO
    }
    return dataclasses.replace(config, **auto)


def resolve(config: ServeConfig, decoder: Any, mesh: Any) -> tuple[ServeConfig, int]:
    """Config whose budgets are numbers, and most tokens of a prompt with its response.

    Raises:
        ConfigError: a budget is not below the model's context.
    """
    budgets = config.max_prompt_tokens, config.max_response_tokens
    if AUTO not in budgets:
        return config, sum(budgets)
    described = read_json(model_path(config.model, "model") / "config.json", "model")
    context = described.get("max_position_embeddings")
    if type(context) is not int or context < 2:
        context = UNKNOWN_CONTEXT
    context = min(context, PREFILL_TOKENS[-1])
    for name, budget in zip(("max_prompt_tokens", "max_response_tokens"), budgets, strict=True):
        allowed = f"below the context, {context}, where the other budget is 'auto'"
        require(budget < context, name, budget, allowed)
    room, least = SHARE * memory.available_bytes(mesh), max(FIRST_TOKENS, *budgets) + 1
    while context // 2 >= least:
        if sum(needs(_with_context(config, context), decoder, mesh).values()) <= room:
            break
        context //= 2
    return _with_context(config, context), context

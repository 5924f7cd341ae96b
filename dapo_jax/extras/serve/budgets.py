"""Token budgets of prompts and responses, from the settings or the model's context and memory."""

import dataclasses
from typing import Any

from dapo_jax.config.experiment import Sampler
from dapo_jax.extras.serve.settings import ServeConfig
from dapo_jax.model.config_json import text_part
from dapo_jax.run import memory
from dapo_jax.runtime.storage.models import model_path
from dapo_jax.runtime.text_files import read_json
from dapo_jax.types.errors import require

AUTO = -1
BUDGETS = ("max_prompt_tokens", "max_response_tokens")
PREFILL_TOKENS = [2**i for i in range(4, 16)]  # padded prompt lengths that JetStream supports
DEFAULT_CONTEXT = 2048  # if config.json does not give the context
# Initial size of a cache window, doubled if a request needs more. Longer prompts are prefilled in
# chunks of this size, and compile when the first one arrives.
FIRST_TOKENS = 512
BURST_TOKENS = 4  # decode steps between two looks at the queue
AUTO_MEMORY_FRACTION = 0.5  # of device memory that 'auto' fills with weights and caches


def prefill_tokens(prompt: int) -> int:
    """Return the padded length of the longest prompt, including JetStream's first token."""
    return min(length for length in PREFILL_TOKENS if length > prompt)


def sampler_settings(config: ServeConfig) -> Sampler:
    """Return the engine's settings for a config with numeric budgets."""
    longest = prefill_tokens(config.max_prompt_tokens) + config.max_response_tokens
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
    sampler = sampler_settings(config)
    prompt = prefill_tokens(config.max_prompt_tokens)
    response = config.max_response_tokens
    cache = memory.cache_bytes(decoder, sampler, mesh, config.slots, prompt, response)
    return {"weights": memory.decoding_bytes(decoder, sampler, mesh), "cache": cache}


def check_slots_fit(config: ServeConfig, decoder: Any, mesh: Any) -> None:
    """Raise `ConfigError` if weights and full caches exceed the devices' memory."""
    slots = f"slots = {config.slots} with max_response_tokens = {config.max_response_tokens}"
    settings = {"cache": slots, "weights": f"model = {config.model!r}"}
    memory.check_fits("serving", memory_needs(config, decoder, mesh), mesh, settings)


def resolve(config: ServeConfig, decoder: Any, mesh: Any) -> tuple[ServeConfig, int]:
    """Return the config with numeric budgets, and the maximum of prompt plus response tokens."""
    budgets = {name: getattr(config, name) for name in BUDGETS}
    if AUTO not in budgets.values():
        return config, sum(budgets.values())
    model_config = read_json(model_path(config.model, "model") / "config.json", "model")
    context = text_part(model_config).get("max_position_embeddings")
    if type(context) is not int or context < 2:
        context = DEFAULT_CONTEXT
    context = min(context, PREFILL_TOKENS[-1])
    for name, budget in budgets.items():
        allowed = f"below the context, {context}, if the other budget is 'auto'"
        require(budget < context, name, budget, allowed)
    available = AUTO_MEMORY_FRACTION * memory.available_bytes(mesh)
    smallest = max(FIRST_TOKENS, *budgets.values()) + 1
    while True:
        longest = min(context - 1, PREFILL_TOKENS[-1] - 1)
        auto = {name: longest for name, budget in budgets.items() if budget == AUTO}
        resolved = dataclasses.replace(config, **auto)
        needed = sum(memory_needs(resolved, decoder, mesh).values())
        if needed <= available or context // 2 < smallest:
            return resolved, context
        context //= 2

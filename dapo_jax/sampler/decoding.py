"""Decode slots as pure functions of `DecodeState`: empty, grown, filled, one token further."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dapo_jax.model import decoder
from dapo_jax.sampler.sampling import SamplingRule, draw
from dapo_jax.structs import DecodeState, KVCache, Prefix


def empty_state(
    config: decoder.DecoderConfig, *, slots: int, max_response_tokens: int, window: int
) -> DecodeState:
    """Every slot free, with room for `window` tokens in its cache."""
    keys = (slots, config.kv_heads, config.head_dim, window)
    values = (slots, config.kv_heads, window, config.head_dim)
    counts = jnp.zeros(slots, jnp.int32)
    return DecodeState(
        caches=tuple(
            KVCache(jnp.zeros(keys, config.dtype), jnp.zeros(values, config.dtype))
            for _ in range(config.layers)
        ),
        last_token=counts,
        length=counts,
        generated=counts,
        active=jnp.zeros(slots, bool),
        key=jax.random.split(jax.random.key(0), slots),
        tokens=jnp.zeros((slots, max_response_tokens), jnp.int32),
        logprobs=jnp.zeros((slots, max_response_tokens), jnp.float32),
        busy_slot_steps=jnp.zeros((), jnp.int32),
        slot_steps=jnp.zeros((), jnp.int32),
    )


def grow(state: DecodeState, *, window: int) -> DecodeState:
    """The same responses with room for `window` tokens per slot."""

    def longer(cache: KVCache) -> KVCache:
        more = window - cache.values.shape[2]
        return KVCache(
            jnp.pad(cache.keys, ((0, 0), (0, 0), (0, 0), (0, more))),
            jnp.pad(cache.values, ((0, 0), (0, 0), (0, more), (0, 0))),
        )

    return state.replace(caches=tuple(map(longer, state.caches)))


def start_responses(
    prefix: Prefix, state: DecodeState, slots: Int[Array, "n"], samples: Int[Array, "n"]
) -> DecodeState:
    """Sample `samples[i]` of the prompt begins in `slots[i]`; a slot past the last is dropped."""

    def place(array, value):
        return array.at[slots].set(value, mode="drop")

    def place_cache(cache: KVCache, new: KVCache) -> KVCache:
        time = new.values.shape[2]
        return KVCache(
            cache.keys.at[slots, :, :, :time].set(new.keys, mode="drop"),
            cache.values.at[slots, :, :time].set(new.values, mode="drop"),
        )

    keys = jax.vmap(jax.random.fold_in, (None, 0))(prefix.key, samples)
    return state.replace(
        caches=tuple(map(place_cache, state.caches, prefix.caches)),
        last_token=place(state.last_token, prefix.last_token),
        length=place(state.length, prefix.true_length - 1),
        generated=place(state.generated, 0),
        active=place(state.active, True),
        key=place(state.key, keys),
    )


def decode_one(
    params: Any,
    config: decoder.DecoderConfig,
    state: DecodeState,
    end_ids: Int[Array, "e"],
    rule: SamplingRule,
) -> DecodeState:
    """One token for every active slot; the others run along and change nothing that counts."""
    logits, caches = decoder.decode_step(
        params, config, state.last_token, state.length, state.caches
    )
    tokens, logprobs = draw(logits, state.key, state.generated, rule)
    slots, limit = state.tokens.shape
    at = jnp.where(state.active, state.generated, limit)  # an index past the end is dropped
    step = state.active.astype(jnp.int32)
    generated = state.generated + step
    ended = (tokens[:, None] == end_ids).any(axis=-1)
    return state.replace(
        caches=caches,
        last_token=jnp.where(state.active, tokens, state.last_token),
        length=state.length + step,
        generated=generated,
        active=state.active & ~ended & (generated < limit),
        tokens=state.tokens.at[jnp.arange(slots), at].set(tokens, mode="drop"),
        logprobs=state.logprobs.at[jnp.arange(slots), at].set(logprobs, mode="drop"),
        busy_slot_steps=state.busy_slot_steps + jnp.sum(step),
        slot_steps=state.slot_steps + slots,
    )

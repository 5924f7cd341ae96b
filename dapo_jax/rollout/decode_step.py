"""Decode steps as pure functions of `DecodeState`: empty, filled, a burst of tokens further."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dapo_jax.model import inference
from dapo_jax.model.caches import DecodeState, Prefix
from dapo_jax.model.decode_attention import SlotContext, at_each
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.rollout.page_table import Fills
from dapo_jax.rollout.sampling import draw, draw_each
from dapo_jax.structs import SamplingRule


def empty_state(
    caches: tuple, tables: Any, slots: int, max_response_tokens: int, **options: Any
) -> DecodeState:
    """Decode state with every slot free; `options` are its optional fields."""
    counts = jnp.zeros(slots, jnp.int32)
    return DecodeState(
        caches=caches,
        tables=tables,
        last_token=counts,
        length=counts,
        generated=counts,
        active=jnp.zeros(slots, bool),
        key=jax.random.split(jax.random.key(0), slots),
        tokens=jnp.zeros((slots, max_response_tokens), jnp.int32),
        logprobs=jnp.zeros((slots, max_response_tokens), jnp.float32),
        busy_slot_steps=jnp.zeros((), jnp.int32),
        slot_steps=jnp.zeros((), jnp.int32),
        **options,
    )


def prefill_prefix(
    config: DecoderConfig,
    chunk_tokens: int,
    params: Any,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    keys: jax.Array,
    drawn: Int[Array, "B"],
) -> Prefix:
    """Keys and values of prompts padded on the right; the last `drawn` tokens are a response's."""
    caches, routes = inference.prefill(params, config, tokens, lengths, chunk_tokens)
    last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]
    return Prefix(caches, last, lengths, keys, drawn, routes=routes)


def start_responses(
    prefix: Prefix,
    state: DecodeState,
    slots: Int[Array, "n"],
    rows: Int[Array, "n"],
    samples: Int[Array, "n"],
    fills: Fills | None,
    *,
    write_prompts: Callable,
    in_turn: bool = False,
) -> DecodeState:
    """Starts sample `samples[i]` of prompt `rows[i]` in `slots[i]`; one past the last is dropped.

    The tokens that a response has already are on the host: only their count is written.

    Args:
        write_prompts: of the cache's layout; `fills` is for it.
        in_turn: layer after layer: else XLA:TPU gathers all prompts of all layers at once. A CPU
            would copy the caches.
    """

    def place(array, value):
        return array.at[slots].set(value, mode="drop")

    keys = jax.vmap(jax.random.fold_in)(prefix.key[rows], samples)
    caches = []
    for cache, new in zip(state.caches, prefix.caches, strict=True):
        if in_turn and caches:
            new, caches[-1] = jax.lax.optimization_barrier((new, caches[-1]))
        caches.append(write_prompts(cache, new, slots, rows, prefix.true_length[rows], fills))
    routes = state.routes
    if routes is not None and prefix.routes is not None:
        prefilled = prefix.routes[rows, : routes.shape[1]]
        routes = routes.at[slots, : prefilled.shape[1]].set(prefilled, mode="drop")
    return state.replace(
        caches=tuple(caches),
        last_token=place(state.last_token, prefix.last_token[rows]),
        length=place(state.length, prefix.true_length[rows] - 1),
        generated=place(state.generated, prefix.drawn[rows]),
        active=place(state.active, True),
        key=place(state.key, keys),
        routes=routes,
        known=None if state.known is None else place(state.known, prefix.drawn[rows]),
        rules=jax.tree.map(lambda old, new: place(old, new[rows]), state.rules, prefix.rules),
    )


def feed_responses(
    state: DecodeState, slots: Int[Array, "n"], tokens: Int[Array, "n C"], known: Int[Array, "n"]
) -> DecodeState:
    """Lets slots go on: the first `known` tokens of their responses are fed, then they draw."""
    assert state.known is not None
    return state.replace(
        tokens=state.tokens.at[slots].set(tokens, mode="drop"),
        known=state.known.at[slots].set(known, mode="drop"),
        active=state.active.at[slots].set(True, mode="drop"),
    )


def stop_responses(state: DecodeState, slots: Int[Array, "n"]) -> DecodeState:
    """Stops slots: they draw nothing more."""
    return state.replace(active=state.active.at[slots].set(False, mode="drop"))


def decode_one(
    params: Any,
    config: DecoderConfig,
    attend: Callable,
    state: DecodeState,
    end_ids: Int[Array, "e"],
    rule: SamplingRule,
    columns: int | None,
) -> DecodeState:
    """Draws one token for every active slot; the others run along and change nothing that counts.

    Nothing here is a sum over slots: on a mesh that would be a reduction over it for every token.

    Args:
        rule: of every slot, where the state has none for each.
        columns: how many of a slot's pages attention has to read.
    """
    tables = None if state.tables is None else state.tables[:, :columns]
    context = SlotContext(state.length[:, None], state.active, tables)
    logits, caches, routes = inference.decode_step(
        params, config, attend, state.last_token, context, state.caches
    )
    if state.rules is None:
        tokens, logprobs = draw(logits, state.key, state.generated, rule)
    else:
        tokens, logprobs = draw_each(logits, state.key, state.generated, state.rules)
    limit = state.tokens.shape[1]
    at = jnp.where(state.active, state.generated, limit)  # an index past the end is dropped
    step = state.active.astype(jnp.int32)
    generated = state.generated + step
    ended = (tokens[:, None] == end_ids).any(axis=-1)
    if state.known is not None:
        fed = state.generated < state.known
        given = jnp.minimum(state.generated, limit - 1)[:, None]
        given = jnp.take_along_axis(state.tokens, given, axis=1)[:, 0]
        tokens, ended = jnp.where(fed, given, tokens), ended & ~fed
    if routes is not None and state.routes is not None:
        place = jnp.where(state.active, state.length, state.routes.shape[1])
        routes = at_each(state.routes, (place,), routes)
    return state.replace(
        caches=caches,
        routes=routes,
        last_token=jnp.where(state.active, tokens, state.last_token),
        length=state.length + step,
        generated=generated,
        active=state.active & ~ended & (generated < limit),
        tokens=at_each(state.tokens, (at,), tokens),
        logprobs=at_each(state.logprobs, (at,), logprobs),
    )


def decode_burst(
    draw_token: Callable[[DecodeState], DecodeState],
    state: DecodeState,
    tokens: int,
    *,
    early: bool,
) -> DecodeState:
    """Draws `tokens` times a token, and counts the steps of slots that took.

    Args:
        early: stop where no slot is active; asked after every token, which on more than one
            replica would make all of them wait for each other.
    """

    def more(carry):
        step, state = carry
        return (step < tokens) & (state.active.any() if early else True)

    before = state.generated
    steps, state = jax.lax.while_loop(more, lambda c: (c[0] + 1, draw_token(c[1])), (0, state))
    return state.replace(
        busy_slot_steps=state.busy_slot_steps + jnp.sum(state.generated - before),
        slot_steps=state.slot_steps + steps * len(before),
    )

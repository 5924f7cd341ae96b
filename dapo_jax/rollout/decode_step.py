"""Decode steps as pure functions of `DecodeState`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dapo_jax.model import inference
from dapo_jax.model.caches import DecodeState, Prefix
from dapo_jax.model.decode_attention import SlotContext, at_each
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.rollout.page_table import Fills
from dapo_jax.rollout.sampling import sample_tokens, sample_tokens_by_slot
from dapo_jax.structs import SamplingRule, present


class Starts(NamedTuple):
    """Responses that start: sample `samples[i]` of prompt `rows[i]` in `slots[i]`."""

    slots: Int[Any, "n"]
    rows: Int[Any, "n"]
    samples: Int[Any, "n"]
    fills: Fills | None  # cache pages to write; None if the cache has no pages


class StepOptions(NamedTuple):
    """Constants of the decode steps of a burst."""

    config: DecoderConfig
    attend: Callable
    end_ids: Int[Array, "e"]
    rule: SamplingRule  # of every slot, unless the state has a rule per slot
    columns: int | None  # number of a slot's pages that attention has to read


def empty_state(
    caches: tuple, tables: Any, slots: int, max_response_tokens: int, **options: Any
) -> DecodeState:
    """Return a decode state with every slot free; `options` are its optional fields."""
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


def start_responses(
    prefix: Prefix,
    state: DecodeState,
    starts: Starts,
    *,
    write_prompts: Callable,  # method of the cache's layout
    in_turn: bool = False,
) -> DecodeState:
    """Start responses to prefilled prompts; a slot past the last one is dropped.

    The known tokens of a resumed response are on the host: only their count is written.
    """
    slots, rows, samples, fills = starts

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
    """Activate slots: they are fed the first `known` tokens of their responses, then sample."""
    return state.replace(
        tokens=state.tokens.at[slots].set(tokens, mode="drop"),
        known=present(state.known, "known").at[slots].set(known, mode="drop"),
        active=state.active.at[slots].set(True, mode="drop"),
    )


def stop_responses(state: DecodeState, slots: Int[Array, "n"]) -> DecodeState:
    """Deactivate slots."""
    return state.replace(active=state.active.at[slots].set(False, mode="drop"))


def decode_one(params: Any, options: StepOptions, state: DecodeState) -> DecodeState:
    """Sample one token for every active slot; other slots compute without effect.

    No value is summed over slots: on a mesh, that would be an all-reduce for every token.
    """
    tables = None if state.tables is None else state.tables[:, : options.columns]
    context = SlotContext(state.length[:, None], state.active, tables)
    logits, caches, routes = inference.decode_step(
        params, options.config, options.attend, state.last_token, context, state.caches
    )
    if state.rules is None:
        tokens, logprobs = sample_tokens(logits, state.key, state.generated, options.rule)
    else:
        tokens, logprobs = sample_tokens_by_slot(logits, state.key, state.generated, state.rules)
    limit = state.tokens.shape[1]
    at = jnp.where(state.active, state.generated, limit)  # an index past the end is dropped
    step = state.active.astype(jnp.int32)
    generated = state.generated + step
    ended = (tokens[:, None] == options.end_ids).any(axis=-1)
    if state.known is not None:
        is_fed = state.generated < state.known
        fed = jnp.minimum(state.generated, limit - 1)[:, None]
        fed = jnp.take_along_axis(state.tokens, fed, axis=1)[:, 0]
        tokens = jnp.where(is_fed, fed, tokens)
        ended = ended & ~is_fed
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
    sample_token: Callable[[DecodeState], DecodeState],
    state: DecodeState,
    tokens: int,
    *,
    early: bool,
) -> DecodeState:
    """Sample `tokens` tokens per active slot, and count the slot steps."""

    def more(carry):
        step, state = carry
        return (step < tokens) & (state.active.any() if early else True)

    before = state.generated
    steps, state = jax.lax.while_loop(more, lambda c: (c[0] + 1, sample_token(c[1])), (0, state))
    return state.replace(
        busy_slot_steps=state.busy_slot_steps + jnp.sum(state.generated - before),
        slot_steps=state.slot_steps + steps * len(before),
    )

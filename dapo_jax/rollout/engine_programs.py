"""Compiled programs of the engine: load, prefill, insert, feed, stop, grow, generate."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from dapo_jax.config.experiment import Sampler
from dapo_jax.model import decoder, inference
from dapo_jax.model.caches import DecodeState, Prefix, PromptCache, StateCache, Texts
from dapo_jax.model.decode_attention import SlotContext, at_each, interleave
from dapo_jax.model.inference import empty_routes, prefill
from dapo_jax.model.quantisation import to_int8
from dapo_jax.rollout.cache_layout import CacheLayout
from dapo_jax.rollout.page_table import Fills
from dapo_jax.rollout.proposals import propose, sibling_texts
from dapo_jax.rollout.sampling import SamplingRules, sample_tokens, sample_tokens_by_slot
from dapo_jax.rollout.weight_transfer import DecodingWeights
from dapo_jax.runtime import sharding
from dapo_jax.types.structs import SamplingRule, present

CALIBRATION_ROWS = 4
CALIBRATION_TOKENS = 256
CALIBRATION_MARGIN = 1.5  # keys and values of a prompt may exceed the calibrated ones by this


@dataclasses.dataclass(frozen=True)
class EngineShape:
    """Everything besides mesh and weights that the programs of an engine depend on."""

    config: decoder.DecoderConfig  # shape and numerics of the policy
    settings: Sampler  # sizes of slots, cache and calls; not the sampling rule
    max_prompt_tokens: int  # maximum length of a prompt
    end_ids: tuple[int, ...]  # tokens that end a response

    @property
    def cache_tokens(self) -> int:
        """Maximum tokens of a slot; the last sampled one is never fed back, proposals are."""
        settings = self.settings
        return self.max_prompt_tokens + settings.max_response_tokens + settings.speculate

    @property
    def tokens_per_burst(self) -> int:
        """Maximum tokens by which a burst extends a response."""
        return self.settings.burst_tokens * (1 + self.settings.speculate)


class Starts(NamedTuple):
    """Responses that start: sample `samples[i]` of prompt `rows[i]` in `slots[i]`."""

    slots: Int[Any, "n"]
    rows: Int[Any, "n"]
    samples: Int[Any, "n"]
    fills: Fills | None  # cache pages to write; None if the cache has no pages
    rules: SamplingRules | None = None  # None if all slots share one


class EnginePrograms:
    """Programs for one policy on one mesh; each compiles at its first call.

    It has one attribute for each compiled program, so more than twelve.
    """

    def __init__(
        self,
        shape: EngineShape,
        mesh: Mesh,
        trained_on: Mesh,  # of the trainer's parameters
        frozen: Any = None,  # parameters that never change
    ):
        self._shape = shape
        self._mesh = mesh
        # An engine has another one, which holds the state of its pages.
        layout: Any = CacheLayout(shape.config, mesh, shape.settings, shape.cache_tokens)
        self._layout = layout
        self.weights = DecodingWeights(shape.config, mesh, trained_on, shape.settings, frozen)
        # Any: a prefix or a state of shardings, which has arrays there.
        place: Any = functools.partial(sharding.sharding, mesh, column=sharding.DECODING)
        replicated = place()
        shapes = jax.eval_shape(functools.partial(self._empty, window=1))
        per_slot = jax.tree.map(lambda leaf: place("batch") if leaf.ndim else replicated, shapes)
        self.state_shardings = state = per_slot.replace(
            caches=layout.shardings(), rules=place("batch")
        )
        self.prompt_shardings = layout.prompt_shardings()
        self.prefill = jax.jit(
            self._prefill,
            in_shardings=(None, place("batch"), None, None, None),
            out_shardings=Prefix(
                self.prompt_shardings, *[replicated] * 4, routes=place("batch"), tokens=replicated
            ),
        )
        start = functools.partial(
            _start_responses,
            write_prompts=layout.write_prompts,
            in_turn=mesh.devices.flat[0].platform == "tpu",
        )
        self.insert = jax.jit(start, donate_argnums=1, out_shardings=state)
        self.stop = jax.jit(
            lambda state, slots: state.replace(
                active=state.active.at[slots].set(False, mode="drop")
            ),
            donate_argnums=0,
            out_shardings=state,
        )
        self.generate = jax.jit(
            self._generate,
            static_argnames=("rule", "columns"),
            donate_argnums=1,
            out_shardings=(state, replicated),
        )
        self.feed = jax.jit(_feed_responses, donate_argnums=0, out_shardings=state)
        self.grow = jax.jit(
            lambda state, window: state.replace(caches=self._layout.grow(state.caches, window)),
            static_argnames="window",
            out_shardings=state,
        )
        self.calibrate = jax.jit(self._calibrate, out_shardings=place("kv_heads"))
        self.empty = jax.jit(self._empty, static_argnames="window", out_shardings=state)
        self.rows = jax.jit(lambda array, slots: array[slots], out_shardings=replicated)

    def split(self, array: np.ndarray) -> jax.Array:
        """Shard an array like the slots; every process has the same host array."""
        place = sharding.sharding(self._mesh, "batch", column=sharding.DECODING)
        return jax.make_array_from_callback(array.shape, place, lambda at: array[at])

    def _empty(self, *, window: int) -> DecodeState:
        config, settings = self._shape.config, self._shape.settings
        slots = settings.slots
        pages = self._layout.pages
        routes = None
        if config.records_routes:
            routes = empty_routes(config, slots, self._shape.cache_tokens)
        counts = jnp.zeros(slots, jnp.int32)
        responses = slots, settings.max_response_tokens
        texts = Texts(jnp.zeros((slots, self._shape.cache_tokens), jnp.int32), counts)
        return DecodeState(
            caches=self._layout.empty(window),
            tables=None if pages is None else jnp.zeros(pages.tables.shape, jnp.int32),
            last_token=counts,
            length=counts,
            generated=counts,
            active=jnp.zeros(slots, bool),
            key=jax.random.split(jax.random.key(0), slots),
            tokens=jnp.zeros(responses, jnp.int32),
            logprobs=jnp.zeros(responses, jnp.float32),
            supports=jnp.zeros((*responses, 2), jnp.float32) if settings.truncates else None,
            busy_slot_steps=jnp.zeros((), jnp.int32),
            slot_steps=jnp.zeros((), jnp.int32),
            routes=routes,
            known=counts if settings.keep_turns else None,
            texts=texts if settings.speculate else None,
        )

    def _calibrate(self, params: Any) -> tuple[Array, ...]:
        """Return scales [K2] of each layer's keys and values, measured on random tokens.

        They depend on the weights only, so that sampling still depends on the key only.
        """
        shape = CALIBRATION_ROWS, min(CALIBRATION_TOKENS, self._shape.cache_tokens)
        tokens = jax.random.randint(jax.random.key(0), shape, 0, self._shape.config.vocab)
        with self._mesh_context():
            caches, _ = prefill(params, self._shape.config, tokens, jnp.full(shape[0], shape[1]))

        def scale(cache: PromptCache | StateCache) -> Array:
            if isinstance(cache, StateCache):  # not read
                return jnp.ones(2 * self._shape.config.kv_heads)
            pairs = interleave(cache.keys, cache.values, 2).astype(jnp.float32)
            return CALIBRATION_MARGIN * to_int8(pairs, (0, 1, 3))[1]

        return tuple(map(scale, caches))

    def _mesh_context(self) -> contextlib.AbstractContextManager:
        """Return a context for traced code that has expert-parallel or sharded int8 products."""
        config = self._shape.config
        if not (config.experts or config.int8_products):  # other policies need no mesh
            return contextlib.nullcontext()
        return sharding.activate(self._mesh, sharding.DECODING, is_traced=True)

    def _prefill(
        self, params: Any, tokens: Array, lengths: Array, keys: Array, sampled: Array
    ) -> Prefix:
        settings = self._shape.settings
        chunk_tokens = settings.prefill_chunk_tokens
        with self._mesh_context():
            caches, routes = prefill(params, self._shape.config, tokens, lengths, chunk_tokens)
            last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]
            kept = tokens if settings.speculate else None
            return Prefix(caches, last, lengths, keys, sampled, routes, kept)

    def _generate(
        self, params: Any, state: DecodeState, *, rule: SamplingRule, columns: int | None
    ) -> tuple[DecodeState, tuple[Array, Array]]:
        """Take up to `burst_tokens` steps of the active slots; return their tokens and number."""
        tokens = self._shape.settings.burst_tokens
        # Several replicas would have to synchronise after every token to stop early.
        early = sharding.shards(self._mesh, "batch", sharding.DECODING) == 1
        before, busy = state.generated, jnp.zeros_like(state.generated)
        others = None if state.texts is None else sibling_texts(state.texts, state.length)

        def more(carry):
            step, _, state = carry
            return (step < tokens) & (state.active.any() if early else True)

        def sample(carry):
            step, busy, state = carry
            busy += state.active
            return step + 1, busy, self._decode(params, state, others, rule, columns)

        with self._mesh_context():
            steps, busy, state = jax.lax.while_loop(more, sample, (0, busy, state))
        state = state.replace(
            busy_slot_steps=state.busy_slot_steps + jnp.sum(busy),
            slot_steps=state.slot_steps + steps * len(before),
        )
        places = before[:, None] + jnp.arange(self._shape.tokens_per_burst)
        places = jnp.minimum(places, state.tokens.shape[1] - 1)
        sampled = jnp.take_along_axis(state.tokens, places, axis=1)
        return state, (sampled, state.generated - before)

    def _decode(
        self, params: Any, state: DecodeState, others: Any, rule: SamplingRule, columns: int | None
    ) -> DecodeState:
        """Sample the next tokens of every active slot; other slots compute without effect.

        They are one more than the proposed tokens that equal the sampled ones. No value is summed
        over slots: on a mesh, that would be an all-reduce for every token.
        """
        proposed = self._shape.settings.speculate
        ahead, limit = jnp.arange(1 + proposed), state.tokens.shape[1]
        places = state.generated[:, None] + ahead
        is_fed, fed = jnp.zeros_like(places, bool), jnp.zeros_like(places)
        if state.known is not None:
            is_fed = places < state.known[:, None]
            fed = jnp.take_along_axis(state.tokens, jnp.minimum(places, limit - 1), axis=1)
        inputs = state.last_token[:, None]
        if state.texts is not None:
            guesses = propose(state.texts.tokens, state.length, others, proposed)
            guesses = jnp.where(is_fed[:, :-1], fed[:, :-1], guesses)
            inputs = jnp.concatenate([inputs, guesses], axis=1)
        tables = None if state.tables is None else state.tables[:, :columns]
        context = SlotContext(state.length[:, None] + ahead, state.active, tables)
        config, attend = self._shape.config, self._layout.attend
        logits, caches, routes = inference.decode_step(
            params, config, attend, inputs, context, state.caches
        )
        sample = functools.partial(sample_tokens, rule=rule)
        if state.rules is not None:
            sample = functools.partial(sample_tokens_by_slot, rules=state.rules)
        tokens, logprobs, supports = jax.vmap(sample, (1, None, 1), 1)(logits, state.key, places)
        ended = (tokens[..., None] == jnp.asarray(self._shape.end_ids, jnp.int32)).any(axis=-1)
        tokens, ended = jnp.where(is_fed, fed, tokens), ended & ~is_fed
        # A token counts if all before it equal the inputs, and none of them has ended the response.
        follows = (tokens[:, :-1] == inputs[:, 1:]) & ~ended[:, :-1]
        counts = jnp.pad(follows, ((0, 0), (1, 0)), constant_values=True).cumprod(axis=1) > 0
        counts &= state.active[:, None] & (places < limit)
        step = jnp.sum(counts, axis=1, dtype=jnp.int32)
        at = jnp.where(counts, places, limit)  # an index past the end is dropped
        last = jnp.take_along_axis(tokens, jnp.maximum(step - 1, 0)[:, None], axis=1)[:, 0]
        texts = state.texts
        if texts is not None:
            at_text = jnp.where(counts, context.positions + 1, self._shape.cache_tokens)
            texts = texts.replace(tokens=at_each(texts.tokens, at_text, tokens))
        if routes is not None and state.routes is not None:
            place = jnp.where(counts, context.positions, state.routes.shape[1])
            routes = at_each(state.routes, place, routes)
        generated, kept = state.generated + step, state.supports
        return state.replace(
            caches=caches,
            routes=routes,
            texts=texts,
            last_token=jnp.where(state.active, last, state.last_token),
            length=state.length + step,
            generated=generated,
            active=state.active & ~(ended & counts).any(axis=1) & (generated < limit),
            tokens=at_each(state.tokens, at, tokens),
            logprobs=at_each(state.logprobs, at, logprobs),
            supports=None if kept is None else at_each(kept, at, supports),
        )


def _start_responses(
    prefix: Prefix, state: DecodeState, starts: Starts, *, write_prompts: Callable, in_turn: bool
) -> DecodeState:
    """Start responses to prefilled prompts; a slot past the last one is dropped.

    The known tokens of a resumed response are on the host: only their count is written.
    """
    slots, rows, samples, fills, rules = starts

    def place(array, value):
        return array.at[slots].set(value, mode="drop")

    keys = jax.vmap(jax.random.fold_in)(prefix.key[rows], samples)
    caches = []
    for cache, new in zip(state.caches, prefix.caches, strict=True):
        # XLA:TPU would gather all prompts of all layers at once. On CPU this would copy the caches.
        if in_turn and caches:
            new, caches[-1] = jax.lax.optimization_barrier((new, caches[-1]))
        caches.append(write_prompts(cache, new, slots, rows, prefix.true_length[rows], fills))
    routes = state.routes
    if routes is not None and prefix.routes is not None:
        prefilled = prefix.routes[rows, : routes.shape[1]]
        routes = routes.at[slots, : prefilled.shape[1]].set(prefilled, mode="drop")
    texts = state.texts
    if texts is not None and prefix.tokens is not None:
        padded, prompts = prefix.tokens[rows], jax.random.key_data(prefix.key)[rows, -1]
        tokens = texts.tokens.at[slots, : padded.shape[1]].set(padded, mode="drop")
        texts = Texts(tokens, place(texts.prompts, prompts.astype(jnp.int32)))
    return state.replace(
        caches=tuple(caches),
        texts=texts,
        last_token=place(state.last_token, prefix.last_token[rows]),
        length=place(state.length, prefix.true_length[rows] - 1),
        generated=place(state.generated, prefix.resumed_tokens[rows]),
        active=place(state.active, True),
        key=place(state.key, keys),
        routes=routes,
        known=None if state.known is None else place(state.known, prefix.resumed_tokens[rows]),
        rules=jax.tree.map(place, state.rules, rules),
    )


def _feed_responses(
    state: DecodeState, slots: Int[Array, "n"], tokens: Int[Array, "n C"], known: Int[Array, "n"]
) -> DecodeState:
    """Activate slots: they are fed the first `known` tokens of their responses, then sample."""
    texts = state.texts
    if texts is not None:
        first = (state.length - state.generated)[slots] + 1  # of the response
        at = first[:, None] + jnp.arange(tokens.shape[1])
        texts = texts.replace(tokens=texts.tokens.at[slots[:, None], at].set(tokens, mode="drop"))
    return state.replace(
        texts=texts,
        tokens=state.tokens.at[slots].set(tokens, mode="drop"),
        known=present(state.known, "known").at[slots].set(known, mode="drop"),
        active=state.active.at[slots].set(True, mode="drop"),
    )

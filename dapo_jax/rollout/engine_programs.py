"""Compiled programs of the engine: load, prefill, insert, stop, grow, generate."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dapo_jax.config.experiment import Sampler
from dapo_jax.model import decoder
from dapo_jax.model.caches import DecodeState, Prefix, PromptCache
from dapo_jax.model.decode_attention import interleave
from dapo_jax.model.inference import empty_routes, prefill
from dapo_jax.model.quantisation import to_int8
from dapo_jax.rollout import decode_step
from dapo_jax.rollout.jetstream_api import ResultTokens, result_tokens
from dapo_jax.rollout.paged_cache import PagedLayout, choose_layout
from dapo_jax.rollout.sampling import repeat_rule
from dapo_jax.rollout.slot_cache import SlotLayout
from dapo_jax.rollout.weight_transfer import Loader
from dapo_jax.runtime import sharding
from dapo_jax.runtime.kept_programs import keep
from dapo_jax.structs import SamplingRule

CALIBRATION_ROWS, CALIBRATION_TOKENS = 4, 256
CALIBRATION_MARGIN = 1.5  # keys and values of a prompt may be so much larger


class EnginePrograms:
    """Programs for one policy on one mesh; each compiles at its first call.

    Args:
        config: shape and numerics of the policy.
        mesh: the devices that decode.
        layout: of the caches.
        settings: sizes, and how parameters are loaded and prompts prefilled.
        cache_tokens: most tokens of a slot.
        end_ids: tokens that end a response.
        rule_per_slot: whether each response has a sampling rule of its own.
        frozen: parameters that never change, of which one decoding copy is made.
        trained_on: the mesh of the trainer's parameters.

    Attributes:
        held: decoding copy of the frozen parameters; None before it was needed.
        load_frozen, load_trained: loaders of the two kinds of parameters.
        state_shardings, prefix_sharding: where decode states and prefilled caches lie.
    """

    def __init__(
        self,
        config: decoder.DecoderConfig,
        mesh: jax.sharding.Mesh,
        layout: SlotLayout | PagedLayout,
        settings: Sampler,
        *,
        cache_tokens: int,
        end_ids: tuple[int, ...],
        rule_per_slot: bool,
        frozen: Any,
        trained_on: jax.sharding.Mesh,
    ):
        self._config, self._mesh, self._settings = config, mesh, settings
        self._cache_tokens = cache_tokens
        self._layout: Any = layout  # whose caches are of its own kind
        self._end_ids, self._rule_per_slot = jnp.asarray(end_ids, jnp.int32), rule_per_slot
        self._frozen, self.held = frozen, None
        boxed = sharding.flatten(decoder.abstract_params(config))
        apart = sharding.flatten(frozen)
        load = functools.partial(Loader, config, trained_on, mesh, settings=settings)
        self.load_frozen = load({path: boxed[path] for path in apart})
        self.load_trained = load({path: leaf for path, leaf in boxed.items() if path not in apart})
        # Any: a prefix or a state of shardings, which has arrays there.
        place: Any = functools.partial(sharding.sharding, mesh, column=sharding.DECODING)
        shapes = jax.eval_shape(functools.partial(self._empty, window=1))
        per_slot = jax.tree.map(lambda leaf: place("batch") if leaf.ndim else place(), shapes)
        self.state_shardings = state = per_slot.replace(caches=layout.shardings())
        self.prefix_sharding, replicated = place("batch", None, "kv_heads"), place()
        self.prefill = jax.jit(
            self._prefill,
            in_shardings=(None, place("batch"), None, None, None),
            out_shardings=Prefix(self.prefix_sharding, *[replicated] * 4, routes=place("batch")),
        )
        on_tpu = mesh.devices.flat[0].platform == "tpu"
        start = decode_step.start_responses
        start = functools.partial(start, write_prompts=layout.write_prompts, in_turn=on_tpu)
        self.insert = jax.jit(start, donate_argnums=1, out_shardings=state)
        self.stop = jax.jit(decode_step.stop_responses, donate_argnums=0, out_shardings=state)
        self.generate = jax.jit(
            self._generate,
            static_argnames=("rule", "columns"),
            donate_argnums=1,
            out_shardings=(state, replicated),
        )
        self.feed = jax.jit(decode_step.feed_responses, donate_argnums=0, out_shardings=state)
        self.grow = jax.jit(self._grow, static_argnames="window", out_shardings=state)
        by_head = place("kv_heads")
        self.calibrate = jax.jit(self._calibrate, out_shardings=by_head)
        self.empty = jax.jit(self._empty, static_argnames="window", out_shardings=state)
        self.rows = jax.jit(lambda array, slots: array[slots], out_shardings=replicated)

    def hold(self) -> dict[str, Array]:
        """Decoding copy of the frozen parameters, made the first time."""
        if self.held is None:
            self.held = self.load_frozen(self._frozen)
        return self.held

    def load(self, params: Any) -> Any:
        """Decoding weights: live parameters of the trainer, resharded, cast and un-stacked."""
        return decoder.for_decoding(self.hold() | self.load_trained(params), self._config)

    def split(self, array: np.ndarray) -> jax.Array:
        """Device array cut where slots are cut; every process has the same host array."""
        place = sharding.sharding(self._mesh, "batch", column=sharding.DECODING)
        return jax.make_array_from_callback(array.shape, place, lambda at: array[at])

    def _empty(self, *, window: int) -> DecodeState:
        caches, pages, slots = self._layout.empty(window), self._layout.pages, self._settings.slots
        tables = None if pages is None else jnp.zeros(pages.tables.shape, jnp.int32)
        rules = repeat_rule(SamplingRule(), slots) if self._rule_per_slot else None
        known = jnp.zeros(slots, jnp.int32) if self._settings.keep_turns else None
        routes = None
        if self._config.records_routes:
            routes = empty_routes(self._config, slots, self._cache_tokens)
        limit, options = self._settings.max_response_tokens, {"rules": rules, "known": known}
        return decode_step.empty_state(caches, tables, slots, limit, routes=routes, **options)

    def _calibrate(self, params: Any) -> tuple[Array, ...]:
        """Scales [K2] of each layer's keys and values, from what the weights make of any tokens.

        They depend on nothing but the weights, so that a draw depends on its key alone.
        """
        shape = CALIBRATION_ROWS, min(CALIBRATION_TOKENS, self._cache_tokens)
        tokens = jax.random.randint(jax.random.key(0), shape, 0, self._config.vocab)
        with self._mesh_context():
            caches, _ = prefill(params, self._config, tokens, jnp.full(shape[0], shape[1]))

        def scale(cache: PromptCache) -> Array:
            pairs = interleave(cache.keys, cache.values, 2).astype(jnp.float32)
            return CALIBRATION_MARGIN * to_int8(pairs, (0, 1, 3))[1]

        return tuple(map(scale, caches))

    def _grow(self, state: DecodeState, *, window: int) -> DecodeState:
        return state.replace(caches=self._layout.grow(state.caches, window))

    def _mesh_context(self) -> contextlib.AbstractContextManager:
        """Context of traced code that computes experts where they lie, and adds by pieces."""
        if not (self._config.experts or self._config.int8_products):  # others need no mesh
            return contextlib.nullcontext()
        return sharding.activate_traced(self._mesh, sharding.DECODING)

    def _prefill(self, *arrays: Any) -> Prefix:
        with self._mesh_context():
            chunk_tokens = self._settings.prefill_chunk_tokens
            return decode_step.prefill_prefix(self._config, chunk_tokens, *arrays)

    def _generate(
        self, params: Any, state: DecodeState, *, rule: SamplingRule, columns: int | None
    ) -> tuple[DecodeState, ResultTokens]:
        def draw_token(state: DecodeState) -> DecodeState:
            end_ids, attend = self._end_ids, self._layout.attend
            return decode_step.decode_one(
                params, self._config, attend, state, end_ids, rule, columns
            )

        started_at, tokens = state.generated, self._settings.burst_tokens
        early = sharding.shards(self._mesh, "batch", sharding.DECODING) == 1
        with self._mesh_context():
            state = decode_step.decode_burst(draw_token, state, tokens, early=early)
        return state, result_tokens(state, started_at, tokens)


def engine_programs(
    config: decoder.DecoderConfig,
    mesh: jax.sharding.Mesh,
    layout: SlotLayout | PagedLayout,
    settings: Sampler,
    *,
    cache_tokens: int,
    frozen: Any,
    **options: Any,
) -> EnginePrograms:
    """Programs of an engine: those of an earlier one that is like it, where nothing is frozen.

    The arguments are as for `EnginePrograms`.
    """
    if frozen:
        options |= {"frozen": frozen, "cache_tokens": cache_tokens}
        return EnginePrograms(config, mesh, layout, settings, **options)
    return keep(_for_any_engine, config, mesh, settings, cache_tokens, **options)


def _for_any_engine(
    config: decoder.DecoderConfig,
    mesh: jax.sharding.Mesh,
    settings: Sampler,
    cache_tokens: int,
    **options: Any,
) -> EnginePrograms:
    """Programs with a layout of their own: an engine's has the state of its pages."""
    layout = choose_layout(config, mesh, settings, cache_tokens)
    options |= {"frozen": {}, "cache_tokens": cache_tokens}
    return EnginePrograms(config, mesh, layout, settings, **options)

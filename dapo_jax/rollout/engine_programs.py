"""Compiled programs of the engine: load, prefill, insert, feed, stop, grow, generate."""

import contextlib
import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from dapo_jax.config.experiment import Sampler
from dapo_jax.model import decoder
from dapo_jax.model.caches import DecodeState, Prefix, PromptCache
from dapo_jax.model.decode_attention import interleave
from dapo_jax.model.inference import empty_routes, prefill
from dapo_jax.model.quantisation import to_int8
from dapo_jax.rollout import decode_step
from dapo_jax.rollout.decode_step import Starts
from dapo_jax.rollout.jetstream_api import ResultTokens, result_tokens
from dapo_jax.rollout.paged_cache import PagedLayout, choose_layout
from dapo_jax.rollout.sampling import repeat_rule
from dapo_jax.rollout.slot_cache import SlotLayout
from dapo_jax.rollout.weight_transfer import DecodingWeights, TrainerWeights
from dapo_jax.runtime import sharding
from dapo_jax.runtime.kept_programs import keep
from dapo_jax.structs import SamplingRule

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
    rule_per_slot: bool = False  # each response has its own sampling rule

    @property
    def cache_tokens(self) -> int:
        """Maximum tokens of a slot; the last sampled one is never fed back."""
        return self.max_prompt_tokens + self.settings.max_response_tokens


class Programs(Protocol):
    """Functions that compute for an engine: compiled ones, or those of a simulation."""

    def resident(self) -> Any: ...

    def load(self, params: Any) -> Any: ...

    def calibrate(self, params: Any) -> Any: ...

    def split(self, array: np.ndarray) -> Any: ...

    def empty(self, *, window: int) -> DecodeState: ...

    def grow(self, state: DecodeState, *, window: int) -> DecodeState: ...

    def prefill(self, params: Any, tokens: Any, lengths: Any, keys: Any, sampled: Any, /) -> Prefix:
        """Compute keys and values of prompts; the last `sampled` tokens are a response's."""
        ...

    def insert(self, prefix: Prefix, state: DecodeState, starts: Starts, /) -> DecodeState: ...

    def feed(self, state: DecodeState, slots: Any, tokens: Any, known: Any, /) -> DecodeState: ...

    def stop(self, state: DecodeState, slots: Any, /) -> DecodeState: ...

    def generate(
        self, params: Any, state: DecodeState, *, rule: SamplingRule, columns: int | None
    ) -> tuple[DecodeState, Any]: ...

    def rows(self, array: Any, slots: Any, /) -> Any: ...


class EnginePrograms:
    """Programs for one policy on one mesh; each compiles at its first call.

    It has one attribute for each compiled program, so more than twelve.

    Attributes:
        weights: loads the parameters.
        state_shardings, prefix_sharding: shardings of decode states and prefilled caches.
    """

    def __init__(
        self,
        shape: EngineShape,
        mesh: Mesh,
        layout: SlotLayout | PagedLayout,  # of the caches
        trainer: TrainerWeights,  # mesh of the trainer's parameters, and those that are frozen
    ):
        self._shape = shape
        self._mesh = mesh
        self._layout: Any = layout  # whose caches are of its own kind
        self.weights = DecodingWeights(shape.config, mesh, trainer, shape.settings)
        # Any: a prefix or a state of shardings, which has arrays there.
        place: Any = functools.partial(sharding.sharding, mesh, column=sharding.DECODING)
        replicated = place()
        shapes = jax.eval_shape(functools.partial(self._empty, window=1))
        per_slot = jax.tree.map(lambda leaf: place("batch") if leaf.ndim else replicated, shapes)
        self.state_shardings = state = per_slot.replace(caches=layout.shardings())
        self.prefix_sharding = place("batch", None, "kv_heads")
        self.prefill = jax.jit(
            self._prefill,
            in_shardings=(None, place("batch"), None, None, None),
            out_shardings=Prefix(self.prefix_sharding, *[replicated] * 4, routes=place("batch")),
        )
        start = functools.partial(
            decode_step.start_responses,
            write_prompts=layout.write_prompts,
            in_turn=mesh.devices.flat[0].platform == "tpu",
        )
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
        self.calibrate = jax.jit(self._calibrate, out_shardings=place("kv_heads"))
        self.empty = jax.jit(self._empty, static_argnames="window", out_shardings=state)
        self.rows = jax.jit(lambda array, slots: array[slots], out_shardings=replicated)

    def resident(self) -> dict[str, Array]:
        return self.weights.frozen()

    def load(self, params: Any) -> Any:
        return self.weights.load(params)

    def split(self, array: np.ndarray) -> jax.Array:
        """Shard an array like the slots; every process has the same host array."""
        place = sharding.sharding(self._mesh, "batch", column=sharding.DECODING)
        return jax.make_array_from_callback(array.shape, place, lambda at: array[at])

    def _empty(self, *, window: int) -> DecodeState:
        config, settings = self._shape.config, self._shape.settings
        slots = settings.slots
        pages = self._layout.pages
        options: dict[str, Any] = {"rules": None, "known": None, "routes": None}
        if self._shape.rule_per_slot:
            options["rules"] = repeat_rule(SamplingRule(), slots)
        if settings.keep_turns:
            options["known"] = jnp.zeros(slots, jnp.int32)
        if config.records_routes:
            options["routes"] = empty_routes(config, slots, self._shape.cache_tokens)
        return decode_step.empty_state(
            self._layout.empty(window),
            None if pages is None else jnp.zeros(pages.tables.shape, jnp.int32),
            slots,
            settings.max_response_tokens,
            **options,
        )

    def _calibrate(self, params: Any) -> tuple[Array, ...]:
        """Return scales [K2] of each layer's keys and values, measured on random tokens.

        They depend on the weights only, so that sampling still depends on the key only.
        """
        shape = CALIBRATION_ROWS, min(CALIBRATION_TOKENS, self._shape.cache_tokens)
        tokens = jax.random.randint(jax.random.key(0), shape, 0, self._shape.config.vocab)
        with self._mesh_context():
            caches, _ = prefill(params, self._shape.config, tokens, jnp.full(shape[0], shape[1]))

        def scale(cache: PromptCache) -> Array:
            pairs = interleave(cache.keys, cache.values, 2).astype(jnp.float32)
            return CALIBRATION_MARGIN * to_int8(pairs, (0, 1, 3))[1]

        return tuple(map(scale, caches))

    def _grow(self, state: DecodeState, *, window: int) -> DecodeState:
        return state.replace(caches=self._layout.grow(state.caches, window))

    def _mesh_context(self) -> contextlib.AbstractContextManager:
        """Return a context for traced code that has expert-parallel or sharded int8 products."""
        config = self._shape.config
        if not (config.experts or config.int8_products):  # other policies need no mesh
            return contextlib.nullcontext()
        return sharding.activate_traced(self._mesh, sharding.DECODING)

    def _prefill(
        self, params: Any, tokens: Array, lengths: Array, keys: Array, sampled: Array
    ) -> Prefix:
        chunk_tokens = self._shape.settings.prefill_chunk_tokens
        with self._mesh_context():
            caches, routes = prefill(params, self._shape.config, tokens, lengths, chunk_tokens)
            last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]
            return Prefix(caches, last, lengths, keys, sampled, routes=routes)

    def _generate(
        self, params: Any, state: DecodeState, *, rule: SamplingRule, columns: int | None
    ) -> tuple[DecodeState, ResultTokens]:
        tokens = self._shape.settings.burst_tokens
        options = decode_step.StepOptions(
            self._shape.config,
            self._layout.attend,
            jnp.asarray(self._shape.end_ids, jnp.int32),
            rule,
            columns,
        )
        sample_token = functools.partial(decode_step.decode_one, params, options)
        generated_before = state.generated
        early = sharding.shards(self._mesh, "batch", sharding.DECODING) == 1
        with self._mesh_context():
            state = decode_step.decode_burst(sample_token, state, tokens, early=early)
        return state, result_tokens(state, generated_before, tokens)


def engine_programs(
    shape: EngineShape, mesh: Mesh, layout: SlotLayout | PagedLayout, trainer: TrainerWeights
) -> EnginePrograms:
    """Return the programs of an engine; equal engines without frozen parameters share them."""
    if trainer.frozen:
        return EnginePrograms(shape, mesh, layout, trainer)
    return keep(_programs_without_frozen, shape, mesh, trainer.mesh)


def _programs_without_frozen(shape: EngineShape, mesh: Mesh, trained_on: Mesh) -> EnginePrograms:
    # These programs have their own layout: the engine's layout holds the state of its pages.
    layout = choose_layout(shape.config, mesh, shape.settings, shape.cache_tokens)
    return EnginePrograms(shape, mesh, layout, TrainerWeights(trained_on))

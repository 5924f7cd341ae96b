"""The policy behind JetStream's `Engine`: prefill, insert, generate.

They keep JetStream's signatures; keyword arguments beyond carry what reproducible rollouts need.
Importing JetStream pulls TensorFlow in, so this is imported after the config was checked.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dapo_jax.config.experiment import Sampler
from dapo_jax.data.prompts.tokenizer import Ends, Tokenizer
from dapo_jax.model import decoder
from dapo_jax.model.caches import DecodeState, Prefix
from dapo_jax.rollout import decode_step
from dapo_jax.rollout.jetstream_api import (
    NO_TOKEN,
    Engine,
    JetStreamTokenizer,
    ResultTokens,
    TokenizerParameters,  # pyright: ignore[reportAttributeAccessIssue]: made when imported
    result_tokens,
)
from dapo_jax.rollout.paged_cache import choose_store
from dapo_jax.rollout.sampling import SAMPLE_FOR_SERVING, SamplingRule, sample_key
from dapo_jax.rollout.weight_transfer import Loader
from dapo_jax.runtime import sharding
from dapo_jax.runtime.settings import require


class PolicyEngine(Engine):
    """Decodes `slots` responses side by side, `burst_tokens` per call.

    Args:
        config: shape and numerics of the policy.
        mesh: the devices; slots are split over data x fsdp (replicas), heads over tensor.
        slots: how many responses decode together.
        burst_tokens: token columns of one `generate` call.
        max_prompt_tokens, max_response_tokens: limits; a slot's cache holds their sum.
        first_window_tokens: cache length of an empty state; it doubles when responses outgrow it:
            attention reads what exists. The limit itself: no growth.
        insert_width: how many slots one `insert` can fill from one prompt (the group size).
        tokenizer: its `end_ids` end a response; JetStream encodes and decodes with it.
        seed: of the draws of prompts that come without a key.
        frozen: parameters that never change: of them one copy is made for decoding.
        settings: those of the cache, of prefill and of loading are read here.
        trained_on: the mesh of the trainer's parameters; None: this one.

    Attributes:
        rule: how tokens are drawn; `generate` reads it at each call.
        held: the decoding copy of the frozen parameters; None before it was needed.
        store: where keys and values are; `claim` a slot there before `insert`, `release` it later.
        replicas: shares of the slots; so many prompts cost as much as one to prefill.
        prefill_width: prompts that `prefill_prompts` takes at most.
    """

    def __init__(
        self,
        config: decoder.DecoderConfig,
        mesh: jax.sharding.Mesh,
        *,
        slots: int,
        burst_tokens: int,
        max_prompt_tokens: int,
        max_response_tokens: int,
        first_window_tokens: int,
        insert_width: int,
        tokenizer: Ends,
        seed: int = 0,
        frozen: Any = None,
        settings: Sampler = Sampler(),  # noqa: B008
        trained_on: jax.sharding.Mesh | None = None,
    ):
        self.replicas = sharding.shards(mesh, "batch", sharding.DECODING)
        allowed = f"a multiple of data x fsdp = {self.replicas}"
        require(slots % self.replicas == 0, "sampler.slots", slots, allowed)
        self.config, self._mesh, self.rule = config, mesh, SamplingRule()
        self._slots, self._burst_tokens = slots, burst_tokens
        self._max_prompt_tokens, self.max_response_tokens = max_prompt_tokens, max_response_tokens
        self._tokenizer, self._seed, self._served = tokenizer, seed, itertools.count()
        self._end_ids = jnp.asarray(tokenizer.end_ids, jnp.int32)
        self.prefill_width = -(-settings.prefill_prompts // self.replicas) * self.replicas
        self.store = choose_store(
            config,
            mesh,
            settings,
            slots=slots,
            cache_tokens=self.cache_tokens,
            first_window_tokens=first_window_tokens,
        )
        prompts = self.prefill_width if self.store.takes_many else 1
        self._insert_widths = sorted({1, insert_width, min(slots, insert_width * prompts)})
        self._frozen, self.held, self._pace = frozen or {}, None, sharding.Pace(mesh)
        self._compile(settings, trained_on or mesh)

    def _compile(self, settings: Sampler, trained_on: jax.sharding.Mesh) -> None:
        # Any: places are handed over as a prefix or a state, which has arrays there.
        place: Any = functools.partial(sharding.sharding, self._mesh, column=sharding.DECODING)
        shapes = jax.eval_shape(functools.partial(self._empty_fn, window=1))
        per_slot = jax.tree.map(lambda leaf: place("batch") if leaf.ndim else place(), shapes)
        state, replicated = per_slot.replace(caches=self.store.shardings()), place()
        self._state_places = state
        boxed = sharding.flatten(decoder.abstract_params(self.config))
        frozen = sharding.flatten(self._frozen)
        load = functools.partial(Loader, self.config, trained_on, self._mesh, settings=settings)
        self._load_frozen = load({path: boxed[path] for path in frozen})
        self._load = load({path: leaf for path, leaf in boxed.items() if path not in frozen})
        self.prefix_place = prompts = place("batch", None, "kv_heads")
        self._prefill = jax.jit(
            functools.partial(
                decode_step.prefill_prefix, self.config, settings.prefill_chunk_tokens
            ),
            in_shardings=(None, place("batch"), None, None, None),
            out_shardings=Prefix(prompts, *[replicated] * 4),
        )
        take_up, on_tpu = self.store.take_up, self._mesh.devices.flat[0].platform == "tpu"
        start = functools.partial(decode_step.start_responses, take_up=take_up, in_turn=on_tpu)
        self._insert = jax.jit(start, donate_argnums=1, out_shardings=state)
        self._stop = jax.jit(decode_step.stop_responses, donate_argnums=0, out_shardings=state)
        self._generate = jax.jit(
            self._generate_fn,
            static_argnames=("rule", "columns"),
            donate_argnums=1,
            out_shardings=(state, replicated),
        )
        self._grow = jax.jit(self._grow_fn, static_argnames="window", out_shardings=state)
        self._empty = jax.jit(self._empty_fn, static_argnames="window", out_shardings=state)
        self._rows = jax.jit(lambda array, slots: array[slots], out_shardings=replicated)

    # --- what JetStream asks for --------------------------------------------------------------

    def load_params(self, params: Any) -> Any:
        """The trainer's live parameters, resharded, cast and un-stacked for decoding."""
        return decoder.for_decoding(self.hold() | self._load(params), self.config)

    def prefill(
        self,
        *,
        params: Any,
        existing_prefix: Prefix | None = None,
        padded_tokens: Int[Array, "P"] | Int[np.ndarray, "P"],
        true_length: int,
        key: jax.Array | None = None,
    ) -> Prefix:
        """Keys and values of one prompt, padded on the right.

        `key` belongs to the prompt (seed, step and place in the data); left out, it is of the
        engine's seed and of how many prompts came without a key before.
        """
        if existing_prefix is not None:
            raise ValueError("prefill: existing_prefix is not supported")
        if padded_tokens[0] == NO_TOKEN:
            padded_tokens = np.append(padded_tokens[1:], self._tokenizer.pad_id)
            true_length -= 1
        limit = min(len(padded_tokens), self._max_prompt_tokens)
        if not 0 < true_length <= limit:
            allowed = f"above 0 and at most {limit}"
            raise ValueError(f"prefill: true_length = {true_length}: must be {allowed}")
        if key is None:
            key = sample_key(self._seed, SAMPLE_FOR_SERVING, 0, next(self._served))
        keys = jnp.stack([key] * self.prefilled_together(1))
        return self.prefill_prompts(params, np.asarray(padded_tokens)[None], [true_length], keys)

    def insert(
        self,
        prefix: Prefix,
        decode_state: DecodeState,
        slot: int | np.ndarray,
        *,
        sample_index: int | np.ndarray = 0,
        row: int | np.ndarray = 0,
    ) -> DecodeState:
        """Starts a response of `prefix` in `slot`, or one in each of up to `most_inserted` slots;
        `row` is which prompt of `prefix`, for each slot."""
        prompts, time = prefix.caches[0].keys.shape[:2]
        decode_state = self._fit(decode_state, time)
        slots, samples = np.atleast_1d(slot), np.atleast_1d(sample_index)
        rows = np.broadcast_to(row, slots.shape)
        if len(slots) > self.most_inserted:
            raise ValueError(f"insert: {len(slots)} slots: at most {self.most_inserted}")
        width = next(width for width in self._insert_widths if len(slots) <= width)
        for one, row in zip(slots.tolist(), rows, strict=True):
            if not self.store.claimed(one):  # JetStream does not ask before
                tokens = int(prefix.true_length[row])
                self.store.claim(one, tokens, prompt=("alone", one), beside=False)
        fills = self.store.fills(slots, rows, width=width, prompts=prompts, time=time)
        pad = (0, width - len(slots))
        # An index past the last slot is dropped by the scatter.
        slots = np.pad(slots, pad, constant_values=self._slots).astype(np.int32)
        rows, samples = (np.pad(x, pad).astype(np.int32) for x in (rows, samples))
        return self._pace(self._insert(prefix, decode_state, slots, rows, samples, fills))

    def generate(
        self, params: Any, decode_state: DecodeState, *, longest: int | None = None
    ) -> tuple[DecodeState, ResultTokens]:
        """Draws up to `burst_tokens` tokens per active slot in one call.

        `longest`: the most tokens that any active slot has in its cache now; left out, a slot may
        be as full as it gets. The cache grows first where this burst would not fit.
        """
        if longest is None:  # nobody has called `make_room`
            longest = self.cache_tokens
            self.store.make_room(self.store.held, self._burst_tokens)
        needed = longest + self._burst_tokens
        decode_state = self._with_tables(self._fit(decode_state, needed))
        self.store.advance(self._burst_tokens)
        return self._generate(
            params, decode_state, rule=self.rule, columns=self.store.columns(needed)
        )

    def init_decode_state(self) -> DecodeState:
        """A state with every slot free, its cache as short as it may be."""
        self.store.reset()
        return self._empty(window=self.store.window(1))

    def get_prefix_destination_sharding(self) -> Any:
        """None: prefill and decoding share the mesh."""
        return None

    def get_tokenizer(self) -> TokenizerParameters:
        """JetStream's description of a vocabulary; ours comes from the model folder instead."""
        return TokenizerParameters()

    def build_tokenizer(self, metadata: TokenizerParameters) -> JetStreamTokenizer:
        """The model folder's own, whatever `metadata` says."""
        assert isinstance(self._tokenizer, Tokenizer)  # who serves has text
        return JetStreamTokenizer(self._tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        return self._slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return self._max_prompt_tokens

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        return None

    # --- what rollouts need beyond it ---------------------------------------------------------

    @property
    def cache_tokens(self) -> int:
        """Tokens a slot can hold; the last drawn one is never fed back."""
        return self._max_prompt_tokens + self.max_response_tokens

    @property
    def most_inserted(self) -> int:
        """Slots that one `insert` can fill."""
        return self._insert_widths[-1]

    def replica(self, slot: int) -> int:
        """Which share of the slots that one is in."""
        return slot * self.replicas // self._slots

    def hold(self) -> dict[str, Array]:
        """The decoding copy of the frozen parameters, made the first time."""
        if self.held is None:
            self.held = self._load_frozen(self._frozen)
        return self.held

    def prefilled_together(self, prompts: int) -> int:
        """Prompts that the call computes which prefills so many."""
        return self.replicas if prompts <= self.replicas else self.prefill_width

    def prefill_prompts(
        self,
        params: Any,
        padded_tokens: Int[np.ndarray, "n P"],
        true_lengths: Sequence[int],
        keys: jax.Array,
        drawn: Sequence[int] = (),
    ) -> Prefix:
        """Keys and values of up to `prefill_width` prompts, split over the replicas.

        Args:
            keys: of the prompts, and again of the last one up to `prefilled_together`.
            drawn: how many of the last tokens are those of a response that goes on; none if empty.
        """
        pad = self.prefilled_together(len(true_lengths)) - len(true_lengths)
        tokens = np.pad(padded_tokens, ((0, pad), (0, 0)), mode="edge").astype(np.int32)
        counts = np.asarray([true_lengths, drawn or [0] * len(true_lengths)], np.int32)
        lengths, before = np.pad(counts, ((0, 0), (0, pad)), mode="edge")
        made = self._prefill(params, self._over_replicas(tokens), lengths, keys, before)
        return self._pace(made)

    def make_room(self, state: DecodeState, slots: Sequence[int]) -> tuple[DecodeState, list[int]]:
        """Room for the next burst; where there is none the youngest of `slots` are stopped.

        Args:
            slots: those that draw, the oldest first.

        Returns the state, and the slots that were stopped, youngest first.
        """
        if gave := self.store.make_room(slots, self._burst_tokens):
            stopped = np.full(self._slots, self._slots, np.int32)
            stopped[: len(gave)] = gave
            state = self._stop(state, stopped)
        return state, gave

    def harvest(self, state: DecodeState, slots: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Drawn tokens and log-probs [len(slots), max_response_tokens] of those slots, on host."""
        padded = np.zeros(1 << (len(slots) - 1).bit_length(), np.int32)
        padded[: len(slots)] = slots
        tokens, logprobs = self._rows(state.tokens, padded), self._rows(state.logprobs, padded)
        return np.asarray(tokens)[: len(slots)], np.asarray(logprobs)[: len(slots)]

    def _fit(self, state: DecodeState, needed: int) -> DecodeState:
        fits = self.store.fits(cast(Any, state.caches), needed)  # which are of the store's kind
        return state if fits else self._grow(state, window=self.store.window(needed))

    def _with_tables(self, state: DecodeState) -> DecodeState:
        tables = self.store.tables
        return state if tables is None else state.replace(tables=self._over_replicas(tables))

    def _over_replicas(self, array: np.ndarray) -> jax.Array:
        """The same host array of every process, cut where slots are cut."""
        place = sharding.sharding(self._mesh, "batch", column=sharding.DECODING)
        return jax.make_array_from_callback(array.shape, place, lambda at: array[at])

    # --- jitted bodies ------------------------------------------------------------------------

    def _empty_fn(self, *, window: int) -> DecodeState:
        caches, tables = self.store.empty(window), self.store.empty_tables()
        return decode_step.empty_state(caches, tables, self._slots, self.max_response_tokens)

    def _grow_fn(self, state: DecodeState, *, window: int) -> DecodeState:
        return state.replace(caches=self.store.grow(cast(Any, state.caches), window))

    def _generate_fn(self, params, state: DecodeState, *, rule: SamplingRule, columns: int | None):
        def one(state: DecodeState) -> DecodeState:
            end_ids, attend = self._end_ids, self.store.attend
            return decode_step.decode_one(
                params, self.config, attend, state, end_ids, rule, columns
            )

        started_at, early = state.generated, self.replicas == 1
        state = decode_step.decode_burst(one, state, self._burst_tokens, early=early)
        return state, result_tokens(state, started_at, self._burst_tokens)

"""Decoding engine behind JetStream's `Engine`: prefill, insert, generate.

The calls keep JetStream's signatures; keyword arguments beyond carry what reproducible rollouts
need.
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dapo_jax.config.experiment import Sampler
from dapo_jax.data.prompts.tokenizer import Ends, Tokenizer
from dapo_jax.model.caches import DecodeState, Prefix
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.rollout.engine_programs import engine_programs
from dapo_jax.rollout.jetstream_api import (
    NO_TOKEN,
    Engine,
    JetStreamTokenizer,
    ResultTokens,
    TokenizerParameters,  # pyright: ignore[reportAttributeAccessIssue]: made when imported
)
from dapo_jax.rollout.paged_cache import choose_layout, with_scales
from dapo_jax.rollout.requests import Drawn
from dapo_jax.rollout.sampling import SAMPLE_FOR_SERVING, sample_key
from dapo_jax.runtime import sharding
from dapo_jax.runtime.pace import Pace
from dapo_jax.runtime.settings import require
from dapo_jax.structs import SamplingRule


class PolicyEngine(Engine):
    """Decodes `settings.slots` responses side by side, `settings.burst_tokens` per call.

    Args:
        config: shape and numerics of the policy.
        mesh: the devices; slots are split over data x fsdp (replicas), heads over tensor.
        settings: sizes of slots, cache and calls; not the sampling rule.
        max_prompt_tokens: longest prompt; with `settings.max_response_tokens` a slot's cache.
        insert_width: slots that one `insert` can fill from one prompt (the group size).
        tokenizer: its `end_ids` end a response; JetStream encodes and decodes with it.
        seed: of the draws of prompts that come without a key.
        frozen: parameters that never change: of them one copy is made for decoding.
        trained_on: the mesh of the trainer's parameters; None: this one.
        programs: makes what computes, as `engine_programs` does.

    Attributes:
        rule: how tokens are drawn; `generate` reads it at each call.
        programs: what computes.
        layout, pages: of the caches on devices; their page table, None where there are no pages.
        keeps_turns: whether `feed` may be called.
        replicas: shares of the slots; so many prompts cost as much as one to prefill.
        prefill_width: most prompts of one `prefill_prompts`.
    """

    RULE_PER_SLOT = False

    def __init__(
        self,
        config: DecoderConfig,
        mesh: jax.sharding.Mesh,
        settings: Sampler,
        *,
        max_prompt_tokens: int,
        insert_width: int = 1,
        tokenizer: Ends,
        seed: int = 0,
        frozen: Any = None,
        trained_on: jax.sharding.Mesh | None = None,
        programs: Callable[..., Any] = engine_programs,
    ):
        int8_products = settings.weights_dtype == "int8_products"
        config = dataclasses.replace(config, int8_products=int8_products)
        slots, self._burst_tokens = settings.slots, settings.burst_tokens
        self.replicas = sharding.shards(mesh, "batch", sharding.DECODING)
        allowed = f"a multiple of data x fsdp = {self.replicas}"
        require(slots % self.replicas == 0, "sampler.slots", slots, allowed)
        self.config, self._mesh, self._slots, self.rule = config, mesh, slots, SamplingRule()
        self._max_prompt_tokens = max_prompt_tokens
        self.max_response_tokens = settings.max_response_tokens
        self.keeps_turns = settings.keep_turns
        self._tokenizer, self._seed, self._served = tokenizer, seed, itertools.count()
        self._pace = Pace(mesh)
        self.prefill_width = -(-settings.prefill_prompts // self.replicas) * self.replicas
        self.layout = choose_layout(config, mesh, settings, self.cache_tokens)
        self.pages, self._page_scales = self.layout.pages, None
        insert_width = min(slots, insert_width)
        prompts = self.prefill_width if self.layout.takes_many else 1
        self._insert_widths = sorted({1, insert_width, min(slots, insert_width * prompts)})
        self.programs = programs(
            config,
            mesh,
            self.layout,
            settings,
            cache_tokens=self.cache_tokens,
            end_ids=tokenizer.end_ids,
            rule_per_slot=self.RULE_PER_SLOT,
            frozen=frozen or {},
            trained_on=trained_on or mesh,
        )

    # --- JetStream's calls ----------------------------------------------------------------------

    def load_params(self, params: Any) -> Any:
        """Decoding weights of the trainer's live parameters."""
        loaded = self.programs.load(params)
        if self.layout.calibrated:
            self._page_scales = self.programs.calibrate(loaded)
        return loaded

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
        fills = None
        if self.pages:
            for number, row in zip(slots.tolist(), rows, strict=True):
                if not self.pages.claimed(number):  # JetStream does not ask before
                    tokens, alone = int(prefix.true_length[row]), ("alone", number)
                    self.pages.claim(number, tokens, prompt=alone, beside=False)
            fills = self.pages.fills(slots, rows, width=width, prompts=prompts, time=time)
        pad = (0, width - len(slots))
        # An index past the last slot is dropped by the scatter.
        slots = np.pad(slots, pad, constant_values=self._slots).astype(np.int32)
        rows, samples = (np.pad(x, pad).astype(np.int32) for x in (rows, samples))
        return self._pace(self.programs.insert(prefix, decode_state, slots, rows, samples, fills))

    def generate(
        self, params: Any, decode_state: DecodeState, *, longest: int | None = None
    ) -> tuple[DecodeState, ResultTokens]:
        """Draws up to `burst_tokens` tokens per active slot in one call.

        `longest`: the most tokens that any active slot has in its cache now; left out, a slot may
        be as full as it gets. The cache grows first where this burst would not fit.
        """
        needed = self._burst_tokens + (self.cache_tokens if longest is None else longest)
        state = self._fit(decode_state, needed)
        if self.pages:
            if longest is None:  # nobody has called `make_room`
                self.pages.make_room(self.pages.slots, self._burst_tokens)
            if (tables := self.pages.changed_tables()) is not None:
                state = state.replace(tables=self.programs.split(tables))
            self.pages.advance(self._burst_tokens)
        columns = self.layout.columns(needed)
        return self.programs.generate(params, state, rule=self.rule, columns=columns)

    def init_decode_state(self) -> DecodeState:
        """Decode state with every slot free, its cache as short as it may be."""
        if self.pages:
            self.pages.reset()
        state = self.programs.empty(window=self.layout.window(1))
        if self._page_scales is None:
            return state
        return state.replace(caches=with_scales(state.caches, self._page_scales))

    def get_prefix_destination_sharding(self) -> Any:
        """None: prefill and decoding share the mesh."""
        return None

    def get_tokenizer(self) -> TokenizerParameters:
        """JetStream's description of a vocabulary, empty: ours comes from the model folder."""
        return TokenizerParameters()

    def build_tokenizer(self, metadata: TokenizerParameters) -> JetStreamTokenizer:
        """Tokenizer of the model folder, whatever `metadata` says."""
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

    # --- calls of the scheduler -------------------------------------------------------------------

    @property
    def cache_tokens(self) -> int:
        """Most tokens of a slot; the last drawn one is never fed back."""
        return self._max_prompt_tokens + self.max_response_tokens

    @property
    def most_inserted(self) -> int:
        """Most slots that one `insert` can fill."""
        return self._insert_widths[-1]

    def claim(self, free: Sequence[int], tokens: int, prompt: Hashable) -> int | None:
        """Keeps room of the cache for a prompt in the first free slot that has it; None: no slot.

        Args:
            prompt: responses to one prompt share what it fills.
        """
        full = set()
        for slot in free:
            replica = slot * self.replicas // self._slots
            if replica in full:
                continue
            if self.pages is None or self.pages.claim(slot, tokens, prompt):
                return slot
            full.add(replica)
        return None

    def release(self, slot: int) -> None:
        """Gives the room of a response that has ended back."""
        if self.pages:
            self.pages.release(slot)

    def prefilled_together(self, prompts: int) -> int:
        """Number of prompts, padding included, of the call that prefills so many."""
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
        tokens = self.programs.split(tokens)
        return self._pace(self.programs.prefill(params, tokens, lengths, keys, before))

    def make_room(
        self, state: DecodeState, slots: Sequence[int], held: Sequence[int] = ()
    ) -> tuple[DecodeState, list[int]]:
        """Room for the next burst; where there is none, slots lose theirs and are stopped.

        Args:
            slots: those that draw, the oldest first.
            held: those of trajectories between two turns, the oldest first.

        Returns the state, and the slots that were stopped: held ones first, then the youngest.
        """
        stopped = self.pages.make_room(slots, self._burst_tokens, held) if self.pages else []
        return self.stop(state, stopped), stopped

    def feed(
        self, state: DecodeState, slots: Sequence[int], responses: Sequence[np.ndarray]
    ) -> DecodeState:
        """State in which slots go on with the tokens of their responses that they lack.

        Args:
            responses: of each slot, whole: [n] tokens, the first of which are in its cache.
        """
        size = 1 << (len(slots) - 1).bit_length()
        tokens = np.zeros((size, self.max_response_tokens), np.int32)
        places, known = np.full(size, self._slots, np.int32), np.zeros(size, np.int32)
        for row, (slot, response) in enumerate(zip(slots, responses, strict=True)):
            tokens[row, : len(response)] = response
            places[row], known[row] = slot, len(response)
        return self.programs.feed(state, places, tokens, known)

    def stop(self, state: DecodeState, slots: Sequence[int]) -> DecodeState:
        """State in which those slots draw nothing more."""
        if not slots:
            return state
        padded = np.full(self._slots, self._slots, np.int32)
        padded[: len(slots)] = slots
        return self.programs.stop(state, padded)

    def harvest(self, state: DecodeState, slots: Sequence[int]) -> list[Drawn]:
        """Responses of those slots, on host."""
        if not slots:
            return []
        padded = np.zeros(1 << (len(slots) - 1).bit_length(), np.int32)
        padded[: len(slots)] = slots
        arrays = state.tokens, state.logprobs, state.routes
        rows: Any = jax.tree.map(lambda x: np.asarray(self.programs.rows(x, padded)), arrays)
        return [Drawn(*jax.tree.map(lambda x, i=i: x[i], rows)) for i in range(len(slots))]

    def _fit(self, state: DecodeState, needed: int) -> DecodeState:
        caches = cast(Any, state.caches)  # which are of the layout's kind
        if self.layout.fits(caches, needed):
            return state
        return self.programs.grow(state, window=self.layout.window(needed))

"""Decoding engine: prefill prompts, insert them into slots, generate tokens."""

import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from dapo_jax.config.experiment import Sampler
from dapo_jax.model.caches import DecodeState, Prefix, PromptCache
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.rollout.cache_layout import CacheLayout, with_scales
from dapo_jax.rollout.engine_programs import EnginePrograms, EngineShape, Starts
from dapo_jax.rollout.requests import SlotOutput
from dapo_jax.rollout.sampling import stack_rules
from dapo_jax.runtime import sharding
from dapo_jax.runtime.kept_programs import keep
from dapo_jax.types.errors import require
from dapo_jax.types.structs import SamplingRule


class Pace:
    """Waits for a result after every few calls, on meshes of several CPU devices.

    XLA's CPU client queues 32 programs per device. One more blocks a thread of a pool with one
    thread per core; with a device per core the queued programs then get no thread, and the process
    aborts after a minute (jaxlib 0.10.2).
    """

    MAX_CALLS = 4  # each queues several programs

    def __init__(self, mesh: jax.sharding.Mesh):
        self._waits = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self._calls = itertools.count(1)

    def __call__(self, result: Any) -> Any:
        """Return the result of a call, sometimes after waiting for it."""
        if self._waits and next(self._calls) % self.MAX_CALLS == 0:
            jax.block_until_ready(result)
        return result


class PolicyEngine:
    """Decodes `settings.slots` responses in parallel, `settings.burst_tokens` tokens per call.

    `replicas` are parts of the slots; prefilling this many prompts costs as much as one.
    """

    def __init__(
        self,
        config: DecoderConfig,  # shape and numerics of the policy
        mesh: jax.sharding.Mesh,
        settings: Sampler,  # sizes of slots, cache and calls; not the sampling rule
        *,
        max_prompt_tokens: int,  # with `settings.max_response_tokens` the size of a slot's cache
        insert_width: int = 1,
        end_ids: tuple[int, ...] = (),  # tokens that end a response
        frozen: Any = None,  # parameters that never change; one copy of them is made for decoding
        trained_on: jax.sharding.Mesh | None = None,
    ):
        int8_products = settings.weights_dtype == "int8_products"
        config = dataclasses.replace(config, int8_products=int8_products)
        allowed = "0 with delta-net layers: their states can't take back a proposed token"
        fits = not (settings.speculate and any(config.recurrent))
        require(fits, "sampler.speculate", settings.speculate, allowed)
        self.replicas = sharding.shards(mesh, "batch", sharding.DECODING)
        slots = settings.slots
        allowed = f"a multiple of data x fsdp = {self.replicas}"
        require(slots % self.replicas == 0, "sampler.slots", slots, allowed)
        self.shape = shape = EngineShape(config, settings, max_prompt_tokens, end_ids)
        self.config = config
        self.cache_tokens = shape.cache_tokens
        self.max_response_tokens = settings.max_response_tokens
        self.max_concurrent_decodes = settings.slots
        self.max_prefill_length = max_prompt_tokens
        self.mesh = mesh
        self._pace = Pace(mesh)
        # Maximum number of prompts of one `prefill_prompts`.
        self.prefill_width = -(-settings.prefill_prompts // self.replicas) * self.replicas
        self.layout = CacheLayout(config, mesh, settings, shape.cache_tokens)
        self.pages = self.layout.pages
        self._page_scales = None
        insert_width = min(slots, insert_width)
        prompts = self.prefill_width if self.layout.takes_many else 1
        self._insert_widths = sorted({1, insert_width, min(slots, insert_width * prompts)})
        self.max_insert_width = self._insert_widths[-1]  # slots that one `insert` can fill
        self.programs = keep(EnginePrograms, shape, mesh, trained_on or mesh, frozen=frozen)

    def load_params(self, params: Any) -> Any:
        """Return decoding weights for the trainer's live parameters."""
        loaded = self.programs.weights.load(params)
        if self.layout.calibrated:
            self._page_scales = self.programs.calibrate(loaded)
        return loaded

    def insert(
        self,
        prefix: Prefix,
        decode_state: DecodeState,
        slot: int | np.ndarray,
        *,
        sample_index: int | np.ndarray = 0,
        row: int | np.ndarray = 0,
        rules: Sequence[SamplingRule] = (),  # of each, if the state has a rule per slot
    ) -> DecodeState:
        """Start a response to prompt `row` of `prefix` in `slot`.

        All three may be arrays of up to `max_insert_width` entries.
        """
        keys = next(c.keys for c in prefix.caches if isinstance(c, PromptCache))
        prompts, time = keys.shape[:2]
        decode_state = self._fit(decode_state, time)
        slots = np.atleast_1d(slot)
        samples = np.atleast_1d(sample_index)
        rows = np.broadcast_to(row, slots.shape)
        if len(slots) > self.max_insert_width:
            raise ValueError(f"insert: {len(slots)} slots: at most {self.max_insert_width}")
        width = next(width for width in self._insert_widths if len(slots) <= width)
        fills = None
        if self.pages:
            fills = self.pages.fills(slots, rows, width=width, prompts=prompts, time=time)
        pad = (0, width - len(slots))
        # The scatter drops an index past the last slot.
        starts = Starts(
            np.pad(slots, pad, constant_values=self.max_concurrent_decodes).astype(np.int32),
            np.pad(rows, pad).astype(np.int32),
            np.pad(samples, pad).astype(np.int32),
            fills,
            stack_rules([*rules, *[SamplingRule()] * pad[1]]) if rules else None,
        )
        return self._pace(self.programs.insert(prefix, decode_state, starts))

    def generate(
        self,
        params: Any,
        decode_state: DecodeState,
        *,
        rule: SamplingRule = SamplingRule(),  # noqa: B008
        longest: int,  # tokens of the longest response with its prompt that runs or is held
    ) -> tuple[DecodeState, tuple[jax.Array, jax.Array]]:
        """Take up to `burst_tokens` steps per active slot; return the tokens and their numbers.

        A rule per slot in the state takes precedence over `rule`.
        """
        burst = self.shape.tokens_per_burst
        needed = burst + longest
        state = self._fit(decode_state, needed)
        if self.pages:
            if (tables := self.pages.changed_tables()) is not None:
                state = state.replace(tables=self.programs.split(tables))
        columns = self.layout.columns(needed)
        rule = rule if state.rules is None else SamplingRule()
        return self.programs.generate(params, state, rule=rule, columns=columns)

    def init_decode_state(self) -> DecodeState:
        """Return a decode state with every slot free and the smallest cache."""
        if self.pages:
            self.pages.reset()
        state = self.programs.empty(window=self.layout.window(1))
        if self._page_scales is None:
            return state
        return state.replace(caches=with_scales(state.caches, self._page_scales))

    def with_rules(self, state: DecodeState, rule: SamplingRule) -> DecodeState:
        """Return a state with a rule for each slot, at first this one."""
        rules = stack_rules([rule] * self.max_concurrent_decodes)
        return state.replace(rules=jax.tree.map(self.programs.split, rules))

    def claim(self, free: Sequence[int], tokens: int, prompt: Hashable) -> int | None:
        """Reserve cache space for a prompt in the first free slot that has it; None if none has."""
        full = set()
        for slot in free:
            replica = slot * self.replicas // self.max_concurrent_decodes
            if replica in full:
                continue
            if self.pages is None or self.pages.claim(slot, tokens, prompt):
                return slot
            full.add(replica)
        return None

    def release(self, slot: int) -> None:
        """Free the cache space of a response that has ended."""
        if self.pages:
            self.pages.release(slot)

    def prefill_batch(self, prompts: int) -> int:
        """Return the batch size, padding included, of a call that prefills this many prompts."""
        return self.replicas if prompts <= self.replicas else self.prefill_width

    def prefill_prompts(
        self,
        params: Any,
        padded_tokens: Int[np.ndarray, "n P"],
        true_lengths: Sequence[int],
        keys: jax.Array,  # of the prompts, with the last one repeated up to `prefill_batch`
        sampled: Sequence[int] = (),
    ) -> Prefix:
        """Compute keys and values of up to `prefill_width` prompts, split over the replicas."""
        pad = self.prefill_batch(len(true_lengths)) - len(true_lengths)
        tokens = np.pad(padded_tokens, ((0, pad), (0, 0)), mode="edge").astype(np.int32)
        counts = np.asarray([true_lengths, sampled or [0] * len(true_lengths)], np.int32)
        lengths, before = np.pad(counts, ((0, 0), (0, pad)), mode="edge")
        tokens = self.programs.split(tokens)
        return self._pace(self.programs.prefill(params, tokens, lengths, keys, before))

    def reserve_burst(
        self,
        state: DecodeState,
        slots: Sequence[int],
        cached: Int[np.ndarray, "S"],  # tokens of each slot
        held: Sequence[int] = (),
    ) -> tuple[DecodeState, list[int]]:
        """Reserve cache space for the next burst; return the state and the slots that lost theirs.

        Running and `held` slots are given the oldest first. Lost slots are stopped.
        """
        needed = cached + self.shape.tokens_per_burst
        stopped = self.pages.reserve(slots, needed, held) if self.pages else []
        return self.stop(state, stopped), stopped

    def feed(
        self, state: DecodeState, slots: Sequence[int], responses: Sequence[np.ndarray]
    ) -> DecodeState:
        """Feed slots the tokens of whole responses that their caches lack; then they sample."""
        size = 1 << (len(slots) - 1).bit_length()
        tokens = np.zeros((size, self.max_response_tokens), np.int32)
        places = np.full(size, self.max_concurrent_decodes, np.int32)
        known = np.zeros(size, np.int32)
        for row, (slot, response) in enumerate(zip(slots, responses, strict=True)):
            tokens[row, : len(response)] = response
            places[row] = slot
            known[row] = len(response)
        return self.programs.feed(state, places, tokens, known)

    def stop(self, state: DecodeState, slots: Sequence[int]) -> DecodeState:
        """Deactivate slots."""
        if not slots:
            return state
        padded = np.full(self.max_concurrent_decodes, self.max_concurrent_decodes, np.int32)
        padded[: len(slots)] = slots
        return self.programs.stop(state, padded)

    def fetch_responses(self, state: DecodeState, slots: Sequence[int]) -> list[SlotOutput]:
        """Copy the responses of these slots to the host."""
        if not slots:
            return []
        padded = np.zeros(1 << (len(slots) - 1).bit_length(), np.int32)
        padded[: len(slots)] = slots
        arrays = state.tokens, state.logprobs, state.routes, state.supports
        rows: Any = jax.tree.map(lambda x: np.asarray(self.programs.rows(x, padded)), arrays)
        return [SlotOutput(*jax.tree.map(lambda x, i=i: x[i], rows)) for i in range(len(slots))]

    def _fit(self, state: DecodeState, needed: int) -> DecodeState:
        caches: Any = state.caches  # of the layout's kind
        if self.layout.fits(caches, needed):
            return state
        return self.programs.grow(state, window=self.layout.window(needed))

"""Continuous batching: prompts in, finished groups out, slots refilled as they free up."""

import collections
import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dapo_jax.data.prompts.tokenizer import Decodes
from dapo_jax.model.caches import DecodeState
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.requests import (
    COARSE,
    PendingGroup,
    PendingResponses,
    carry_groups,
    completion_of,
    pad_prompt,
    split_group,
)
from dapo_jax.rollout.sampling import SamplingRule, sample_keys
from dapo_jax.runtime.sharding import to_host
from dapo_jax.structs import Carried, Completion, Prompt


@dataclasses.dataclass
class SamplerCounts:
    """What one rollout cost. Occupancy is measured only while prompts were still waiting."""

    prefills: int = 0
    bursts: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0  # that the host waited for bursts
    responses: int = 0
    tokens: int = 0
    abandoned_responses: int = 0
    abandoned_tokens: int = 0
    unfinished_tokens: int = 0  # of responses that the next step goes on with
    put_back_tokens: int = 0
    busy_slot_steps: int = 0
    slot_steps: int = 0

    @property
    def drawn_tokens(self) -> int:
        """Of all responses, also those that were stopped or drawn again."""
        return self.tokens + self.abandoned_tokens + self.unfinished_tokens + self.put_back_tokens

    @property
    def occupancy(self) -> float:
        """Share of decode-slot steps that drew a token while the queue was not empty."""
        return self.busy_slot_steps / self.slot_steps if self.slot_steps else 1.0

    def metrics(self) -> dict[str, float]:
        """What of this a step logs as it is."""
        return {
            "abandoned_tokens": float(self.abandoned_tokens),
            "put_back_tokens": float(self.put_back_tokens),
            "decode_steps": float(self.decode_steps),
            "decode_bursts": float(self.bursts),
            "prefills": float(self.prefills),
            "slot_occupancy": self.occupancy,
            "seconds_decode": self.decode_seconds,
        }


class Scheduler:
    """Keeps the engine's slots full and hands back whole groups.

    A prompt is prefilled once and inserted `samples` times. What is drawn depends on the key of
    (seed, purpose, step, prompt index, sample index, position) only, never on which slot, how many
    slots, or who shares the batch. Where the cache has no room for all that run, the youngest are
    put back and drawn again later: the same, by their keys.
    """

    def __init__(self, engine: PolicyEngine, tokenizer: Decodes, seed: int):
        self._engine, self._tokenizer, self._seed = engine, tokenizer, seed
        self._generated = np.zeros(engine.max_concurrent_decodes, np.int64)
        self._waiting: collections.deque[PendingResponses] = collections.deque()
        self._in_slot: dict[int, tuple[PendingResponses, int]] = {}  # the oldest first
        self._submitted = itertools.count()
        self.counts = SamplerCounts()

    def begin(
        self,
        params: Any,
        *,
        purpose: int,
        step: int,
        rule: SamplingRule,
        policy_step: int | None = None,
    ) -> None:
        """Takes over the trainer's live parameters and empties the slots.

        Args:
            step: keys the draws.
            policy_step: how many steps those parameters have learned; None: as many.
        """
        self.release()
        self._params = self._engine.load_params(params)
        self._engine.rule = rule
        self._state = self._engine.init_decode_state()
        self._purpose, self._step = purpose, step
        self._policy_step = step if policy_step is None else policy_step
        self._generated = np.zeros_like(self._generated)
        self._slot_counts_before = (0, 0)
        self.counts = SamplerCounts()

    def submit(self, prompt: Prompt, samples: int, carried: Carried | None = None) -> None:
        """Queues a group of `samples` responses. Raises ValueError for an empty prompt.

        Args:
            carried: what an earlier step has of it; its draws go on as if no step had ended.
        """
        asked = PendingGroup(prompt, range(samples), whole=True, step=self._step)
        if carried is not None and carried.tokens:
            asked.step = carried.step
            asked.finished = {one.sample: one for one in carried.finished}
        self._queue(asked, carried)

    def submit_each(self, prompt: Prompt, samples: Sequence[int]) -> None:
        """Queues the responses of those numbers; each is a group of its own, once finished."""
        self._queue(PendingGroup(prompt, samples, whole=False, step=self._step))

    def _queue(self, asked: PendingGroup, carried: Carried | None = None) -> None:
        tokens, engine, pad_id = asked.prompt.tokens, self._engine, self._tokenizer.pad_id
        if len(tokens) == 0:
            raise ValueError(f"prompt {asked.prompt.id!r} has no tokens")
        for begun, samples in split_group(asked, carried):
            if begun is None:
                padded = pad_prompt(tokens, engine.max_prefill_length, pad_id)
            else:
                known = np.concatenate([tokens, begun.tokens])
                padded = pad_prompt(known, engine.cache_tokens, pad_id, COARSE)
            waiting, number = collections.deque(samples), next(self._submitted)
            self._waiting.append(PendingResponses(asked, waiting, number, padded, begun))

    @property
    def held(self) -> Any:
        """What stays in memory after `release`: the decoding copy of frozen parameters."""
        return self._engine.held

    def hold(self) -> None:
        """Makes that copy, the first time."""
        self._engine.hold()

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is being decoded."""
        return not self._waiting and not self._in_slot

    @property
    def room(self) -> int:
        """Responses that could start beside those that run or wait."""
        waiting = sum(len(request.waiting) for request in self._waiting)
        return self._engine.max_concurrent_decodes - len(self._in_slot) - waiting

    def decode_burst(self) -> list[tuple[Prompt, tuple[Completion, ...]]]:
        """Refills free slots, decodes one burst, returns the groups that it completed."""
        self._fill_slots()
        if not self._in_slot:
            return []
        self._make_room()
        state, _ = self._engine.generate(self._params, self._running, longest=self._longest())
        self._state = state
        read = (state.active, state.generated, state.busy_slot_steps, state.slot_steps)
        began = time.perf_counter()
        active, self._generated, busy, total = map(np.array, to_host(read))
        self.counts.decode_seconds += time.perf_counter() - began
        self.counts.bursts += 1
        self.counts.decode_steps += (int(total) - self._slot_counts_before[1]) // len(active)
        if self._waiting:
            self.counts.busy_slot_steps += int(busy) - self._slot_counts_before[0]
            self.counts.slot_steps += int(total) - self._slot_counts_before[1]
        self._slot_counts_before = (int(busy), int(total))
        return self._collect([slot for slot in self._in_slot if not active[slot]])

    def suspend(self) -> list[Carried]:
        """Everything that waits or is decoded, group by group, as far as it was drawn.

        Nothing is left here; a group of which nothing was drawn has no tokens.
        """
        parts = [(request.asked, request.begun) for request in self._waiting]
        slots = list(self._in_slot)
        rows = self._engine.harvest(self._running, slots) if slots else ((), ())
        for slot, tokens, logprobs in zip(slots, *rows, strict=True):
            (request, sample), length = self._in_slot[slot], int(self._generated[slot])
            drawn = tokens[:length], logprobs[:length]
            begun = completion_of(request, sample, *drawn, self._policy_step)
            parts.append((request.asked, begun if length else None))
            self.counts.unfinished_tokens += length - request.drawn
            self._engine.store.release(slot)
        self._in_slot.clear()
        self._waiting.clear()
        return carry_groups(parts)

    def abandon(self) -> None:
        """Forgets everything waiting or being decoded, and counts it."""
        for slot, (request, _) in self._in_slot.items():
            self.counts.abandoned_responses += 1
            self.counts.abandoned_tokens += int(self._generated[slot]) - request.drawn
            self._engine.store.release(slot)
        self._in_slot.clear()
        self._waiting.clear()

    def release(self) -> None:
        """Gives the memory of caches and decoding weights back until the next `begin`."""
        self.abandon()
        self._state = self._params = None

    @property
    def _running(self) -> DecodeState:
        assert self._state is not None  # from `begin` to `release`
        return self._state

    def _longest(self) -> int:
        return max(
            len(request.asked.prompt.tokens) - 1 + int(self._generated[slot])
            for slot, (request, _) in self._in_slot.items()
        )

    def _fill_slots(self) -> None:
        """The first response that waits gets a free slot that has room for it, and so on."""
        slots = range(self._engine.max_concurrent_decodes)
        free = [slot for slot in slots if slot not in self._in_slot]
        starting: dict[int, list[tuple[int, PendingResponses, int]]] = {}
        while free and self._waiting:
            request = self._waiting[0]
            slot = self._claim(free, request)
            if slot is None:
                break
            free.remove(slot)
            if request.prefilled is None:
                self._prefill_ahead()
            assert request.prefilled is not None  # the first that waits is among them
            sample = request.waiting.popleft()
            self._in_slot[slot] = (request, sample)
            starting.setdefault(id(request.prefilled[0]), []).append((slot, request, sample))
            if not request.waiting:
                self._waiting.popleft()
        for started in starting.values():
            for i in range(0, len(started), self._engine.most_inserted):
                self._insert(started[i : i + self._engine.most_inserted])
        for request in {request for started in starting.values() for _, request, _ in started}:
            if not request.waiting:
                request.prefilled = None

    def _claim(self, free: list[int], request: PendingResponses) -> int | None:
        """The first free slot whose replica has room; None if none has."""
        tokens, full = request.length, set()
        for slot in free:
            replica = self._engine.replica(slot)
            if replica in full:
                continue
            if self._engine.store.claim(slot, tokens, request.number):
                return slot
            full.add(replica)
        return None

    def _insert(self, started: list[tuple[int, PendingResponses, int]]) -> None:
        slots, requests, samples = zip(*started, strict=True)
        slots, rows = np.array(slots), [request.prefilled[1] for request in requests]
        prefix = requests[0].prefilled[0]
        self._state = self._engine.insert(
            prefix, self._running, slots, sample_index=np.array(samples), row=np.array(rows)
        )
        self._generated[slots] = [request.drawn for request in requests]

    def _prefill_ahead(self) -> None:
        """Prefills the first prompt that waits, with others of its length that do."""
        engine, first = self._engine, self._waiting[0]
        alike = (
            request
            for request in self._waiting
            if request.prefilled is None and len(request.padded) == len(first.padded)
        )
        batch = list(itertools.islice(alike, engine.prefill_width))
        if len(batch) <= engine.prefill_width // 2:  # most of a wide call would be padding
            batch = batch[: engine.replicas]
        self.counts.prefills += len(batch)
        prefix = engine.prefill_prompts(
            self._params,
            np.stack([request.padded for request in batch]),
            [request.length for request in batch],
            self._keys([request.asked for request in batch]),
            [request.drawn for request in batch],
        )
        for row, request in enumerate(batch):
            request.prefilled = (prefix, row)

    def _keys(self, asked: list[PendingGroup]) -> jax.Array:
        asked += [asked[-1]] * (self._engine.prefilled_together(len(asked)) - len(asked))
        places = [one.step for one in asked], [one.prompt.index for one in asked]
        return sample_keys(self._seed, self._purpose, *places)

    def _make_room(self) -> None:
        """Puts the youngest responses back into the queue where the cache has no room for all."""
        self._state, stopped = self._engine.make_room(self._running, list(self._in_slot))
        for slot in stopped:
            request, sample = self._in_slot.pop(slot)
            self.counts.put_back_tokens += int(self._generated[slot]) - request.drawn
            if not request.waiting:
                self._waiting.appendleft(request)
            request.waiting.appendleft(sample)

    def _collect(self, slots: list[int]) -> list[tuple[Prompt, tuple[Completion, ...]]]:
        if not slots:
            return []
        tokens, logprobs = self._engine.harvest(self._running, slots)
        groups = []
        for row, slot in enumerate(slots):
            request, sample = self._in_slot.pop(slot)
            self._engine.store.release(slot)
            asked, length = request.asked, int(self._generated[slot])
            drawn = tokens[row, :length]
            completion = completion_of(
                request,
                sample,
                drawn,
                logprobs[row, :length],
                self._policy_step,
                truncated=length == 0 or int(drawn[-1]) not in self._tokenizer.end_ids,
            )
            text = self._tokenizer.decode(completion.tokens.tolist())
            completion = dataclasses.replace(completion, text=text)
            self.counts.responses += 1
            self.counts.tokens += length - request.drawn
            if not asked.whole:
                groups.append((asked.prompt, (completion,)))
                continue
            asked.finished[sample] = completion
            if len(asked.finished) == len(asked.samples):
                ordered = tuple(asked.finished[i] for i in asked.samples)
                groups.append((asked.prompt, ordered))
        return groups

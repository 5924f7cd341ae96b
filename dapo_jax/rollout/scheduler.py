"""Scheduler of continuous batching: prompts in, finished groups out, slots refilled."""

import collections
import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from dapo_jax.data.prompts.tokenizer import Decodes
from dapo_jax.model.caches import Prefix
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
from dapo_jax.structs import Completion, PartialGroup, Prompt


@dataclasses.dataclass
class SamplerCounts:
    """Counts of one rollout. Occupancy is measured only while prompts were still waiting."""

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
        """Tokens of all responses, also of those that were stopped or drawn again."""
        return self.tokens + self.abandoned_tokens + self.unfinished_tokens + self.put_back_tokens

    @property
    def occupancy(self) -> float:
        """Share of decode-slot steps that drew a token while the queue was not empty."""
        return self.busy_slot_steps / self.slot_steps if self.slot_steps else 1.0

    def metrics(self) -> dict[str, float]:
        """Metrics of a step that are counts as they are."""
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
        self._params: Any = None  # they and the decode state are there from `begin` to `release`
        self._state: Any = None
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

    def submit(self, prompt: Prompt, samples: int, carried: PartialGroup | None = None) -> None:
        """Queues a group of `samples` responses. Raises ValueError for an empty prompt.

        Args:
            carried: what an earlier step has of it; its draws go on as if no step had ended.
        """
        group = PendingGroup(prompt, range(samples), whole=True, step=self._step)
        if carried is not None and carried.tokens:
            group.step = carried.step
            group.finished = {response.sample: response for response in carried.finished}
        self._queue(group, carried)

    def submit_each(self, prompt: Prompt, samples: Sequence[int]) -> None:
        """Queues the responses of those numbers; each is a group of its own, once finished."""
        self._queue(PendingGroup(prompt, samples, whole=False, step=self._step))

    def _queue(self, group: PendingGroup, carried: PartialGroup | None = None) -> None:
        tokens, engine, pad_id = group.prompt.tokens, self._engine, self._tokenizer.pad_id
        if len(tokens) == 0:
            raise ValueError(f"prompt {group.prompt.id!r} has no tokens")
        for begun, samples in split_group(group, carried):
            if begun is None:
                padded = pad_prompt(tokens, engine.max_prefill_length, pad_id)
            else:
                known = np.concatenate([tokens, begun.tokens])
                padded = pad_prompt(known, engine.cache_tokens, pad_id, COARSE)
            waiting, number = collections.deque(samples), next(self._submitted)
            self._waiting.append(PendingResponses(group, waiting, number, padded, begun))

    @property
    def held(self) -> Any:
        """Decoding copy of frozen parameters, which stays in memory after `release`."""
        return self._engine.programs.held

    def hold(self) -> None:
        """Makes the decoding copy of frozen parameters, the first time."""
        self._engine.programs.hold()

    @property
    def idle(self) -> bool:
        """True where nothing waits and nothing is being decoded."""
        return not self._waiting and not self._in_slot

    @property
    def room(self) -> int:
        """Number of responses that could start beside those that run or wait."""
        waiting = sum(len(pending.waiting) for pending in self._waiting)
        return self._engine.max_concurrent_decodes - len(self._in_slot) - waiting

    def decode_burst(self) -> list[tuple[Prompt, tuple[Completion, ...]]]:
        """Refills free slots, decodes one burst, returns the groups that it completed."""
        self._fill_slots()
        if not self._in_slot:
            return []
        self._make_room()
        self._state, _ = self._engine.generate(self._params, self._state, longest=self._longest())
        state, began = self._state, time.perf_counter()
        read = (state.active, state.generated, state.busy_slot_steps, state.slot_steps)
        active, self._generated, busy, total = map(np.array, to_host(read))
        self.counts.decode_seconds += time.perf_counter() - began
        self.counts.bursts += 1
        self.counts.decode_steps += (int(total) - self._slot_counts_before[1]) // len(active)
        if self._waiting:
            self.counts.busy_slot_steps += int(busy) - self._slot_counts_before[0]
            self.counts.slot_steps += int(total) - self._slot_counts_before[1]
        self._slot_counts_before = (int(busy), int(total))
        return self._collect([slot for slot in self._in_slot if not active[slot]])

    def suspend(self) -> list[PartialGroup]:
        """Takes out everything that waits or is decoded, group by group, as far as it was drawn.

        A group of which nothing was drawn has no tokens.
        """
        parts = [(pending.group, pending.begun) for pending in self._waiting]
        slots = list(self._in_slot)
        rows = self._engine.harvest(self._state, slots) if slots else ((), ())
        for slot, tokens, logprobs in zip(slots, *rows, strict=True):
            (pending, sample), length = self._in_slot[slot], int(self._generated[slot])
            drawn = tokens[:length], logprobs[:length]
            begun = completion_of(pending, sample, *drawn, self._policy_step)
            parts.append((pending.group, begun if length else None))
            self.counts.unfinished_tokens += length - pending.drawn
        self._clear()
        return carry_groups(parts)

    def abandon(self) -> None:
        """Forgets everything waiting or being decoded, and counts it."""
        for slot, (pending, _) in self._in_slot.items():
            self.counts.abandoned_responses += 1
            self.counts.abandoned_tokens += int(self._generated[slot]) - pending.drawn
        self._clear()

    def _clear(self) -> None:
        for slot in self._in_slot:
            self._engine.release(slot)
        self._in_slot.clear()
        self._waiting.clear()

    def release(self) -> None:
        """Gives the memory of caches and decoding weights back until the next `begin`."""
        self.abandon()
        self._state = self._params = None

    def _longest(self) -> int:
        return max(
            len(pending.group.prompt.tokens) - 1 + int(self._generated[slot])
            for slot, (pending, _) in self._in_slot.items()
        )

    def _fill_slots(self) -> None:
        """Gives the first response that waits a free slot that has room for it, and so on."""
        slots = range(self._engine.max_concurrent_decodes)
        free = [slot for slot in slots if slot not in self._in_slot]
        starting: dict[int, list[tuple[int, int, int]]] = {}  # slot, sample, row by prefix
        prefixes: dict[int, Prefix] = {}
        while free and self._waiting:
            pending = self._waiting[0]
            slot = self._claim(free, pending)
            if slot is None:
                break
            free.remove(slot)
            prefix, row = pending.prefilled or self._prefill_ahead()
            sample = pending.waiting.popleft()
            self._in_slot[slot] = (pending, sample)
            prefixes[id(prefix)] = prefix
            starting.setdefault(id(prefix), []).append((slot, sample, row))
            self._generated[slot] = pending.drawn
            if not pending.waiting:
                self._waiting.popleft().prefilled = None
        width = self._engine.most_inserted
        for number, started in starting.items():
            for i in range(0, len(started), width):
                slots, samples, rows = map(np.array, zip(*started[i : i + width], strict=True))
                self._state = self._engine.insert(
                    prefixes[number], self._state, slots, sample_index=samples, row=rows
                )

    def _claim(self, free: list[int], pending: PendingResponses) -> int | None:
        """First free slot whose replica has room, claimed; None if none has."""
        full = set()
        for slot in free:
            replica = self._engine.replica(slot)
            if replica in full:
                continue
            if self._engine.claim(slot, pending.length, pending.number):
                return slot
            full.add(replica)
        return None

    def _prefill_ahead(self) -> tuple[Prefix, int]:
        """Prefills the first prompt that waits, with others of its length that do."""
        engine, first = self._engine, self._waiting[0]
        alike = (
            pending
            for pending in self._waiting
            if pending.prefilled is None and len(pending.padded) == len(first.padded)
        )
        batch = list(itertools.islice(alike, engine.prefill_width))
        if len(batch) <= engine.prefill_width // 2:  # most of a wide call would be padding
            batch = batch[: engine.replicas]
        self.counts.prefills += len(batch)
        padding = engine.prefilled_together(len(batch)) - len(batch)
        groups = [pending.group for pending in [*batch, *[batch[-1]] * padding]]
        steps, places = [group.step for group in groups], [group.prompt.index for group in groups]
        prefix = engine.prefill_prompts(
            self._params,
            np.stack([pending.padded for pending in batch]),
            [pending.length for pending in batch],
            sample_keys(self._seed, self._purpose, steps, places),
            [pending.drawn for pending in batch],
        )
        for row, pending in enumerate(batch):
            pending.prefilled = (prefix, row)
        return prefix, 0

    def _make_room(self) -> None:
        """Puts the youngest responses back into the queue where the cache has no room for all."""
        self._state, stopped = self._engine.make_room(self._state, list(self._in_slot))
        for slot in stopped:
            pending, sample = self._in_slot.pop(slot)
            self.counts.put_back_tokens += int(self._generated[slot]) - pending.drawn
            if not pending.waiting:
                self._waiting.appendleft(pending)
            pending.waiting.appendleft(sample)

    def _collect(self, slots: list[int]) -> list[tuple[Prompt, tuple[Completion, ...]]]:
        if not slots:
            return []
        tokens, logprobs = self._engine.harvest(self._state, slots)
        completed = []
        for row, slot in enumerate(slots):
            pending, sample = self._in_slot.pop(slot)
            self._engine.release(slot)
            group, length = pending.group, int(self._generated[slot])
            drawn = tokens[row, :length]
            completion = completion_of(
                pending,
                sample,
                drawn,
                logprobs[row, :length],
                self._policy_step,
                truncated=length == 0 or int(drawn[-1]) not in self._tokenizer.end_ids,
            )
            text = self._tokenizer.decode(completion.tokens.tolist())
            completion = dataclasses.replace(completion, text=text)
            self.counts.responses += 1
            self.counts.tokens += length - pending.drawn
            if not group.whole:
                completed.append((group.prompt, (completion,)))
                continue
            group.finished[sample] = completion
            if len(group.finished) == len(group.samples):
                ordered = tuple(group.finished[i] for i in group.samples)
                completed.append((group.prompt, ordered))
        return completed

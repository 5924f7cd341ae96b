"""Scheduler of continuous batching: prompts in, finished groups out, slots refilled."""

import collections
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from dapo_jax.data.prompts.tokenizer import Decodes
from dapo_jax.model.caches import Prefix
from dapo_jax.rollout.counts import SamplerCounts
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.requests import (
    COARSE,
    PendingGroup,
    PendingResponses,
    carry_groups,
    completion_of,
    pad_prompt,
    split_group,
    with_text,
)
from dapo_jax.rollout.sampling import SamplingRule, sample_keys
from dapo_jax.rollout.trajectories import Steps, Trajectories
from dapo_jax.runtime.sharding import to_host
from dapo_jax.structs import Completion, PartialGroup, Prompt


class Scheduler:
    """Keeps the engine's slots full and hands back whole groups.

    A prompt is prefilled once and inserted `samples` times. What is drawn depends on the key of
    (seed, purpose, step, prompt index, sample index, position) only, never on which slot, how many
    slots, or who shares the batch. Where the cache has no room for all that run, the youngest are
    put back and drawn again later: the same, by their keys.

    Args:
        environments: answer the policy between the turns of a trajectory.
    """

    def __init__(
        self,
        engine: PolicyEngine,
        tokenizer: Decodes,
        seed: int,
        environments: Steps | None = None,
    ):
        self._engine, self._tokenizer, self._seed = engine, tokenizer, seed
        self._params: Any = None  # they and the decode state are there from `begin` to `release`
        self._state: Any = None
        self._generated = np.zeros(engine.max_concurrent_decodes, np.int64)
        self._waiting: collections.deque[PendingResponses] = collections.deque()
        self._in_slot: dict[int, tuple[PendingResponses, int]] = {}  # the oldest first
        self._submitted = itertools.count()
        self.environments = environments  # read at `begin`
        self._trajectories = Trajectories(None, engine.max_response_tokens)
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
        key, most = (self._seed, purpose), self._engine.max_response_tokens
        self._trajectories = Trajectories(self.environments, most, key)
        self.counts = SamplerCounts(
            turns=self._trajectories.counts if self.environments is not None else None
        )

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
            if begun is not None:
                self._queue_begun(group, begun)
                continue
            padded = pad_prompt(tokens, engine.max_prefill_length, pad_id)
            waiting, number = collections.deque(samples), next(self._submitted)
            self._waiting.append(PendingResponses(group, waiting, number, padded))

    def _queue_begun(self, group: PendingGroup, begun: Completion, *, first: bool = False) -> None:
        """Queues the rest of a response. One that ended its turn first hears its environment."""
        ended = self._ended(begun.tokens) and not (begun.turns and not begun.turns[-1].drawn)
        if ended and self._trajectories.ask(group, begun, self.counts.bursts):
            return
        known = np.concatenate([group.prompt.tokens, begun.tokens])
        padded = pad_prompt(known, self._engine.cache_tokens, self._tokenizer.pad_id, COARSE)
        waiting, number = collections.deque([begun.sample]), next(self._submitted)
        pending = PendingResponses(group, waiting, number, padded, begun)
        (self._waiting.appendleft if first else self._waiting.append)(pending)

    def _ended(self, tokens: np.ndarray) -> bool:
        """True where the last token ends a response, or a turn."""
        return len(tokens) > 0 and int(tokens[-1]) in self._tokenizer.end_ids

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
        return not self._waiting and not self._in_slot and not self._trajectories

    @property
    def room(self) -> int:
        """Number of responses that could start beside those that run or wait."""
        waiting = sum(len(pending.waiting) for pending in self._waiting)
        return self._engine.max_concurrent_decodes - len(self._in_slot) - waiting

    def decode_burst(self) -> list[tuple[Prompt, tuple[Completion, ...]]]:
        """Refills free slots, decodes one burst, returns the groups that it completed."""
        completed = self._place_observations()
        self._fill_slots()
        if not self._in_slot:
            return completed
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
        ended = [slot for slot in self._in_slot if not active[slot] or self._spent(slot)]
        if running := [slot for slot in ended if active[slot]]:
            self._state = self._engine.stop(self._state, running)
        return completed + self._collect(ended)

    def _spent(self, slot: int) -> bool:
        """True where a trajectory has drawn as much as it may."""
        most = self._in_slot[slot][0].most_tokens(self._trajectories.drawn_limit)
        return int(self._generated[slot]) >= most

    def _place_observations(self) -> list[tuple[Prompt, tuple[Completion, ...]]]:
        """Lets trajectories go on whose environments are due; returns groups that this ended."""
        idle, completed = not self._in_slot and not self._waiting, []
        going_on = []
        for group, completion, goes_on in self._trajectories.due(self.counts.bursts, idle):
            if goes_on:
                going_on.append((group, completion))
            else:
                completed += self._finish(group, completion)
        for group, completion in reversed(going_on):
            self._queue_begun(group, completion, first=True)
        return completed

    def suspend(self) -> list[PartialGroup]:
        """Takes out everything that waits or is decoded, group by group, as far as it was drawn.

        A group of which nothing was drawn has no tokens.
        """
        parts = [(pending.group, pending.begun) for pending in self._waiting]
        parts += self._trajectories.take()
        slots = list(self._in_slot)
        rows = self._engine.harvest(self._state, slots) if slots else ((), ())
        for slot, tokens, logprobs in zip(slots, *rows, strict=True):
            (pending, sample), length = self._in_slot[slot], int(self._generated[slot])
            drawn = tokens[:length], logprobs[:length]
            begun = completion_of(pending, sample, *drawn, self._policy_step)
            begun = with_text(begun, self._tokenizer.decode)
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
        self._trajectories.take()

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
            most = pending.most_tokens(self._trajectories.drawn_limit)
            length = min(int(self._generated[slot]), most)
            drawn = tokens[row, :length]
            completion = completion_of(
                pending,
                sample,
                drawn,
                logprobs[row, :length],
                self._policy_step,
                truncated=not self._ended(drawn),
            )
            completion = with_text(completion, self._tokenizer.decode)
            self.counts.tokens += length - pending.drawn
            if not self._trajectories.ask(pending.group, completion, self.counts.bursts):
                completed += self._finish(pending.group, completion)
        return completed

    def _finish(
        self, group: PendingGroup, completion: Completion
    ) -> list[tuple[Prompt, tuple[Completion, ...]]]:
        """Adds a finished response to its group; returns the group where it was the last one."""
        self.counts.responses += 1
        if not group.whole:
            return [(group.prompt, (completion,))]
        group.finished[completion.sample] = completion
        if len(group.finished) < len(group.samples):
            return []
        return [(group.prompt, tuple(group.finished[i] for i in group.samples))]

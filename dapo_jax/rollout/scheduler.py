"""Scheduler of continuous batching: prompts in, finished groups out, slots refilled."""

import collections
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dapo_jax.data.prompts.tokenizer import Decodes
from dapo_jax.model.caches import Prefix
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.held_turns import HeldTurns
from dapo_jax.rollout.prefill_ahead import insert_all, prefill_ahead
from dapo_jax.rollout.requests import (
    COARSE,
    PendingGroup,
    PendingResponses,
    carry_groups,
    completion_of,
    pad_prompt,
    split_group,
)
from dapo_jax.rollout.trajectories import Steps, Trajectories
from dapo_jax.runtime.sharding import to_host
from dapo_jax.structs import (
    Completion,
    PartialGroup,
    Prompt,
    SamplerCounts,
    SamplingRule,
    present,
    with_texts,
)


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
        # Of each slot's response: drawn tokens, their limit, tokens of its prompt.
        of_slots = np.zeros((3, engine.max_concurrent_decodes), np.int64)
        self._generated, self._limit, self._prompt_tokens = of_slots
        self._waiting: collections.deque[PendingResponses] = collections.deque()
        self._in_slot: dict[int, tuple[PendingResponses, int]] = {}  # the oldest first
        self._held = HeldTurns()
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
        turns = self._trajectories.counts if self.environments is not None else None
        self.counts = SamplerCounts(turns=turns)

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

    def _queue_begun(self, group: PendingGroup, begun: Completion) -> None:
        """Queues the rest of a response. One that ended its turn first hears its environment."""
        ended = self._ended(begun.tokens) and not (begun.turns and not begun.turns[-1].drawn)
        if not ended or not self._trajectories.ask(group, begun, self.counts.bursts):
            self._waiting.append(self._prefilled_whole(group, begun))

    def _prefilled_whole(self, group: PendingGroup, begun: Completion) -> PendingResponses:
        known = np.concatenate([group.prompt.tokens, begun.tokens])
        padded = pad_prompt(known, self._engine.cache_tokens, self._tokenizer.pad_id, COARSE)
        waiting, number = collections.deque([begun.sample]), next(self._submitted)
        return PendingResponses(group, waiting, number, padded, begun)

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
        busy = len(self._in_slot) + len(self._held.slots)
        return self._engine.max_concurrent_decodes - busy - waiting

    def decode_burst(
        self, meanwhile: Callable[[], None] = lambda: None
    ) -> list[tuple[Prompt, tuple[Completion, ...]]]:
        """Refills free slots, decodes one burst, returns the groups that it completed.

        `meanwhile` runs beside the devices. Texts are made where an environment reads them.
        """
        completed = self._place_observations()
        self._fill_slots()
        if not self._in_slot:
            meanwhile()
            return completed
        self._make_room()
        # The burst runs along in held slots, and writes beyond what they have.
        reach = (self._prompt_tokens + self._generated)[[*self._in_slot, *self._held.slots]]
        longest = int(reach.max()) - 1
        state, _ = self._engine.generate(self._params, self._state, longest=longest)
        meanwhile()
        self._state, began = state, time.perf_counter()
        read = (state.active, state.generated, state.busy_slot_steps, state.slot_steps)
        active, self._generated, busy, total = map(np.array, to_host(read))
        self.counts.decode_seconds += time.perf_counter() - began
        self.counts.bursts += 1
        self.counts.decode_steps += (int(total) - self._slot_counts_before[1]) // len(active)
        if self._waiting:
            self.counts.busy_slot_steps += int(busy) - self._slot_counts_before[0]
            self.counts.slot_steps += int(total) - self._slot_counts_before[1]
        self._slot_counts_before = (int(busy), int(total))
        ends = (~active | (self._generated >= self._limit)).tolist()
        ended = [slot for slot in self._in_slot if ends[slot]]
        self._state = self._engine.stop(self._state, [slot for slot in ended if active[slot]])
        return completed + self._collect(ended)

    def _occupy(self, slot: int, pending: PendingResponses) -> int:
        """Gives a slot to the next of those responses; returns its sample number."""
        sample = pending.waiting.popleft()
        self._in_slot[slot] = pending, sample
        self._limit[slot] = pending.most_tokens(self._trajectories.drawn_limit)
        self._prompt_tokens[slot] = len(pending.group.prompt.tokens)
        return sample

    def _place_observations(self) -> list[tuple[Prompt, tuple[Completion, ...]]]:
        """Lets trajectories go on whose environments are due; returns groups that this ended."""
        idle = not self._in_slot and (not self._waiting or bool(self._held.slots))
        completed, going_on, held_on = [], [], []
        for group, completion, goes_on in self._trajectories.due(self.counts.bursts, idle):
            held = self._held.take(group, completion.sample)
            slot = held and held.slot
            if not goes_on:
                completed += self._finish(group, completion)
                if slot is not None:
                    self._engine.release(slot)
                continue
            if held is None:
                pending = self._prefilled_whole(group, completion)
            else:
                pending = held.begun_as.going_on(completion, next(self._submitted))
            if slot is None:
                known = pending.drawn - completion.turns[-1].tokens
                self._trajectories.counts.prefilled_again_tokens += known
                going_on.append(pending)
            else:
                self._occupy(slot, pending)
                held_on.append(slot)
        self._waiting.extendleft(reversed(going_on))
        self._feed(held_on)
        return completed

    def _feed(self, slots: Sequence[int]) -> None:
        """Feeds the responses in those slots what is not in their caches."""
        begun = [self._in_slot[slot][0].begun for slot in slots]
        if begun:
            tokens = [response.tokens for response in begun if response is not None]
            self._state = self._engine.feed(self._state, slots, tokens)

    def suspend(self) -> list[PartialGroup]:
        """Takes out everything that waits or is decoded, group by group, as far as it was drawn.

        A group of which nothing was drawn has no tokens.
        """
        parts = [(pending.group, pending.begun) for pending in self._waiting]
        parts += self._trajectories.take()
        slots, begun = list(self._in_slot), []
        for slot, drawn in zip(slots, self._engine.harvest(self._state, slots), strict=True):
            (pending, sample), length = self._in_slot[slot], int(self._generated[slot])
            begun.append(completion_of(pending, sample, drawn, length, self._policy_step))
            self.counts.unfinished_tokens += max(length - pending.drawn, 0)
        if self.environments is not None:
            begun = with_texts(begun, self._tokenizer.decode_all)
        for slot, response in zip(slots, begun, strict=True):
            some = response if self._generated[slot] else None
            parts.append((self._in_slot[slot][0].group, some))
        self._clear()
        return carry_groups(parts)

    def abandon(self) -> None:
        """Forgets everything waiting or being decoded, and counts it."""
        for slot, (pending, _) in self._in_slot.items():
            self.counts.abandoned_responses += 1
            self.counts.abandoned_tokens += self._drawn_here(slot, pending)
        self._clear()

    def _clear(self) -> None:
        for slot in [*self._in_slot, *self._held.slots]:
            self._engine.release(slot)
        self._in_slot.clear()
        self._held.clear()
        self._waiting.clear()
        self._trajectories.take()

    def release(self) -> None:
        """Gives the memory of caches and decoding weights back until the next `begin`."""
        self.abandon()
        self._state = self._params = None

    def _fill_slots(self) -> None:
        """Gives the first response that waits a free slot that has room for it, and so on."""
        if not self._waiting:
            return
        slots, taken, fed = len(self._generated), {*self._in_slot, *self._held.slots}, []
        free = [slot for slot in range(slots) if slot not in taken]
        starting: dict[int, list[tuple[int, int, int]]] = {}  # slot, sample, row by prefix
        prefixes: dict[int, Prefix] = {}
        while free and self._waiting:
            pending = self._waiting[0]
            slot = self._engine.claim(free, pending.length, pending.number)
            if slot is None:
                break
            free.remove(slot)
            if pending.prefilled is None:
                key = self._seed, self._purpose
                prefilled = prefill_ahead(self._engine, self._params, self._waiting, *key)
                self.counts.prefills += prefilled
            prefix, row = present(pending.prefilled, "prefilled")
            sample = self._occupy(slot, pending)
            prefixes[id(prefix)] = prefix
            starting.setdefault(id(prefix), []).append((slot, sample, row))
            self._generated[slot] = pending.ahead
            fed += [slot] if pending.fed else []
            if not pending.waiting:
                self._waiting.popleft().prefilled = None
        for number, started in starting.items():
            self._state = insert_all(self._engine, self._state, prefixes[number], started)
        self._feed(fed)

    def _drawn_here(self, slot: int, pending: PendingResponses) -> int:
        """Tokens that a slot has drawn of its response, those that it was fed not counted."""
        return max(int(self._generated[slot]) - pending.drawn, 0)

    def _make_room(self) -> None:
        """Puts the youngest responses back into the queue where the cache has no room for all."""
        drawing, held = list(self._in_slot), self._held.slots
        self._state, stopped = self._engine.make_room(self._state, drawing, held)
        self._held.evict(stopped)
        for slot in (slot for slot in stopped if slot in self._in_slot):
            pending, sample = self._in_slot.pop(slot)
            self.counts.put_back_tokens += self._drawn_here(slot, pending)
            if not pending.waiting:
                self._waiting.appendleft(pending)
            pending.waiting.appendleft(sample)

    def _collect(self, slots: list[int]) -> list[tuple[Prompt, tuple[Completion, ...]]]:
        ended, responses, completed = [], [], []
        for slot, drawn in zip(slots, self._engine.harvest(self._state, slots), strict=True):
            pending, sample = self._in_slot.pop(slot)
            length = int(min(self._generated[slot], self._limit[slot]))
            cut, by = not self._ended(drawn.tokens[:length]), self._policy_step
            ended.append((slot, pending, sample))
            responses.append(completion_of(pending, sample, drawn, length, by, truncated=cut))
            self.counts.tokens += length - pending.drawn
        if self.environments is not None:
            responses = with_texts(responses, self._tokenizer.decode_all)
        for (slot, pending, sample), completion in zip(ended, responses, strict=True):
            asked = self._trajectories.ask(pending.group, completion, self.counts.bursts)
            if not asked:
                completed += self._finish(pending.group, completion)
            if asked and self._engine.keeps_turns:
                self._held.hold(pending, sample, slot)
            else:
                self._engine.release(slot)
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

"""Continuous batching: free decode slots take the next waiting response."""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dapo_jax.data.prompts.tokenizer import Decodes
from dapo_jax.model.caches import Prefix
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.requests import (
    RESUMED_BUCKET_FACTOR,
    HeldSlot,
    PendingGroup,
    PendingResponses,
    Trajectories,
    carry_groups,
    make_completion,
    pad_prompt,
)
from dapo_jax.rollout.sampling import sample_keys
from dapo_jax.runtime.sharding import to_host
from dapo_jax.types.contracts import FinishedResponses, do_nothing
from dapo_jax.types.structs import (
    Completion,
    PartialGroup,
    Prompt,
    SamplerCounts,
    SamplingRule,
    present,
    with_texts,
)


@dataclasses.dataclass
class Decoding:
    """Policy, decode state and key of a rollout; `release` frees the arrays."""

    params: Any = None
    state: Any = None
    rule: SamplingRule = SamplingRule()
    purpose: int = 0
    step: int = 0
    policy_step: int = 0
    slot_steps: tuple[int, int] = (0, 0)  # busy and total, that the state had counted before


class Slots:
    """Decode slots: the response in each, and per-slot counters of tokens."""

    def __init__(self, count: int):
        # Pending responses and sample number by occupied slot, the oldest first.
        self.responses: dict[int, tuple[PendingResponses, int]] = {}
        self.generated = np.zeros(count, np.int64)
        self.limit = np.zeros(count, np.int64)  # of generated tokens
        self.prompt_tokens = np.zeros(count, np.int64)

    def occupy(self, slot: int, pending: PendingResponses, sampled_limit: int) -> int:
        """Give a slot to the next of the pending responses; return its sample number."""
        sample = pending.waiting.popleft()
        self.responses[slot] = pending, sample
        observed = pending.known_tokens - len(pending.resumed or ())
        self.limit[slot] = observed + sampled_limit
        self.prompt_tokens[slot] = len(pending.group.prompt.tokens)
        return sample

    def sampled_here(self, slot: int, pending: PendingResponses) -> int:
        """Return the number of tokens that a slot has sampled, without those it was fed."""
        return max(int(self.generated[slot]) - pending.known_tokens, 0)


class Scheduler:
    """The `contracts.Sampler` of this process: keeps the slots of an engine full.

    A prompt is prefilled once and inserted `samples` times. Sampling is batch-invariant: it
    depends on the key of (seed, purpose, step, prompt index, sample index, position), not on
    slots. If the cache has no space for all running responses, the youngest return to the queue
    and are sampled again, with the same result.
    """

    def __init__(
        self,
        engine: PolicyEngine,
        tokenizer: Decodes,
        seed: int,
        environments: Any = None,  # such as `environments.sessions.Environments`
    ):
        self.environments = environments
        self.counts = SamplerCounts()
        self._engine = engine
        self._tokenizer = tokenizer
        self._seed = seed
        self._decoding = Decoding()
        self._prepared: tuple[int, Any] = (-1, None)  # step and weights of a policy
        self._waiting: collections.deque[PendingResponses] = collections.deque()
        self._prefix_ids = itertools.count()
        self._slots = Slots(engine.max_concurrent_decodes)
        self._trajectories = Trajectories(None, engine.max_response_tokens)

    def prepare(self, params: Any, policy_step: int) -> None:
        self._prepared = policy_step, self._engine.load_params(params)

    def begin(
        self,
        params: Any,
        *,
        purpose: int,
        step: int,
        rule: SamplingRule,
        policy_step: int | None = None,
    ) -> None:
        """Load the trainer's parameters and empty the slots."""
        self.release()
        engine = self._engine
        policy_step = step if policy_step is None else policy_step
        (prepared, loaded), self._prepared = self._prepared, (-1, None)
        self._decoding = Decoding(
            params=loaded if prepared == policy_step else engine.load_params(params),
            state=engine.init_decode_state(),
            rule=rule,
            purpose=purpose,
            step=step,
            policy_step=policy_step,
        )
        self._slots.generated[:] = 0
        key = self._seed, purpose
        self._trajectories = Trajectories(self.environments, engine.max_response_tokens, key)
        turns = self._trajectories.counts if self.environments is not None else None
        self.counts = SamplerCounts(turns=turns)

    def submit(self, prompt: Prompt, samples: int, carried: PartialGroup | None = None) -> None:
        group = PendingGroup(prompt, range(samples), whole=True, step=self._decoding.step)
        if carried is not None and carried.tokens:
            group.step = carried.step
            group.finished = {response.sample: response for response in carried.finished}
        self._queue(group, carried)

    def submit_each(self, prompt: Prompt, samples: Sequence[int]) -> None:
        self._queue(PendingGroup(prompt, samples, whole=False, step=self._decoding.step))

    def resident(self) -> Any:
        return self._engine.programs.resident()

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._slots.responses and not self._trajectories

    @property
    def room(self) -> int:
        waiting = sum(len(pending.waiting) for pending in self._waiting)
        return self._engine.max_concurrent_decodes - len(self._occupied()) - waiting

    def decode_burst(self, meanwhile: Callable[[], None] = do_nothing) -> list[FinishedResponses]:
        completed = self._resume_trajectories()
        self._fill_slots()
        if not self._slots.responses:
            meanwhile()
            return completed
        self._reserve_burst()
        # Held slots run along in the burst, and write past the tokens that they have.
        occupied = self._occupied()
        longest = int((self._slots.prompt_tokens + self._slots.generated)[occupied].max()) - 1
        decoding = self._decoding
        decoding.state, _ = self._engine.generate(
            decoding.params, decoding.state, rule=decoding.rule, longest=longest
        )
        meanwhile()
        active = self._await_burst()
        ends = (~active | (self._slots.generated >= self._slots.limit)).tolist()
        ended = [slot for slot in self._slots.responses if ends[slot]]
        decoding.state = self._engine.stop(decoding.state, [slot for slot in ended if active[slot]])
        return completed + self._collect(ended)

    def suspend(self) -> list[PartialGroup]:
        parts = [(pending.group, pending.resumed) for pending in self._waiting]
        parts += self._trajectories.unfinished()
        slots = list(self._slots.responses)
        policy_step = self._decoding.policy_step
        partial = []
        outputs = self._engine.fetch_responses(self._decoding.state, slots)
        for slot, output in zip(slots, outputs, strict=True):
            pending, sample = self._slots.responses[slot]
            length = int(self._slots.generated[slot])
            partial.append(
                make_completion(pending, sample, output, length, policy_step=policy_step)
            )
            self.counts.unfinished_tokens += self._slots.sampled_here(slot, pending)
        if self.environments is not None:
            partial = with_texts(partial, self._tokenizer.decode_all)
        for slot, response in zip(slots, partial, strict=True):
            pending, _ = self._slots.responses[slot]
            parts.append((pending.group, response if self._slots.generated[slot] else None))
        self._clear()
        return carry_groups(parts)

    def abandon(self) -> None:
        for slot, (pending, _) in self._slots.responses.items():
            self.counts.abandoned_responses += 1
            self.counts.abandoned_tokens += self._slots.sampled_here(slot, pending)
        self._clear()

    def release(self) -> None:
        self.abandon()
        self._decoding = Decoding()

    def _clear(self) -> None:
        for slot in self._occupied():
            self._engine.release(slot)
        self._slots.responses.clear()
        self._waiting.clear()
        self._trajectories.clear()

    def _occupied(self) -> list[int]:
        """Return the running slots, then those that trajectories hold; the oldest first."""
        return [*self._slots.responses, *self._trajectories.held_slots]

    # --- the queue ------------------------------------------------------------------------------

    def _queue(self, group: PendingGroup, carried: PartialGroup | None = None) -> None:
        tokens = group.prompt.tokens
        if len(tokens) == 0:
            raise ValueError(f"prompt {group.prompt.id!r} has no tokens")
        begun = {response.sample: response for response in carried.begun} if carried else {}
        for response in begun.values():
            # A carried response that had ended its turn still needs the environment's reply.
            observed = response.turns and not response.turns[-1].drawn
            ended = not observed and self._has_ended(response.tokens)
            if not ended or not self._trajectories.request(group, response, self.counts.bursts):
                self._waiting.append(self._resumed(group, response))
        fresh = [i for i in group.samples if i not in begun and i not in group.finished]
        if fresh:
            padded = pad_prompt(tokens, self._engine.max_prefill_length, self._tokenizer.pad_id)
            waiting = collections.deque(fresh)
            prefix_id = next(self._prefix_ids)
            self._waiting.append(PendingResponses(group, waiting, prefix_id, padded))

    def _resumed(self, group: PendingGroup, response: Completion) -> PendingResponses:
        """Return a response that resumes after a prefill of prompt and known tokens."""
        known = np.concatenate([group.prompt.tokens, response.tokens])
        limit = self._engine.cache_tokens
        padded = pad_prompt(known, limit, self._tokenizer.pad_id, RESUMED_BUCKET_FACTOR)
        waiting = collections.deque([response.sample])
        return PendingResponses(group, waiting, next(self._prefix_ids), padded, response)

    def _has_ended(self, tokens: np.ndarray) -> bool:
        """Return True if the last token ends a response or a turn."""
        return len(tokens) > 0 and int(tokens[-1]) in self._tokenizer.end_ids

    # --- starting responses ---------------------------------------------------------------------

    def _fill_slots(self) -> None:
        """Start waiting responses, in order, as long as a free slot has cache space for them."""
        if not self._waiting:
            return
        occupied = set(self._occupied())
        free = [slot for slot in range(len(self._slots.generated)) if slot not in occupied]
        starts: dict[int, tuple[Prefix, list[tuple[int, int, int]]]] = {}
        fed: list[int] = []
        while free and self._waiting:
            pending = self._waiting[0]
            slot = self._engine.claim(free, pending.length, pending.prefix_id)
            if slot is None:
                break
            free.remove(slot)
            if pending.prefilled is None:
                self._prefill_first()
            prefix, row = present(pending.prefilled, "prefilled")
            sample = self._slots.occupy(slot, pending, self._trajectories.sampled_limit)
            starts.setdefault(id(prefix), (prefix, []))[1].append((slot, sample, row))
            self._slots.generated[slot] = pending.prefilled_response_tokens
            if pending.fed:
                fed.append(slot)
            if not pending.waiting:
                self._waiting.popleft().prefilled = None
        for prefix, started in starts.values():
            self._insert(prefix, started)
        self._feed(fed)

    def _prefill_first(self) -> None:
        """Prefill the first waiting prompt, together with others of its padded length."""
        engine, decoding = self._engine, self._decoding
        length = len(self._waiting[0].padded)
        same_length = (
            pending
            for pending in self._waiting
            if pending.prefilled is None and len(pending.padded) == length
        )
        batch = list(itertools.islice(same_length, engine.prefill_width))
        if len(batch) <= engine.prefill_width // 2:  # most of a wide call would be padding
            batch = batch[: engine.replicas]
        padding = engine.prefill_batch(len(batch)) - len(batch)
        groups = [pending.group for pending in [*batch, *[batch[-1]] * padding]]
        keys = sample_keys(
            self._seed,
            decoding.purpose,
            [group.step for group in groups],
            [group.prompt.index for group in groups],
        )
        prefix = engine.prefill_prompts(
            decoding.params,
            np.stack([pending.padded for pending in batch]),
            [pending.length for pending in batch],
            keys,
            [pending.prefilled_response_tokens for pending in batch],
        )
        for row, pending in enumerate(batch):
            pending.prefilled = (prefix, row)
        self.counts.prefills += len(batch)

    def _insert(self, prefix: Prefix, starts: Sequence[tuple[int, int, int]]) -> None:
        """Start responses, (slot, sample, row of the prefix) each, as many per call as possible."""
        width = self._engine.max_insert_width
        for i in range(0, len(starts), width):
            slots, samples, rows = np.array(starts[i : i + width]).T
            self._decoding.state = self._engine.insert(
                prefix, self._decoding.state, slots, sample_index=samples, row=rows
            )

    def _feed(self, slots: Sequence[int]) -> None:
        """Feed the resumed responses in these slots the tokens that their caches lack."""
        resumed = [self._slots.responses[slot][0].resumed for slot in slots]
        if resumed:
            tokens = [response.tokens for response in resumed if response is not None]
            self._decoding.state = self._engine.feed(self._decoding.state, slots, tokens)

    def _reserve_burst(self) -> None:
        """Return the youngest responses to the queue if the cache has no space for all."""
        running = list(self._slots.responses)
        held = self._trajectories.held_slots
        self._decoding.state, stopped = self._engine.reserve_burst(
            self._decoding.state, running, held
        )
        self._trajectories.evict(stopped)
        for slot in stopped:
            if slot not in self._slots.responses:
                continue
            pending, sample = self._slots.responses.pop(slot)
            self.counts.put_back_tokens += self._slots.sampled_here(slot, pending)
            if not pending.waiting:
                self._waiting.appendleft(pending)
            pending.waiting.appendleft(sample)

    # --- turns ----------------------------------------------------------------------------------

    def _resume_trajectories(self) -> list[FinishedResponses]:
        """Resume trajectories with the replies that are due; return groups that this finished."""
        running = bool(self._slots.responses)
        idle = not running and (not self._waiting or bool(self._trajectories.held_slots))
        completed: list[FinishedResponses] = []
        queued: list[PendingResponses] = []
        kept: list[int] = []
        for turn in self._trajectories.due(self.counts.bursts, idle):
            slot = turn.held.slot if turn.held else None
            if not turn.continues:
                completed += self._finish(turn.group, turn.completion)
                if slot is not None:
                    self._engine.release(slot)
                continue
            if turn.held is None:
                pending = self._resumed(turn.group, turn.completion)
            else:
                pending = turn.held.pending.extended(turn.completion, next(self._prefix_ids))
            if slot is not None:
                self._slots.occupy(slot, pending, self._trajectories.sampled_limit)
                kept.append(slot)
                continue
            known = pending.known_tokens - turn.completion.turns[-1].tokens
            self._trajectories.counts.prefilled_again_tokens += known
            queued.append(pending)
        self._waiting.extendleft(reversed(queued))
        self._feed(kept)
        return completed

    # --- finished responses ---------------------------------------------------------------------

    def _await_burst(self) -> np.ndarray:
        """Wait for a burst, update the counts, and return for each slot if it is still active."""
        state, counts = self._decoding.state, self.counts
        start = time.perf_counter()
        fields = (state.active, state.generated, state.busy_slot_steps, state.slot_steps)
        active, generated, busy, total = map(np.array, to_host(fields))
        counts.decode_seconds += time.perf_counter() - start
        self._slots.generated = generated
        busy_before, total_before = self._decoding.slot_steps
        self._decoding.slot_steps = (int(busy), int(total))
        counts.bursts += 1
        counts.decode_steps += (int(total) - total_before) // len(active)
        if self._waiting:
            counts.busy_slot_steps += int(busy) - busy_before
            counts.slot_steps += int(total) - total_before
        return active

    def _collect(self, slots: list[int]) -> list[FinishedResponses]:
        """Take ended responses out of their slots; return the groups that this finished."""
        ended, responses, completed = [], [], []
        outputs = self._engine.fetch_responses(self._decoding.state, slots)
        for slot, output in zip(slots, outputs, strict=True):
            pending, sample = self._slots.responses.pop(slot)
            length = int(min(self._slots.generated[slot], self._slots.limit[slot]))
            response = make_completion(
                pending,
                sample,
                output,
                length,
                policy_step=self._decoding.policy_step,
                truncated=not self._has_ended(output.tokens[:length]),
            )
            ended.append((slot, pending))
            responses.append(response)
            self.counts.tokens += length - pending.known_tokens
        if self.environments is not None:
            responses = with_texts(responses, self._tokenizer.decode_all)
        for (slot, pending), response in zip(ended, responses, strict=True):
            held = HeldSlot(pending, slot) if self._engine.shape.settings.keep_turns else None
            burst = self.counts.bursts
            requested = self._trajectories.request(pending.group, response, burst, held)
            if not requested:
                completed += self._finish(pending.group, response)
            if not requested or held is None:
                self._engine.release(slot)
        return completed

    def _finish(self, group: PendingGroup, completion: Completion) -> list[FinishedResponses]:
        self.counts.responses += 1
        return group.finish(completion)

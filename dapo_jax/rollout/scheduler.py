"""Continuous batching: free decode slots take the next waiting response."""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.model.caches import Prefix
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.requests import (
    RESUMED_BUCKET_FACTOR,
    PendingResponses,
    Reader,
    Trajectories,
    carry_groups,
    make_completion,
    pad_prompt,
)
from dapo_jax.rollout.sampling import SAMPLE_BY_SEED, sample_keys
from dapo_jax.runtime.sharding import to_host
from dapo_jax.types.contracts import do_nothing
from dapo_jax.types.structs import (
    Completion,
    Finished,
    NewTokens,
    PartialGroup,
    Prompt,
    Request,
    RolloutKey,
    SamplerCounts,
    SamplingRule,
    Stop,
    present,
    with_texts,
)


@dataclasses.dataclass
class Decoding:
    """Policy, decode state and key of a rollout; `close` frees the arrays."""

    params: Any = None
    state: Any = None
    key: RolloutKey = RolloutKey(0)
    rule: SamplingRule = SamplingRule()
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
        budget = pending.group.budget or sampled_limit
        self.limit[slot] = observed + min(budget, sampled_limit)
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
        tokenizer: Tokenizer,
        seed: int,
        environments: Any = None,  # such as `environments.sessions.Environments`
    ):
        self.environments = environments
        self.key: RolloutKey | None = None
        self.counts = SamplerCounts()
        self._engine = engine
        self._tokenizer = tokenizer
        self._seed = seed
        self._decoding = Decoding()
        self._waiting: collections.deque[PendingResponses] = collections.deque()
        self._prefix_ids = itertools.count()
        self._slots = Slots(engine.max_concurrent_decodes)
        self._trajectories = Trajectories(None, engine.max_response_tokens)

    def begin(self, params: Any, key: RolloutKey, rule: SamplingRule) -> None:
        self.close()
        self.open(self._engine.load_params(params), key, rule)

    def open(
        self, weights: Any, key: RolloutKey, rule: SamplingRule, rule_per_slot: bool = False
    ) -> None:
        """Begin with decoding weights; `rule_per_slot` if requests will have other rules."""
        engine, self.key = self._engine, key
        state = engine.init_decode_state()
        if rule_per_slot:
            state = engine.with_rules(state, rule)
        self._decoding = Decoding(weights, state, key, rule)
        self._slots.generated[:] = 0
        seed = self._seed, key.purpose
        self._trajectories = Trajectories(self.environments, engine.max_response_tokens, seed)
        turns = self._trajectories.counts if self.environments is not None else None
        self.counts = SamplerCounts(turns=turns)

    def submit(
        self,
        prompt: Prompt,
        samples: int | Sequence[int],
        rule: SamplingRule | None = None,
        budget: int | None = None,
        stop: Stop = Stop(),  # noqa: B008
        *,
        carried: PartialGroup | None = None,
        seed: int | None = None,
        watch: Callable[[NewTokens], None] | None = None,
    ) -> Request:
        """Request responses; `seed` and `watch` are fields of `Request`."""
        decoding = self._decoding
        request = Request(prompt, samples, rule or decoding.rule, budget, stop, decoding.key.step)
        request.seed, request.watch = seed, watch
        if carried is not None and carried.tokens:
            request.step = carried.step
            request.finished = {response.sample: response for response in carried.finished}
        if request.rule != decoding.rule and decoding.state.rules is None:
            decoding.state = self._engine.with_rules(decoding.state, decoding.rule)
        self._queue(request, carried)
        return request

    def cancel(self, request: Request) -> None:
        waiting = (pending for pending in self._waiting if pending.group is not request)
        self._waiting = collections.deque(waiting)
        slots = [s for s, (pending, _) in self._slots.responses.items() if pending.group is request]
        self._discard(slots)
        for slot in [*slots, *self._trajectories.cancel(request)]:
            self._engine.release(slot)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._slots.responses and not self._trajectories

    @property
    def room(self) -> int:
        waiting = sum(len(pending.waiting) for pending in self._waiting)
        return self._engine.max_concurrent_decodes - len(self._occupied()) - waiting

    def step(self, meanwhile: Callable[[], None] = do_nothing) -> list[Finished]:
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
        decoding.state, burst = self._engine.generate(
            decoding.params, decoding.state, rule=decoding.rule, longest=longest
        )
        meanwhile()
        active = self._await_burst()
        self._read_burst(burst, active)
        ends = (~active | (self._slots.generated >= self._slots.limit)).tolist()
        ended = [slot for slot in self._slots.responses if ends[slot]]
        decoding.state = self._engine.stop(decoding.state, [slot for slot in ended if active[slot]])
        return completed + self._collect(ended)

    def stop(self, keep: bool) -> list[PartialGroup]:
        partial = self._partial_groups() if keep else []
        occupied = self._occupied()
        self._discard(list(self._slots.responses), kept=keep)
        for slot in occupied:
            self._engine.release(slot)
        self._waiting.clear()
        self._trajectories.clear()
        return partial

    def close(self) -> None:
        if self.key is not None:
            self.stop(keep=False)
        self._decoding, self.key = Decoding(), None

    def _discard(self, slots: list[int], kept: bool = False) -> None:
        """Stop running responses and add them to the counts; `kept` ones are sampled further."""
        for slot in slots:
            pending, _ = self._slots.responses.pop(slot)
            tokens = self._slots.sampled_here(slot, pending)
            self.counts.unfinished_tokens += tokens * kept
            self.counts.abandoned_tokens += tokens * (not kept)
            self.counts.abandoned_responses += not kept
        self._decoding.state = self._engine.stop(self._decoding.state, slots)

    def _partial_groups(self) -> list[PartialGroup]:
        parts = [(pending.group, pending.resumed) for pending in self._waiting]
        parts += self._trajectories.unfinished()
        slots = list(self._slots.responses)
        for slot, response in zip(slots, self._responses(slots), strict=True):
            pending, _ = self._slots.responses[slot]
            parts.append((pending.group, response if self._slots.generated[slot] else None))
        return carry_groups(parts)

    def _responses(self, slots: list[int], ended: bool = False) -> Sequence[Completion]:
        """Return the responses of slots so far; with texts if an environment reads them."""
        responses = []
        outputs = self._engine.fetch_responses(self._decoding.state, slots)
        for slot, output in zip(slots, outputs, strict=True):
            pending, sample = self._slots.responses[slot]
            length = int(min(self._slots.generated[slot], self._slots.limit[slot]))
            reader = pending.readers.get(sample)
            stopped = reader and reader.stopped or self._has_ended(output.tokens[:length])
            fields = {
                "policy_step": self._decoding.key.policy_step,
                "truncated": ended and not stopped,
            }
            responses.append(make_completion(pending, sample, output, length, **fields))
        if self.environments is None:
            return responses
        return with_texts(responses, self._tokenizer.decode_all)

    def _occupied(self) -> list[int]:
        """Return the running slots, then those that trajectories hold; the oldest first."""
        return [*self._slots.responses, *self._trajectories.held_slots]

    # --- the queue ------------------------------------------------------------------------------

    def _queue(self, group: Request, carried: PartialGroup | None) -> None:
        tokens = group.prompt.tokens
        begun = {response.sample: response for response in carried.begun} if carried else {}
        for response in begun.values():
            # A carried response that had ended its turn still needs the environment's reply.
            observed = response.turns and not response.turns[-1].is_sampled
            ended = not observed and self._has_ended(response.tokens)
            if not ended or not self._trajectories.request(group, response, self.counts.bursts):
                self._waiting.append(self._resumed(group, response))
        fresh = [i for i in group.samples if i not in begun and i not in group.finished]
        if fresh:
            padded = pad_prompt(tokens, self._engine.max_prefill_length, self._tokenizer.pad_id)
            waiting = collections.deque(fresh)
            prefix_id = next(self._prefix_ids)
            self._waiting.append(PendingResponses(group, waiting, prefix_id, padded))

    def _resumed(self, group: Request, response: Completion) -> PendingResponses:
        """Return a response that resumes after a prefill of prompt and known tokens."""
        known = np.concatenate([group.prompt.tokens, response.tokens])
        limit = self._engine.cache_tokens
        padded = pad_prompt(known, limit, self._tokenizer.pad_id, RESUMED_BUCKET_FACTOR)
        waiting = collections.deque([response.sample])
        return PendingResponses(group, waiting, next(self._prefix_ids), padded, response)

    def _has_ended(self, tokens: np.ndarray) -> bool:
        """Return True if the last token ends a response or a turn."""
        return len(tokens) > 0 and int(tokens[-1]) in self._engine.shape.end_ids

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
        keys = sample_keys([self._key_parts(group) for group in groups])
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

    def _key_parts(self, group: Request) -> tuple[int, int, int, int]:
        if group.seed is None:
            return self._seed, self._decoding.key.purpose, group.step, group.prompt.index
        high, low = divmod(group.seed, 2**32)
        return low, SAMPLE_BY_SEED, high, group.prompt.index

    def _insert(self, prefix: Prefix, starts: Sequence[tuple[int, int, int]]) -> None:
        """Start responses, (slot, sample, row of the prefix) each, as many per call as possible."""
        width = self._engine.max_insert_width
        for i in range(0, len(starts), width):
            slots, samples, rows = np.array(starts[i : i + width]).T
            state, rules = self._decoding.state, ()
            if state.rules is not None:
                groups = [self._slots.responses[slot][0].group for slot in slots.tolist()]
                rules = [present(group.rule, "rule") for group in groups]
            self._decoding.state = self._engine.insert(
                prefix, state, slots, sample_index=samples, row=rows, rules=rules
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
        cached = self._slots.prompt_tokens + self._slots.generated - 1
        self._decoding.state, stopped = self._engine.reserve_burst(
            self._decoding.state, running, cached, held
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

    def _resume_trajectories(self) -> list[Finished]:
        """Resume trajectories with the replies that are due; return groups that this finished."""
        running = bool(self._slots.responses)
        idle = not running and (not self._waiting or bool(self._trajectories.held_slots))
        completed: list[Finished] = []
        queued: list[PendingResponses] = []
        kept: list[int] = []
        for turn in self._trajectories.due(self.counts.bursts, idle):
            if not turn.continues:
                completed += self._finish(turn.group, turn.completion)
                if turn.slot is not None:
                    self._engine.release(turn.slot)
                continue
            if turn.pending is None:
                pending = self._resumed(turn.group, turn.completion)
            else:
                pending = turn.pending.extended(turn.completion, next(self._prefix_ids))
            if turn.slot is not None:
                self._slots.occupy(turn.slot, pending, self._trajectories.sampled_limit)
                kept.append(turn.slot)
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
        counts.decoded_tokens += int(np.sum(generated - self._slots.generated))
        self._slots.generated = generated
        busy_before, total_before = self._decoding.slot_steps
        self._decoding.slot_steps = (int(busy), int(total))
        counts.bursts += 1
        counts.decoding_slot_steps += int(busy) - busy_before
        counts.decode_steps += (int(total) - total_before) // len(active)
        if self._waiting:
            counts.busy_slot_steps += int(busy) - busy_before
            counts.slot_steps += int(total) - total_before
        return active

    def _read_burst(self, burst: tuple[Any, Any], active: np.ndarray) -> None:
        """Read the new tokens of responses with stops or a watcher; a stop becomes the limit."""
        watched = {
            slot: (pending, sample)
            for slot, (pending, sample) in self._slots.responses.items()
            if pending.group.watch or any(pending.group.stop)
        }
        if not watched:
            return
        tokens, counts = to_host(burst)
        for slot, (pending, sample) in watched.items():
            if sample not in pending.readers:
                ends = self._engine.shape.end_ids
                pending.readers[sample] = Reader(self._tokenizer, pending.group, ends)
            reader = pending.readers[sample]
            end = min(self._slots.generated[slot], self._slots.limit[slot])
            first = self._slots.generated[slot] - counts[slot]
            ids = tokens[slot, max(reader.seen - first, 0) : max(end - first, 0)].tolist()
            last = not active[slot] or end == self._slots.limit[slot]
            if reader.read(sample, ids, last):
                self._slots.limit[slot] = reader.seen

    def _collect(self, slots: list[int]) -> list[Finished]:
        """Take ended responses out of their slots; return the groups that this finished."""
        completed: list[Finished] = []
        for slot, response in zip(slots, self._responses(slots, ended=True), strict=True):
            pending, sample = self._slots.responses.pop(slot)
            pending.readers.pop(sample, None)
            self.counts.tokens += len(response.tokens) - pending.known_tokens
            keeps = self._engine.shape.settings.keep_turns
            kept = {"pending": pending, "slot": slot} if keeps else {}
            turn = pending.group, response, self.counts.bursts
            requested = self._trajectories.request(*turn, **kept)
            if not requested:
                completed += self._finish(pending.group, response)
            if not requested or not keeps:
                self._engine.release(slot)
        return completed

    def _finish(self, group: Request, completion: Completion) -> list[Finished]:
        self.counts.responses += 1
        return group.finish(completion)

"""Continuous batching: prompts in, finished groups out, slots refilled as they free up."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dapo_jax.prompts.tokenizer import Tokenizer
from dapo_jax.sampler.engine import PolicyEngine
from dapo_jax.sampler.sampling import SamplingRule, sample_key
from dapo_jax.sharding import to_host
from dapo_jax.structs import Completion, Prefix, Prompt

SMALLEST_PROMPT_BUCKET = 16


@dataclasses.dataclass
class _Request:
    """A prompt on its way: how many of its samples have a slot, and those that are finished."""

    prompt: Prompt
    samples: Sequence[int]
    whole: bool  # all samples are handed back together
    started: int = 0
    prefix: Prefix | None = None
    finished: dict[int, Completion] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class SamplerCounts:
    """What one rollout cost. Occupancy is measured only while prompts were still waiting."""

    prefills: int = 0
    responses: int = 0
    tokens: int = 0
    abandoned_responses: int = 0
    abandoned_tokens: int = 0
    busy_slot_steps: int = 0
    slot_steps: int = 0

    @property
    def occupancy(self) -> float:
        """Share of decode-slot steps that drew a token while the queue was not empty."""
        return self.busy_slot_steps / self.slot_steps if self.slot_steps else 1.0


def pad_prompt(tokens: np.ndarray, limit: int, pad_id: int) -> np.ndarray:
    """Right-padded to the next power of two (at most `limit`), so that few lengths compile."""
    length = SMALLEST_PROMPT_BUCKET
    while length < len(tokens):
        length *= 2
    padded = np.full(max(len(tokens), min(length, limit)), pad_id, np.int32)
    padded[: len(tokens)] = tokens
    return padded


class RolloutSampler:
    """Keeps the engine's slots full and hands back whole groups.

    A prompt is prefilled once and inserted `samples` times. What is drawn depends on the key of
    (seed, purpose, step, prompt index, sample index, position) only, never on which slot, how many
    slots, or who shares the batch.
    """

    def __init__(self, engine: PolicyEngine, tokenizer: Tokenizer, seed: int):
        self._engine, self._tokenizer, self._seed = engine, tokenizer, seed
        self._generated = np.zeros(engine.max_concurrent_decodes, np.int64)
        self._waiting: collections.deque[_Request] = collections.deque()
        self._in_slot: dict[int, tuple[_Request, int]] = {}
        self.counts = SamplerCounts()

    def begin(self, params: Any, *, purpose: int, step: int, rule: SamplingRule) -> None:
        """Takes over the trainer's live parameters and empties the slots."""
        self.release()
        self._params = self._engine.load_params(params)
        self._engine.rule = rule
        self._state = self._engine.init_decode_state()
        self._purpose, self._step = purpose, step
        self._generated = np.zeros_like(self._generated)
        self._slot_counts_before = (0, 0)
        self.counts = SamplerCounts()

    def submit(self, prompt: Prompt, samples: int) -> None:
        """Queues a group of `samples` responses. Raises ValueError for an empty prompt."""
        self._queue(_Request(prompt, range(samples), whole=True))

    def submit_each(self, prompt: Prompt, samples: Sequence[int]) -> None:
        """Queues the responses of those numbers; each is a group of its own, once finished."""
        self._queue(_Request(prompt, samples, whole=False))

    def _queue(self, request: _Request) -> None:
        if len(request.prompt.tokens) == 0:
            raise ValueError(f"prompt {request.prompt.id!r} has no tokens")
        self._waiting.append(request)

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

    def decode_burst(self) -> list[tuple[Prompt, tuple[Completion, ...]]]:
        """Refills free slots, decodes one burst, returns the groups that it completed."""
        self._fill_slots()
        if not self._in_slot:
            return []
        self._state, _ = self._engine.generate(self._params, self._state, longest=self._longest())
        active, self._generated, busy, total = (
            np.array(array)
            for array in to_host(
                (
                    self._state.active,
                    self._state.generated,
                    self._state.busy_slot_steps,
                    self._state.slot_steps,
                )
            )
        )
        if self._waiting:
            self.counts.busy_slot_steps += int(busy) - self._slot_counts_before[0]
            self.counts.slot_steps += int(total) - self._slot_counts_before[1]
        self._slot_counts_before = (int(busy), int(total))
        return self._collect([slot for slot in self._in_slot if not active[slot]])

    def abandon(self) -> None:
        """Forgets everything waiting or being decoded, and counts it."""
        for slot in self._in_slot:
            self.counts.abandoned_responses += 1
            self.counts.abandoned_tokens += int(self._generated[slot])
        self._in_slot.clear()
        self._waiting.clear()

    def release(self) -> None:
        """Gives the memory of caches and decoding weights back until the next `begin`."""
        self.abandon()
        self._state = self._params = None

    def _longest(self) -> int:
        return max(
            len(request.prompt.tokens) - 1 + int(self._generated[slot])
            for slot, (request, _) in self._in_slot.items()
        )

    def _fill_slots(self) -> None:
        slots = range(self._engine.max_concurrent_decodes)
        free = [slot for slot in slots if slot not in self._in_slot]
        while free and self._waiting:
            request = self._waiting[0]
            if request.prefix is None:
                request.prefix = self._prefill(request.prompt)
            count = min(len(free), len(request.samples) - request.started)
            taken, free = free[:count], free[count:]
            samples = request.samples[request.started : request.started + count]
            self._state = self._engine.insert(
                request.prefix, self._state, np.array(taken), sample_index=np.array(samples)
            )
            self._generated[taken] = 0
            self._in_slot.update(
                (slot, (request, sample)) for slot, sample in zip(taken, samples, strict=True)
            )
            request.started += count
            if request.started == len(request.samples):
                request.prefix = None
                self._waiting.popleft()

    def _prefill(self, prompt: Prompt) -> Prefix:
        self.counts.prefills += 1
        limit = self._engine.max_prefill_length
        return self._engine.prefill(
            params=self._params,
            padded_tokens=pad_prompt(prompt.tokens, limit, self._tokenizer.pad_id),
            true_length=len(prompt.tokens),
            key=sample_key(self._seed, self._purpose, self._step, prompt.index),
        )

    def _collect(self, slots: list[int]) -> list[tuple[Prompt, tuple[Completion, ...]]]:
        if not slots:
            return []
        tokens, logprobs = self._engine.harvest(self._state, slots)
        groups = []
        for row, slot in enumerate(slots):
            request, sample = self._in_slot.pop(slot)
            drawn = tokens[row, : self._generated[slot]]
            completion = Completion(
                tokens=drawn,
                sampler_logprobs=logprobs[row, : len(drawn)],
                truncated=len(drawn) == 0 or int(drawn[-1]) not in self._tokenizer.end_ids,
                policy_step=self._step,
                text=self._tokenizer.decode(drawn.tolist()),
                sample=sample,
            )
            self.counts.responses += 1
            self.counts.tokens += len(drawn)
            if not request.whole:
                groups.append((request.prompt, (completion,)))
                continue
            request.finished[sample] = completion
            if len(request.finished) == len(request.samples):
                ordered = tuple(request.finished[i] for i in request.samples)
                groups.append((request.prompt, ordered))
        return groups

"""Trajectories between two turns, while their environments compute a reply.

A reply is requested when a turn ends and placed a fixed number of bursts later; decoding waits for
a reply that takes longer. So every decision depends on burst counts, never on the clock.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from dapo_jax.config.experiment import Environment
from dapo_jax.rollout.requests import PendingGroup, PendingResponses
from dapo_jax.structs import Completion, Prompt, Turn, TurnCounts


class EnvironmentPool(Protocol):
    """Environments that run beside decoding, such as `environments.sessions.Environments`."""

    settings: Environment

    def submit(
        self, prompt: Prompt, seed: int, texts: Sequence[str], failures: Sequence[str], /
    ) -> Any: ...

    def steps(self, requests: Sequence[Any], /) -> list[Any]: ...


@dataclasses.dataclass
class HeldSlot:
    """Slot that a trajectory keeps between turns; None after its cache pages were taken."""

    pending: PendingResponses
    slot: int | None


class AwaitingReply(NamedTuple):
    """Trajectory that waits for the reply of its environment."""

    burst: int  # its turn ended after this burst
    group: PendingGroup
    completion: Completion
    request: Any
    held: HeldSlot | None  # None: its slot was released


class NextTurn(NamedTuple):
    """Trajectory with the reply to its last turn."""

    group: PendingGroup
    held: HeldSlot | None
    completion: Completion
    continues: bool


class Trajectories:
    """Trajectories that wait for their environments, ordered by the end of their turns."""

    def __init__(
        self, environments: EnvironmentPool | None, max_tokens: int, key: Sequence[int] = ()
    ):
        self.counts = TurnCounts()
        self._environments = environments
        self._max_tokens = max_tokens
        self._key = key
        self._awaiting: collections.deque[AwaitingReply] = collections.deque()

    def __len__(self) -> int:
        return len(self._awaiting)

    @property
    def sampled_limit(self) -> int:
        """Maximum number of tokens that a trajectory samples."""
        limit = self._environments.settings.max_drawn_tokens if self._environments else 0
        return min(limit or self._max_tokens, self._max_tokens)

    @property
    def held_slots(self) -> list[int]:
        """Slots that trajectories keep, the oldest first."""
        held = [waiting.held for waiting in self._awaiting if waiting.held]
        return [kept.slot for kept in held if kept.slot is not None]

    def evict(self, slots: Sequence[int]) -> None:
        """Take slots away; their trajectories will be prefilled and fed again."""
        for waiting in self._awaiting:
            if waiting.held and waiting.held.slot in slots:
                waiting.held.slot = None

    def unfinished(self) -> list[tuple[PendingGroup, Completion]]:
        """Return all trajectories as far as they were sampled."""
        return [(waiting.group, waiting.completion) for waiting in self._awaiting]

    def clear(self) -> None:
        self._awaiting.clear()

    def request(
        self, group: PendingGroup, completion: Completion, burst: int, held: HeldSlot | None = None
    ) -> bool:
        """Request the reply to a turn; return False if the response ends here."""
        if self._environments is None or completion.truncated:
            return False
        prompt = group.prompt
        key = [*self._key, group.step, prompt.index, completion.sample]
        seed = int(np.random.SeedSequence(key).generate_state(1)[0])
        texts = [turn.text for turn in completion.turns if turn.drawn] or [completion.text]
        request = self._environments.submit(prompt, seed, texts, completion.failures)
        self.counts.turns += 1
        self._awaiting.append(AwaitingReply(burst, group, completion, request, held))
        return True

    def due(self, burst: int, idle: bool) -> list[NextTurn]:
        """Return the trajectories to place after a burst, with their replies.

        If nothing else can be decoded (`idle`), wait for the next replies now.
        """
        if self._environments is None or not self._awaiting:
            return []
        last = burst - self._environments.settings.wait_bursts
        if idle:
            last = max(last, self._awaiting[0].burst)
        due = []
        while self._awaiting and self._awaiting[0].burst <= last:
            due.append(self._awaiting.popleft())
        start = time.perf_counter()
        requests = [waiting.request for waiting in due]
        replies = self._environments.steps(requests) if due else []
        self.counts.wait_seconds += time.perf_counter() - start
        max_turns = self._environments.settings.max_turns
        return [
            self._next_turn(waiting, reply, max_turns)
            for waiting, reply in zip(due, replies, strict=True)
        ]

    def _next_turn(self, waiting: AwaitingReply, reply: Any, max_turns: int) -> NextTurn:
        """Append the reply, such as a `sessions.TokenizedReply`, unless the trajectory ends."""
        counts = self.counts
        next_turn = functools.partial(NextTurn, waiting.group, waiting.held)
        counts.failed_steps += bool(reply.failure)
        counts.late_steps += reply.late
        counts.cut_observations += reply.cut
        completion = dataclasses.replace(
            waiting.completion,
            rewards=(*waiting.completion.rewards, reply.reward),
            failures=(*waiting.completion.failures, reply.failure),
            lost_environment=reply.lost,
        )
        turns = completion.turns or (Turn(True, len(completion.tokens), completion.text),)
        if not reply.tokens:
            counts.ended_by_tokens += reply.cut
            return next_turn(dataclasses.replace(completion, truncated=reply.cut), continues=False)
        by_turns = sum(turn.drawn for turn in turns) >= max_turns
        remaining = self._max_tokens - len(completion.tokens) - len(reply.tokens)
        by_tokens = remaining <= 0 or len(completion) >= self.sampled_limit
        if by_turns or by_tokens:
            counts.ended_by_turns += by_turns
            counts.ended_by_tokens += not by_turns
            return next_turn(dataclasses.replace(completion, truncated=True), continues=False)
        counts.observation_tokens += len(reply.tokens)
        logprobs = completion.sampler_logprobs
        completion = dataclasses.replace(
            completion,
            tokens=np.append(completion.tokens, np.asarray(reply.tokens, np.int32)),
            sampler_logprobs=np.append(logprobs, np.zeros(len(reply.tokens), logprobs.dtype)),
            turns=(*turns, Turn(False, len(reply.tokens), reply.text)),
        )
        return next_turn(completion, continues=True)

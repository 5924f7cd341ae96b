"""Trajectories between two turns: their slots are free while the environment thinks.

A step is asked for when a turn ends and placed a fixed number of bursts later; decoding waits for
one that takes longer. So every decision is a function of burst counts, never of the clock.
"""

import collections
import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from dapo_jax.config.sections import Environment
from dapo_jax.rollout.requests import PendingGroup
from dapo_jax.structs import Completion, Prompt, Turn, TurnCounts


class Step(Protocol):
    """Reply to a turn, as `environments.sessions.Step` is."""

    tokens: list[int]
    text: str
    reward: float
    failure: str
    cut: bool
    late: bool


class Steps(Protocol):
    """Runs environments beside decoding, as `environments.sessions.Environments` does."""

    settings: Environment

    def submit(
        self, prompt: Prompt, seed: int, said: Sequence[str], failed: Sequence[str]
    ) -> Any: ...

    def steps(self, asked: Sequence[Any]) -> list[Any]: ...


class AwaitingStep(NamedTuple):
    """Trajectory whose environment is asked."""

    burst: int  # after which its turn ended
    group: PendingGroup
    completion: Completion
    asked: Any


class Trajectories:
    """Trajectories whose environments are asked, in the order in which their turns ended.

    Args:
        environments: None: responses have one turn.
        most_tokens: of a trajectory, observations included.
        key: of the draws; a trajectory's seed follows from it, from prompt, step and sample.
    """

    def __init__(self, environments: Steps | None, most_tokens: int, key: Sequence[int] = ()):
        self._environments, self._most_tokens, self._key = environments, most_tokens, key
        self._between: collections.deque[AwaitingStep] = collections.deque()
        self.counts = TurnCounts()

    def __len__(self) -> int:
        return len(self._between)

    @property
    def drawn_limit(self) -> int:
        """Most tokens that a trajectory draws."""
        limit = self._environments.settings.max_drawn_tokens if self._environments else 0
        return min(limit or self._most_tokens, self._most_tokens)

    def take(self) -> list[tuple[PendingGroup, Completion]]:
        """Takes out all trajectories, as far as they were drawn."""
        taken = [(one.group, one.completion) for one in self._between]
        self._between.clear()
        return taken

    def ask(self, group: PendingGroup, completion: Completion, burst: int) -> bool:
        """Asks the environment for its reply to a turn; False where there is nobody to ask."""
        if self._environments is None or completion.truncated:
            return False
        prompt, said = group.prompt, [turn.text for turn in completion.turns if turn.drawn]
        key = [*self._key, group.step, prompt.index, completion.sample]
        seed = int(np.random.SeedSequence(key).generate_state(1)[0])
        said = said or [completion.text]
        asked = self._environments.submit(prompt, seed, said, completion.failures)
        self.counts.turns += 1
        self._between.append(AwaitingStep(burst, group, completion, asked))
        return True

    def due(self, burst: int, idle: bool) -> list[tuple[PendingGroup, Completion, bool]]:
        """Trajectories whose steps are due after that burst, and whether each goes on.

        Args:
            idle: nothing else is to be decoded: the next ones are waited for at once.
        """
        if self._environments is None or not self._between:
            return []
        last = burst - self._environments.settings.wait_bursts
        if idle:
            last = max(last, self._between[0].burst)
        due = []
        while self._between and self._between[0].burst <= last:
            due.append(self._between.popleft())
        began = time.perf_counter()
        steps = self._environments.steps([one.asked for one in due]) if due else []
        self.counts.wait_seconds += time.perf_counter() - began
        pairs = zip(due, steps, strict=True)
        return [(one.group, *self._placed(one.completion, step)) for one, step in pairs]

    def _placed(self, completion: Completion, step: Step) -> tuple[Completion, bool]:
        """Trajectory with the reply, and whether it goes on."""
        environments, counts = self._environments, self.counts
        assert environments is not None
        counts.failed_steps += bool(step.failure)
        counts.late_steps += step.late
        counts.cut_observations += step.cut
        completion = dataclasses.replace(
            completion,
            rewards=(*completion.rewards, step.reward),
            failures=(*completion.failures, step.failure),
        )
        turns = completion.turns or (Turn(True, len(completion.tokens), completion.text),)
        if not step.tokens:
            counts.ended_by_tokens += step.cut
            return dataclasses.replace(completion, truncated=step.cut), False
        by_turns = sum(turn.drawn for turn in turns) >= environments.settings.max_turns
        room = self._most_tokens - len(completion.tokens) - len(step.tokens)
        by_tokens = room <= 0 or len(completion) >= self.drawn_limit
        if by_turns or by_tokens:
            counts.ended_by_turns += by_turns
            counts.ended_by_tokens += not by_turns
            return dataclasses.replace(completion, truncated=True), False
        counts.observation_tokens += len(step.tokens)
        logprobs = completion.sampler_logprobs
        return dataclasses.replace(
            completion,
            tokens=np.append(completion.tokens, np.asarray(step.tokens, np.int32)),
            sampler_logprobs=np.append(logprobs, np.zeros(len(step.tokens), logprobs.dtype)),
            turns=(*turns, Turn(False, len(step.tokens), step.text)),
        ), True

"""From finished responses to rewarded groups: workers, the reward model, and the sum of parts."""

import dataclasses
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import numpy as np

from dapo_jax.config.experiment import Config
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.runtime import processes
from dapo_jax.structs import Completion, Group, Interrupted, Prompt, Verdict

LOOK_SECONDS = 0.2  # between two looks whether to wait any longer


class Pending(NamedTuple):
    """A finished group whose verdicts are under way, on the one process that judges it."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    verdicts: list[Future[Verdict]]


class RewardModel(Protocol):
    """Learned scores of responses; `learner.reward_model` has the one on devices."""

    def score(self, responses: list[tuple[Prompt, Completion]]) -> np.ndarray:
        """[len(responses)] float32 scores, in their order."""
        ...


class Judge:
    """Judging overlaps decoding: `submit` returns at once, `groups` waits.

    Args:
        given_up: whether this process is not to wait any longer; `groups` then raises.
    """

    def __init__(
        self,
        config: Config,
        pool: RewardPool,
        model: RewardModel | None = None,
        given_up: Callable[[], bool] = lambda: False,
    ):
        self._config, self._pool, self._model = config, pool, model
        self._given_up = given_up

    def submit(self, prompt: Prompt, completions: tuple[Completion, ...]) -> Pending:
        """Hands the responses to the workers, where this process judges the prompt."""
        if prompt.index % processes.count() != processes.index():
            return Pending(prompt, completions, [])
        verdicts = [
            self._pool.submit(prompt.text, c.text, prompt.answer, prompt.source, prompt.metadata)
            for c in completions
        ]
        return Pending(prompt, completions, verdicts)

    def groups(self, pending: list[Pending]) -> list[Group]:
        """The rewarded groups, in the order given, on every process. Raises `Interrupted`."""
        scores = self._model_scores(pending)
        judged = zip(pending, self._verdicts(pending), scores, strict=True)
        return [
            reward_group(self._config, one.prompt, one.completions, verdicts, own)
            for one, verdicts, own in judged
        ]

    def _verdicts(self, pending: list[Pending]) -> list[tuple[Verdict, ...]]:
        if processes.count() == 1:
            return [self._wait(one.verdicts) for one in pending]

        def of_group(i: int) -> list[dict] | None:
            try:
                return [dataclasses.asdict(one) for one in self._wait(pending[i].verdicts)]
            except Interrupted:  # on all processes, once all have been told
                return None

        said = processes.share_out([one.prompt.index for one in pending], of_group, "verdicts")
        if None in said:
            raise Interrupted
        return [tuple(Verdict(**fields) for fields in one) for one in said]

    def _wait(self, verdicts: list[Future[Verdict]]) -> tuple[Verdict, ...]:
        while futures.wait(verdicts, LOOK_SECONDS).not_done:
            if self._given_up():
                raise Interrupted
        return tuple(future.result() for future in verdicts)

    def _model_scores(self, pending: list[Pending]) -> list[np.ndarray | None]:
        if self._model is None or not pending:
            return [None] * len(pending)
        scores = self._model.score([(p.prompt, done) for p in pending for done in p.completions])
        ends = np.cumsum([len(p.completions) for p in pending])
        return list(np.split(scores, ends[:-1]))

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()

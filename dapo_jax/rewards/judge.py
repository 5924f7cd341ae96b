"""Judging of finished responses: verdicts of the pool, model scores, rewarded groups."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import numpy as np

from dapo_jax.config.experiment import Config
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.runtime import processes
from dapo_jax.structs import Completion, Group, Interrupted, Prompt, Verdict, with_texts

POLL_SECONDS = 0.2  # between two looks whether to wait any longer


class Pending(NamedTuple):
    """Finished group whose verdicts are under way, on the one process that judges the group."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    verdicts: list[Future[Verdict]]


class RewardModel(Protocol):
    """Learned scores of responses; `learner.reward_model` has the one on devices."""

    def score(self, groups: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[np.ndarray]:
        """[len(completions)] float32 scores of each group."""
        ...


class Judge:
    """Judge of responses beside the decoding: `submit` waits for no verdict, `groups` does.

    Args:
        decode_all: texts of responses that have none yet; by default they stay empty.
        should_abort: tells whether to stop waiting; `groups` then raises.
    """

    def __init__(
        self,
        config: Config,
        pool: RewardPool,
        model: RewardModel | None = None,
        should_abort: Callable[[], bool] = lambda: False,
        decode_all: Callable[[list[list[int]]], list[str]] = lambda rows: [""] * len(rows),
    ):
        self._config, self._pool, self._model = config, pool, model
        self._given_up, self._decode_all = should_abort, decode_all

    def submit(self, prompt: Prompt, completions: tuple[Completion, ...]) -> Pending:
        """Decodes the responses, and submits them where this process judges the prompt."""
        completions = with_texts(completions, self._decode_all)
        if prompt.index % processes.count() != processes.index():
            return Pending(prompt, completions, [])
        return Pending(prompt, completions, self._pool.submit_group(prompt, completions))

    def groups(self, pending: list[Pending]) -> list[Group]:
        """Rewarded groups, in the order of `pending`, on every process. Raises `Interrupted`."""
        scores = self._model_scores(pending)
        judged = zip(pending, self._verdicts(pending), scores, strict=True)
        return [
            reward_group(self._config, group.prompt, group.completions, verdicts, model_scores)
            for group, verdicts, model_scores in judged
        ]

    def _verdicts(self, pending: list[Pending]) -> list[tuple[Verdict, ...]]:
        if processes.count() == 1:
            return [self._wait(group.verdicts) for group in pending]

        def judge(i: int) -> list[dict] | None:
            try:
                return [dataclasses.asdict(verdict) for verdict in self._wait(pending[i].verdicts)]
            except Interrupted:  # on all processes, once all have been told
                return None

        groups = processes.map_over_hosts(
            [group.prompt.index for group in pending], judge, "verdicts"
        )
        if None in groups:
            raise Interrupted
        return [tuple(Verdict(**fields) for fields in group) for group in groups]

    def _wait(self, verdicts: list[Future[Verdict]]) -> tuple[Verdict, ...]:
        while futures.wait(verdicts, POLL_SECONDS).not_done:
            if self._given_up():
                raise Interrupted
        return tuple(future.result() for future in verdicts)

    def _model_scores(self, pending: list[Pending]) -> Sequence[np.ndarray | None]:
        if self._model is None or not pending:
            return [None] * len(pending)
        return self._model.score([(group.prompt, group.completions) for group in pending])

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()

"""From finished responses to rewarded groups: workers, the reward model, and the sum of parts."""

from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from dapo_jax.experiment.config import Config
from dapo_jax.rewards.model import RewardModel
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.rule import reward_group
from dapo_jax.structs import Completion, Group, Prompt, Verdict


class Pending(NamedTuple):
    """A finished group whose verdicts are under way."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    verdicts: list[Future[Verdict]]


class Judge:
    """Judging overlaps decoding: `submit` returns at once, `groups` waits."""

    def __init__(self, config: Config, pool: RewardPool, model: RewardModel | None = None):
        self._config, self._pool, self._model = config, pool, model

    def submit(self, prompt: Prompt, completions: tuple[Completion, ...]) -> Pending:
        """Hands the responses to the workers."""
        verdicts = [
            self._pool.submit(prompt.text, c.text, prompt.answer, prompt.source, prompt.metadata)
            for c in completions
        ]
        return Pending(prompt, completions, verdicts)

    def groups(self, pending: list[Pending]) -> list[Group]:
        """The rewarded groups, in the order given."""
        scores = self._model_scores(pending)
        return [
            reward_group(
                self._config,
                one.prompt,
                one.completions,
                tuple(future.result() for future in one.verdicts),
                own,
            )
            for one, own in zip(pending, scores, strict=True)
        ]

    def _model_scores(self, pending: list[Pending]) -> list[np.ndarray | None]:
        if self._model is None or not pending:
            return [None] * len(pending)
        scores = self._model.score([(p.prompt, done) for p in pending for done in p.completions])
        ends = np.cumsum([len(p.completions) for p in pending])
        return np.split(scores, ends[:-1])

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()

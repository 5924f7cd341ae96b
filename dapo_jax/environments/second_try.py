"""Ready environment: a second try after a wrong answer."""

import functools
from typing import Any

from dapo_jax.config.sections import Reward
from dapo_jax.environments.interface import Observation, Problem
from dapo_jax.rewards.pool import RewardPool


@functools.cache
def _pool(**reward: Any) -> RewardPool:
    return RewardPool(Reward(**reward))


class SecondTry:
    """A wrong answer is told, and may be corrected; rewards judge the last turn.

    Args:
        reward: settings of the section by which answers are right.
    """

    FEEDBACK = "That is not right. Try again, and end with the answer in the same form."

    def __init__(self, verifier: str = "math", **reward: str):
        self._pool = _pool(verifier=verifier, **reward)

    def reset(self, problem: Problem) -> None:
        """Makes the problem's own scorer ready, where it has one: that can take seconds."""
        self._problem = problem
        self._is_right("")

    def step(self, text: str) -> Observation:
        """Feedback on a wrong answer; a right one ends the trajectory."""
        if self._is_right(text):
            return Observation(reward=1.0, done=True)
        return Observation(self.FEEDBACK)

    def _is_right(self, text: str) -> bool:
        problem = self._problem
        place = problem.answer, problem.source, problem.metadata
        return self._pool.submit(problem.text, text, *place).result().correct

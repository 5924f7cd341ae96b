"""Ready environments: a calculator, a guessing game, a second try after a wrong answer."""

import functools
import re
import zlib
from typing import Any

from dapo_jax.config.sections import Reward
from dapo_jax.environments.interface import Observation
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.structs import Problem

NUMBER = re.compile(r"\d+")
CALL = re.compile(r"\s*(\d{1,9}(?:\+\d{1,9}){1,7})=?\s*")
SECRETS = 10


class Calculator:
    """Calculator for sums: a turn that is nothing but a sum is answered with its value.

    Any other turn is the answer, and ends the trajectory.
    """

    def step(self, text: str) -> Observation:
        """The value of a sum such as `47+85=`."""
        call = CALL.fullmatch(text)
        if not call:
            return Observation(done=True)
        return Observation(str(sum(map(int, call[1].split("+")))))


class Guessing:
    """Game: find a number below 10, told after each guess whether it is larger or smaller.

    The number is drawn by the problem, so that all responses to a prompt look for the same one.
    A guess is the last number of a turn. The reward is 1 for the number found, and less by 0.2 for
    every guess before it.
    """

    PROMPT, LARGER, SMALLER = "=", "+=", ",="

    def __init__(self):
        self._guesses = 0

    def reset(self, problem: Problem) -> str:
        """Prompt, the same one for every number."""
        self._secret = zlib.crc32(problem.text.encode()) % SECRETS
        return self.PROMPT

    def step(self, text: str) -> Observation:
        """`+=` where the number is larger than the guess, `,=` where it is smaller."""
        numbers = NUMBER.findall(text)
        guess, self._guesses = int(numbers[-1][-9:]) if numbers else -1, self._guesses + 1
        if guess == self._secret:
            return Observation(reward=max(0.0, 1 - 0.2 * (self._guesses - 1)), done=True)
        return Observation(self.LARGER if guess < self._secret else self.SMALLER)


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

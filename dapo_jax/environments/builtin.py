"""Built-in environments: a calculator, a guessing game, and a second try after a wrong answer."""

import functools
import hashlib
import re
from typing import TYPE_CHECKING, Any

from dapo_jax.config.experiment import Reward
from dapo_jax.types.structs import Observation, Problem

if TYPE_CHECKING:
    from dapo_jax.rewards.pool import RewardPool

NUMBER = re.compile(r"\d+")
SUM = re.compile(r"\s*(\d{1,9}(?:\+\d{1,9}){1,7})=?\s*")
PAIR = re.compile(r"\s*(\d{1,9})([-*/])(\d{1,9})=?\s*")
SECRETS = 10
MAX_TRIES = 2  # answers of `second_try`


class Calculator:
    """Calculator for sums such as `47+85=`, and `-`, `*` and `/` of two numbers.

    Any other turn ends the trajectory, as a division with a remainder does.
    """

    def reset(self, problem: Problem) -> None:
        """Keep the problem's own prompt."""

    def step(self, text: str) -> Observation:
        """Return the value of a turn that is nothing but a calculation."""
        if match := SUM.fullmatch(text):
            return Observation(str(sum(map(int, match[1].split("+")))))
        if match := PAIR.fullmatch(text):
            left, right = int(match[1]), int(match[3])
            if match[2] == "/":
                if right and left % right == 0:
                    return Observation(str(left // right))
            else:
                return Observation(str(left - right if match[2] == "-" else left * right))
        return Observation(done=True)


class Guessing:
    """Game: find a number below 10 from replies that say whether it is larger or smaller.

    The problem determines the number, so all responses to a prompt search for the same one. A
    guess is the last number of a turn. The reward is 1, less 0.2 for every wrong guess.
    """

    PROMPT = "="
    LARGER = "+="
    SMALLER = ",="

    def __init__(self):
        self._guesses = 0

    def reset(self, problem: Problem) -> str:
        """Return the prompt, the same for every number."""
        # Not the CRC: its multiples of 8 are held out, so held-out numbers would all be even.
        self._secret = int(hashlib.sha256(problem.text.encode()).hexdigest(), 16) % SECRETS
        return self.PROMPT

    def step(self, text: str) -> Observation:
        """Return `+=` if the number is larger than the guess, `,=` if it is smaller."""
        numbers = NUMBER.findall(text)
        guess = int(numbers[-1][-9:]) if numbers else -1
        self._guesses += 1
        if guess == self._secret:
            return Observation(reward=max(0.0, 1 - 0.2 * (self._guesses - 1)), done=True)
        return Observation(self.LARGER if guess < self._secret else self.SMALLER)


@functools.cache
def _pool(**reward: Any) -> "RewardPool":
    from dapo_jax.rewards.pool import RewardPool  # only workers of `second_try` import verifiers

    return RewardPool(Reward(**reward))


class SecondTry:
    """Environment that reports a wrong first answer, so that the next turn can correct it.

    Args:
        reward: settings of the section `reward` that decide which answers are correct.
    """

    FEEDBACK = "That is not right. Try again, and end with the answer in the same form."

    def __init__(self, verifier: str = "math", **reward: str):
        self._pool = _pool(verifier=verifier, **reward)

    def reset(self, problem: Problem) -> None:
        """Load the problem's own scorer, if it has one; that can take seconds."""
        self._problem = problem
        self._tries = 0
        self._is_correct("")

    def step(self, text: str) -> Observation:
        """Return feedback on a wrong first answer; a correct or second one ends the trajectory."""
        self._tries += 1
        if self._is_correct(text):
            return Observation(reward=1.0, done=True)
        if self._tries == MAX_TRIES:
            return Observation(done=True)
        return Observation(self.FEEDBACK)

    def _is_correct(self, text: str) -> bool:
        problem = self._problem
        verdict = self._pool.submit(
            problem.text, text, problem.answer, problem.source, problem.metadata
        )
        result = verdict.result()
        if result.failure:
            raise RuntimeError(result.failure.text)
        return result.correct

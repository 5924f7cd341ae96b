"""Ready environments: a calculator and a guessing game."""

import hashlib
import re

from dapo_jax.environments.interface import Observation, Problem

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
        # Not by the CRC: whose multiples of 8 hold a problem out, which would all be even here.
        self._secret = int(hashlib.sha256(problem.text.encode()).hexdigest(), 16) % SECRETS
        return self.PROMPT

    def step(self, text: str) -> Observation:
        """`+=` where the number is larger than the guess, `,=` where it is smaller."""
        numbers = NUMBER.findall(text)
        guess, self._guesses = int(numbers[-1][-9:]) if numbers else -1, self._guesses + 1
        if guess == self._secret:
            return Observation(reward=max(0.0, 1 - 0.2 * (self._guesses - 1)), done=True)
        return Observation(self.LARGER if guess < self._secret else self.SMALLER)

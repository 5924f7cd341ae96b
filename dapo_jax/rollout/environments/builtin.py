"""Built-in environments: a calculator and a guessing game."""

import hashlib
import re

from dapo_jax.types.structs import Observation, Problem

NUMBER = re.compile(r"\d+")
SUM = re.compile(r"\s*(\d{1,9}(?:\+\d{1,9}){1,7})=?\s*")
PAIR = re.compile(r"\s*(\d{1,9})([-*/])(\d{1,9})=?\s*")
SECRETS = 10


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

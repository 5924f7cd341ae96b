"""Environment `second_try`: a second answer after a wrong one."""

import functools
import json
from collections.abc import Callable

from dapo_jax.config.experiment import Reward
from dapo_jax.config.settings import open_extras
from dapo_jax.rewards.functions import ResponseCall
from dapo_jax.rewards.verifying import open_verifier, open_workers, verify_and_score
from dapo_jax.types.structs import Observation, Problem

MAX_TRIES = 2


@functools.cache
def _open(verifier: str, extras: str) -> Callable:
    verifying = open_verifier(Reward(verifier=verifier), open_extras(json.loads(extras)))
    return functools.partial(verify_and_score, verifying, open_workers(verifying))


class SecondTry:
    """Environment that reports a wrong first answer, so that the next turn can correct it.

    Args:
        verifier: `reward.verifier`, which decides which answers are correct.
        extras: JSON of the changed settings of extras, by dotted name.
    """

    FEEDBACK = "That is not right. Try again, and end with the answer in the same form."

    def __init__(self, verifier: str = "math", extras: str = "{}"):
        self._verify = _open(verifier, extras)

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
        call = ResponseCall(self._problem.text, text, self._problem.answer)
        (verdict,) = self._verify([(self._problem, call)])
        if verdict.failure:
            raise RuntimeError(verdict.failure.text)
        return verdict.correct

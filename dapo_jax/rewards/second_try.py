"""Environment `second_try`: a second answer after a wrong one."""

import functools
import json

import numpy as np

from dapo_jax.config.experiment import Reward
from dapo_jax.config.settings import open_extras
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.types.structs import Completion, Observation, Problem, Prompt

NO_TOKENS = np.empty(0, np.int32)
MAX_TRIES = 2


@functools.cache
def _pool(verifier: str, extras: str) -> RewardPool:
    return RewardPool(Reward(verifier=verifier), extras=open_extras(json.loads(extras)))


class SecondTry:
    """Environment that reports a wrong first answer, so that the next turn can correct it.

    Args:
        verifier: `reward.verifier`, which decides which answers are correct.
        extras: JSON of the changed settings of extras, by dotted name.
    """

    FEEDBACK = "That is not right. Try again, and end with the answer in the same form."

    def __init__(self, verifier: str = "math", extras: str = "{}"):
        self._pool = _pool(verifier, extras)

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
        own = self._problem
        named = own.text, NO_TOKENS, own.answer, own.source
        prompt = Prompt(0, own.id, *named, metadata=own.metadata)
        response = Completion(NO_TOKENS, NO_TOKENS, False, 0, text)
        (verdict,) = self._pool.submit_group(prompt, [response]).result()
        if verdict.failure:
            raise RuntimeError(verdict.failure.text)
        return verdict.correct

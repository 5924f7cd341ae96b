"""Environment of `turns.py`, a separate module because its workers should not import JAX."""

import os
import time

from dapo_jax import Observation

TURNS, SECONDS = 3, "TALK_SECONDS"


class Talk:
    """Environment that replies with another problem after a fixed time."""

    def reset(self, problem):
        self._turns = 0

    def step(self, text: str) -> Observation:
        self._turns += 1
        time.sleep(float(os.environ[SECONDS]))
        return Observation("12+7+25=", done=self._turns == TURNS)

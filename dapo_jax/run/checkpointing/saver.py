"""Checkpoint schedule with retries."""

import time
from collections.abc import Callable

from dapo_jax.run.checkpointing.checkpoints import Checkpoints
from dapo_jax.runtime.storage.retries import NotSaved, Storage, reason

TRIES = 3  # of a save, a step apart
LAST_PAUSES = (0, 5, 20)  # seconds before each try of the last one
WAIT_SECONDS = 60.0  # for slow storage, before a save that is due is left out
WHAT = "the checkpoint"


class CheckpointSaver:
    """Saver of checkpoints while training goes on. Every process calls every method.

    Args:
        storage: warns of failed saves.
    """

    def __init__(self, checkpoints: Checkpoints, storage: Storage):
        self._checkpoints, self._storage = checkpoints, storage
        self._failures, self._pending = 0, False  # in a row; whether one is being written

    def step(self, due: bool, save: Callable[[], None]) -> None:
        """Saves after a step, where that is due or has just failed."""
        try:
            if self._pending:
                if not self._checkpoints.done(WAIT_SECONDS if due else 0):
                    if due:
                        text = f"the one before it takes more than {WAIT_SECONDS:.0f} s"
                        self._storage.failed(WHAT, text)
                    return
                self._pending, self._failures = False, 0
                self._storage.works(WHAT)
        except NotSaved as error:
            self._failed(error)
        if due or 0 < self._failures < TRIES:
            try:
                save()
                self._pending = True
            except NotSaved as error:
                self._failed(error)

    def _failed(self, error: NotSaved) -> None:
        self._pending, self._failures = False, self._failures + 1
        self._storage.failed(WHAT, reason(error))

    def last(self, save: Callable[[], None]) -> None:
        """Saves, and returns when that is on disk. Raises `NotSaved` after a few tries."""
        for number, pause in enumerate(LAST_PAUSES, 1):
            time.sleep(pause)
            try:
                save()
                return self._checkpoints.wait()
            except NotSaved:
                if number == len(LAST_PAUSES):
                    raise

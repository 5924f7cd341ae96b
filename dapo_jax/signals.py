"""Leaving when asked to: SIGTERM and Ctrl-C are remembered, and acted on at a safe place."""

import signal
import threading
from typing import Any

from dapo_jax import processes


class Signals:
    """Remembers the first SIGTERM or Ctrl-C, so that work is saved before the process leaves.

    A second one acts as it always does. Call it to ask; use it as a context manager.
    """

    def __init__(self):
        self.received = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            return self  # Python delivers signals to the main thread only
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: Any) -> None:
        self.received = signal.Signals(number).name
        self.__exit__()

    def __call__(self) -> bool:
        """Whether any process received one; all of them ask at the same place of the schedule."""
        heard = processes.agree(self.received, "signals")
        self.received = self.received or next(filter(None, heard), "")
        return any(heard)

"""SIGTERM and Ctrl-C: recorded, and acted on at a safe place."""

import os
import signal
import socket
import sys
import threading
import time
from typing import Any

from dapo_jax.runtime import processes

SAME_SECONDS = 1.0  # within which a terminal and a launcher may both send the same signal
SHOW_CURSOR = b"\x1b[?25h"  # which a live line hides


class Signals:
    """Recorder of the first SIGTERM or Ctrl-C, so that work is saved before the process leaves.

    A thread prints a line at once, whatever the main thread is computing. A second signal ends the
    process at once, with nothing saved beyond what is on disk; in a program that calls the library
    it acts as Python's default does. Used as a context manager; a call asks all processes.

    Args:
        leave_seconds: until a command gives up what it is computing and leaves as after a second
            signal, unless `at_safe_place` was called meanwhile; 0: never.

    Attributes:
        received: name of the signal; empty before one came.
    """

    def __init__(self, leave_seconds: float = 0.0):
        self.received, self._handled, self._seconds = "", False, leave_seconds
        self._before: dict[int, Any] = {}
        self._safe = threading.Event()

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            return self  # Python delivers signals to the main thread only
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._remember)
        # C code hands the number over also where the main thread is in no state to run a handler.
        self._before_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True, name="signals").start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._safe.set()
        if self._before:
            signal.set_wakeup_fd(self._before_fd)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before = {}
            self._writer.close()

    def _remember(self, number: int, _: Any) -> None:
        if self._handled and not processes.is_command():
            self.__exit__()
            signal.raise_signal(number)
        self._handled = True
        self.received = self.received or signal.Signals(number).name

    def _listen(self) -> None:
        first = 0.0
        with self._reader:
            while byte := self._reader.recv(1):
                if byte[0] not in self._before:
                    continue
                if not first:
                    first = time.monotonic()
                    self._answer(byte[0])
                elif processes.is_command() and time.monotonic() - first > SAME_SECONDS:
                    name = signal.Signals(byte[0]).name
                    _leave(byte[0], f"{name} once more: leaving at once")

    def _answer(self, number: int) -> None:
        self.received = self.received or signal.Signals(number).name
        soon = f" within {self._seconds:g} s" * bool(self._seconds and processes.is_command())
        processes.complain(f"{self.received}: leaving at the next safe place{soon}")
        if soon:
            threading.Thread(target=self._count_down, args=(number,), daemon=True).start()

    def _count_down(self, number: int) -> None:
        if not self._safe.wait(self._seconds):
            _leave(number, f"no safe place within {self._seconds:g} s: what was computed is lost")

    def here(self) -> bool:
        """True if this process received a signal; others may not know."""
        return self.received != ""

    def at_safe_place(self) -> None:
        """Cancels the forced exit: a save follows."""
        self._safe.set()

    def __call__(self) -> bool:
        """True if any process received a signal. Every process calls it at the same place."""
        heard = processes.agree(self.received, "signals")
        self.received = self.received or next(filter(None, heard), "")
        return any(heard)


def _leave(number: int, text: str) -> None:
    processes.complain(text)
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), SHOW_CURSOR)
    processes.leave(128 + number)

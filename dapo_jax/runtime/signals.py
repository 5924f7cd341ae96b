"""Signals that ask to leave (SIGTERM, Ctrl-C, ...): recorded, and acted on at a safe place."""

import _thread
import signal
import socket
import sys
import threading
import time
from typing import Any

from dapo_jax.runtime import processes

# Beside SIGTERM and Ctrl-C: a dropped connection, a scheduler's warning, the terminal's quit key.
# They count unless somebody decided on them before, as `nohup` does.
MORE_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)
SAME_SECONDS = 1.0  # within which a terminal and a launcher may both ask


class Signals:
    """Recorder of the first signal, so that work is saved before the process leaves.

    A thread prints a line at once, whatever the main thread is computing. A second signal ends the
    process at once, with nothing saved beyond what is on disk. Used as a context manager; a call
    asks all processes.

    In a program that calls the library the end of the block passes the signal on, so that Ctrl-C
    is a KeyboardInterrupt after the save. A second one is passed on at once, and ends the process
    where Python can't take it within `SAME_SECONDS`; an interactive session stays.

    Args:
        leave_seconds: until a command gives up what it is computing and leaves as after a second
            signal, unless `at_safe_place` was called meanwhile; 0: never.

    Attributes:
        received: name of the signal; empty before one came.
    """

    def __init__(self, leave_seconds: float = 0.0):
        self.received, self._again, self._seconds = "", False, leave_seconds
        self._before: dict[int, Any] = {}
        self._safe, self._closed = threading.Event(), threading.Event()

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            return self  # Python delivers signals to the main thread only
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        more = (number for number in MORE_SIGNALS if signal.getsignal(number) is signal.SIG_DFL)
        for number in (signal.SIGTERM, signal.SIGINT, *more):
            self._before[number] = signal.signal(number, self._remember)
        # C code hands the number over also where the main thread is in no state to run a handler.
        self._before_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True, name="signals").start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        caught = self._before and self.received in signal.Signals.__members__
        self._close()
        if caught and error is None and not processes.is_command():
            signal.raise_signal(signal.Signals[self.received])  # now that the work is saved

    def _close(self) -> None:
        self._safe.set()
        self._closed.set()
        if self._before:
            signal.set_wakeup_fd(self._before_fd)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before = {}
            self._writer.close()

    def _remember(self, number: int, _: Any) -> None:
        self.received = self.received or signal.Signals(number).name
        if self._again:
            self._close()
            signal.raise_signal(number)

    def _listen(self) -> None:
        first = 0.0
        with self._reader:
            while byte := self._reader.recv(1):
                if byte[0] not in self._before or self._again:
                    continue
                if not first:
                    first = time.monotonic()
                    self._answer(byte[0])
                elif time.monotonic() - first > SAME_SECONDS:
                    self._leave_now(byte[0])

    def _leave_now(self, number: int) -> None:
        """Ends the process; a program that calls the library may first do so itself."""
        self._again = not processes.is_command()
        if self._again:
            # `_remember` comes once the main thread runs Python.
            _thread.interrupt_main(signal.Signals(number))
            if hasattr(sys, "ps1") or self._closed.wait(SAME_SECONDS):
                return
        _leave(number, f"{signal.Signals(number).name} once more: leaving at once")

    def _answer(self, number: int) -> None:
        self.received = self.received or signal.Signals(number).name
        soon = f" within {self._seconds:g} s" * bool(self._seconds and processes.is_command())
        processes.print_error(f"{self.received}: leaving at the next safe place{soon}")
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
        heard = processes.all_gather_json(self.received, "signals")
        self.received = self.received or next(filter(None, heard), "")
        return any(heard)


def _leave(number: int, text: str) -> None:
    processes.print_error(text)
    processes.exit_all(128 + number)

"""Termination signals (SIGTERM, Ctrl-C, ...), handled at a safe point of the program."""

import _thread
import signal
import socket
import sys
import threading
import time
from typing import Any

from dapo_jax.runtime import processes, signal_handlers

# Hang-up, a scheduler's warning, the terminal's quit key. Handled unless the program or `nohup` has
# set them before.
MORE_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)
SAME_SECONDS = 1.0  # a terminal and a launcher may both send the first signal


class Signals:
    """A context manager that records the first signal, so that work is saved before the exit.

    A thread prints a line immediately, even if the main thread is busy. A second signal exits
    without saving. Calling the object asks whether any process received a signal.

    In a program that calls the library, leaving the context raises the signal again, so that Ctrl-C
    is a KeyboardInterrupt after the save. A second signal is raised immediately, and exits the
    process if Python does not handle it within `SAME_SECONDS`, except in interactive sessions.

    A command exits without saving after `leave_seconds` (0: never) unless `cancel_forced_exit` was
    called.
    """

    def __init__(self, leave_seconds: float = 0.0):
        self.received = ""  # name of the signal
        self._again = False
        self._leave_seconds = leave_seconds
        self._previous: dict[int, Any] = {}  # handlers by signal
        self._safe = threading.Event()
        self._closed = threading.Event()

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            return self  # Python delivers signals to the main thread only
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        more = (number for number in MORE_SIGNALS if signal.getsignal(number) is signal.SIG_DFL)
        for number in (signal.SIGTERM, signal.SIGINT, *more):
            self._previous[number] = signal_handlers.install(number, self._remember)
        # C code writes the number even if the main thread cannot run a handler.
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True, name="signals").start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        caught = self._previous and self.received in signal.Signals.__members__
        self._close()
        if caught and error is None and not processes.is_command():
            signal.raise_signal(signal.Signals[self.received])  # the work is saved now

    def _close(self) -> None:
        self._safe.set()
        self._closed.set()
        if self._previous:
            signal.set_wakeup_fd(self._previous_fd)
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            self._previous = {}
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
                if byte[0] not in self._previous or self._again:
                    continue
                if not first:
                    first = time.monotonic()
                    self._answer(byte[0])
                elif time.monotonic() - first > SAME_SECONDS:
                    self._leave_now(byte[0])

    def _leave_now(self, number: int) -> None:
        """Exit; a program that calls the library first gets the chance to do so itself."""
        self._again = not processes.is_command()
        if self._again:
            # The main thread calls `_remember` once it runs Python code.
            _thread.interrupt_main(signal.Signals(number))
            if hasattr(sys, "ps1") or self._closed.wait(SAME_SECONDS):
                return
        _leave(number, f"{signal.Signals(number).name} again: exiting without saving")

    def _answer(self, number: int) -> None:
        self.received = self.received or signal.Signals(number).name
        is_limited = self._leave_seconds > 0 and processes.is_command()
        soon = f" within {self._leave_seconds:g} s" * is_limited
        processes.print_error(f"{self.received}: stopping at the next safe point{soon}")
        if is_limited:
            seconds = self._leave_seconds

            def count_down() -> None:
                if not self._safe.wait(seconds):
                    _leave(number, f"no safe point within {seconds:g} s: exiting without saving")

            threading.Thread(target=count_down, daemon=True).start()

    @property
    def exit_code(self) -> int:
        """Exit code of a command, as shells report a signal: 128 + its number; 0 without one."""
        names = signal.Signals.__members__
        return processes.SIGNAL_CODE + names[self.received] if self.received in names else 0

    def received_locally(self) -> bool:
        """Return True if this process received a signal; others may not know."""
        return self.received != ""

    def cancel_forced_exit(self) -> None:
        """Cancel the forced exit, because a save follows."""
        self._safe.set()

    def __call__(self) -> bool:
        """Return True if any process received a signal; a collective call."""
        received = processes.all_gather_json(self.received, "signals")
        self.received = self.received or next(filter(None, received), "")
        return any(received)


def _leave(number: int, text: str) -> None:
    processes.print_error(text)
    processes.exit_process(processes.SIGNAL_CODE + number)

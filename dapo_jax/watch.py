"""Noticing that a process is gone: each says every second that it is there, and looks at the
others.

jax notices too, but late, with a stack trace, and without a name. A collective that waits for a
dead process never returns, so threads decide here, and leave by `os._exit`.
"""

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from typing import Any

import jax

DEAD = 75  # EX_TEMPFAIL of sysexits.h: start all of them again
SECONDS = 1.0  # between two signs of life
SILENCE_SECONDS = 15.0  # then a process counts as dead
LEAVING_SECONDS = 10.0  # for those that are about to leave for the same reason, in their own words
ALIVE, STOPPED = "dapo_jax/alive/", "dapo_jax/stopped/"


def _hold_aborts() -> None:
    """Lets C++ abort some seconds later than it would.

    Where process 0 dies, and with it the service, jax aborts every other process at once, before
    anyone could say who died. `sleep(6)` is the handler: SIGABRT is 6, and sleep is one of the few
    calls that a handler may make.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(int(signal.SIGABRT), ctypes.cast(libc.sleep, ctypes.c_void_p))


class Watch:
    """The signs of life of all processes, in the coordination service that jax runs anyway.

    Args:
        client: the service's, as `jax.distributed.initialize` made it.
        index, count: this process, and how many there are.
    """

    def __init__(self, client: Any, index: int, count: int):
        self._client, self._index, self._count = client, index, count
        self._me = f"{socket.gethostname()}, pid {os.getpid()}"
        self._names = dict.fromkeys(range(count), "")
        self._values = dict.fromkeys(range(count), "")
        self._seen = dict.fromkeys(range(count), time.monotonic())
        self._answered, self._failures = time.monotonic(), 0
        self._stopped: dict[int, tuple[int, str]] = {}
        self._stopped_since: float | None = None
        self._over = False
        _hold_aborts()
        # Two: the service may leave a question without an answer.
        for work in (self._beat, self._look):
            threading.Thread(target=work, daemon=True, name="watch").start()

    def close(self) -> None:
        """From now on the others may go."""
        self._over = True

    def leave(self, code: int) -> None:
        """Ends this process, with word to the others, which leave with the same code."""
        self._over = True
        self._go(code, f"process {self._index} stopped with exit code {code}")

    def _beat(self) -> None:
        number = 0
        while not self._over:
            number += 1
            try:
                key, value = f"{ALIVE}{self._index}", f"{number} {self._me}"
                self._client.key_value_set(key, value, allow_overwrite=True)
                self._read()
                self._answered, self._failures = time.monotonic(), 0
            except jax.errors.JaxRuntimeError:
                self._failures += 1
            time.sleep(SECONDS)

    def _read(self) -> None:
        now = time.monotonic()
        for key, value in self._client.key_value_dir_get(ALIVE):
            process = int(key.rpartition("/")[2])
            if value != self._values[process]:
                self._values[process], self._seen[process] = value, now
                self._names[process] = value.partition(" ")[2]
        for key, value in self._client.key_value_dir_get(STOPPED):
            code, _, text = value.partition(" ")
            self._stopped[int(key.rpartition("/")[2])] = int(code), text
        if self._stopped and self._stopped_since is None:
            self._stopped_since = now

    def _look(self) -> None:
        while not self._over:
            time.sleep(SECONDS / 4)
            code, text = self._verdict()
            if code and not self._over:
                os.write(2, f"error: {text}\n".encode())
                self._go(code, text)

    def _verdict(self) -> tuple[int, str]:
        """Why to leave, and with which code; 0 to stay."""
        now = time.monotonic()
        for code, text in self._stopped.values():
            if code == DEAD or now - self._stopped_since > LEAVING_SECONDS:
                return code, text
        late = [p for p, seen in self._seen.items() if now - seen > SILENCE_SECONDS]
        if self._failures > 1 or now - self._answered > SILENCE_SECONDS:
            late = [0]  # it runs the service
        if not late or late == [self._index]:
            return 0, ""
        process = min(set(late) - {self._index})
        return DEAD, (
            f"process {process} ({self._names[process] or 'never heard of'}) is dead or cut off, "
            f"process {self._index} stops. Start all {self._count} again to go on from the newest "
            "checkpoint"
        )

    def _go(self, code: int, text: str) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            key = f"{STOPPED}{self._index}"
            self._client.key_value_set(key, f"{code} {text}", allow_overwrite=True)
            if self._index == 0:  # the others still read it: the service ends with this process
                self._wait_for_others()
        os._exit(code)

    def _wait_for_others(self) -> None:
        until = time.monotonic() + LEAVING_SECONDS + 3 * SECONDS
        while time.monotonic() < until:
            self._read()
            silent = {p for p, at in self._seen.items() if time.monotonic() - at > SILENCE_SECONDS}
            if len(self._stopped.keys() | silent | {0}) == self._count:
                return
            time.sleep(SECONDS / 4)

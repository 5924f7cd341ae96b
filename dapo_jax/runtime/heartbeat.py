"""Heartbeat of the processes of a run: a dead one is named, and the others leave.

jax has a heartbeat too. It is kept as a second guard only: it acts after 100 s, aborts with a stack
trace, names a task's number instead of a host, and hands on no exit code. A collective that waits
for a dead process never returns, so threads decide here, and leave by `os._exit`.
"""

import contextlib
import ctypes
import math
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
LEAVING_SECONDS = 10.0  # for processes that are about to leave with a message of their own
ANSWER_SECONDS = 2.5  # that the service may take before its port is tried
ALIVE, STOPPED = "dapo_jax/alive/", "dapo_jax/stopped/"


def _hold_aborts() -> None:
    """Delays an abort of C++ code by six seconds.

    Where process 0 dies, and with it the service, jax aborts every other process at once, before
    anyone could say who died. The handler is libc's `sleep`, which a handler may call; its argument
    is the number of the signal, 6.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(int(signal.SIGABRT), ctypes.cast(libc.sleep, ctypes.c_void_p))


class Heartbeat:
    """Heartbeat of this process, and a watch over the others'.

    Beats are entries of the coordination service that jax runs anyway.

    Args:
        client, address: of the coordination service, which jax started on process 0.
        index, count: this process, and how many there are.
    """

    def __init__(self, client: Any, address: str, index: int, count: int):
        self._client, self._address, self._index, self._count = client, address, index, count
        self._host = f"{socket.gethostname()}, pid {os.getpid()}"
        self._names = dict.fromkeys(range(count), "")
        self._values = dict.fromkeys(range(count), "")
        self._seen = dict.fromkeys(range(count), time.monotonic())
        self._answered, self._failures = time.monotonic(), 0
        self._stopped: dict[int, tuple[int, str]] = {}
        self._stopped_since = math.inf
        self._over, self._served = False, True
        _hold_aborts()
        self._announced = threading.Event()
        # Two: the service may leave a question without an answer.
        for work in (self._beat, self._look):
            threading.Thread(target=work, daemon=True, name="heartbeat").start()

    def close(self) -> None:
        """Ends the watch: from now on the others may leave."""
        self._over = True

    def leave(self, code: int) -> None:
        """Ends this process, and the others with the same exit code."""
        self._over = True
        self._go(code, f"process {self._index} stopped with exit code {code}")

    def _beat(self) -> None:
        number = 0
        while not self._over:
            number += 1
            try:
                key, value = f"{ALIVE}{self._index}", f"{number} {self._host}"
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
        if self._stopped:
            self._stopped_since = min(self._stopped_since, now)

    def _look(self) -> None:
        while not self._over:
            time.sleep(SECONDS / 4)
            code, text = self._find_stopped() or self._find_dead()
            if code and not self._over:
                os.write(2, f"error: {text}\n".encode())
                self._go(code, text)

    def _find_stopped(self) -> tuple[int, str] | None:
        """Exit code and message of a process that left; None while none has."""
        for code, text in self._stopped.values():
            if code == DEAD or time.monotonic() - self._stopped_since > LEAVING_SECONDS:
                return code, text
        return None

    def _find_dead(self) -> tuple[int, str]:
        """Exit code and message for a process that is no longer heard; 0 where all are."""
        now = time.monotonic()
        late = [p for p, seen in self._seen.items() if now - seen > SILENCE_SECONDS]
        if self._failures > 1 or now - self._answered > SILENCE_SECONDS or self._is_refused(now):
            late, self._served = [0], self._index == 0  # it runs the service
        if not late or late == [self._index]:
            return 0, ""
        process = min(set(late) - {self._index})
        return DEAD, (
            f"process {process} ({self._names[process] or 'never heard of'}) is dead or cut off, "
            f"process {self._index} stops. Start all {self._count} again to go on from the newest "
            "checkpoint"
        )

    def _is_refused(self, now: float) -> bool:
        """True if process 0 refuses connections; a question to it would block until jax aborts."""
        if self._index == 0 or now - self._answered < ANSWER_SECONDS:
            return False
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False

    def _go(self, code: int, text: str) -> None:
        if self._served:  # otherwise nobody hears it, and the question may hang
            threading.Thread(target=self._announce, args=(f"{code} {text}",), daemon=True).start()
            self._announced.wait(LEAVING_SECONDS + 3 * SECONDS)
        os._exit(code)

    def _announce(self, text: str) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(f"{STOPPED}{self._index}", text, allow_overwrite=True)
            if self._index == 0:  # the others still read it: the service ends with this process
                self._wait_for_others()
        self._announced.set()

    def _wait_for_others(self) -> None:
        silent: set[int] = set()
        while len(self._stopped.keys() | silent | {0}) < self._count:
            time.sleep(SECONDS / 4)
            self._read()
            now = time.monotonic()
            silent = {p for p, seen in self._seen.items() if now - seen > SILENCE_SECONDS}

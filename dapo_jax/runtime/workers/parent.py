"""Parent side of a worker process: JSON lines with deadlines; a late worker is killed."""

import atexit
import contextlib
import functools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

START_SECONDS = 60.0  # for an interpreter to start on a busy machine
MAX_SECONDS = 1e6  # of a socket's time limit, which cannot be infinite
MAX_REPLY_BYTES = 1 << 26  # rewards of each token of 64 responses; a longer reply is broken
# Longer limits of a second attempt, relative to the first.
LATE_FACTOR = 4
BUSY_FACTOR = 12  # with a limit of CPU time, which ends a job that computes, also on a busy machine


class Limits(NamedTuple):
    """Time limits of a job, in seconds, without the start of a process.

    seconds: of the first attempt.
    late_seconds: of a second attempt, in a new process, if the first was late; 0: there is none.
    computing: CPU time of an attempt; 0: no limit. A job that exceeded it is never repeated.
    """

    seconds: float
    late_seconds: float = 0.0
    computing: float = 0.0


class WorkerProcess:
    """Process `python -m MODULE ARGUMENTS` that runs `child.serve`.

    It imports modules from the same paths as this process.
    """

    def __init__(self, module: str, *arguments: str):
        self._prepared: set[str] = set()
        # A socket has time limits of its own, which cost less than a thread that watches a pipe.
        self._channel, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=other.fileno(),
                stdout=other.fileno(),
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
            )
        try:
            self._exchange(b"", time.monotonic() + START_SECONDS)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def ask(self, job: dict, deadline: float, computing: float = 0.0) -> dict:
        """Return the reply to a job, by `deadline` of time.monotonic().

        Args:
            computing: limit of CPU time in seconds; 0: none.

        Raises:
            TimeoutError, OSError, ValueError: the process is unusable afterwards.
        """
        # Code that runs in the worker can write lines too, but does not know the ids.
        identity = secrets.token_hex(8)
        request = {"id": identity, "computing": computing, "job": job}
        lines = self._exchange(json.dumps(request).encode() + b"\n", deadline).splitlines()
        reply = json.loads(lines[0])
        if len(lines) > 1 or not isinstance(reply, dict) or reply.get("id") != identity:
            raise ValueError("the worker wrote a line that is no reply to the request")
        return reply["reply"]

    def prepare(self, job: dict) -> None:
        """Run a job once that later jobs depend on; their time limits do not include it."""
        name = json.dumps(job)
        if name not in self._prepared:
            self.ask(job, time.monotonic() + START_SECONDS)
            self._prepared.add(name)

    def _exchange(self, message: bytes, deadline: float) -> bytes:
        def transfer(function: Callable[[Any], Any], argument: Any) -> Any:
            seconds = deadline - time.monotonic()
            if seconds <= 0:  # also of a process that never stops writing
                raise TimeoutError
            self._channel.settimeout(min(seconds, MAX_SECONDS))
            return function(argument)

        reply = bytearray()
        try:
            transfer(self._channel.sendall, message)
            while not reply.endswith(b"\n") and (part := transfer(self._channel.recv, 1 << 16)):
                reply += part
                if len(reply) > MAX_REPLY_BYTES:
                    raise ValueError(f"the reply has over {MAX_REPLY_BYTES} bytes")
        except TimeoutError:
            raise TimeoutError("no answer in time") from None
        except OSError:
            reply.clear()
        # Not in the block above: no lost connection is the error's context.
        if not reply.endswith(b"\n"):
            raise OSError("the worker died")
        return bytes(reply)

    def stop(self) -> None:
        """Kill the process and its forked children; a thread that waits for a reply gets none."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def kill(self) -> int:
        """Stop the process, and return its exit code; no other thread may use it."""
        self.stop()
        self._channel.close()
        return self._process.wait()


class ComputedTooLong(TimeoutError):
    """A job used up the CPU time of its process."""


class RestartingWorker:
    """Worker process that starts with the first job and is replaced after a failure.

    It is safe to share between threads. A forked child starts a process of its own.
    """

    def __init__(self, module: str, *arguments: str):
        self._start = functools.partial(WorkerProcess, module, *arguments)
        self._closed = False
        self.kills = 0  # failed processes
        self.start_seconds = 0.0  # spent on starting processes
        self.forget()
        _workers.add(self)

    def ask(self, job: dict, limits: Limits, first: dict | None = None) -> dict:
        """Return the reply to a job; repeat it once in a new process if the process fails.

        Args:
            first: job that a process runs once before others; its time does not count as theirs.

        Raises:
            TimeoutError: the reply is late, or the process used up its CPU time.
            OSError, ValueError: the process died, or its reply can't be read.
        """
        with self._lock:
            try:
                return self._ask(job, limits.seconds, limits.computing, first)
            except (OSError, ValueError) as error:
                is_late = isinstance(error, TimeoutError)
                if isinstance(error, ComputedTooLong) or is_late and not limits.late_seconds:
                    raise
                if self._closed and not is_late:
                    raise
            seconds = limits.late_seconds if is_late else limits.seconds
            return self._ask(job, seconds, limits.computing, first)

    def _ask(self, job: dict, seconds: float, computing: float, first: dict | None) -> dict:
        try:
            process = self._running()
            if first is not None:
                process.prepare(first)
            return process.ask(job, time.monotonic() + seconds, computing)
        except (OSError, ValueError):
            process = self._process
            self._process = None
            if process is not None:
                self.kills += 1
                if process.kill() == -signal.SIGPROF:
                    raise ComputedTooLong("the worker computed for too long") from None
            raise

    def _running(self) -> WorkerProcess:
        if self._process is None and not self._closed:
            began = time.monotonic()
            self._process = self._start()
            self.start_seconds += time.monotonic() - began
        if self._closed or self._process is None:  # closed before or during the start
            raise OSError("closed")
        return self._process

    def forget(self) -> None:
        """After a fork, drop the inherited worker without ending it: it belongs to the parent."""
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None

    def close(self) -> None:
        """End the process, even while another thread waits for its reply."""
        self._closed = True
        process = self._process
        if process is not None:
            process.stop()
            if self._lock.acquire(blocking=False):  # else the thread that asks clears up
                process.kill()
                self._lock.release()


_workers: weakref.WeakSet[RestartingWorker] = weakref.WeakSet()


def _close_all() -> None:
    for worker in list(_workers):
        worker.close()


def _forget_all() -> None:
    for worker in list(_workers):
        worker.forget()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)

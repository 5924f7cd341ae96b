"""Parent side of a worker process: JSON lines with deadlines; a late worker is killed."""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

LONGEST_WAIT_SECONDS = 3600.0  # a later deadline was never set
START_SECONDS = 60.0  # for an interpreter to come up on a busy machine
LONGEST_REPLY = 1 << 20  # bytes; a worker that writes on and on is broken


class WorkerProcess:
    """Process of `python -m MODULE ARGUMENTS`, which answers as `child.serve` does.

    Args:
        environment: variables; None: those of this process.
        longest_reply: bytes.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: dict[str, str] | None = None,
        longest_reply: int = LONGEST_REPLY,
    ):
        self._longest, self._prepared = longest_reply, set()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        os.set_blocking(self._to.fileno(), False)
        try:
            self._read_line(time.monotonic() + START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def ask(self, job: dict, deadline: float) -> dict:
        """Reply to a job, by `deadline` of time.monotonic().

        Raises TimeoutError, OSError or ValueError; the process is then of no more use.
        """
        message, pipe = json.dumps(job).encode() + b"\n", self._to.fileno()
        while message:
            self._wait([], [pipe], deadline)
            message = message[os.write(pipe, message[:65_536]) :]
        return json.loads(self._read_line(deadline))

    def prepare(self, job: dict) -> None:
        """Has a job done that others need first, once: its time is not theirs. Raises as `ask`."""
        name = json.dumps(job)
        if name not in self._prepared:
            self.ask(job, time.monotonic() + START_SECONDS)
            self._prepared.add(name)

    def _read_line(self, deadline: float) -> bytes:
        reply, pipe = b"", self._from.fileno()
        while not reply.endswith(b"\n"):
            self._wait([pipe], [], deadline)
            piece = os.read(pipe, 65_536)
            if not piece:
                raise OSError("the worker died")
            reply += piece
            if len(reply) > self._longest:
                raise ValueError("no reply is that long")
        return reply

    @staticmethod
    def _wait(readable: list[int], writable: list[int], deadline: float) -> None:
        waiting = select.poll()  # unlike select(), for any number of open files
        for pipe in readable:
            waiting.register(pipe, select.POLLIN)
        for pipe in writable:
            waiting.register(pipe, select.POLLOUT)
        seconds = min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT_SECONDS)
        if not waiting.poll(1000 * seconds):
            raise TimeoutError("no answer in time")

    def kill(self) -> int:
        """Kills the process and returns its exit code; one that had ended keeps its own.

        Processes that it has forked, which are of its group, are killed with it.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        code = self._process.wait()
        self._to.close()
        self._from.close()
        return code


class ComputedTooLong(TimeoutError):
    """End of a process that spent the computing time it may spend on a job."""


class RestartingWorker:
    """Worker process that the first job starts, and that a new one replaces where it fails.

    Threads ask in turn. A forked child starts a process of its own.

    Args:
        options: keyword arguments of `WorkerProcess`.

    Attributes:
        kills: processes that failed and were killed.
        start_seconds: time spent on starting processes.
    """

    def __init__(self, module: str, *arguments: str, **options: Any):
        self._start = functools.partial(WorkerProcess, module, *arguments, **options)
        self._closed, self.kills, self.start_seconds = False, 0, 0.0
        self.forget()
        _workers.add(self)

    def ask(
        self, job: dict, seconds: float, *, retry_late: bool = False, first: dict | None = None
    ) -> dict:
        """Reply to a job. It is tried again once, in a new process, where the first one fails.

        Args:
            seconds: limit of one try, without the start of a process.
            retry_late: whether the job is also tried again where the first process was late. One
                that spent its computing time would spend it again.
            first: job that a process does before others, once, and that does not count as theirs.

        Raises:
            TimeoutError: the reply is late, or the process spent the computing time it may spend.
            OSError, ValueError: the process died, or its reply can't be read.
        """
        with self._lock:
            try:
                return self._ask(job, seconds, first)
            except ComputedTooLong:
                raise
            except TimeoutError:
                if not retry_late:
                    raise
            except (OSError, ValueError):
                if self._closed:
                    raise
            return self._ask(job, seconds, first)

    def _ask(self, job: dict, seconds: float, first: dict | None) -> dict:
        try:
            process = self._running()
            if first is not None:
                process.prepare(first)
            return process.ask(job, time.monotonic() + seconds)
        except (OSError, ValueError):
            process, self._process = self._process, None
            if process is not None:
                self.kills += 1
                if process.kill() == -signal.SIGXCPU:
                    raise ComputedTooLong("the worker computed for too long") from None
            raise

    def _running(self) -> WorkerProcess:
        if self._process is None and not self._closed:
            began = time.monotonic()
            self._process = self._start()
            self.start_seconds += time.monotonic() - began
        if self._closed or self._process is None:  # also: closed while it was starting
            raise OSError("closed")
        return self._process

    def forget(self) -> None:
        """Leaves the process to the parent that this one was forked from."""
        self._lock, self._process = threading.Lock(), None

    def close(self) -> None:
        """Ends the process, also while another thread waits for its reply."""
        self._closed, process = True, self._process
        if process is not None:
            process.kill()


_workers: weakref.WeakSet[RestartingWorker] = weakref.WeakSet()


def _close_all() -> None:
    for worker in list(_workers):
        worker.close()


def _forget_all() -> None:
    for worker in list(_workers):
        worker.forget()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)

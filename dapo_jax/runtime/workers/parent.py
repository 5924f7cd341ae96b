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

MAX_WAIT_SECONDS = 3600.0  # bounds the argument of poll(), which is an int of milliseconds
START_SECONDS = 60.0  # for an interpreter to start on a busy machine
MAX_REPLY_BYTES = 1 << 20  # a worker that writes more is broken


class WorkerProcess:
    """Process `python -m MODULE ARGUMENTS` that runs `child.serve`.

    It imports modules from the same paths as this process.
    """

    def __init__(self, module: str, *arguments: str, max_reply_bytes: int = MAX_REPLY_BYTES):
        self._max_reply_bytes = max_reply_bytes
        self._prepared: set[str] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout
        self._to = self._process.stdin
        self._from = self._process.stdout
        os.set_blocking(self._to.fileno(), False)
        try:
            self._read_line(time.monotonic() + START_SECONDS)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def ask(self, job: dict, deadline: float) -> dict:
        """Return the reply to a job, by `deadline` of time.monotonic().

        Raises:
            TimeoutError, OSError, ValueError: the process is unusable afterwards.
        """
        message = json.dumps(job).encode() + b"\n"
        pipe = self._to.fileno()
        while message:
            self._wait(pipe, select.POLLOUT, deadline)
            message = message[os.write(pipe, message[:65_536]) :]
        return json.loads(self._read_line(deadline))

    def prepare(self, job: dict) -> None:
        """Run a job that others need first, once, without counting its time as theirs."""
        name = json.dumps(job)
        if name not in self._prepared:
            self.ask(job, time.monotonic() + START_SECONDS)
            self._prepared.add(name)

    def _read_line(self, deadline: float) -> bytes:
        reply = b""
        pipe = self._from.fileno()
        while not reply.endswith(b"\n"):
            self._wait(pipe, select.POLLIN, deadline)
            piece = os.read(pipe, 65_536)
            if not piece:
                raise OSError("the worker died")
            reply += piece
            if len(reply) > self._max_reply_bytes:
                raise ValueError(f"the reply has over {self._max_reply_bytes} bytes")
        return reply

    @staticmethod
    def _wait(pipe: int, event: int, deadline: float) -> None:
        poll = select.poll()  # unlike select(), it has no limit on file numbers
        poll.register(pipe, event)
        seconds = min(max(0.0, deadline - time.monotonic()), MAX_WAIT_SECONDS)
        if not poll.poll(1000 * seconds):
            raise TimeoutError("no answer in time")

    def kill(self) -> int:
        """Kill the process and its forked children, and return its exit code."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        code = self._process.wait()
        self._to.close()
        self._from.close()
        return code


class ComputedTooLong(TimeoutError):
    """A job used up the CPU time of its process."""


class RestartingWorker:
    """Worker process that starts with the first job and is replaced after a failure.

    It is safe to share between threads. A forked child starts a process of its own.

    Attributes:
        kills: number of failed processes that were killed.
        start_seconds: time spent on starting processes.
    """

    def __init__(self, module: str, *arguments: str, max_reply_bytes: int = MAX_REPLY_BYTES):
        self._start = functools.partial(
            WorkerProcess, module, *arguments, max_reply_bytes=max_reply_bytes
        )
        self._closed = False
        self.kills = 0
        self.start_seconds = 0.0
        self.forget()
        _workers.add(self)

    def ask(
        self, job: dict, seconds: float, *, retry_late: bool = False, first: dict | None = None
    ) -> dict:
        """Return the reply to a job; retry once in a new process if the process fails.

        Raises:
            TimeoutError: the reply is late, or the process used up its CPU time.
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
            process = self._process
            self._process = None
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
        if self._closed or self._process is None:  # closed before or during the start
            raise OSError("closed")
        return self._process

    def forget(self) -> None:
        """Leave the process to the parent that this process was forked from."""
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None

    def close(self) -> None:
        """End the process, even while another thread waits for its reply."""
        self._closed = True
        process = self._process
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

"""Child side of a worker process: one JSON line per job, one JSON line with its id per reply."""

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

from dapo_jax.runtime import signal_handlers

READY_LINE = b'{"ready": true}\n'
MAX_MEMORY_BYTES = 2 << 30  # address space; resident memory is far smaller
PARENT_CHECK_SECONDS = 1.0


def limit_process() -> None:
    """Limit memory and forbid writing files, since the process parses untrusted text."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_computing(seconds: float) -> None:
    """Limit further CPU time: after it SIGPROF kills the process; 0: no limit.

    CPU time, unlike wall time, does not depend on the load of the machine.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)


def discard_output() -> None:
    """Send everything that the process prints to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def exit_with_parent() -> None:
    """Exit soon after the parent dies, even if the worker is busy."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _take_channel() -> tuple[BinaryIO, BinaryIO]:
    """Return private copies of standard input and output, and disconnect those two.

    Programs that a job starts do not inherit the copies, and its forks close them.
    """
    channel = [os.dup(0), os.dup(1)]
    files = os.fdopen(channel[0], "rb"), os.fdopen(channel[1], "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)  # user code may print

    def close_in_fork() -> None:
        while channel:  # empty in forks of the fork, which may use these numbers for other files
            os.close(channel.pop())

    os.register_at_fork(after_in_child=close_in_fork)
    return files


def serve(make_answer: Callable[[], Callable[[dict], dict]]) -> None:
    """Answer requests until their pipe closes. A reply has the id of its request.

    Signals to the process group are ignored: the trainer handles them, and a worker that died of
    one would lose pending replies. Children of the worker are ended by them.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal_handlers.install(number, signal_handlers.ignore)
    requests, output = _take_channel()
    answer = make_answer()
    exit_with_parent()
    output.write(READY_LINE)
    output.flush()
    for line in requests:
        request = json.loads(line)
        limit_computing(request["computing"])
        reply = {"id": request["id"], "reply": answer(request["job"])}
        limit_computing(0)
        output.write(json.dumps(reply).encode() + b"\n")
        output.flush()

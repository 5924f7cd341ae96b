"""Child side of a worker process: one JSON line per job, one JSON line per reply."""

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable

READY_LINE = b'{"ready": true}\n'
MAX_MEMORY_BYTES = 2 << 30  # address space; resident memory is far smaller
PARENT_CHECK_SECONDS = 1.0


def limit_process() -> None:
    """Limit memory and forbid writing files, since the process parses untrusted text."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_computing(seconds: int) -> None:
    """Limit further CPU time; the kernel kills the process at the next whole second.

    CPU time, unlike wall time, does not depend on the load of the machine.
    """
    spent = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(spent.ru_utime + spent.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


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


def serve(make_answer: Callable[[], Callable[[dict], dict]]) -> None:
    """Answer the lines of standard input until it closes.

    Signals to the process group are ignored: the trainer handles them, and a worker that died of
    one would turn pending verdicts into wrong ones.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Replies use a copy of stdout: user code may print, which must not mix with them.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answer = make_answer()
    exit_with_parent()
    output.write(READY_LINE)
    output.flush()
    for line in sys.stdin.buffer:
        output.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        output.flush()

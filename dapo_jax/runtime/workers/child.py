"""The child's side of a worker process: one JSON line per job, one JSON line per reply."""

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable

READY = b'{"ready": true}\n'
MEMORY_BYTES = 2 << 30  # of addresses; what is resident stays far below
PARENT_CHECK_SECONDS = 1.0


def limit_process() -> None:
    """No large memory, no file: what text could make a parser do, it can't do here."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_computing(seconds: int) -> None:
    """Lets the process compute for so many more seconds; the kernel ends it at the next whole one.

    A machine that is busy with others does not count.
    """
    spent = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(spent.ru_utime + spent.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def exit_with_parent() -> None:
    """A worker that is busy when its trainer dies does not outlive it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def serve(make_answer: Callable[[], Callable[[dict], dict]]) -> None:
    """Answers standard input, line by line, until it closes.

    Args:
        make_answer: prepares the process and returns the function from a job to its reply.

    A signal to the whole process group is the trainer's to handle: a worker that died of it would
    turn the verdicts under way into wrong ones.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A reward function may print; the line to the trainer must stay clean.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answer = make_answer()
    exit_with_parent()
    output.write(READY)
    output.flush()
    for line in sys.stdin.buffer:
        output.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        output.flush()

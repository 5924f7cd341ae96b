"""User code of every kind that ends the programs and forks that it starts."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

from dapo_jax.types.structs import Observation

WAIT = "import time; print('busy', flush=True); time.sleep(60)"
ENDED = "[True, True, True, True, [1, 2]]"
LATE = 10.0


def wait(started):
    started.send(True)
    time.sleep(60)


def end_children() -> str:
    """Says whether each signal ended a program and a fork, and what a pool computed."""
    codes = []
    fork = multiprocessing.get_context("fork")
    for number in (signal.SIGTERM, signal.SIGINT):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        program = subprocess.Popen([sys.executable, "-c", WAIT], **options)
        assert program.stdout is not None and program.stdout.readline()
        program.send_signal(number)
        reader, writer = fork.Pipe()
        child = fork.Process(target=wait, args=(writer,))
        child.start()
        if number == signal.SIGINT:  # Python loses a KeyboardInterrupt while it forks
            reader.recv()
        os.kill(child.pid or 0, number)
        child.join(LATE)
        codes += [program.wait(LATE) == -number, child.exitcode in (-number, 1)]
        child.kill()
    with fork.Pool(2) as pool:
        codes.append(pool.map(abs, [-1, 2]))
    return str(codes)


def score(prompt, response, answer):
    return float(end_children() == ENDED)


def send(prompt, response, answer):
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    return 1.0


def tool() -> str:
    return end_children()


class Ending:
    def reset(self, problem): ...

    def step(self, text):
        return Observation(end_children())

"""A reward worker: reads one JSON line per job, answers with one JSON line.

python -m dapo_jax.rewards.worker algebra         equality of what a model wrote
python -m dapo_jax.rewards.worker parts NAMES     reward functions, the user's among them
python -m dapo_jax.rewards.worker gym             scorers of reasoning-gym
"""

import importlib
import json
import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable

READY = b'{"ready": true}\n'
MEMORY_BYTES = 2 << 30  # of addresses; what is resident stays far below
CACHED_JOBS = 1_000  # after so many, sympy's own caches are emptied
PARENT_CHECK_SECONDS = 1.0


def limit_process() -> None:
    """No large memory, no file: what text could make a parser do, it can't do here."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def exit_with_parent() -> None:
    """A worker that is busy when its trainer dies does not outlive it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def make_algebra() -> Callable[[dict], dict]:
    """The function that answers `{"question", "prediction", "answer"}` with `{"same"}`."""
    from sympy.core.cache import clear_cache

    from dapo_jax.verifier.judgement import WorkerAlgebra

    limit_process()
    algebra, jobs = WorkerAlgebra(), 0

    def answer(job: dict) -> dict:
        nonlocal jobs
        jobs += 1
        if jobs % CACHED_JOBS == 0:
            clear_cache()
        try:
            same = getattr(algebra, job["question"])(job["prediction"], job["answer"])
            return {"same": bool(same)}
        except Exception as error:  # not understood is not equal, whatever the reason
            return {"same": False, "failure": repr(error)[:200]}

    return answer


def make_parts(names: list[str]) -> Callable[[dict], dict]:
    """The function that answers `{"prompt", "response", "answer"}` with the parts' rewards."""
    from dapo_jax.rewards.functions import worker_parts

    parts = worker_parts(names)

    def answer(job: dict) -> dict:
        reply = {"parts": {}}
        for name, part in parts.items():
            try:
                value = float(part(**job))
                if not math.isfinite(value):
                    raise ValueError(f"returned {value}")
                reply["parts"][name] = value
            except Exception as error:
                reply.setdefault("broken", f"{name}: {error!r}")
        return reply

    return answer


def make_gym(output: int) -> Callable[[dict], dict]:
    """The function that answers `{"source", "metadata", "answer"}` with the task's own `{"score"}`.

    It works in a jail. Where none can be had, scorers that evaluate text are not asked.

    Args:
        output: the open file to the trainer. What a scorer prints goes nowhere.
    """
    from dapo_jax.data import gym, harmless
    from dapo_jax.rewards import jail

    limit_process()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    jailed, reason = True, ""
    try:
        jail.enter_jail(gym.package_folders(), keep=[output])
    except jail.NoJail as error:
        jailed, reason = False, str(error)
    try:
        importlib.import_module("reasoning_gym")  # now: it takes longer than a job may
    except ImportError:
        pass  # each job says so

    def answer(job: dict) -> dict:
        task = job["source"].removeprefix(gym.PREFIX)
        if task in harmless.EVALUATING and not jailed:
            return {"score": 0.0, "failure": f"gym:{task} takes a jail: {reason}"}
        try:
            return {"score": gym.gym_score(task, job["metadata"], job["answer"])}
        except Exception as error:  # some scorers raise where an answer is junk
            return {"score": 0.0, "failure": repr(error)[:200]}

    return answer


def main() -> None:
    """Serves standard input until it closes.

    A signal to the whole process group is the trainer's to handle: a worker that died of it would
    turn the verdicts under way into wrong ones.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A reward function may print; the line to the trainer must stay clean.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    kind, *names = sys.argv[1:]
    makers = {
        "algebra": make_algebra,
        "gym": lambda: make_gym(output.fileno()),
        "parts": lambda: make_parts(names),
    }
    answer = makers[kind]()
    exit_with_parent()
    output.write(READY)
    output.flush()
    for line in sys.stdin.buffer:
        output.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        output.flush()


if __name__ == "__main__":
    main()

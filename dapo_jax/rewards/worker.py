"""Worker process of rewards: one JSON line per job, one JSON line per reply.

python -m dapo_jax.rewards.worker parts NAMES     reward functions, the user's among them
python -m dapo_jax.rewards.worker gym             scorers of reasoning-gym
"""

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable

from dapo_jax.runtime.workers.child import limit_process, serve

NUMPY_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def make_parts(names: list[str]) -> Callable[[dict], dict]:
    """Function that answers `{"prompt", "response", "answer"}` with the parts' rewards."""
    from dapo_jax.rewards.functions import compute, own_parts

    return functools.partial(compute, own_parts(names))


def make_gym() -> Callable[[dict], dict]:
    """Function that answers `{"source", "metadata", "answer"}` with the task's own `{"score"}`.

    The process gets limits on memory and files. Lines that a scorer prints go nowhere.
    """
    # Threads of numpy's libraries would each reserve a part of the addresses.
    os.environ |= dict.fromkeys(NUMPY_THREADS, "1")
    from dapo_jax.rewards.gym import tasks

    limit_process()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    with contextlib.suppress(ImportError):  # each job says so
        importlib.import_module("reasoning_gym")  # now: it takes longer than a job may

    def answer(job: dict) -> dict:
        task = job["source"].removeprefix(tasks.PREFIX)
        try:
            return {"score": tasks.gym_score(task, job["metadata"], job["answer"])}
        except Exception as error:  # some scorers raise where an answer is junk
            return {"score": 0.0, "failure": repr(error)[:200]}

    return answer


def main() -> None:
    """Serves the kind of job that the command line names."""
    kind, *names = sys.argv[1:]
    serve(lambda: make_gym() if kind == "gym" else make_parts(names))


if __name__ == "__main__":
    main()

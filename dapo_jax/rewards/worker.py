"""Worker process of rewards: one JSON line per job, one JSON line per reply.

python -m dapo_jax.rewards.worker parts FILE SECONDS NAMES   reward functions, the user's too
python -m dapo_jax.rewards.worker gym                        scorers of reasoning-gym
"""

import contextlib
import importlib
import os
import pathlib
import sys
from collections.abc import Callable

from dapo_jax.runtime.workers.child import limit_computing, limit_process, serve

SECONDS = 2  # of computing, for one score; the kernel ends the process at the next whole one
NUMPY_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def make_parts(file: str, seconds: float, names: list[str]) -> Callable[[dict], dict]:
    """Function that answers `{"prompt", "response", "answer"}` with the parts' rewards.

    `{"prompt", "responses", ...}` asks the functions that see a group: `functions.compute`.
    It answers `{"jobs"}`, for functions that wait, with `{"replies"}`.

    Args:
        file: copies of functions that the program gave; empty: there are none.
        seconds: limit of a call that waits.
    """
    from dapo_jax.config.user_code import describe_error
    from dapo_jax.rewards.functions import compute, compute_together, own_parts
    from dapo_jax.rewards.pickled_functions import read_copies

    try:
        if file:
            read_copies(pathlib.Path(file))
        functions = own_parts(names)
    except Exception as error:  # a module that is found here, and not by the worker
        broken = {"parts": {}, "broken": f"{names[0]}: in a worker: {describe_error(error)}"}
        return lambda job: {"replies": [broken] * len(job["jobs"])} if "jobs" in job else broken

    def answer(job: dict) -> dict:
        if "jobs" in job:
            return {"replies": compute_together(functions, job["jobs"], seconds)}
        return compute(functions, job, seconds)

    return answer


def make_gym() -> Callable[[dict], dict]:
    """Function that answers `{"source", "metadata", "answer"}` with the task's own `{"score"}`.

    A job of a source alone makes its scorer ready, without a score.

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
        if "answer" not in job:
            tasks.prepare(task)
            return {}
        limit_computing(SECONDS)
        try:
            return {"score": tasks.gym_score(task, job["metadata"], job["answer"])}
        except Exception as error:  # some scorers raise where an answer is junk
            return {"score": 0.0, "failure": repr(error)[:200]}

    return answer


def main() -> None:
    """Serves the kind of job that the command line names."""
    kind, *rest = sys.argv[1:]
    serve(lambda: make_gym() if kind == "gym" else make_parts(rest[0], float(rest[1]), rest[2:]))


if __name__ == "__main__":
    main()

"""A reward worker: reads one JSON line per job, answers with one JSON line.

python -m dapo_jax.rewards.worker parts NAMES     reward functions, the user's among them
python -m dapo_jax.rewards.worker gym             scorers of reasoning-gym
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable

from dapo_jax.runtime.workers.child import limit_process, serve


def make_parts(names: list[str]) -> Callable[[dict], dict]:
    """The function that answers `{"prompt", "response", "answer"}` with the parts' rewards."""
    from dapo_jax.rewards.functions import compute, own_parts

    return functools.partial(compute, own_parts(names))


def make_gym(output: int) -> Callable[[dict], dict]:
    """The function that answers `{"source", "metadata", "answer"}` with the task's own `{"score"}`.

    It works in a jail. Where none can be had, scorers that evaluate text are not asked.

    Args:
        output: the open file to the trainer. What a scorer prints goes nowhere.
    """
    from dapo_jax.rewards.gym import answer_forms, tasks
    from dapo_jax.verifier import jail

    limit_process()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    jailed, reason = True, ""
    try:
        jail.enter_jail(tasks.package_folders(), keep=[output])
    except jail.NoJail as error:
        jailed, reason = False, str(error)
    try:
        importlib.import_module("reasoning_gym")  # now: it takes longer than a job may
    except ImportError:
        pass  # each job says so

    def answer(job: dict) -> dict:
        task = job["source"].removeprefix(tasks.PREFIX)
        if task in answer_forms.EVALUATING and not jailed:
            return {"score": 0.0, "failure": f"gym:{task} takes a jail: {reason}"}
        try:
            return {"score": tasks.gym_score(task, job["metadata"], job["answer"])}
        except Exception as error:  # some scorers raise where an answer is junk
            return {"score": 0.0, "failure": repr(error)[:200]}

    return answer


def main() -> None:
    """Serves what the command line names."""
    kind, *names = sys.argv[1:]
    serve({"gym": make_gym, "parts": lambda output: make_parts(names)}[kind])


if __name__ == "__main__":
    main()

"""Worker process of rewards.

python -m dapo_jax.rewards.worker parts FILE SECONDS JUDGE NAMES   reward functions, also the user's
python -m dapo_jax.rewards.worker gym                              scorers of reasoning-gym
"""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable

from dapo_jax.runtime.workers.child import discard_output, limit_process, serve

NUMPY_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def make_parts(file: str, seconds: str, judge: str, *names: str) -> Callable[[dict], dict]:
    """Return the function that answers `{"calls"}` with `{"replies"}` of the named parts.

    Args:
        file: `FunctionCopies.path`.
        seconds: limit of an async call.
        judge: JSON of the settings of the part `judge`.
    """
    from dapo_jax.config.experiment import ModelJudge
    from dapo_jax.config.user_code import describe_error
    from dapo_jax.rewards.functions import PartsReply, compute, find_functions, read_call
    from dapo_jax.runtime.workers.pickled_functions import load_copies
    from dapo_jax.structs import Failure, Outcome

    functions = {}
    failure = None
    try:
        load_copies(file)
        functions = find_functions(names, judge=ModelJudge(**json.loads(judge)))
    except Exception as error:  # a module that the trainer finds, and the worker does not
        text = f"{names[0]}: in a worker: {describe_error(error)}"
        failure = PartsReply({}, Failure(Outcome.USER_ERROR, text))

    def answer(job: dict) -> dict:
        calls = [read_call(fields) for fields in job["calls"]]
        replies = [failure] * len(calls) if failure else compute(functions, calls, float(seconds))
        return {"replies": [reply._asdict() for reply in replies]}

    return answer


def make_gym() -> Callable[[dict], dict]:
    """Return the function that answers a `ScoreRequest` with a `ScoreReply`.

    The process has limits on memory and files, and its output is discarded.
    """
    # Each thread of numpy's libraries would reserve a part of the address space.
    os.environ |= dict.fromkeys(NUMPY_THREADS, "1")
    from dapo_jax.rewards import gym
    from dapo_jax.runtime.settings import ConfigError
    from dapo_jax.structs import Failure, Outcome

    limit_process()
    discard_output()
    with contextlib.suppress(ImportError):  # each job reports it
        importlib.import_module("reasoning_gym")  # it takes longer than the limit of a job

    def answer(job: dict) -> dict:
        request = gym.ScoreRequest(**job)
        if request.metadata is None:
            gym.prepare(request.source)
            return gym.ScoreReply()._asdict()
        try:
            score = gym.gym_score(request.source, request.metadata, request.answer)
            return gym.ScoreReply(score)._asdict()
        except (MemoryError, ConfigError) as error:
            outcome = Outcome.MEMORY if isinstance(error, MemoryError) else Outcome.USER_ERROR
            return gym.ScoreReply(failure=Failure(outcome, repr(error)[:200]))._asdict()
        except Exception:  # some scorers raise if an answer can't be parsed: it is wrong
            return gym.ScoreReply(how=gym.SCORER_ERROR)._asdict()

    return answer


def main() -> None:
    """Serve the kind of job that the command line names."""
    kind, *rest = sys.argv[1:]
    serve(lambda: make_gym() if kind == "gym" else make_parts(*rest))


if __name__ == "__main__":
    main()

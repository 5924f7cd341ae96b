"""Worker process of rewards.

python -m dapo_jax.rewards.worker parts FILE SECONDS REWARD NAMES  reward functions, also the user's
python -m dapo_jax.rewards.worker scores                           scorers of the problems' sources
python -m dapo_jax.rewards.worker verifier NAME                    a verifier that is a function
"""

import json
import os
import sys
from collections.abc import Callable

from dapo_jax.runtime.workers.child import discard_output, limit_process, serve

NUMPY_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def make_parts(file: str, seconds: str, reward: str, *names: str) -> Callable[[dict], dict]:
    """Return the function that answers `{"calls"}` with `{"replies"}` of the named parts.

    Args:
        file: `FunctionCopies.path`.
        seconds: limit of an async call.
        reward: JSON of the settings of rewards.
    """
    from dapo_jax.config.experiment import Reward
    from dapo_jax.config.settings import from_dict
    from dapo_jax.config.user_code import describe_error
    from dapo_jax.rewards.functions import PartsReply, compute, find_functions, read_call
    from dapo_jax.runtime.workers.pickled_functions import load_copies
    from dapo_jax.types.structs import Failure, Outcome

    functions = {}
    failure = None
    try:
        load_copies(file)
        functions = find_functions(names, reward=from_dict(Reward, json.loads(reward), "reward."))
    except Exception as error:  # a module that the trainer finds, and the worker does not
        text = f"{names[0]}: in a worker: {describe_error(error)}"
        failure = PartsReply({}, Failure(Outcome.USER_ERROR, text))

    def answer(job: dict) -> dict:
        calls = [read_call(fields) for fields in job["calls"]]
        replies = [failure] * len(calls) if failure else compute(functions, calls, float(seconds))
        return {"replies": [reply._asdict() for reply in replies]}

    return answer


def make_scores() -> Callable[[dict], dict]:
    """Return the function that answers a `ScoreRequest` with a `ScoreReply`.

    The process has limits on memory and files, and its output is discarded.
    """
    # Each thread of numpy's libraries would reserve a part of the address space.
    os.environ |= dict.fromkeys(NUMPY_THREADS, "1")
    from dapo_jax.rewards.scoring import SCORER_ERROR, ScoreReply, ScoreRequest, find_source
    from dapo_jax.types.errors import ConfigError
    from dapo_jax.types.structs import Failure, Outcome

    limit_process()
    discard_output()

    def answer(job: dict) -> dict:
        request = ScoreRequest(**job)
        source = find_source(request.source)
        if request.metadata is None:
            source.prepare(request.source)
            return ScoreReply()._asdict()
        try:
            score = source.score(request.source, request.metadata, request.answer)
            return ScoreReply(score)._asdict()
        except (MemoryError, ConfigError) as error:
            outcome = Outcome.MEMORY if isinstance(error, MemoryError) else Outcome.USER_ERROR
            return ScoreReply(failure=Failure(outcome, repr(error)[:200]))._asdict()
        except Exception:  # some scorers raise if an answer can't be parsed: it is wrong
            return ScoreReply(how=SCORER_ERROR)._asdict()

    return answer


def make_verifier(name: str) -> Callable[[dict], dict]:
    """Return the function that answers the arguments of a verifier with its result."""
    from dapo_jax.config.user_code import describe_error
    from dapo_jax.rewards.verifying import find_verifier
    from dapo_jax.types.contracts import VerifierResult

    verifier = find_verifier(name)

    def answer(job: dict) -> dict:
        try:
            result = verifier(**job)
        except Exception as error:  # another package's code may raise anything
            return {"error": describe_error(error)}
        return {"result": result if isinstance(result, tuple) else VerifierResult(result, None)}

    return answer


KINDS = {"parts": make_parts, "scores": make_scores, "verifier": make_verifier}


def main() -> None:
    """Serve the kind of job that the command line names."""
    kind, *rest = sys.argv[1:]
    serve(lambda: KINDS[kind](*rest))


if __name__ == "__main__":
    main()

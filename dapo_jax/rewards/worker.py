"""Worker process that computes rewards.

python -m dapo_jax.rewards.worker functions FILE SECONDS EXTRAS NAMES  reward functions
python -m dapo_jax.rewards.worker scores                           scorers of the problems' sources
python -m dapo_jax.rewards.worker verifier NAME                    a verifier that is a function
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from dapo_jax.runtime.workers.child import discard_output, limit_process, serve

WAIT_SECONDS = 0.05  # for an async call to end, until the parent may send others
NUMPY_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def make_functions(file: str, seconds: str, extras: str, *names: str) -> Callable[[dict], dict]:
    """Return the function that answers `{"name", "call"}` with the reply of that function.

    If the first function is async, `{"start", "stop"}` starts and stops calls by number; the answer
    says which have ended, after a moment in which none did.

    Args:
        file: `FunctionCopies.path`.
        seconds: limit of an async call.
        extras: JSON of the changed settings of extras.
    """
    from dapo_jax.config.settings import open_extras
    from dapo_jax.rewards.functions import PartsReply, find_functions, read_call
    from dapo_jax.runtime.user_code import describe_error
    from dapo_jax.runtime.workers.pickled_functions import load_copies
    from dapo_jax.types.structs import Failure, Outcome

    runner, tasks = asyncio.Runner(), dict[str, asyncio.Task[dict]]()
    functions, failed = {}, PartsReply({})
    try:
        load_copies(file)
        functions = find_functions(names, extras=open_extras(json.loads(extras)))
    except Exception as error:  # a module that the trainer finds, and the worker does not
        text = f"{names[0]}: in a worker: {describe_error(error)}"
        failed = PartsReply({}, Failure(Outcome.USER_ERROR, text))

    async def score(fields: Sequence[Any]) -> dict:
        if failed.failure:
            return failed._asdict()
        reply = await functions[names[0]].score_async(read_call(fields), float(seconds))
        return reply._asdict()

    async def wait(start: dict[str, Any], stop: list[str]) -> dict:
        tasks.update((number, asyncio.create_task(score(call))) for number, call in start.items())
        for number in tasks.keys() & stop:
            if not tasks[number].cancelling():  # once: a call may await what it has begun
                tasks[number].cancel()
        if tasks:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait(tasks.values(), timeout=WAIT_SECONDS, return_when=first)
        ended = {number: tasks.pop(number) for number in [*tasks] if tasks[number].done()}
        done = {number: task.result() for number, task in ended.items() if not task.cancelled()}
        return {"done": done, "running": [*tasks]}

    def answer(job: dict) -> dict:
        if "start" in job:
            return runner.run(wait(**job))
        if failed.failure:
            return failed._asdict()
        return functions[job["name"]].score(read_call(job["call"]), float(seconds))._asdict()

    return answer


def make_scores() -> Callable[[dict], dict]:
    """Return the function that answers a `ScoreRequest` with a `PartsReply`: a part, or a failure.

    A request without metadata only loads the scorer. If the scorer raises, the answer is wrong: the
    reply is empty. The process has limits on memory and files, and its output is discarded.
    """
    # Each thread of numpy's libraries would reserve a part of the address space.
    os.environ |= dict.fromkeys(NUMPY_THREADS, "1")
    from dapo_jax.rewards.functions import GYM, PartsReply
    from dapo_jax.rewards.verifying import ScoreRequest, find_source
    from dapo_jax.types.errors import ConfigError
    from dapo_jax.types.structs import Failure, Outcome

    limit_process()
    discard_output()

    def answer(job: dict) -> dict:
        request = ScoreRequest(**job)
        source, reply = find_source(request.source), PartsReply({})
        if request.metadata is None:
            source.prepare(request.source)  # an error ends the process: no answer is at fault
            return reply._asdict()
        try:
            reply = PartsReply({GYM: source.score(*request)})
        except (MemoryError, ConfigError) as error:
            outcome = Outcome.MEMORY if isinstance(error, MemoryError) else Outcome.USER_ERROR
            reply = PartsReply({}, Failure(outcome, repr(error)[:200]))
        except Exception:  # some scorers raise if an answer can't be parsed: it is wrong
            pass
        return reply._asdict()

    return answer


def make_verifier(name: str) -> Callable[[dict], dict]:
    """Return the function that answers the arguments of a verifier with its result."""
    from dapo_jax.rewards.verifying import find_verifier
    from dapo_jax.runtime.user_code import describe_error
    from dapo_jax.types.contracts import VerifierResult

    verifier = find_verifier(name)

    def answer(job: dict) -> dict:
        try:
            result = verifier(**job)
        except Exception as error:  # another package's code may raise anything
            return {"error": describe_error(error)}
        return {"result": result if isinstance(result, tuple) else VerifierResult(result, None)}

    return answer


KINDS = {"functions": make_functions, "scores": make_scores, "verifier": make_verifier}


def main() -> None:
    """Serve the kind of job that the command line names."""
    kind, *rest = sys.argv[1:]
    serve(lambda: KINDS[kind](*rest))


if __name__ == "__main__":
    main()

"""Worker process of environments: one JSON line per step, one JSON line per reply.

    python -m dapo_jax.environments.worker NAME FILE [TOOL ...]

`NAME` is an environment's, empty for tools; `FILE` has copies of what a program gave. A job
carries all that the policy has said, so any worker can take it: one that lacks the trajectory's
environment repeats the steps before.
"""

import collections
import functools
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from dapo_jax.runtime.workers.child import serve

MAX_LIVE = 512  # environments that a process keeps between steps
MAX_CHARACTERS = 1 << 16  # of an observation; the limit in tokens is far below


class Sessions:
    """Environments of trajectories that have begun, the latest used last."""

    def __init__(self, make: Callable[[int], Any]):
        self._make = make
        self._live: collections.OrderedDict[str, tuple[Any, int]] = collections.OrderedDict()

    def answer(self, job: dict) -> dict:
        """Reply to `{"session", "seed", "problem", "said"}`, or the prompt of `{"problem"}`."""
        from dapo_jax.environments.interface import Problem, check_observation, reset

        problem = Problem(**job["problem"])
        if "said" not in job:
            return {"prompt": reset(self._make(0), problem)}
        said = job["said"]
        environment, steps = self._live.pop(job["session"], (None, -1))
        if steps != len(said) - 1:
            environment = self._make(job["seed"])
            reset(environment, problem)
            for text in said[:-1]:
                environment.step(text)
        observation = check_observation(environment.step(said[-1]))
        if not observation.done:
            self._live[job["session"]] = environment, len(said)
        while len(self._live) > MAX_LIVE:
            self._live.popitem(last=False)
        texts = [str(message.get("content", "")) for message in observation.messages]
        if sum(map(len, [observation.text, *texts])) > MAX_CHARACTERS:
            text = (observation.text or "\n".join(texts))[:MAX_CHARACTERS]
            return vars(observation) | {"text": text, "messages": [], "cut": True}
        return vars(observation) | {"messages": list(observation.messages)}


def make_answer(name: str, file: str, tools: list[str]) -> Callable[[dict], dict]:
    """Function that answers jobs; whatever a step raises is told in its reply as `failure`.

    The policy is shown the error without its file and line.

    What an environment prints goes nowhere, and a process that it forks answers nothing.
    """
    from dapo_jax.config.user_code import describe_error, error_message

    own = os.getpid()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        from dapo_jax.environments.interface import make_environment
        from dapo_jax.environments.registry import open_factory
        from dapo_jax.rewards.pickled_functions import read_copies

        if file:
            read_copies(pathlib.Path(file))
        sessions = Sessions(functools.partial(make_environment, open_factory(name, tools)))
    except Exception as error:  # a module that is found here, and not by the worker
        told = f"in a worker: {describe_error(error)}"
        failure = {"failure": told, "shown": error_message(error)}
        return lambda job: failure

    def answer(job: dict) -> dict:
        try:
            reply = sessions.answer(job)
        except BaseException as error:  # also SystemExit: a step costs itself alone
            reply = {"failure": describe_error(error), "shown": error_message(error)}
        if os.getpid() != own:
            os._exit(0)
        return reply

    return answer


def main() -> None:
    """Serves the environment that the command line names."""
    name, file, *tools = sys.argv[1:]
    serve(lambda: make_answer(name, file, tools))


if __name__ == "__main__":
    main()

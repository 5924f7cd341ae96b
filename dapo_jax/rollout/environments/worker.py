"""Worker process of environments, and the messages that it exchanges.

    python -m dapo_jax.rollout.environments.worker NAME FILE [TOOL ...]

`NAME` is an environment's, empty for tools; `FILE` is `FunctionCopies.path`. A request holds all
turns of the policy, so any worker can answer it: one that lacks the trajectory's environment
repeats the earlier steps.
"""

import collections
import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dapo_jax.runtime.workers.child import discard_output, serve
from dapo_jax.types.contracts import Environment
from dapo_jax.types.structs import Observation, Problem

MAX_LIVE = 512  # environments that a process keeps between steps
MAX_CHARACTERS = 1 << 16  # of an observation; the limit in tokens is far below
MAX_REWARD = 1e30
PROBLEM_FIELDS = ("id", "text", "answer", "source", "metadata")


class Request(NamedTuple):
    """Request for the reply to the last turn; without turns, for the prompt.

    Attributes:
        session: name of the trajectory.
        turns: texts of the policy, without turns that an environment failed on.
    """

    problem: Problem
    session: str = ""
    seed: int = 0
    turns: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        problem = {name: getattr(self.problem, name) for name in PROBLEM_FIELDS}
        return self._asdict() | {"problem": problem}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Request":
        return cls(**fields)._replace(problem=Problem(**fields["problem"]))


class Reply(NamedTuple):
    """Reply to a request: a prompt, an observation, or a failure."""

    prompt: Any = None  # text or messages that `reset` returned
    observation: Observation | None = None
    cut: bool = False  # the observation was longer than `MAX_CHARACTERS`
    failure: str = ""  # error with file and line, for the log
    shown: str = ""  # the error as the policy sees it

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {"observation": self.observation and vars(self.observation)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Reply":
        observation = fields["observation"]
        return cls(**fields)._replace(observation=observation and Observation(**observation))


def _check_observation(value: Any) -> Observation:
    """Return the observation that `step` returned. Raises TypeError, ValueError."""
    if value is None:
        return Observation(done=True)
    if not isinstance(value, Observation):
        raise TypeError(f"step returned {value!r:.80}: must be an Observation or None")
    if not isinstance(value.text, str):
        raise TypeError(f"the observation's text is {value.text!r:.80}: must be text")
    if not all(isinstance(message, dict) and "role" in message for message in value.messages):
        raise TypeError(f"a message in {value.messages!r:.80} has no role")
    reward = float(value.reward)
    if not abs(reward) < MAX_REWARD:
        raise ValueError(f"the observation's reward is {value.reward!r}: must be a finite number")
    messages = list(value.messages)
    return dataclasses.replace(value, messages=messages, reward=reward, done=bool(value.done))


def _close(environment: Environment) -> None:
    getattr(environment, "close", lambda: None)()


class Sessions:
    """Environments of running trajectories, ordered by their last use.

    Args:
        factory: makes an environment; it gets the seed if it has a parameter `seed`.
    """

    def __init__(self, factory: Callable[..., Environment]):
        self._factory = factory
        self._live = collections.OrderedDict[str, tuple[Environment, int]]()  # with steps made

    def _start(self, problem: Problem, seed: int) -> tuple[Environment, Any]:
        """Return a new environment and its prompt; None for the problem's own."""
        takes_seed = "seed" in inspect.signature(self._factory).parameters
        environment = self._factory(seed=seed) if takes_seed else self._factory()
        try:
            return environment, getattr(environment, "reset", lambda _: None)(problem)
        except BaseException:
            _close(environment)
            raise

    def answer(self, request: Request) -> Reply:
        """Return the reply to a request. Raises whatever the environment raises."""
        if not request.turns:
            environment, prompt = self._start(request.problem, 0)
            _close(environment)
            return Reply(prompt=prompt)
        *before, last = request.turns
        environment, steps = self._live.pop(request.session, (None, 0))
        if environment is None or steps != len(before):
            environment, _ = self._start(request.problem, request.seed)
            for text in before:
                environment.step(text)
        try:
            observation = _check_observation(environment.step(last))
        except BaseException:
            _close(environment)
            raise
        if observation.done:
            _close(environment)
        else:
            self._live[request.session] = environment, len(request.turns)
        while len(self._live) > getattr(environment, "MAX_LIVE", MAX_LIVE):
            _close(self._live.popitem(last=False)[1][0])
        texts = [str(message.get("content", "")) for message in observation.messages]
        if sum(map(len, [observation.text, *texts])) <= MAX_CHARACTERS:
            return Reply(observation=observation)
        text = (observation.text or "\n".join(texts))[:MAX_CHARACTERS]
        return Reply(observation=dataclasses.replace(observation, text=text, messages=[]), cut=True)


def make_answer(name: str, file: str, tools: list[str]) -> Callable[[dict], dict]:
    """Return the function that answers requests; its replies report all exceptions.

    Output of an environment is discarded, and a process that it forks answers nothing.
    """
    from dapo_jax.runtime.user_code import describe_error, error_message

    pid = os.getpid()
    discard_output()
    try:
        from dapo_jax.rollout.environments.registry import open_factory
        from dapo_jax.runtime.workers.pickled_functions import load_copies

        load_copies(file)
        sessions = Sessions(open_factory(name, tools))
    except Exception as error:  # a module that the trainer finds, and the worker does not
        failure = f"in a worker: {describe_error(error)}"
        broken = Reply(failure=failure, shown=error_message(error)).to_json()
        return lambda job: broken

    def answer(job: dict) -> dict:
        try:
            reply = sessions.answer(Request.from_json(job))
        except BaseException as error:  # also SystemExit: it costs only this step
            reply = Reply(failure=describe_error(error), shown=error_message(error))
        if os.getpid() != pid:
            os._exit(0)
        return reply.to_json()

    return answer


def main() -> None:
    """Serve the environment that the command line names."""
    name, file, *tools = sys.argv[1:]
    serve(functools.partial(make_answer, name, file, tools))


if __name__ == "__main__":
    main()

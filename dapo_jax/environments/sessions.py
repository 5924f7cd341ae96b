"""Steps of environments beside decoding: processes that can be killed, a lane of steps for each."""

import dataclasses
import os
import pathlib
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from dapo_jax.config.sections import Environment
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.environments.interface import Problem as Fields
from dapo_jax.environments.registry import open_factory, tool_names
from dapo_jax.environments.transcript import Transcript
from dapo_jax.rewards.pickled_functions import GIVEN, write_copies
from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.workers.parent import RestartingWorker
from dapo_jax.structs import Interrupted, Problem, Prompt

WORKER = "dapo_jax.environments.worker"
POLL_SECONDS = 0.2  # between two looks whether to wait any longer
SHOWN_OF_ERROR = 200  # characters


class Step(NamedTuple):
    """Reply to a turn, as the sampler places it."""

    tokens: list[int]  # none: the trajectory ends, as truncated where the observation was cut
    text: str
    reward: float = 0.0
    failure: str = ""
    cut: bool = False
    late: bool = False


class Asked(NamedTuple):
    """Step under way, on the one process that runs the prompt's environments."""

    index: int  # of the prompt
    step: Future[Step] | None


def problem_of(prompt: Prompt) -> dict[str, str]:
    """Fields of a problem that an environment may read."""
    return {name: getattr(prompt, name) for name in Fields._fields} | {"text": prompt.problem}


class Environments:
    """Environments of all trajectories of a run.

    A step's reply depends on the problem, the trajectory's seed and what the policy said: a process
    that was killed costs the others that it kept nothing but time.

    Args:
        chat: whether prompts are written by the model's chat template.
        should_abort: tells whether to stop waiting; `steps` then raises.

    Raises:
        ConfigError: there is no such environment, or the chat template can't show observations.
    """

    def __init__(
        self,
        settings: Environment,
        tokenizer: Tokenizer,
        chat: bool,
        should_abort: Callable[[], bool] = lambda: False,
    ):
        self.settings, self._given_up, self._begun = settings, should_abort, False
        self._first: dict[str, dict[str, Any]] = {}  # problem of a source, whose reset comes first
        names = tool_names(settings)
        open_factory(settings.name, names)  # a wrong name stops here, not in a worker
        self._role = "tool" if names else "user"
        self._transcript = Transcript(tokenizer, chat, self._role)
        self._files = tempfile.TemporaryDirectory(prefix="dapo_jax_", ignore_cleanup_errors=True)
        copies = ""
        if given := [name for name in (settings.name, *names) if name.startswith(GIVEN)]:
            copies = os.path.join(self._files.name, "functions")
            write_copies(given, pathlib.Path(copies))
        # It finds the user's own modules wherever this process does.
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        words = WORKER, settings.name, copies, *names
        self._lanes = [
            (
                RestartingWorker(*words, environment=variables),
                ThreadPoolExecutor(1, thread_name_prefix="environment"),
            )
            for _ in range(settings.workers)
        ]

    def submit(
        self, prompt: Prompt, seed: int, said: Sequence[str], failed: Sequence[str]
    ) -> Asked:
        """Asks the environment of a trajectory for its reply to the last turn.

        Args:
            seed: of the trajectory, and its name.
            said: texts of its turns.
            failed: failures of the steps before the last, empty where there were none; such steps
                are not repeated.
        """
        if prompt.index % processes.count() != processes.index():
            return Asked(prompt.index, None)
        *before, last = said
        passed = [text for text, failure in zip(before, failed, strict=True) if not failure]
        job = {
            "session": f"{prompt.index} {seed}",
            "seed": seed,
            "problem": problem_of(prompt),
            "said": [*passed, last],
        }
        worker, lane = self._lanes[zlib.crc32(job["session"].encode()) % len(self._lanes)]
        return Asked(prompt.index, lane.submit(self._step, worker, job))

    def _step(self, worker: RestartingWorker, job: dict[str, Any]) -> Step:
        late, seconds = False, self.settings.step_seconds
        reply: dict[str, Any]
        try:
            reply = self._ask(worker, job, seconds * len(job["said"]))
        except TimeoutError:
            reply, late = {"failure": f"no reply within {seconds:g} s"}, True
        except (OSError, ValueError) as error:
            reply = {"failure": f"{type(error).__name__}: {error}"}
        failure = reply.get("failure", "")[:SHOWN_OF_ERROR]
        messages, text = reply.get("messages", []), reply.get("text", "")
        if failure and not messages:
            text = f"error: {reply.get('shown', failure)[:SHOWN_OF_ERROR]}"
        if text:
            messages = [{"role": reply.get("role", self._role), "content": text}]
        shown = "\n".join(str(message.get("content", "")) for message in messages)
        if reply.get("done") or not shown:
            return Step([], shown, reply.get("reward", 0.0), failure)
        tokens, cut = self._transcript.tokens(messages, self.settings.max_observation_tokens)
        cut = cut or reply.get("cut", False) or not tokens  # nothing of it can be shown
        return Step(tokens, shown, reply.get("reward", 0.0), failure, cut, late)

    def _ask(self, worker: RestartingWorker, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Reply of a process; a reset comes first, in no time of the job's: it may load things."""
        problem = job["problem"]
        source, first = problem["source"], {"problem": problem}
        try:
            first = None if self.settings.tools else self._first.setdefault(source, first)
            return worker.ask(job, seconds, first=first)
        except TimeoutError:
            self._first.pop(source, None)  # another problem's may end
            raise

    def steps(self, asked: Sequence[Asked]) -> list[Step]:
        """Replies, in order, on every process. Raises `Interrupted`."""

        def wait(i: int) -> list[Any] | None:
            step = asked[i].step
            assert step is not None
            while not futures.wait([step], POLL_SECONDS).done:
                if self._given_up():
                    return None
            return list(step.result())

        replies = processes.map_over_hosts([one.index for one in asked], wait, "observations")
        if None in replies:
            raise Interrupted
        return [Step(*reply) for reply in replies]

    def open(self, problem: Problem) -> Problem:
        """Problem as the environment begins it: its text, and the messages before it.

        One whose `reset` fails later than the first keeps its own: its steps will say why.

        Raises:
            ConfigError: the first `reset` failed.
        """
        if self.settings.tools:
            return problem
        known = {name: getattr(problem, name) for name in Fields._fields}
        try:
            reply = self._ask(self._lanes[0][0], {"problem": known}, self.settings.step_seconds)
            opened = with_prompt(problem, reply.get("prompt"))
        except (OSError, ValueError, TypeError) as error:
            reply, opened = {"failure": f"{type(error).__name__}: {error}"}, problem
        if "failure" in reply and not self._begun:
            failure = reply["failure"][:SHOWN_OF_ERROR]
            raise ConfigError(f"config.environment.name: reset of {problem.id}: {failure}")
        self._begun = True
        return opened

    def close(self) -> None:
        """Ends the worker processes; steps under way are lost."""
        for worker, lane in self._lanes:
            lane.shutdown(wait=False, cancel_futures=True)
            worker.close()
        self._files.cleanup()


def with_prompt(problem: Problem, prompt: Any) -> Problem:
    """Problem whose text, and messages before it, are those of an environment's prompt.

    Raises:
        TypeError: the prompt is neither text nor messages that end with the user's.
    """
    if prompt is None:
        return problem
    if isinstance(prompt, str):
        return dataclasses.replace(problem, text=prompt)
    try:
        said = [(message["role"], message["content"]) for message in prompt]
        (role, text), turns = said[-1], said[:-1]
        system = "".join(content for role, content in turns if role == "system")
        turns = tuple((role, content) for role, content in turns if role != "system")
        if role != "user" or not isinstance(text, str):
            raise TypeError
    except (TypeError, KeyError, IndexError, ValueError):
        raise TypeError(
            f"reset returned {prompt!r:.80}: must be text, None, or messages of which the last is "
            "the user's"
        ) from None
    return dataclasses.replace(problem, text=text, turns=turns, system=system or problem.system)

"""Steps of environments while decoding continues, in worker processes that can be killed."""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from dapo_jax.config.experiment import Environment
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.rollout.environments.registry import open_factory, tool_names, tool_schemas
from dapo_jax.rollout.environments.transcript import Transcript
from dapo_jax.rollout.environments.worker import Reply, Request
from dapo_jax.runtime import processes
from dapo_jax.runtime.workers.parent import LATE_FACTOR, Limits, RestartingWorker
from dapo_jax.runtime.workers.pickled_functions import FunctionCopies
from dapo_jax.runtime.workers.pool import WorkerPool, gather_results
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import Observation, Problem, Prompt

WORKER = "dapo_jax.rollout.environments.worker"
MAX_ERROR_CHARACTERS = 200


class TokenizedReply(NamedTuple):
    """Reply to a turn, as the sampler places it."""

    tokens: list[int]  # empty: the trajectory ends, as truncated if the observation was cut
    text: str
    reward: float = 0.0
    failure: str = ""
    cut: bool = False
    late: bool = False
    lost: bool = False  # the environment failed: there is no reward


class Environments:
    """Environments of all trajectories of a run.

    A reply depends on the problem, the trajectory's seed and its turns. After a process is killed,
    another one repeats the steps of its other trajectories, which costs only time.

    Args:
        chat: whether the model's chat template writes the prompts.
        should_abort: called while replies are missing; if true, `steps` raises `Interrupted`.

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
        self.settings = settings
        self._should_abort = should_abort
        self._has_reset = False
        self._first: dict[str, dict[str, Any]] = {}  # per source, the request of its first reset
        tools = tool_names(settings)
        open_factory(settings.name, tools)  # fails here, not in a worker
        self._role = "tool" if tools else "user"
        self._transcript = Transcript(tokenizer, chat, self._role, tool_schemas(settings))
        self._copies = FunctionCopies([settings.name, *tools])

        words = (settings.name, self._copies.path, *tools)
        # A trajectory always uses the same process, which keeps its environment between steps.
        self._pools = [
            WorkerPool([(RestartingWorker(WORKER, *words),)], "environment")
            for _ in range(settings.workers)
        ]

    def submit(
        self, prompt: Prompt, seed: int, turns: Sequence[str], failed: Sequence[str]
    ) -> list[Future[TokenizedReply]]:
        """Request the reply to the last turn of a trajectory; empty on all processes but one.

        Args:
            seed: seed of the trajectory, which also names it.
            turns: texts of its turns.
            failed: failures of the steps before the last, empty if a step succeeded; failed steps
                are not repeated.
        """
        if prompt.index % processes.count() != processes.index():
            return []
        *before, last = turns
        passed = [text for text, failure in zip(before, failed, strict=True) if not failure]
        problem = Problem(
            prompt.id, prompt.problem, prompt.answer, prompt.source, metadata=prompt.metadata
        )
        if self.settings.tools:  # they may run code of the policy: only what the policy sees
            problem = Problem("", prompt.problem, "", "")
        request = Request(problem, f"{prompt.index} {seed}", seed, [*passed, last])
        pool = self._pools[zlib.crc32(request.session.encode()) % len(self._pools)]
        return [pool.submit(self._step, request)]

    def _step(self, workers: tuple[RestartingWorker], request: Request) -> TokenizedReply:
        late = False
        seconds = self.settings.step_seconds
        try:
            reply = self._ask(workers, request, seconds * len(request.turns))
        except TimeoutError:
            reply = Reply(failure=f"no reply within {seconds:g} s")
            late = True
        except (OSError, ValueError) as error:
            reply = Reply(failure=f"{type(error).__name__}: {error}")
        observation = reply.observation or Observation(role=self._role)
        failure = (reply.failure or observation.failure)[:MAX_ERROR_CHARACTERS]
        if reply.failure and not self.settings.tools:
            return TokenizedReply([], "", failure=failure, late=late, lost=True)
        messages = observation.messages
        text = observation.text
        if failure and not messages:
            text = f"error: {(reply.shown or failure)[:MAX_ERROR_CHARACTERS]}"
        if text:
            messages = [{"role": observation.role, "content": text}]
        shown = "\n".join(str(message.get("content", "")) for message in messages)
        if observation.done or not shown:
            return TokenizedReply([], shown, observation.reward, failure)
        tokens, cut = self._transcript.tokens(messages, self.settings.max_observation_tokens)
        cut = cut or reply.cut or not tokens  # no tokens: the tokenizer drops all of the text
        return TokenizedReply(tokens, shown, observation.reward, failure, cut, late)

    def _ask(self, workers: tuple[RestartingWorker], request: Request, seconds: float) -> Reply:
        """Return a worker's reply; a first reset may load data, so its time does not count.

        A call of a tool that is late is not repeated: its arguments may be the cause.
        """
        source = request.problem.source
        first = None
        late_seconds = 0.0
        if not self.settings.tools:
            late_seconds = LATE_FACTOR * seconds
            first = self._first.setdefault(source, Request(request.problem).to_json())
        try:
            limits = Limits(seconds, late_seconds)
            return Reply.from_json(workers[0].ask(request.to_json(), limits, first))
        except TimeoutError:
            self._first.pop(source, None)  # the reset of another problem may end in time
            raise

    def steps(self, asked: Sequence[list[Future[TokenizedReply]]]) -> list[TokenizedReply]:
        """Return the replies, in order, on every process. Raises `Interrupted`."""
        results = gather_results(
            asked, lambda _, reply: list(reply), self._should_abort, "observations", len(asked)
        )
        return [TokenizedReply(*fields) for (fields,) in results.values()]

    def open(self, problem: Problem) -> Problem:
        """Return a problem with the prompt of its environment.

        If `reset` fails after an earlier one succeeded, the problem keeps its own prompt, and its
        trajectories get no reward.

        Raises:
            ConfigError: the first `reset` failed.
        """
        if self.settings.tools:
            return problem
        seconds = self.settings.step_seconds
        opened = problem
        try:
            reply = self._pools[0].submit(self._ask, Request(problem), seconds).result()
            opened = _with_prompt(problem, reply.prompt)
            failure = reply.failure
        except (OSError, ValueError, TypeError) as error:
            failure = f"{type(error).__name__}: {error}"
        if failure and not self._has_reset:
            failure = failure[:MAX_ERROR_CHARACTERS]
            raise ConfigError(f"config.environment.name: reset of {problem.id}: {failure}")
        self._has_reset = True
        return opened

    def close(self) -> None:
        """End the worker processes; pending steps are lost."""
        for pool in self._pools:
            pool.close()
        self._copies.close()


def _with_prompt(problem: Problem, prompt: Any) -> Problem:
    """Return a problem with the text, and the messages before it, of an environment's prompt."""
    if prompt is None:
        return problem
    if isinstance(prompt, str):
        return dataclasses.replace(problem, text=prompt)
    try:
        *before, (role, text) = [(message["role"], message["content"]) for message in prompt]
        system = "".join(content for role, content in before if role == "system")
        turns = tuple((role, content) for role, content in before if role != "system")
        if role != "user" or not isinstance(text, str):
            raise TypeError
    except (TypeError, KeyError, ValueError):
        raise TypeError(
            f"reset returned {prompt!r:.80}: must be text, None, or messages of which the last is "
            "the user's"
        ) from None
    system = system or problem.system
    return dataclasses.replace(problem, text=text, turns=turns, messages="", system=system)

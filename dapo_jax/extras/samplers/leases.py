"""Leases of groups: which sampler draws which group, and what its answer has to look like.

A group's key names all that its responses depend on, so an answer counts whoever sends it and
whenever. The first one is taken; a later one, or one to a group that is not wanted, is ignored.
"""

import dataclasses
import functools
import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from dapo_jax.rollout.group_format import completion_from
from dapo_jax.types.structs import (
    Completion,
    Prompt,
    RemoteCounts,
    SamplerCounts,
    SamplingRule,
    TurnCounts,
)

LOCAL = "the trainer's process"  # name of its sampler as a holder of leases
MAX_REFUSED = 3  # answers of a sampler before it gets no more groups


class WrongAnswer(ValueError):
    """An answer that can't be what the lease asks for."""


@dataclasses.dataclass(frozen=True)
class Session:
    """Settings that the groups between `begin` and `release` share."""

    purpose: int
    step: int
    policy_step: int
    rule: SamplingRule
    weights: str = ""  # digest of the version of the policy


@dataclasses.dataclass(frozen=True)
class Task:
    """A group that is wanted: its samples are returned together, or each alone."""

    session: Session
    prompt: Prompt
    samples: tuple[int, ...]

    @functools.cached_property
    def key(self) -> str:
        """Name of everything that the responses depend on."""
        tokens = np.asarray(self.prompt.tokens, np.int32).tobytes()
        named = [dataclasses.astuple(self.session), self.prompt.index, self.samples]
        content = json.dumps(named).encode() + tokens
        return hashlib.sha256(content).hexdigest()[:24]

    def fields(self) -> dict[str, Any]:
        """Return the message from which `from_fields` makes the task."""
        prompt = {f.name: getattr(self.prompt, f.name) for f in dataclasses.fields(self.prompt)}
        session = dataclasses.asdict(self.session)
        return {"key": self.key, "session": session, "prompt": prompt, "samples": self.samples}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Task":
        session = fields["session"] | {"rule": SamplingRule(*fields["session"]["rule"])}
        return cls(Session(**session), Prompt(**fields["prompt"]), tuple(fields["samples"]))


FinishedTask = tuple[Task, tuple[Completion, ...]]


@dataclasses.dataclass(frozen=True)
class AnswerLimits:
    """Bounds of a valid answer."""

    vocab: int
    response_tokens: int
    routes: tuple[int, int, int] | None = None  # layers, experts per token, experts


def read_answer(task: Task, answer: Any, limits: AnswerLimits) -> tuple[Completion, ...]:
    """Return the responses of an answer. Raise `WrongAnswer`, whatever the answer is."""
    try:
        responses = tuple(map(completion_from, answer))
        samples = tuple(response.sample for response in responses)
        flaws = [_flaw(response, task, limits) for response in responses]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WrongAnswer(f"no list of responses: {error}") from None
    if samples != task.samples:
        raise WrongAnswer(f"samples {samples}, not {task.samples}")
    if flaw := next(filter(None, flaws), ""):
        raise WrongAnswer(flaw)
    return responses


def _flaw(response: Completion, task: Task, limits: AnswerLimits) -> str:
    tokens, logprobs = response.tokens, response.sampler_logprobs
    for array, kind in (tokens, "int32"), (logprobs, "float32"):
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != kind:
            return f"an array is not [n] {kind}"
    if not 0 < len(tokens) == len(logprobs) <= limits.response_tokens:
        return f"{len(tokens)} tokens and {len(logprobs)} log-probs"
    if tokens.min() < 0 or tokens.max() >= limits.vocab:
        return f"a token outside the vocabulary of {limits.vocab}"
    if not np.isfinite(logprobs).all() or logprobs.max() > 1e-3:
        return "a log-prob that is none"
    if response.policy_step != task.session.policy_step or response.earlier:
        return f"sampled by the policy of step {response.policy_step}"
    if response.turns and sum(turn.tokens for turn in response.turns) != len(tokens):
        return "turns that are not its tokens"
    texts = response.text, *(turn.text for turn in response.turns), *response.failures
    if not all(isinstance(text, str) for text in texts):
        return "a text that is none"
    if not np.isfinite(response.rewards).all():
        return "a reward that is no number"
    return "" if _has_routes(response, task, limits) else "routes of another model"


def _has_routes(response: Completion, task: Task, limits: AnswerLimits) -> bool:
    """Return True if a response has the routes that training replays, or needs none."""
    routes = response.routes
    if limits.routes is None or routes is None:
        return limits.routes is None and routes is None
    layers, per_token, experts = limits.routes
    tokens = len(task.prompt.tokens) + len(response.tokens)
    fits = routes.ndim == 3 and routes.shape[1:] == (layers, per_token) and len(routes) <= tokens
    return fits and routes.dtype.kind in "iu" and bool(((routes >= 0) & (routes < experts)).all())


def counts_from(fields: Any) -> SamplerCounts:
    """Return the counts in a message; zero if it has none."""
    try:
        turns = fields["turns"] and TurnCounts(**fields["turns"])
        counts = SamplerCounts(**fields | {"turns": turns, "remote": None})
        return SamplerCounts(turns=turns and TurnCounts()) + counts  # numbers, or a TypeError
    except (KeyError, TypeError):
        return SamplerCounts()


@dataclasses.dataclass
class _Sampler:
    seen: float  # time of its last message
    room: int = 0  # responses that it could start
    refused: int = 0
    counts: SamplerCounts = dataclasses.field(default_factory=SamplerCounts)


class Leases:
    """The wanted groups of a session, in data order; two threads may call it at once.

    Args:
        seconds: silence of a sampler that ends its leases.
        clock: seconds that only grow.
    """

    def __init__(
        self, limits: AnswerLimits, seconds: float, clock: Callable[[], float] = time.monotonic
    ):
        self._limits = limits
        self._seconds = seconds
        self._clock = clock
        self._changed = threading.Condition()
        self._samplers: dict[str, _Sampler] = {}
        self.unreadable = False  # a sampler could not read this session's weights
        self.following: tuple[int, str] | None = None  # step and digest of the next weights
        self.open(None)

    def open(self, session: Session | None) -> None:
        """Forget all groups, and begin a session; None: no group is wanted."""
        with self._changed:
            self.session = session
            self.counts = RemoteCounts()
            for sampler in self._samplers.values():
                sampler.counts = SamplerCounts()
            self.clear()

    def clear(self) -> None:
        """Want no group any more."""
        with self._changed:
            self._tasks: dict[str, Task] = {}  # without an answer, in data order
            self._holders: dict[str, str] = {}  # sampler of each leased task
            self._finished: list[FinishedTask] = []

    def add(self, task: Task) -> None:
        """Want a group."""
        with self._changed:
            self._tasks[task.key] = task

    def room(self) -> int:
        """Return how many more responses samplers could start now, if more were wanted."""
        oldest = self._clock() - self._seconds
        with self._changed:
            heard = [sampler for sampler in self._samplers.values() if sampler.seen >= oldest]
            free = sum(max(0, sampler.room) for sampler in heard if sampler.refused < MAX_REFUSED)
            waiting = self._tasks.keys() - self._holders.keys()
            return free - sum(len(self._tasks[key].samples) for key in waiting)

    def hear(
        self, name: str, held: Collection[str], counts: SamplerCounts, room: int = 0
    ) -> list[str]:
        """Note that a sampler works on the tasks `held`, and could start `room` more responses.

        Return the tasks that nobody wants from it.
        """
        with self._changed:
            sampler = self._samplers.setdefault(name, _Sampler(0.0))
            sampler.seen = self._clock()
            sampler.counts = counts
            sampler.room = room
            for key in [k for k, holder in self._holders.items() if holder == name]:
                if key not in held:  # it has started again, or could not do it
                    del self._holders[key]
            for key in held:
                if key in self._tasks:
                    self._holders.setdefault(key, name)
            return [key for key in held if self._holders.get(key) != name]

    def lease(self, name: str, room: int) -> list[Task]:
        """Lease tasks to a sampler until they fill the room for responses that it has."""
        with self._changed:
            taken = self._free(name, room)
            self._holders |= dict.fromkeys((task.key for task in taken), name)
            if name in self._samplers:
                self._samplers[name].room -= sum(len(task.samples) for task in taken)
            return taken

    def _free(self, name: str, room: int) -> list[Task]:
        """Return the first tasks that a sampler may take."""
        if name != LOCAL and self.session and not self.session.weights:  # nothing to read
            return []
        if name in self._samplers and self._samplers[name].refused >= MAX_REFUSED:
            return []
        oldest = self._clock() - self._seconds
        silent = {n for n, sampler in self._samplers.items() if -math.inf < sampler.seen < oldest}
        if silent:
            ended = [key for key, holder in self._holders.items() if holder in silent]
            self.counts.expired_leases += len(ended)
            for key in ended:
                del self._holders[key]
            for other in silent:
                self._samplers[other].seen = -math.inf  # it holds no more
        if len(self._holders) == len(self._tasks):  # waiting samplers ask often
            return []
        taken = []
        for key, task in self._tasks.items():
            if key not in self._holders and room > 0:
                taken.append(task)
                room -= len(task.samples)
        return taken

    def answer(self, name: str, key: str, answer: Any) -> None:
        """Take the answer to a task; ignore it if nobody waits for it. Raise `WrongAnswer`."""
        with self._changed:
            task = self._tasks.get(key)
            if task is None:
                self.counts.late_answers += 1
                return
            try:
                responses = read_answer(task, answer, self._limits)
            except WrongAnswer:
                self.counts.refused_answers += 1
                if name in self._samplers:
                    self._samplers[name].refused += 1
                if self._holders.get(key) == name:
                    del self._holders[key]
                raise
            self.counts.groups += 1
            self.finish(task, responses)

    def finish(self, task: Task, responses: Sequence[Completion]) -> None:
        """Store the responses to a task, unless it has an answer."""
        with self._changed:
            self._holders.pop(task.key, None)
            if self._tasks.pop(task.key, None):
                self._finished.append((task, tuple(responses)))
                self._changed.notify_all()

    def take(self, seconds: float) -> list[FinishedTask]:
        """Return the groups that have finished; wait up to `seconds` for the first."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished, seconds)
            finished, self._finished = self._finished, []
            return finished

    def remote_counts(self) -> SamplerCounts:
        """Return the sum of the counts that samplers have sent in this session."""
        with self._changed:
            total = SamplerCounts()
            for sampler in self._samplers.values():
                total = total + sampler.counts
            return dataclasses.replace(total, remote=self.counts)

"""Leases of groups: which worker samples which group, and validation of its results.

A group's key names all that its responses depend on, so an answer counts whoever sends it and
whenever. The first one is taken; a later one, or one to a group that is not wanted, is ignored.
"""

import dataclasses
import functools
import hashlib
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from dapo_jax.rollout.group_format import completion_from
from dapo_jax.types.structs import Completion, Prompt, RolloutKey, SamplerCounts, SamplingRule


class WrongAnswer(ValueError):
    """An answer that can't be what the lease asks for."""


@dataclasses.dataclass(frozen=True)
class Session:
    """State that the groups between `begin` and `close` share."""

    key: RolloutKey
    rule: SamplingRule
    weights: str  # name of the version of the policy


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
        return hashlib.sha256(json.dumps(named).encode() + tokens).hexdigest()[:24]

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Task":
        """Return the task of a message."""
        key, rule, weights = fields["session"].values()
        session = Session(RolloutKey(*key), SamplingRule(*rule), weights)
        return cls(session, Prompt(**fields["prompt"]), tuple(fields["samples"]))


def read_answer(
    task: Task, answer: Any, vocab: int, response_tokens: int
) -> tuple[Completion, ...]:
    """Return the responses of an answer. Raise `WrongAnswer`, whatever the answer is."""
    limits = task.session.key.policy_step, vocab, response_tokens
    try:
        responses = tuple(map(completion_from, answer))
        checks = (check for response in responses for check in _checks(response, *limits))
        flaw = next((name for name, fits in checks if not fits), "")
        samples = tuple(response.sample for response in responses)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WrongAnswer(f"no list of responses: {error}") from None
    if flaw or samples != task.samples:
        raise WrongAnswer(f"wrong {flaw}" if flaw else f"samples {samples}, not {task.samples}")
    return responses


def _checks(done: Completion, policy: int, vocab: int, limit: int) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a response, and whether each is valid; checks rely on earlier ones."""
    tokens, logprobs, count = done.tokens, done.sampler_logprobs, len(done.tokens)
    supports = np.zeros((count, 2), np.float32) if done.supports is None else done.supports
    for array, kind, *more in (tokens, np.int32), (logprobs, np.float32), (supports, np.float32, 2):
        yield "arrays", (array.shape, array.dtype) == ((count, *more), kind)
    yield "number of tokens", 0 < count <= limit
    yield "tokens", bool(tokens.min() >= 0 and tokens.max() < vocab)
    below = (np.append(logprobs, supports) <= 1e-3).all()
    yield "log-probs", bool(np.isfinite(logprobs).all() and below)
    yield "policy", done.policy_step == policy and not done.earlier


@dataclasses.dataclass
class _Sampler:
    seen: float  # time of its last message
    room: int = 0  # responses that it could start
    counts: SamplerCounts = dataclasses.field(default_factory=SamplerCounts)


class Leases:
    """The wanted groups of a session, in data order; two threads may call it at once.

    Args:
        limits: size of the vocabulary, and the largest number of tokens of a response.
        seconds: silence of a sampler that ends its leases.
    """

    def __init__(
        self, limits: tuple[int, int], seconds: float, clock: Callable[[], float] = time.monotonic
    ):
        self._limits, self._seconds, self._clock = limits, seconds, clock
        self._changed = threading.Condition()
        self._samplers: dict[str, _Sampler] = {}
        self.unreadable = False  # a sampler could not read this session's weights
        self.open(None)

    def open(self, session: Session | None) -> None:
        """Forget all groups, and begin a session; None: no group is wanted."""
        with self._changed:
            self.session = session
            self.groups = self.late_answers = self.refused_answers = self.expired_leases = 0
            for sampler in self._samplers.values():
                sampler.counts = SamplerCounts()
            self.clear()

    def clear(self) -> None:
        """Drop all pending groups."""
        with self._changed:
            self._tasks: dict[str, Task] = {}  # without an answer, in data order
            self._holders: dict[str, str] = {}  # sampler of each leased task
            self._finished: list[tuple[Task, tuple[Completion, ...]]] = []

    def add(self, task: Task) -> None:
        """Add a group to the queue."""
        with self._changed:
            self._tasks[task.key] = task

    def room(self) -> int:
        """Return how many responses the samplers could start beyond those that wait for one."""
        with self._changed:
            free = sum(max(0, s.room) for s in self._samplers.values() if not self._is_silent(s))
            waiting = self._tasks.keys() - self._holders.keys()
            return free - sum(len(self._tasks[key].samples) for key in waiting)

    def _is_silent(self, sampler: _Sampler) -> bool:
        return sampler.seen < self._clock() - self._seconds

    def hear(
        self, name: str, held: Collection[str], counts: SamplerCounts, room: int = 0
    ) -> list[str]:
        """Note that a sampler works on the tasks `held`, and could start `room` more responses.

        Return the tasks that nobody wants from it.
        """
        with self._changed:
            self._samplers[name] = _Sampler(self._clock(), room, counts)
            for key in [k for k, holder in self._holders.items() if holder == name]:
                if key not in held:  # it has started again, or could not do it
                    del self._holders[key]
            for key in held:
                if key in self._tasks:
                    self._holders.setdefault(key, name)
            return [key for key in held if self._holders.get(key) != name]

    def lease(self, name: str, room: int) -> list[Task]:
        """Lease the first free tasks to a sampler until they fill its room for responses."""
        with self._changed:
            silent = {n for n, sampler in self._samplers.items() if self._is_silent(sampler)}
            for key in [key for key, holder in self._holders.items() if holder in silent]:
                self.expired_leases += 1
                del self._holders[key]
            taken = []
            for key, task in self._tasks.items() if len(self._holders) < len(self._tasks) else ():
                if key not in self._holders and room > 0:
                    taken.append(task)
                    room -= len(task.samples)
                    self._holders[key] = name
            if name in self._samplers:
                self._samplers[name].room -= sum(len(task.samples) for task in taken)
            return taken

    def answer(self, name: str, key: str, answer: Any) -> None:
        """Take the answer to a task; ignore it if nobody waits for it.

        Raise `WrongAnswer`, after which the sampler holds no lease.
        """
        with self._changed:
            task = self._tasks.get(key)
            if task is None:
                self.late_answers += 1
                return
            try:
                responses = read_answer(task, answer, *self._limits)
            except WrongAnswer:
                self.refused_answers += 1
                self.hear(name, (), SamplerCounts())
                raise
            self.groups += 1
            del self._tasks[key]
            self._holders.pop(key, None)
            self._finished.append((task, responses))
            self._changed.notify_all()

    def take(self, seconds: float) -> list[tuple[Task, tuple[Completion, ...]]]:
        """Return the groups that have finished; wait up to `seconds` for the first."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished, seconds)
            finished, self._finished = self._finished, []
            return finished

    def counts(self) -> SamplerCounts:
        """Return the sum of the counts that samplers have sent in this session, and of leases."""
        with self._changed:
            total = SamplerCounts()
            for sampler in self._samplers.values():
                total = total + sampler.counts
            names = "groups", "late_answers", "refused_answers", "expired_leases"
            others = {f"remote_{name}": float(getattr(self, name)) for name in names}
            return dataclasses.replace(total, others=others)

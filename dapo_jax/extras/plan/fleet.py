"""Samplers in other processes (`dapo-jax sampler`) on a virtual clock, with preemptions.

Each is the scheduler and engine of a run, with simulated programs and a clock of its own. The one
whose clock is behind leases groups in data order and decodes a burst. A preempted one loses its
groups, which others get once its leases have ended.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dapo_jax.extras.plan.simulate import Meter, RolloutRecord, SimulatedPrograms
from dapo_jax.extras.samplers.remote_sampler import submit
from dapo_jax.types.structs import Completion, PartialGroup, Prompt, SamplerCounts

Finished = list[tuple[Prompt, tuple[Completion, ...]]]


@dataclasses.dataclass(frozen=True)
class Times:
    """Waiting times of samplers in seconds, and the rate of their preemptions."""

    write: float = 0.0  # of a version of the policy, by the trainer
    read: float = 0.0  # of a version, by each sampler
    ahead: bool = False  # versions are read while their predecessors sample
    lease: float = 60.0  # silence that ends a sampler's leases
    restart: float = 0.0  # from a preemption to the successor's start
    preemptions: float = 0.0  # of a sampler in an hour


@dataclasses.dataclass(frozen=True)
class _Task:
    prompt: Prompt
    samples: tuple[int, ...]
    since: float  # when it can be leased


class _Machine:
    """A sampler's process: its clock, its leases and the moments when it is preempted."""

    def __init__(self, sampler: Any, programs: SimulatedPrograms, rng: np.random.Generator):
        self.sampler, self.programs, self._rng = sampler, programs, rng
        self.now = 0.0  # when it can decode its next burst
        self.preempted_at = 0.0
        self.tasks: list[_Task] = []

    def survive(self, after: float, times: Times) -> None:
        """Draw the next preemption after a moment."""
        hours = self._rng.exponential() / times.preemptions if times.preemptions else math.inf
        self.preempted_at = after + 3600 * hours

    def attach(self, record: RolloutRecord) -> None:
        """Take part in the step of a record, with a meter of its own."""
        meter = Meter(self.programs.record.meter.costs)
        self.programs.record = dataclasses.replace(record, meter=meter)

    def burst(self) -> Finished:
        meter = self.programs.record.meter
        before = meter.now
        finished = self.sampler.decode_burst()
        self.now += meter.now - before
        ended = {(prompt.index, tuple(r.sample for r in each)) for prompt, each in finished}
        self.tasks = [t for t in self.tasks if (t.prompt.index, t.samples) not in ended]
        return finished


class Fleet:
    """A `contracts.Sampler` of simulated samplers; seconds count as "samplers" in its record.

    Args:
        opened: sampler and programs of each.
        slots: of each.
    """

    environments = None

    def __init__(
        self,
        opened: Sequence[tuple[Any, SimulatedPrograms]],
        slots: int,
        times: Times,
        seed: int = 0,
    ):
        self._times, self.slots = times, slots
        self._machines = [
            _Machine(*each, np.random.default_rng([seed, i])) for i, each in enumerate(opened)
        ]
        for machine in self._machines:
            machine.survive(0.0, times)
        self._queue: list[_Task] = []  # in data order
        self._now = self._started = 0.0
        self._step = -1
        self.record: RolloutRecord = opened[0][1].record
        self.preemptions = 0

    @property
    def counts(self) -> SamplerCounts:
        return sum((m.sampler.counts for m in self._machines), SamplerCounts())

    @property
    def idle(self) -> bool:
        return not self._queue and not any(machine.tasks for machine in self._machines)

    @property
    def room(self) -> int:
        free = sum(max(0, machine.sampler.room) for machine in self._machines)
        return free - sum(len(task.samples) for task in self._queue)

    def begin(self, params: Any, *, step: int, **keyed: Any) -> None:
        """Write the version of a step, and let all samplers read it."""
        self._queue.clear()
        waits = 0.0
        if step != self._step:  # else a second session of the step, with the same weights
            waits = self._times.write + self._times.read
            if self._times.ahead:
                self.record.meter.seconds["version"], waits = waits, 0.0
            self._started, self._step = self._now, step
        for machine in self._machines:
            machine.tasks.clear()
            machine.attach(self.record)
            machine.sampler.begin(params, step=step, **keyed)
            machine.now = max(machine.now, self._now + waits)

    def submit(self, prompt: Prompt, samples: int, carried: PartialGroup | None = None) -> None:
        self._queue.append(_Task(prompt, tuple(range(samples)), self._now))

    def submit_each(self, prompt: Prompt, samples: Sequence[int]) -> None:
        self._queue += [_Task(prompt, (sample,), self._now) for sample in samples]

    def decode_burst(self, meanwhile: Callable[[], None] = lambda: None) -> Finished:
        meanwhile()
        if self.idle:
            return []
        machine = min(self._machines, key=self._next_moment)
        machine.now = self._next_moment(machine)
        if machine.now >= machine.preempted_at:
            return self._preempt(machine)
        self._lease(machine)
        finished = machine.burst()
        self._now = max(self._now, machine.now)
        meter = self.record.meter
        meter.wait("samplers", self._now - self._started + meter.seconds["version"])
        return finished

    def _next_moment(self, machine: _Machine) -> float:
        """Return when a sampler can decode its next burst; infinity without work for it."""
        if machine.tasks:
            return machine.now
        first = min((task.since for task in self._queue), default=math.inf)
        return max(machine.now, first)

    def _lease(self, machine: _Machine) -> None:
        for task in list(self._queue):
            if machine.sampler.room <= 0:
                return
            if task.since <= machine.now:
                self._queue.remove(task)
                machine.tasks.append(task)
                submit(machine.sampler, task.prompt, task.samples)

    def _preempt(self, machine: _Machine) -> Finished:
        moment, times = machine.preempted_at, self._times
        lost = [dataclasses.replace(t, since=moment + times.lease) for t in machine.tasks]
        self._queue = sorted(self._queue + lost, key=lambda task: task.prompt.index)
        machine.tasks.clear()
        machine.sampler.abandon()
        machine.now = max(machine.now, moment + times.restart + times.read)
        machine.survive(machine.now, times)
        self.preemptions += 1
        return []

    def abandon(self) -> None:
        self._queue.clear()
        for machine in self._machines:
            machine.tasks.clear()
            machine.sampler.abandon()

    def suspend(self) -> list[PartialGroup]:
        raise NotImplementedError("groups of samplers are not carried over")

    release = abandon

    def resident(self) -> Any:
        return None

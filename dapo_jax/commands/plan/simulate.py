"""Simulated training steps: the run's schedule on a virtual clock, with responses of a workload.

`dynamic_sampling.collect`, the scheduler, the engine, its page table and the packing are those of a
run. The compiled programs and the reward workers are replaced by their costs. So the counts are
those of a run with the same responses.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax

from dapo_jax.commands.plan.cost_model import (
    BACKGROUND,
    LEARNING,
    SCORE,
    UPDATE,
    Costs,
    Counts,
    Meter,
)
from dapo_jax.commands.plan.simulated_engine import (
    Burst,
    RolloutRecord,
    SimulatedJudge,
    SimulatedPrograms,
    SimulatedPrompts,
    Text,
)
from dapo_jax.commands.plan.workload import Workload
from dapo_jax.config.experiment import Config
from dapo_jax.learner.packing import assign_rows
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.rollout.carry_over import open_collection
from dapo_jax.rollout.dynamic_sampling import (
    INITIAL_KEPT_FRACTION,
    CollectionHooks,
    collect,
    seek,
)
from dapo_jax.rollout.sampling import SAMPLE_FOR_TRAINING
from dapo_jax.run.compute import open_engine, open_sampler
from dapo_jax.structs import CollectedGroups, Group, SamplerCounts, SamplingRule


def changed(config: Config, section: str, **values: Any) -> Config:
    """Return a copy of a config with other values in one section."""
    part = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **{section: part})


@dataclasses.dataclass(frozen=True)
class Step:
    """Counts and virtual seconds of a simulated step. Slots are those of all replicas.

    Its 13 attributes are the independent figures of a step; nothing else groups them.

    Attributes:
        seconds: by field of `Costs`, and `judge`: waiting for verdicts.
        counts: amounts by field of `Costs`.
        surplus: groups judged beyond the last used one; the next step samples them again.
        rounds: prompts requested per prompt of a batch.
        rows: packed rows of all updates.
        fill: fraction of the positions of all microbatches that hold a token.
    """

    seconds: Counts
    counts: Counts
    sampled: SamplerCounts
    slots: int
    bursts: list[Burst]
    asked: int
    judged: int
    kept: int
    surplus: int
    kept_tokens: int
    rounds: float
    rows: int
    fill: float

    @property
    def rollout_seconds(self) -> float:
        return sum(value for name, value in self.seconds.items() if name not in LEARNING)

    @property
    def update_seconds(self) -> float:
        """Seconds of score passes and updates."""
        return sum(self.seconds.get(name, 0.0) for name in LEARNING)

    @property
    def utilisation(self) -> float:
        """Fraction of decode steps times slots that sampled a token."""
        steps = self.slots * sum(burst.steps for burst in self.bursts)
        return sum(burst.busy_slot_steps for burst in self.bursts) / steps if steps else 0.0

    @property
    def tail_seconds(self) -> float:
        """Seconds of bursts with fewer than half of the slots busy, on average."""
        half = self.slots / 2
        return sum(b.seconds for b in self.bursts if b.busy_slot_steps < half * b.steps)

    @property
    def drawn_tokens(self) -> int:
        """Tokens of all responses, including those stopped or sampled again."""
        return self.sampled.drawn_tokens


class Simulation:
    """A run of simulated steps.

    Args:
        decoder: the policy's shape, for its cache.
        mesh: may have only named devices (`named_mesh`).
        reads: as for `SimulatedPrograms`.
    """

    def __init__(
        self,
        config: Config,
        decoder: DecoderConfig,
        mesh: jax.sharding.Mesh,
        workload: Workload,
        costs: Costs,
        *,
        reads: str = "auto",
    ):
        self._config, self._workload, self._costs = config, workload, costs
        programs = functools.partial(
            SimulatedPrograms,
            workload=workload,
            record=RolloutRecord(Meter(costs)),
            samples=config.rollout.samples_per_prompt,
            reads=reads,
        )
        engine = open_engine(config, decoder, mesh, mesh, Text(), programs=programs)
        self._programs = cast(SimulatedPrograms, engine.programs)
        self.sampler = open_sampler(engine, Text(), config.seed)
        self._prompts, self._carried = SimulatedPrompts(workload), ()
        self._number, self._kept_fraction = 0, INITIAL_KEPT_FRACTION

    def _begin(self) -> Meter:
        meter = Meter(self._costs)
        first_steps = {group.prompt.index: group.step for group in self._carried if group.tokens}
        self._programs.record = RolloutRecord(meter, self._number, first_steps)
        keyed = {"purpose": SAMPLE_FOR_TRAINING, "step": self._number}
        self.sampler.begin(None, rule=SamplingRule(), **keyed)
        self._number += 1
        return meter

    @property
    def position(self) -> int:
        """Index of the next prompt in the data."""
        return self._prompts.position

    def step(self, on_burst: Callable[[Any], None] = lambda _: None) -> Step:
        """Simulate the next step. Raises as `dynamic_sampling.collect` does."""
        meter, number = self._begin(), self._number - 1
        judge = SimulatedJudge(self._config, self._workload, self._programs.record)
        before = self._kept_fraction, number, self._carried, self._prompts.position
        collection = open_collection(self._config, *before)
        hooks = CollectionHooks(SimulatedJournal(meter).add, on_burst)
        collected = collect(collection, self._prompts, self.sampler, judge, hooks)
        meter.add_behind(host_listed=_tokens([*collected.judged, *collected.surplus]))
        seek(self._prompts, collected.next_position)
        self._kept_fraction, self._carried = collected.kept_fraction, collected.carried
        return self._summary(meter, collected)

    def sample(self, prompts: int) -> Step:
        """Sample all responses to a number of prompts, without filter and update."""
        meter = self._begin()
        for _ in range(prompts):
            self.sampler.submit(next(self._prompts), self._config.rollout.samples_per_prompt)
        while not self.sampler.idle:
            self.sampler.decode_burst()
        return self._summary(meter, None)

    def _summary(self, meter: Meter, collected: CollectedGroups | None) -> Step:
        groups = collected.groups if collected else []
        rows, fill = learn(self._config, groups, meter)
        meter.wait(BACKGROUND, meter.background_free)
        asked = collected.asked_prompts if collected else 0
        return Step(
            seconds=dict(meter.seconds),
            counts=dict(meter.counts),
            sampled=dataclasses.replace(self.sampler.counts),
            slots=self._config.sampler.slots,
            bursts=self._programs.record.bursts,
            asked=asked,
            judged=len(collected.judged) if collected else 0,
            kept=len(groups),
            surplus=len(collected.surplus) if collected else 0,
            kept_tokens=_tokens(groups),
            rounds=asked / self._config.rollout.prompts_per_step,
            rows=rows,
            fill=fill,
        )


def _tokens(groups: Sequence[Group]) -> int:
    return sum(len(response) for group in groups for response in group.completions)


class SimulatedJournal:
    """Files of judged groups, written in the background as `RolloutJournal` does."""

    def __init__(self, meter: Meter):
        self._meter, self._file_begins = meter, 0.0

    def add(self, groups: list[Group]) -> None:
        """Add groups to the file that is not being written yet, or start another."""
        meter = self._meter
        if groups and meter.now >= self._file_begins:
            self._file_begins = max(meter.now, meter.background_free)
            meter.add_behind(host_write=1)
        meter.add_behind(host_judged=_tokens(groups))


def learn(config: Config, groups: list[Group], meter: Meter) -> tuple[int, float]:
    """Add the costs of score passes and updates; return packed rows and their fill."""
    packing, algorithm, rollout = config.rows(), config.algorithm, config.rollout
    size = rollout.prompts_per_step // rollout.updates_per_rollout
    old = algorithm.scores_old_policy(math.ceil(len(groups) / size))
    passes = old + algorithm.reference + algorithm.critic
    models = 1 + algorithm.critic
    rows = places = tokens = 0
    for i in range(0, len(groups), size):
        minibatch = groups[i : i + size]
        lengths = [len(g.prompt.tokens) + len(c) for g in minibatch for c in g.completions]
        packed = len(assign_rows(lengths, packing.row_tokens))
        microbatches = math.ceil(packed / packing.rows_per_microbatch)
        used = microbatches * packing.rows_per_microbatch * packing.row_tokens
        rows += packed
        places += used
        tokens += sum(lengths)
        meter.add(score_pass=passes, score_token=passes * used)
        meter.add(update=models, update_token=models * used, host_packed=sum(lengths))
    for name, overlapped in (("host_weighed", SCORE), ("host_measured", UPDATE)):
        hidden = sum(meter.seconds.get(part, 0.0) for part in overlapped)
        meter.wait(name, meter.now + tokens * getattr(meter.costs, name) - hidden)
    return rows, tokens / places if places else 0.0

"""Simulated training steps: the real schedule on a virtual clock, responses from a workload.

`dynamic_sampling.collect`, `Scheduler`, `PolicyEngine`, its page table and the packing are those of
a run. Replaced are the compiled programs, by what they would have drawn and cost, and the judge's
workers. So the counts are those of a run with the same responses.
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
    """Copy of a config with other values in one section."""
    part = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **{section: part})


@dataclasses.dataclass(frozen=True)
class Step:
    """Counts and virtual seconds of a simulated step. Slots are those of all replicas.

    Attributes:
        seconds: by what was used (the fields of `Costs`), and `judge`: waiting for verdicts.
        counts: how much of each was used.
        bursts: of decoding, in order.
        surplus: groups judged beyond the last one that is used; asked again in the next step.
        rounds: prompts asked for, per prompt that is wanted.
        rows, fill: packed rows of all updates; the share of trained microbatches' places in them
            that holds a token.
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
        """Seconds of learning, scoring included."""
        return sum(self.seconds.get(name, 0.0) for name in LEARNING)

    @property
    def utilisation(self) -> float:
        """Share of decode-slot steps that drew a token, the tail included."""
        steps = self.slots * sum(burst.steps for burst in self.bursts)
        return sum(burst.busy_slot_steps for burst in self.bursts) / steps if steps else 0.0

    @property
    def tail_seconds(self) -> float:
        """Seconds of bursts in which less than half of the slots drew, on average."""
        half = self.slots / 2
        return sum(b.seconds for b in self.bursts if b.busy_slot_steps < half * b.steps)

    @property
    def drawn_tokens(self) -> int:
        """Tokens of all responses, also of those that were stopped or drawn again."""
        return self.sampled.drawn_tokens


class Simulation:
    """Simulated run: steps, one after the other.

    Args:
        config: of the run; its sections rollout, sampler, packing, algorithm and data's and
            reward's limits are read.
        decoder: the policy's shape, for its cache.
        mesh: only named devices will do (`named_mesh`).
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
        """Place in the data from which the next step asks."""
        return self._prompts.position

    def step(self, on_burst: Callable[[Any], None] = lambda _: None) -> Step:
        """The next step. Raises as `dynamic_sampling.collect` does."""
        meter, number = self._begin(), self._number - 1
        judge = SimulatedJudge(self._config, self._workload, self._programs.record)
        before = self._kept_fraction, number, self._carried, self._prompts.position
        collection = open_collection(self._config, *before)
        hooks = CollectionHooks(SimulatedJournal(meter).add, on_burst)
        collected = collect(collection, self._prompts, self.sampler, judge, hooks)
        meter.add_behind(host_listed=_tokens([*collected.judged, *collected.surplus]))
        seek(self._prompts, collected.next_position)
        self._kept_fraction, self._carried = collected.kept_fraction, collected.carried
        return self._summary(meter, collected.groups, collected)

    def sample(self, prompts: int) -> Step:
        """Draws every response to so many prompts, without filter and update."""
        meter = self._begin()
        for _ in range(prompts):
            self.sampler.submit(next(self._prompts), self._config.rollout.samples_per_prompt)
        while not self.sampler.idle:
            self.sampler.decode_burst()
        return self._summary(meter, [], None)

    def _summary(
        self, meter: Meter, groups: list[Group], collected: CollectedGroups | None
    ) -> Step:
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
    """Books files of judged groups, as `RolloutJournal` writes them in the background."""

    def __init__(self, meter: Meter):
        self._meter, self._file_begins = meter, 0.0

    def add(self, groups: list[Group]) -> None:
        """Groups for the file that has not begun, else for a new one."""
        meter = self._meter
        if groups and meter.now >= self._file_begins:
            self._file_begins = max(meter.now, meter.background_free)
            meter.add_behind(host_write=1)
        meter.add_behind(host_judged=_tokens(groups))


def learn(config: Config, groups: list[Group], meter: Meter) -> tuple[int, float]:
    """Books score pass and updates of groups; returns packed rows and their fill."""
    packing, algorithm, rollout = config.rows(), config.algorithm, config.rollout
    share, models = rollout.prompts_per_step // rollout.updates_per_rollout, 1 + algorithm.critic
    old = algorithm.old_logprobs == "recompute" and (
        len(groups) > share
        or algorithm.kl == "reward"
        or algorithm.trained_responses == "pairs"
        or algorithm.distillation == "reverse"
    )
    passes, rows, places, tokens = old + algorithm.reference + algorithm.critic, 0, 0, 0
    for i in range(0, len(groups), share):
        part = groups[i : i + share]
        lengths = [len(g.prompt.tokens) + len(c) for g in part for c in g.completions]
        packed = len(assign_rows(lengths, packing.row_tokens))
        microbatches = math.ceil(packed / packing.rows_per_microbatch)
        used = microbatches * packing.rows_per_microbatch * packing.row_tokens
        rows, places, tokens = rows + packed, places + used, tokens + sum(lengths)
        meter.add(score_pass=passes, score_token=passes * used)
        meter.add(update=models, update_token=models * used, host_packed=sum(lengths))
    for name, beside in (("host_weighed", SCORE), ("host_measured", UPDATE)):
        hidden = sum(meter.seconds.get(part, 0.0) for part in beside)
        meter.wait(name, meter.now + tokens * getattr(meter.costs, name) - hidden)
    return rows, tokens / places if places else 0.0

"""Simulated training steps: the run's schedule on a virtual clock, with responses of a workload.

`dynamic_sampling.collect`, the scheduler, the engine, its page table and the packing are those of a
run. The compiled programs and the reward workers are replaced by their costs. So the counts are
those of a run with the same responses.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from dapo_jax.config.algorithm import OF_GREEDY
from dapo_jax.config.experiment import Config, Reward
from dapo_jax.extras.plan.workload import Drawn, Workload
from dapo_jax.learner.minibatches import choose_packing, split_groups
from dapo_jax.learner.packing import assign_rows, prompt_groups
from dapo_jax.model.caches import DecodeState, PageCache, Prefix, PromptCache, StateCache
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.rollout.carry_over import open_collection
from dapo_jax.rollout.dynamic_sampling import (
    INITIAL_KEPT_FRACTION,
    collect,
    seek,
)
from dapo_jax.rollout.engine_programs import EngineShape, Starts
from dapo_jax.rollout.sampling import SAMPLE_FOR_TRAINING
from dapo_jax.run.compute import open_engine, open_sampler
from dapo_jax.runtime import sharding
from dapo_jax.types.structs import (
    Completion,
    Group,
    Prompt,
    SamplerCounts,
    SamplingRule,
    Verdict,
)

Counts = dict[str, float]  # amount used of each field of `Costs`


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds per unit. Replicas decode at the same time, so one replica's work counts.

    Packed tokens of score passes and updates include padding.
    """

    load: float = 0.0  # the weights, once per rollout
    prefill_token: float = 0.0  # of a replica's padded prompts
    burst: float = 0.0
    decode_step: float = 0.0
    decode_products: float = 0.0  # per decode step, as the two below
    decode_exchange: float = 0.0
    decode_draw: float = 0.0
    slot_step: float = 0.0  # per slot of a replica in a decode step, busy or not
    read_token: float = 0.0  # per cached token that a replica's attention reads in a decode step
    response: float = 0.0  # the host's work on a finished response
    score_token: float = 0.0
    update: float = 0.0
    update_token: float = 0.0
    host_slot: float = 0.0  # per slot of all replicas in a burst
    host_packed: float = 0.0  # per token of a trained response
    host_weighed: float = 0.0  # the same, beside the score pass
    host_measured: float = 0.0  # the same, beside the updates


LEARNING = "score_token update update_token host_packed host_weighed host_measured version".split()
HOSTS = ("host_slot", "host_packed", "host_weighed", "host_measured")

# Seconds of host work, fitted to `python tests/benchmarks/hosts.py`, a step of 8,192 responses of
# 4k tokens on an AMD EPYC (docs/performance.md). Decoding texts overlaps the next burst, and files
# are written in a thread: both cost nothing.
HOST_COSTS = {
    "host_slot": 9.2e-7,  # scheduling, refilling, filter
    "host_packed": 1.22e-7,  # packing into rows
    "host_weighed": 1.9e-7,  # rewards to loss weights
    "host_measured": 2.2e-7,  # metrics and traces
}


class Meter:
    """Virtual clock that counts amounts and adds up their costs, each by field of `Costs`."""

    def __init__(self, costs: Costs):
        self.costs = costs
        self.counts: Counts = collections.defaultdict(float)
        self.seconds: Counts = collections.defaultdict(float)  # of the counts, and of waiting

    @property
    def now(self) -> float:
        return sum(self.seconds.values())

    def add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.counts[name] += amount
            self.seconds[name] += amount * getattr(self.costs, name)

    def wait(self, name: str, until: float) -> None:
        """Wait until a time of the clock, under a separate name."""
        self.seconds[name] += max(0.0, until - self.now)


class Burst(NamedTuple):
    """Decode steps, slots and seconds of one call of `generate`."""

    steps: int
    running: int  # slots that drew its first token
    busy_slot_steps: int
    seconds: float


@dataclasses.dataclass
class RolloutRecord:
    """Simulated rollout step that programs and judge read and write."""

    workload: Workload
    meter: Meter
    step: int = 0
    first_steps: dict[int, int] = dataclasses.field(default_factory=dict)  # of groups, by index
    bursts: list[Burst] = dataclasses.field(default_factory=list)

    def draw(self, index: int, samples: int) -> Drawn:
        """Return the group of a prompt."""
        return self.workload.draw(self.first_steps.get(index, self.step), index, samples)


class Text:
    """Tokenizer of responses that have a length and an end, and no text."""

    pad_id, end_ids = 0, (1,)

    def decode_all(self, rows: list[list[int]]) -> list[str]:
        return [""] * len(rows)


class SimulatedPrograms:
    """`rollout.engine_programs.EnginePrograms` that only count; caches are shapes.

    A simulated prompt's tokens are its position in the data. In a decode step, attention reads what
    the layout reads: all positions of all slots, or with a kernel for it only stored tokens.
    """

    def __init__(
        self,
        shape: EngineShape,
        mesh: jax.sharding.Mesh,
        layout: Any,
        trainer: Any,
        *,
        record: RolloutRecord,
        samples: int,
    ):
        self.record = record
        self._config, self._settings, self._layout = shape.config, shape.settings, layout
        self._samples, self._slots = samples, shape.settings.slots
        self._replicas = sharding.shards(mesh, "batch", sharding.DECODING)
        self._lengths = np.zeros(self._slots, np.int64)
        self._ends = np.zeros(self._slots, bool)
        self._reads_window = not layout.by_kernel

    def resident(self) -> None: ...

    def load(self, params: Any) -> None:
        self.record.meter.add(load=1)

    def calibrate(self, params: Any) -> None: ...

    def split(self, array: np.ndarray) -> np.ndarray:
        return array

    def empty(self, *, window: int) -> DecodeState:
        zeros = np.zeros(self._slots, np.int64)
        arrays: dict[str, Any] = dict.fromkeys(("last_token", "length", "generated"), zeros)
        arrays |= {
            "caches": jax.eval_shape(lambda: self._layout.empty(window)),
            "active": np.zeros(self._slots, bool),
            "tokens": np.zeros((self._slots, 1), np.int32),
            "logprobs": np.zeros((self._slots, 1), np.float32),
            "busy_slot_steps": np.int64(0),
            "slot_steps": np.int64(0),
        }
        return DecodeState(**arrays, tables=None, key=cast(Any, None))

    def grow(self, state: DecodeState, *, window: int) -> DecodeState:
        return state.replace(caches=jax.eval_shape(lambda: self._layout.empty(window)))

    def prefill(self, params: Any, tokens: Any, lengths: Any, keys: Any, drawn: Any) -> Prefix:
        self.record.meter.add(prefill_token=tokens.size / self._replicas)
        shape = (*tokens.shape, self._config.kv_heads, self._config.head_dim)
        kept: Any = jax.ShapeDtypeStruct(shape, self._config.dtype)
        return Prefix((PromptCache(kept, kept),), tokens[:, 0], lengths, keys, drawn)

    def insert(self, prefix: Prefix, state: DecodeState, starts: Starts) -> DecodeState:
        real = starts.slots < self._slots
        slots, rows, samples = (array[real] for array in starts[:3])
        for slot, row, sample in zip(slots, rows, samples, strict=True):
            drawn = self.record.draw(int(prefix.last_token[row]), self._samples)
            self._lengths[slot] = drawn.tokens[sample]
            self._ends[slot] = not drawn.truncated[sample]
        length, generated, active = map(np.copy, (state.length, state.generated, state.active))
        length[slots] = prefix.true_length[rows] - 1
        generated[slots] = prefix.drawn[rows]
        active[slots] = True
        return state.replace(length=length, generated=generated, active=active)

    def feed(self, state: DecodeState, slots: Any, tokens: Any, known: Any) -> DecodeState:
        raise NotImplementedError("simulated trajectories have one turn")

    def stop(self, state: DecodeState, stopped: np.ndarray) -> DecodeState:
        active = state.active.copy()
        active[stopped[stopped < self._slots]] = False
        return state.replace(active=active)

    def generate(self, params: Any, state: DecodeState, *, rule: SamplingRule, columns: Any):
        left = np.where(state.active, self._lengths - state.generated, 0)
        steps = self._settings.burst_tokens
        if self._replicas == 1:  # which stops early
            steps = min(steps, int(left.max()))
        drawn = np.minimum(left, steps)
        self._record_burst(state, steps, drawn, columns)
        state = state.replace(
            length=state.length + drawn,
            generated=state.generated + drawn,
            active=state.active & (left > drawn),
            busy_slot_steps=state.busy_slot_steps + drawn.sum(),
            slot_steps=state.slot_steps + steps * self._slots,
        )
        return state, None

    def _record_burst(
        self, state: DecodeState, steps: int, drawn: np.ndarray, columns: Any
    ) -> None:
        """Add the costs of a burst: every replica waits for the one that reads most."""
        meter = self.record.meter
        each, launched = self._slots // self._replicas, meter.now
        # With the i-th token, i - 1 drawn ones and what was there before.
        tokens = drawn * state.length + drawn * (drawn + 1) // 2
        existing = tokens.reshape(self._replicas, each).sum(axis=1).max()

        def read_of(cache: Any, reach: int | None) -> int:
            paged = isinstance(cache, PageCache)
            if not self._reads_window and (paged or reach is None):
                return existing
            window = columns * self._settings.page_tokens if paged else cache.values.shape[2]
            return steps * each * window

        pairs = zip(state.caches, self._config.reaches, strict=True)
        reads = [read_of(*pair) for pair in pairs if not isinstance(pair[0], StateCache)]
        read = sum(reads) / len(reads)
        meter.add(burst=1, slot_step=steps * each, read_token=read, host_slot=self._slots)
        phases = "decode_step decode_products decode_exchange decode_draw".split()
        meter.add(**dict.fromkeys(phases, steps))
        burst = Burst(steps, int(state.active.sum()), int(drawn.sum()), meter.now - launched)
        self.record.bursts.append(burst)

    def rows(self, array: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Return rows of the token that each response ends with."""
        last = self._ends[slots].astype(array.dtype)[:, None]
        return np.broadcast_to(last, (len(slots), self._settings.max_response_tokens))


class SimulatedPrompts:
    """Endless data order of a workload."""

    def __init__(self, workload: Workload):
        self.position, self._workload = 0, workload

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        index, self.position = self.position, self.position + 1
        tokens = np.full(self._workload.prompt_tokens(index), index, np.int32)
        return Prompt(index, str(index), "", tokens, "", "simulated", digest=str(index))


class SimulatedJudge:
    """Verdicts of the workload, right or wrong; they take no time."""

    def __init__(self, config: Config, record: RolloutRecord):
        self._config = dataclasses.replace(config, reward=Reward())
        self._record = record

    def submit(self, prompt: Prompt, completions: tuple[Completion, ...]) -> Group:
        self._record.meter.add(response=len(completions))
        drawn = self._record.draw(prompt.index, len(completions))
        verdicts = tuple(Verdict(bool(right), None) for right in drawn.correct)
        return reward_group(self._config, prompt, completions, verdicts)

    def groups(self, pending: list[Group]) -> list[Group]:
        return pending


@dataclasses.dataclass(frozen=True)
class Step:
    """Counts and virtual seconds of a simulated step, both by field of `Costs`."""

    seconds: Counts
    counts: Counts
    sampled: SamplerCounts
    slots: int  # of all replicas
    bursts: list[Burst]
    asked: int = 0
    judged: int = 0
    kept: int = 0
    surplus: int = 0  # groups judged beyond the last used one
    kept_tokens: int = 0
    rows: int = 0  # of all updates
    fill: float = 0.0  # fraction of the positions of all microbatches that hold a token

    @property
    def rollout_seconds(self) -> float:
        return sum(value for name, value in self.seconds.items() if name not in LEARNING)

    @property
    def update_seconds(self) -> float:
        """Seconds of score passes, updates, and of a version for samplers that read it ahead."""
        return sum(self.seconds.get(name, 0.0) for name in LEARNING)

    @property
    def utilisation(self) -> float:
        """Fraction of decode steps times slots that sampled a token."""
        steps = self.slots * sum(burst.steps for burst in self.bursts)
        return sum(burst.busy_slot_steps for burst in self.bursts) / steps if steps else 0.0

    @property
    def drawn_tokens(self) -> int:
        """Tokens of all responses, including those stopped or sampled again."""
        return self.sampled.drawn_tokens


def simulate_sampler(
    config: Config, decoder: DecoderConfig, mesh: jax.sharding.Mesh, record: RolloutRecord
) -> tuple[Any, SimulatedPrograms]:
    """Return a run's sampler on a mesh, and its programs, which write to `record`."""
    samples = config.rollout.samples_per_prompt
    programs = functools.partial(SimulatedPrograms, record=record, samples=samples)
    engine = open_engine(config, decoder, mesh, mesh, Text(), programs=programs)
    return open_sampler(engine, Text(), config.seed), cast(SimulatedPrograms, engine.programs)


class Simulation:
    """Run of simulated steps; the devices of its mesh need only names.

    `remote` is a sampler that samples instead of these devices, such as a `fleet.Fleet`.
    """

    def __init__(
        self,
        config: Config,
        decoder: DecoderConfig,
        mesh: jax.sharding.Mesh,
        workload: Workload,
        costs: Costs,
        remote: Any = None,
    ):
        self._config, self._workload, self._costs = config, workload, costs
        self._decoder = decoder
        self._slots = config.sampler.slots
        if remote:
            self.sampler, self._programs, self._slots = remote, remote, remote.slots
        else:
            record = RolloutRecord(workload, Meter(costs))
            self.sampler, self._programs = simulate_sampler(config, decoder, mesh, record)
        self._prompts, self._carried = SimulatedPrompts(workload), ()
        self._number, self._kept_fraction = 0, INITIAL_KEPT_FRACTION

    def _begin(self) -> RolloutRecord:
        first_steps = {group.prompt.index: group.step for group in self._carried if group.tokens}
        record = RolloutRecord(self._workload, Meter(self._costs), self._number, first_steps)
        self._programs.record = record
        self._begin_sampling(self._number)
        self._number += 1
        return record

    def _begin_sampling(self, step: int) -> None:
        self.sampler.begin(None, rule=SamplingRule(), purpose=SAMPLE_FOR_TRAINING, step=step)

    def _sample_all(self, prompts: Iterable[Prompt], samples: int) -> None:
        for prompt in prompts:
            self.sampler.submit(prompt, samples)
        while not self.sampler.idle:
            self.sampler.decode_burst()

    @property
    def position(self) -> int:
        """Index of the next prompt in the data."""
        return self._prompts.position

    def step(self) -> Step:
        """Simulate the next step. Raises as `dynamic_sampling.collect` does."""
        record = self._begin()
        meter = record.meter
        judge = SimulatedJudge(self._config, record)
        before = self._kept_fraction, record.step, self._carried, self.position
        collection = open_collection(self._config, *before)
        collected = collect(collection, self._prompts, self.sampler, judge)
        counts = dataclasses.replace(self.sampler.counts)
        if self._config.algorithm.advantage in OF_GREEDY:
            self._begin_sampling(record.step)
            self._sample_all((group.prompt for group in collected.groups), 1)
            counts = counts + self.sampler.counts
        seek(self._prompts, collected.next_position)
        self._kept_fraction, self._carried = collected.kept_fraction, collected.carried
        rows, fill = learn(self._config, self._decoder, collected.groups, meter)
        return dataclasses.replace(
            self._sampled(record, counts),
            asked=collected.asked_prompts,
            judged=len(collected.judged),
            kept=len(collected.groups),
            surplus=len(collected.surplus),
            kept_tokens=sum(len(c) for group in collected.groups for c in group.completions),
            rows=rows,
            fill=fill,
        )

    def sample(self, prompts: int) -> Step:
        """Sample all responses to a number of prompts, without filter and update."""
        record = self._begin()
        self._sample_all(islice(self._prompts, prompts), self._config.rollout.samples_per_prompt)
        return self._sampled(record, dataclasses.replace(self.sampler.counts))

    def _sampled(self, record: RolloutRecord, counts: SamplerCounts) -> Step:
        return Step(
            seconds=dict(record.meter.seconds),
            counts=dict(record.meter.counts),
            sampled=counts,
            slots=self._slots,
            bursts=record.bursts,
        )


def learn(
    config: Config, decoder: DecoderConfig, groups: list[Group], meter: Meter
) -> tuple[int, float]:
    """Add the costs of score passes and updates; return packed rows and their fill."""
    algorithm = config.algorithm
    compiled = dataclasses.replace(config, packing=config.rows())
    minibatches = split_groups(config, groups)
    packing = choose_packing(compiled, decoder, 1, minibatches)
    scored = algorithm.scored_minibatches(len(minibatches))
    models = 1 + algorithm.critic
    rows = places = tokens = 0
    for u, segments in enumerate(minibatches):
        passes = (u in scored) + algorithm.reference + algorithm.critic
        together = prompt_groups(segments, packing.share_prompts)
        lengths = [group.tokens for group in together]
        packed = len(assign_rows(together, packing.row_tokens))
        microbatches = math.ceil(packed / packing.rows_per_microbatch)
        used = microbatches * packing.rows_per_microbatch * packing.row_tokens
        rows += packed
        places += used
        tokens += sum(lengths)
        meter.add(score_token=passes * used, host_packed=sum(lengths))
        meter.add(update=models, update_token=models * used)
    seconds, costs = meter.seconds, meter.costs
    weighed = tokens * costs.host_weighed - seconds["score_token"]
    measured = tokens * costs.host_measured - seconds["update"] - seconds["update_token"]
    meter.wait("host_weighed", meter.now + weighed)
    meter.wait("host_measured", meter.now + measured)
    return rows, tokens / places if places else 0.0

"""Stand-ins for the programs, the data and the judge of a run that is only simulated."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from dapo_jax.commands.plan.cost_model import Meter
from dapo_jax.commands.plan.workload import Workload
from dapo_jax.config.experiment import Config, Reward
from dapo_jax.config.sections import Mesh
from dapo_jax.model.caches import DecodeState, PageCache, Prefix, PromptCache
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.rollout.engine_programs import EngineShape, Starts
from dapo_jax.run.compute import mesh_sizes
from dapo_jax.runtime import sharding
from dapo_jax.structs import Completion, Group, Prompt, SamplingRule, Verdict


@dataclasses.dataclass(frozen=True)
class _Chip:
    """Device that need not be there."""

    id: int
    platform: str
    process_index: int = 0


def named_mesh(settings: Mesh, platform: str, chips: int) -> jax.sharding.Mesh:
    """Mesh of the run's shape whose devices are only named; nothing can be computed on it.

    Raises `ConfigError` where the product is not the number of chips.
    """
    shape = sharding.mesh_shape(**mesh_sizes(settings), devices=chips)
    devices = np.empty(chips, object)
    devices[:] = [_Chip(i, platform) for i in range(chips)]
    return jax.sharding.Mesh(devices.reshape(shape), sharding.AXES)


class Burst(NamedTuple):
    """Decode steps, slots and seconds of one call of `generate`."""

    steps: int
    running: int  # slots that drew its first token
    busy_slot_steps: int
    seconds: float


class Text:
    """Tokenizer of responses that have a length and an end, and no text."""

    pad_id, end_ids = 0, (1,)

    def decode_all(self, rows: list[list[int]]) -> list[str]:
        return [""] * len(rows)


@dataclasses.dataclass
class RolloutRecord:
    """Simulated rollout step that the programs read and write.

    Attributes:
        meter: the clock.
        step: number of the step, for the workload.
        first_steps: the step that started a group, by position in the data, if it was earlier.
        bursts: of decoding, in order.
    """

    meter: Meter
    step: int = 0
    first_steps: dict[int, int] = dataclasses.field(default_factory=dict)
    bursts: list[Burst] = dataclasses.field(default_factory=list)


class SimulatedPrograms:
    """`rollout.engine_programs.Programs` that only count, with host arrays and shapes of caches.

    A simulated prompt's tokens are its position in the data.

    Args:
        shape, mesh, layout, trainer: as for `EnginePrograms`.
        samples: responses of a group.
        reads: part of the cache that attention reads in a decode step: 'window' (all positions of
            all slots), 'existing' (only stored tokens), or 'auto': as the layout's attention.

    Attributes:
        record: the current step; a simulation replaces it before each step.
    """

    def __init__(
        self,
        shape: EngineShape,
        mesh: jax.sharding.Mesh,
        layout: Any,
        trainer: Any,
        *,
        workload: Workload,
        record: RolloutRecord,
        samples: int,
        reads: str,
    ):
        self.record = record
        self._config = shape.config
        self._layout = layout
        self._settings = shape.settings
        self._workload, self._samples, self._slots = workload, samples, shape.settings.slots
        self._replicas = sharding.shards(mesh, "batch", sharding.DECODING)
        self._lengths = np.zeros(self._slots, np.int64)
        self._ends = np.zeros(self._slots, bool)
        kernel = getattr(layout.attend, "kernel", False)
        self._reads_window = reads == "window" or (reads == "auto" and not kernel)
        self._reads_existing = reads == "existing"  # rings of sliding layers too

    def resident(self) -> None:
        """Return None: nothing is loaded."""

    def load(self, params: Any) -> None:
        self.record.meter.add(load=1)

    def calibrate(self, params: Any) -> None:
        """Costs as little as it takes beside a rollout: nothing."""

    def split(self, array: np.ndarray) -> np.ndarray:
        return array

    def empty(self, *, window: int) -> DecodeState:
        zeros = np.zeros(self._slots, np.int64)
        arrays: dict[str, Any] = dict(  # of the host, where the engine's are the devices'
            caches=jax.eval_shape(lambda: self._layout.empty(window)),
            tables=None,
            last_token=zeros,
            length=zeros,
            generated=zeros,
            active=np.zeros(self._slots, bool),
            key=None,
            tokens=np.zeros((self._slots, 1), np.int32),
            logprobs=np.zeros((self._slots, 1), np.float32),
            busy_slot_steps=np.int64(0),
            slot_steps=np.int64(0),
        )
        return DecodeState(**arrays)

    def grow(self, state: DecodeState, *, window: int) -> DecodeState:
        return state.replace(caches=jax.eval_shape(lambda: self._layout.empty(window)))

    def prefill(self, params: Any, tokens: Any, lengths: Any, keys: Any, drawn: Any) -> Prefix:
        self.record.meter.add(prefill_call=1, prefill_token=tokens.size / self._replicas)
        shape = (*tokens.shape, self._config.kv_heads, self._config.head_dim)
        kept: Any = jax.ShapeDtypeStruct(shape, self._config.dtype)
        return Prefix((PromptCache(kept, kept),), tokens[:, 0], lengths, keys, drawn)

    def insert(self, prefix: Prefix, state: DecodeState, starts: Starts) -> DecodeState:
        real = starts.slots < self._slots
        slots, rows, samples = (array[real] for array in starts[:3])
        self.record.meter.add(insert_call=1, insert=len(slots))
        length, generated, active = (
            array.copy() for array in (state.length, state.generated, state.active)
        )
        for slot, row, sample in zip(slots, rows, samples, strict=True):
            index = int(prefix.last_token[row])
            step = self.record.first_steps.get(index, self.record.step)
            drawn = self._workload.draw(step, index, self._samples)
            self._lengths[slot] = drawn.tokens[sample]
            self._ends[slot] = not drawn.truncated[sample]
        length[slots], active[slots] = prefix.true_length[rows] - 1, True
        generated[slots] = prefix.drawn[rows]
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
        self._book(state, steps, drawn, columns)
        state = state.replace(
            length=state.length + drawn,
            generated=state.generated + drawn,
            active=state.active & (left > drawn),
            busy_slot_steps=state.busy_slot_steps + drawn.sum(),
            slot_steps=state.slot_steps + steps * self._slots,
        )
        return state, None

    def _book(self, state: DecodeState, steps: int, drawn: np.ndarray, columns: Any) -> None:
        """Books a burst: every replica waits for the one that reads most."""
        meter = self.record.meter
        each, meter.launched = self._slots // self._replicas, meter.now
        # With the i-th token, i - 1 drawn ones and what was there before.
        tokens = drawn * state.length + drawn * (drawn + 1) // 2
        existing = tokens.reshape(self._replicas, each).sum(axis=1).max()

        def read_of(cache: Any, reach: int | None) -> int:
            paged = isinstance(cache, PageCache)
            if not self._reads_window and (paged or reach is None or self._reads_existing):
                return existing
            window = columns * self._settings.page_tokens if paged else cache.values.shape[2]
            return steps * each * window

        read = sum(map(read_of, state.caches, self._config.reaches)) / len(state.caches)
        meter.add(burst=1, slot_step=steps * each, read_token=read, host_slot=self._slots)
        phases = "decode_step decode_products decode_exchange decode_draw".split()
        meter.add(**dict.fromkeys(phases, steps))
        running, seconds = int(state.active.sum()), meter.now - meter.launched
        self.record.bursts.append(Burst(steps, running, int(drawn.sum()), seconds))

    def rows(self, array: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Rows of a drawn token: the one that the response ends with, over and over."""
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
        return Prompt(index, str(index), "", tokens, "", "simulated")


class PendingVerdicts(NamedTuple):
    """Group on its way through the simulated workers, and the second when they have read it."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    ready: float


class SimulatedJudge:
    """Verdicts from the workload, by workers that take their time beside decoding."""

    def __init__(self, config: Config, workload: Workload, record: RolloutRecord):
        # Right or wrong is all that a workload says.
        self._config = dataclasses.replace(config, reward=Reward())
        self._workers = config.reward.workers
        self._workload, self._meter, self._record = workload, record.meter, record
        self._free = 0.0

    def submit(self, prompt: Prompt, completions: tuple[Completion, ...]) -> PendingVerdicts:
        self._meter.add(response=len(completions))
        seconds = len(completions) * self._meter.costs.judged / self._workers
        self._free = max(self._free, self._meter.launched) + seconds
        return PendingVerdicts(prompt, completions, self._free)

    def groups(self, pending: list[PendingVerdicts]) -> list[Group]:
        for group in pending:
            self._meter.wait("judge", group.ready)
        self._meter.launched = self._meter.now
        return [self._judged(group.prompt, group.completions) for group in pending]

    def _judged(self, prompt: Prompt, completions: tuple[Completion, ...]) -> Group:
        step = self._record.first_steps.get(prompt.index, completions[0].policy_step)
        drawn = self._workload.draw(step, prompt.index, len(completions))
        verdicts = tuple(Verdict(bool(right), None) for right in drawn.correct)
        return reward_group(self._config, prompt, completions, verdicts)

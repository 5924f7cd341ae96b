"""What stands in for the programs, the data and the judge of a run that is only simulated."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from dapo_jax.commands.plan.cost_model import Meter
from dapo_jax.commands.plan.workload import Workload
from dapo_jax.config.compute import Mesh
from dapo_jax.config.experiment import Config, Reward
from dapo_jax.model.caches import DecodeState, PageCache, Prefix, PromptCache
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.sampling import SamplingRule
from dapo_jax.runtime.sharding import AXES, mesh_shape
from dapo_jax.structs import Completion, Group, Prompt, Verdict


@dataclasses.dataclass(frozen=True)
class _Chip:
    """A device that need not be there."""

    id: int
    platform: str
    process_index: int = 0


def named_mesh(settings: Mesh, platform: str, chips: int) -> jax.sharding.Mesh:
    """A mesh of the run's shape whose devices are only named; nothing can be computed on it.

    Raises `ConfigError` where the product is not the number of chips.
    """
    sizes = settings.data, settings.fsdp, settings.tensor
    shape = mesh_shape(*sizes, chips, decode_tensor=settings.decode_tensor)
    devices = np.empty(chips, object)
    devices[:] = [_Chip(i, platform) for i in range(chips)]
    return jax.sharding.Mesh(devices.reshape(shape), AXES)


class Burst(NamedTuple):
    """One call of `generate`."""

    steps: int
    running: int  # slots that drew its first token
    busy_slot_steps: int
    seconds: float


class Text:
    """A tokenizer of responses that have a length and an end, and no text."""

    pad_id, end_ids = 0, (1,)

    def decode(self, ids: list[int]) -> str:
        return ""


class SimulatedEngine(PolicyEngine):
    """The engine with its programs replaced. A simulated prompt's tokens are its place in the data.

    Args:
        reads: what attention reads of the cache in a decode step: 'window' (all places of all
            slots), 'existing' (tokens that are there), or 'auto': as the store's attention does.

    Attributes:
        step: of the rollout, for the workload.
        begun: the step that began a group, by its place in the data, where that was an earlier one.
        bursts: since it was last emptied.
        meter: the clock; replaced at every step.
    """

    def __init__(
        self,
        config: Config,
        decoder: DecoderConfig,
        mesh: jax.sharding.Mesh,
        workload: Workload,
        meter: Meter,
        reads: str,
    ):
        self.step, self.begun, self.bursts = 0, {}, []
        self._workload, self.meter, self._samples = (
            workload,
            meter,
            config.rollout.samples_per_prompt,
        )
        super().__init__(
            decoder,
            mesh,
            slots=config.sampler.slots,
            burst_tokens=config.sampler.burst_tokens,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=config.sampler.max_response_tokens,
            first_window_tokens=config.sampler.first_window_tokens,
            insert_width=min(
                config.sampler.slots, max(self._samples, config.evaluation.samples_per_problem)
            ),
            tokenizer=Text(),
            settings=config.sampler,
        )
        kernel = getattr(self.store.attend, "kernel", False)
        self._reads_window = reads == "window" or (reads == "auto" and not kernel)
        self._page_tokens = config.sampler.page_tokens

    def _compile(self, *_: Any) -> None:
        """Nothing is compiled; these stand where programs would."""
        self._lengths = np.zeros(self._slots, np.int64)
        self._ends = np.zeros(self._slots, bool)

    def load_params(self, params: Any) -> None:
        self.meter.add(load=1)

    def hold(self) -> dict[str, jax.Array]:
        """There are no parameters."""
        return {}

    def _over_replicas(self, array: np.ndarray) -> np.ndarray:
        return array

    def _empty(self, *, window: int) -> DecodeState:
        """Every slot free; caches are shapes."""
        zeros, size = np.zeros(self._slots, np.int64), (self._slots, self.max_response_tokens)
        arrays: dict[str, Any] = dict(  # of the host, where the engine's are the devices'
            caches=jax.eval_shape(lambda: self.store.empty(window)),
            tables=None,
            last_token=zeros,
            length=zeros,
            generated=zeros,
            active=np.zeros(self._slots, bool),
            key=None,
            tokens=np.broadcast_to(np.int32(0), size),
            logprobs=np.broadcast_to(np.float32(0), size),
            busy_slot_steps=np.int64(0),
            slot_steps=np.int64(0),
        )
        return DecodeState(**arrays)

    def _grow(self, state: DecodeState, *, window: int) -> DecodeState:
        return state.replace(caches=jax.eval_shape(lambda: self.store.empty(window)))

    def _prefill(self, params: Any, tokens: Any, lengths: Any, keys: Any, drawn: Any) -> Prefix:
        self.meter.add(prefill_call=1, prefill_token=tokens.size / self.replicas)
        shape = (*tokens.shape, self.config.kv_heads, self.config.head_dim)
        kept: Any = jax.ShapeDtypeStruct(shape, self.config.dtype)
        return Prefix((PromptCache(kept, kept),), tokens[:, 0], lengths, keys, drawn)

    def _insert(self, prefix, state, slots, rows, samples, fills) -> DecodeState:
        real = slots < self._slots
        slots, rows, samples = slots[real], rows[real], samples[real]
        self.meter.add(insert_call=1, insert=len(slots))
        length, generated, active = (
            array.copy() for array in (state.length, state.generated, state.active)
        )
        for slot, row, sample in zip(slots, rows, samples, strict=True):
            index = int(prefix.last_token[row])
            drawn = self._workload.draw(self.begun.get(index, self.step), index, self._samples)
            self._lengths[slot] = drawn.tokens[sample]
            self._ends[slot] = not drawn.truncated[sample]
        length[slots], active[slots] = prefix.true_length[rows] - 1, True
        generated[slots] = prefix.drawn[rows]
        return state.replace(length=length, generated=generated, active=active)

    def _stop(self, state: DecodeState, stopped: np.ndarray) -> DecodeState:
        active = state.active.copy()
        active[stopped[stopped < self._slots]] = False
        return state.replace(active=active)

    def _generate(self, params: Any, state: DecodeState, *, rule: SamplingRule, columns: Any):
        left = np.where(state.active, self._lengths - state.generated, 0)
        steps = self._burst_tokens
        if self.replicas == 1:  # which stops early
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
        """What a burst costs: every replica waits for the one that reads most."""
        each, before = self._slots // self.replicas, self.meter.now
        if self._reads_window:
            cache = state.caches[0]
            paged = isinstance(cache, PageCache)
            window = columns * self._page_tokens if paged else cache.values.shape[2]
            read = steps * each * window
        else:  # with the i-th token, i - 1 drawn ones and what was there before
            tokens = drawn * state.length + drawn * (drawn + 1) // 2
            read = tokens.reshape(self.replicas, each).sum(axis=1).max()
        self.meter.add(burst=1, decode_step=steps, slot_step=steps * each, read_token=read)
        running, seconds = int(state.active.sum()), self.meter.now - before
        self.bursts.append(Burst(steps, running, int(drawn.sum()), seconds))

    def _rows(self, array: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """What was drawn: nothing but the token that the response ends with, over and over."""
        last = self._ends[slots].astype(array.dtype)[:, None]
        return np.broadcast_to(last, (len(slots), array.shape[1]))


class SimulatedPrompts:
    """The endless data order of a workload."""

    def __init__(self, workload: Workload):
        self.position, self._workload = 0, workload

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        index, self.position = self.position, self.position + 1
        tokens = np.full(self._workload.prompt_tokens(index), index, np.int32)
        return Prompt(index, str(index), "", tokens, "", "simulated")


class Judged(NamedTuple):
    """A group on its way through the simulated workers, and the second when they have read it."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    ready: float


class SimulatedJudge:
    """Verdicts from the workload, by workers that take their time beside decoding."""

    def __init__(self, config: Config, workload: Workload, meter: Meter, begun: dict[int, int]):
        # Right or wrong is all that a workload says.
        self._config = dataclasses.replace(config, reward=Reward())
        self._workers = config.reward.workers
        self._workload, self._meter, self._begun, self._free = workload, meter, begun, 0.0

    def submit(self, prompt: Prompt, completions: tuple[Completion, ...]) -> Judged:
        self._meter.add(response=len(completions))
        took = len(completions) * self._meter.costs.judged / self._workers
        self._free = max(self._free, self._meter.now) + took
        return Judged(prompt, completions, self._free)

    def groups(self, pending: list[Judged]) -> list[Group]:
        for one in pending:
            self._meter.wait("judge", one.ready)
        return [self._group(one) for one in pending]

    def _group(self, one: Judged) -> Group:
        step = self._begun.get(one.prompt.index, one.completions[0].policy_step)
        drawn = self._workload.draw(step, one.prompt.index, len(one.completions))
        verdicts = tuple(Verdict(bool(right), None) for right in drawn.correct)
        return reward_group(self._config, one.prompt, one.completions, verdicts)

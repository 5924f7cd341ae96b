"""Source of rollouts: samples each step's groups, on policy or `rollout.staleness` steps ahead.

With a staleness of L, step s is sampled by the policy after s - L steps (the first L steps by the
initial policy): while step s - L is updated, the policy from before that update samples step s.
Rollouts wait in the source's state, which decides the next ones, and a checkpoint holds all of it.
Random keys contain step and position in the data, so the same state gives the same rollouts.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dapo_jax.config.experiment import Config
from dapo_jax.data.prompt_stream import PromptStream
from dapo_jax.rollout.carry_over import CarryOverCollection
from dapo_jax.rollout.curriculum import Pools, RestingPrompts, update_pools
from dapo_jax.rollout.dynamic_sampling import (
    INITIAL_KEPT_FRACTION,
    Collection,
    Judge,
    Starved,
    collect,
)
from dapo_jax.rollout.sampling import SAMPLE_FOR_TRAINING
from dapo_jax.runtime.clock import timed
from dapo_jax.types.contracts import Sampler
from dapo_jax.types.errors import require
from dapo_jax.types.structs import (
    CollectedGroups,
    Group,
    Interrupted,
    PartialGroup,
    Prompt,
    RolloutKey,
    SamplerCounts,
    SamplingRule,
)

OnBurst = Callable[[Collection], None]


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Collected groups of a step, the sampler's counts, and the seconds it took."""

    batch: CollectedGroups
    counts: SamplerCounts | None  # None: the groups are given
    seconds: float
    passed_over: int = 0  # turns of resting problems (`rollout.curriculum`)

    @property
    def groups(self) -> list[Group]:
        return self.batch.groups


@dataclasses.dataclass(frozen=True)
class SourceState:
    """Everything that decides the next rollouts, besides the policy."""

    position: int = 0  # position in the endless data order
    kept_fraction: float = INITIAL_KEPT_FRACTION  # running estimate of groups that carry signal
    partial: tuple[PartialGroup, ...] = ()  # groups of earlier steps (`rollout.carry_over`)
    pools: Pools = dataclasses.field(default_factory=dict)  # `rollout.curriculum`
    ahead: tuple[Rollout, ...] = ()  # of the next steps (`rollout.staleness`)
    # Parameters before the newest update; None once they have sampled what they have to.
    behaviour: Any = None


class GroupSource(Protocol):
    """Source of each step's groups: sampled by the policy, or given by a user's examples."""

    @property
    def config(self) -> Config: ...

    def collect(
        self, state: SourceState, params: Any, step: int
    ) -> tuple[SourceState, Rollout]: ...

    def prefetch(self, state: SourceState, step: int) -> SourceState: ...


class Journal:
    """Storage of the scored groups of an unfinished step; this one stores nothing."""

    def begin(self, step: int) -> None: ...

    def recall(self, prompt: Prompt) -> Group | None: ...

    def add(self, groups: Sequence[Group]) -> None: ...

    def forget(self, step: int) -> None: ...


@dataclasses.dataclass(frozen=True)
class RolloutSource:
    """Source of the rollouts of each step; `sample` runs `dynamic_sampling.collect` for one."""

    config: Config
    prompts: PromptStream
    sampler: Sampler
    judge: Judge
    # Copies the parameters that sample during an update (`rollout.staleness`), which consumes them;
    # None: the current policy samples.
    copy_behaviour: Callable[[Any], Any] | None = None
    journal: Journal = Journal()  # stores the groups of a step in progress
    interrupted: Callable[[], bool] = lambda: False  # between bursts; True ends a step
    # Context of a step's collection (from 1) that yields a callback for every burst.
    show: Callable[[int, SamplerCounts], contextlib.AbstractContextManager[OnBurst]] = (
        lambda step, counts: contextlib.nullcontext(lambda collection: None)
    )

    @timed("rollout")
    def collect(self, state: SourceState, params: Any, step: int) -> tuple[SourceState, Rollout]:
        """Return the rollouts of `step`, and the state after them.

        It raises as `dynamic_sampling.collect` does; `state` repeats the step.
        """
        if state.behaviour is not None:  # what an interruption left to it
            while missing := self._missing_step(state, step - 1):
                state = self._extend(state, state.behaviour, missing, step - 1)
        if not state.ahead:
            state = self._extend(state, params, step, policy_step=step)
        rollout, *ahead = state.ahead
        behaviour = self.copy_behaviour(params) if self.copy_behaviour else None
        state = dataclasses.replace(state, ahead=tuple(ahead), behaviour=behaviour)
        if behaviour is not None and (following := self._missing_step(state, step)):
            self._begin(behaviour, following, step)  # before the update, which keeps devices busy
        return state, rollout

    @timed("ahead")
    def prefetch(self, state: SourceState, step: int) -> SourceState:
        """Return the state with the rollouts that are sampled during the update of `step`."""
        if self.copy_behaviour is None:
            return state
        try:
            while missing := self._missing_step(state, step):
                state = self._extend(state, state.behaviour, missing, step)
        except (Interrupted, Starved):  # raised again when the next step samples them
            return state
        is_full = len(state.ahead) == self.config.rollout.staleness
        return dataclasses.replace(state, behaviour=None) if is_full else state

    def _missing_step(self, state: SourceState, step: int) -> int | None:
        """Return the next step that the policy from before the update of `step` has to sample."""
        staleness = self.config.rollout.staleness
        following = step + 1 + len(state.ahead)
        if len(state.ahead) == staleness or following >= self.config.total_steps:
            return None
        allowed = (
            "what it was: the policies that sample further steps are gone, since the last "
            f"rollout.staleness = {staleness} steps of a run sample none ahead"
        )
        has_policy = max(0, following - staleness) == step
        require(has_policy, "total_steps", self.config.total_steps, allowed)
        return following

    def _extend(self, state: SourceState, params: Any, step: int, policy_step: int) -> SourceState:
        """Sample `step`, and return the state with its rollouts behind those that wait."""
        rollout = self.sample(state, params, step, policy_step)
        batch, ahead = rollout.batch, (*state.ahead, rollout)
        pools = state.pools
        if self.config.rollout.curriculum == "pools":
            pools = update_pools(pools, batch.judged, self.config.reward)
        following = batch.next_position, batch.kept_fraction, batch.carried, pools
        return SourceState(*following, ahead, state.behaviour)

    def sample(self, state: SourceState, params: Any, step: int, policy_step: int) -> Rollout:
        """Return the rollouts of `step`, sampled by a policy trained for `policy_step` steps."""
        start = time.perf_counter()
        sampler = self.sampler
        self._begin(params, step, policy_step)
        kind = Collection if self.config.rollout.carry_over == "none" else CarryOverCollection
        collection = kind(self.config, state.kept_fraction, state.position, step, state.partial)
        rate, seed = self.config.rollout.resting_rate, self.config.seed
        self.prompts.position = state.position
        prompts = RestingPrompts(self.prompts, state.pools, rate, seed)
        self.journal.begin(step)
        try:
            with self.show(step + 1, sampler.counts) as on_burst:
                batch = collect(
                    collection,
                    prompts,
                    sampler,
                    self.judge,
                    self.journal.recall,
                    on_scored=self.journal.add,
                    on_burst=on_burst,
                    interrupted=self.interrupted,
                )
            counts = dataclasses.replace(sampler.counts)
        finally:
            sampler.close()  # an update may need the memory of the caches
        return Rollout(batch, counts, time.perf_counter() - start, prompts.passed_over)

    def _begin(self, params: Any, step: int, policy_step: int) -> None:
        """Begin to sample a step, unless that was done ahead."""
        key = RolloutKey(SAMPLE_FOR_TRAINING, step, policy_step)
        settings = self.config.sampler
        if self.sampler.key != key:
            rule = SamplingRule(settings.temperature, settings.top_p, settings.top_k)
            self.sampler.begin(params, key, rule)

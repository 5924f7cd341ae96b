"""Source of rollouts: samples each step's groups, on policy or one step ahead of the update.

The source's state decides the next rollouts, and a checkpoint holds all of it. Random keys contain
step and position in the data, so the same state gives the same rollouts.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from dapo_jax.config.algorithm import OF_GREEDY
from dapo_jax.config.experiment import Config
from dapo_jax.contracts import FinishedResponses, Sampler
from dapo_jax.data.prompt_stream import PromptStream
from dapo_jax.rollout.carry_over import open_collection
from dapo_jax.rollout.curriculum import Pools, RestingPrompts, update_pools
from dapo_jax.rollout.dynamic_sampling import (
    INITIAL_KEPT_FRACTION,
    NO_GROUPS,
    Collection,
    CollectionHooks,
    FinishedGroups,
    Judge,
    Starved,
    collect,
)
from dapo_jax.rollout.sampling import SAMPLE_FOR_TRAINING
from dapo_jax.runtime.clock import timed
from dapo_jax.structs import (
    CollectedGroups,
    Group,
    Interrupted,
    PartialGroup,
    SamplerCounts,
    SamplingRule,
    add_counts,
)

OnBurst = Callable[[Collection], None]


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Collected groups of a step, the sampler's counts, and the seconds it took."""

    batch: CollectedGroups
    counts: SamplerCounts
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
    behaviour: Any = None  # parameters before the update, which sample next (`rollout.lag`)
    ahead: Rollout | None = None  # of the next step (`rollout.lag`); a resumed run samples it again


class Journal:
    """Storage of the scored groups of an unfinished step; this one stores nothing."""

    def begin(self, step: int) -> FinishedGroups:
        return NO_GROUPS

    def add(self, groups: Sequence[Group]) -> None: ...

    def forget(self, step: int) -> None: ...


@dataclasses.dataclass(frozen=True)
class RolloutSource:
    """Source of the rollouts of each step."""

    config: Config
    prompts: PromptStream
    sampler: Sampler
    judge: Judge
    # Copies the parameters that sample the next step while the policy is updated (`rollout.lag`),
    # since an update consumes them; None: the current policy samples.
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
        rollout = state.ahead
        if rollout is None and state.behaviour is None:
            rollout = self.sample(state, params, step, policy_step=step)
        elif rollout is None:
            rollout = self.sample(state, state.behaviour, step, policy_step=step - 1)
        batch = rollout.batch
        behaviour = self.copy_behaviour(params) if self.copy_behaviour else None
        pools = state.pools
        if self.config.rollout.curriculum == "pools":
            pools = update_pools(pools, batch.judged, self.config.reward)
        following = SourceState(
            batch.next_position, batch.kept_fraction, batch.carried, pools, behaviour
        )
        return following, rollout

    @timed("ahead")
    def prefetch(self, state: SourceState, step: int) -> SourceState:
        """Return the state with the rollouts of step + 1, if they are sampled during the update."""
        if self.copy_behaviour is None or step + 1 == self.config.total_steps:
            return state
        try:
            ahead = self.sample(state, state.behaviour, step + 1, policy_step=step)
        except (Interrupted, Starved):  # raised again when the next step samples them
            return state
        return dataclasses.replace(state, ahead=ahead)

    def sample(self, state: SourceState, params: Any, step: int, policy_step: int) -> Rollout:
        """Return the rollouts of `step`, sampled by a policy trained for `policy_step` steps."""
        start = time.perf_counter()
        sampler, settings = self.sampler, self.config.sampler
        keyed = {"purpose": SAMPLE_FOR_TRAINING, "step": step, "policy_step": policy_step}
        rule = SamplingRule(settings.temperature, settings.top_p, settings.top_k)
        sampler.begin(params, rule=rule, **keyed)
        collection = open_collection(
            self.config, state.kept_fraction, step, state.partial, state.position
        )
        rate, seed = self.config.rollout.resting_rate, self.config.seed
        prompts = RestingPrompts(self.prompts, state.pools, rate, seed)
        with self.show(step + 1, sampler.counts) as on_burst:
            hooks = CollectionHooks(self.journal.add, on_burst, self.interrupted)
            finished = self.journal.begin(step)
            batch = collect(collection, prompts, sampler, self.judge, hooks, finished)
        counts = dataclasses.replace(sampler.counts)
        if self.config.algorithm.advantage in OF_GREEDY and batch.groups:
            sampler.begin(params, rule=SamplingRule(temperature=0.0), **keyed)
            batch = dataclasses.replace(batch, groups=self._with_baselines(batch.groups))
            counts = add_counts(counts, sampler.counts)
        sampler.release()  # an update may need the memory of the caches
        return Rollout(batch, counts, time.perf_counter() - start, prompts.passed_over)

    def _with_baselines(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with the rewards of greedy responses, without those that have none."""
        for group in groups:
            self.sampler.submit(group.prompt, 1)
        ended: list[FinishedResponses] = []
        while not self.sampler.idle and not self.interrupted():
            ended += self.sampler.decode_burst()
        greedy = self.judge.groups([self.judge.submit(*response) for response in ended])
        if self.interrupted():  # a resumed step samples the same responses again
            raise Interrupted
        rewards = {done.prompt.index: float(done.rewards[0]) for done in greedy if not done.failed}
        return [
            dataclasses.replace(group, baseline=rewards[group.prompt.index])
            for group in groups
            if group.prompt.index in rewards
        ]

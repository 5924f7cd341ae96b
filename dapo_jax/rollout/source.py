"""Sources of rollouts: on policy, a step ahead of the update, or with groups carried over.

A source is what draws; its state is what decides the next draw, and is all of it that a checkpoint
holds. Draws are keyed by step and place in the data, so a state repeats its rollouts.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dapo_jax.config.experiment import Config
from dapo_jax.data.prompt_stream import PromptStream
from dapo_jax.rollout.carry_over import open_collection
from dapo_jax.rollout.dynamic_sampling import (
    NOTHING,
    Collection,
    FinishedGroups,
    Judge,
    Starved,
    collect,
)
from dapo_jax.rollout.sampling import SAMPLE_FOR_TRAINING
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.runtime.clock import timed
from dapo_jax.structs import (
    CollectedGroups,
    Group,
    Interrupted,
    PartialGroup,
    SamplerCounts,
    SamplingRule,
)

FIRST_KEPT_FRACTION = 0.5  # before any group was judged
OnBurst = Callable[[Collection], None]


@dataclasses.dataclass(frozen=True)
class Rollout:
    """The rollout batch of a step, the sampler's counts of its cost, and the seconds it took."""

    batch: CollectedGroups
    counts: SamplerCounts
    seconds: float

    @property
    def groups(self) -> list[Group]:
        return self.batch.groups


@dataclasses.dataclass(frozen=True)
class SourceState:
    """Everything that decides the next rollouts, beside the policy.

    Attributes:
        position: place in the endless data order.
        kept_fraction: running estimate of the share of groups that carry signal.
        partial: groups that earlier steps began or judged and did not train on (`CarryOver`).
        behaviour: parameters that draw the next rollouts (`Lagged`): the policy before its update.
        ahead: rollouts of the next step (`Lagged`); a resumed run draws them again, to the bit.
    """

    position: int = 0
    kept_fraction: float = FIRST_KEPT_FRACTION
    partial: tuple[PartialGroup, ...] = ()
    behaviour: Any = None
    ahead: Rollout | None = None


class Journal(Protocol):
    """Storage of judged groups of a step that is not done, so that a kill costs none of them."""

    def begin(self, step: int) -> FinishedGroups: ...

    def add(self, groups: Sequence[Group]) -> None: ...

    def forget(self, step: int) -> None: ...


class NoJournal:
    """The journal that keeps nothing."""

    def begin(self, step: int) -> FinishedGroups:
        return NOTHING

    def add(self, groups: Sequence[Group]) -> None:
        pass

    def forget(self, step: int) -> None:
        pass


@contextlib.contextmanager
def _show_nothing(step: int, sampler: Scheduler):
    yield lambda collection: None


class OnPolicy:
    """Rollouts drawn by the policy that learns from them, each step by itself.

    Args:
        journal: reads and keeps the groups of a step in progress.
        interrupted: asked between two bursts; True ends a step without a batch.
        show: context of a step's collection (from 1) that yields a callback for every burst.
    """

    def __init__(
        self,
        config: Config,
        prompts: PromptStream,
        sampler: Scheduler,
        judge: Judge,
        *,
        journal: Journal | None = None,
        interrupted: Callable[[], bool] = lambda: False,
        show: Callable[
            [int, Scheduler], contextlib.AbstractContextManager[OnBurst]
        ] = _show_nothing,
    ):
        self._config, self._prompts, self._sampler, self._judge = config, prompts, sampler, judge
        self._journal, self._interrupted, self._show = journal or NoJournal(), interrupted, show

    @timed("rollout")
    def collect(self, state: SourceState, params: Any, step: int) -> tuple[SourceState, Rollout]:
        """The rollouts of `step`, and the state after them.

        Args:
            params: of the policy, which has learned for `step` steps.

        Raises:
            Starved, Interrupted: as `dynamic_sampling.collect`; `state` repeats the step.
        """
        result = self.draw(state, params, step, policy_step=step)
        return _advance(state, result), result

    @timed("ahead")
    def prefetch(self, state: SourceState, step: int) -> SourceState:
        """The state with the rollouts of step + 1, where they may be drawn during the update."""
        return state

    def draw(self, state: SourceState, params: Any, step: int, policy_step: int) -> Rollout:
        """The rollouts of `step`, drawn by a policy that has learned for `policy_step` steps."""
        start, sampler, settings = time.perf_counter(), self._sampler, self._config.sampler
        rule = SamplingRule(settings.temperature, settings.top_p, settings.top_k)
        keys = {"purpose": SAMPLE_FOR_TRAINING, "step": step}
        sampler.begin(params, rule=rule, policy_step=policy_step, **keys)
        self._prompts.position = state.position
        collection = open_collection(
            self._config, state.kept_fraction, step, state.partial, state.position
        )
        with self._show(step + 1, sampler) as on_burst:
            batch = collect(
                collection,
                self._prompts,
                sampler,
                self._judge,
                finished=self._journal.begin(step),
                on_judged=self._journal.add,
                on_burst=on_burst,
                interrupted=self._interrupted,
            )
        sampler.release()  # where an update follows, it needs the memory of the caches
        counts = dataclasses.replace(sampler.counts)
        return Rollout(batch, counts, time.perf_counter() - start)


class CarryOver(OnPolicy):
    """Rollouts that go on with the groups which earlier steps drew and did not train on."""

    def collect(self, state, params, step):
        state, result = super().collect(state, params, step)
        return dataclasses.replace(state, partial=result.batch.carried), result


class Lagged(OnPolicy):
    """Rollouts drawn while the policy learns from the ones before: by the policy of a step ago.

    Args:
        copy: a copy of parameters, since an update consumes them.
    """

    def __init__(self, *rooms, copy: Callable[[Any], Any], **options):
        super().__init__(*rooms, **options)
        self._copy = copy

    @timed("rollout")
    def collect(self, state, params, step):
        result = state.ahead
        if result is None and state.behaviour is None:  # nothing has been learned yet
            result = self.draw(state, params, step, policy_step=step)
        elif result is None:
            result = self.draw(state, state.behaviour, step, policy_step=step - 1)
        return _advance(state, result, behaviour=self._copy(params)), result

    @timed("ahead")
    def prefetch(self, state, step):
        if step + 1 == self._config.total_steps:
            return state
        try:
            ahead = self.draw(state, state.behaviour, step + 1, policy_step=step)
        except (Interrupted, Starved):  # comes up again when the next step draws them
            return state
        return dataclasses.replace(state, ahead=ahead)


RolloutSource = OnPolicy  # the type of all three


def _advance(state: SourceState, result: Rollout, behaviour: Any = None) -> SourceState:
    batch = result.batch
    return SourceState(batch.next_position, batch.kept_fraction, behaviour=behaviour)


def open_source(
    config: Config,
    prompts: PromptStream,
    sampler: Scheduler,
    judge: Judge,
    copy: Callable[[Any], Any],
    **options: Any,
) -> RolloutSource:
    """The source that `config.rollout` asks for; `options` as of `OnPolicy`."""
    rooms = config, prompts, sampler, judge
    if config.rollout.lag:
        return Lagged(*rooms, copy=copy, **options)
    if config.rollout.carry_over != "none":
        return CarryOver(*rooms, **options)
    return OnPolicy(*rooms, **options)

"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): collect groups that carry signal.

A group whose answers are all right or all wrong has no advantage and so no gradient. `collect`
asks for prompts until enough groups are left, keeping the first that qualify in DATA order: order
of arrival would favour short responses and depend on timing.

With `rollout.carry_over` the batch is full as soon as enough groups qualify, whichever they are;
others go on in the next step, and a step waits for those that are `carry_over_max_age` steps old.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence, Set
from typing import Generic, Protocol, TypeVar

import numpy as np

from dapo_jax.config.experiment import Config, Reward
from dapo_jax.rollout.carry_over import carry_on
from dapo_jax.run.checkpointing.rollout_journal import NOTHING, Known, recall
from dapo_jax.structs import Carried, Collected, Completion, Group, Interrupted, Prompt

Pending = TypeVar("Pending")  # what a judge keeps of a group until it is asked for it
SMALLEST_KEPT_FRACTION = 1 / 16  # bounds how far ahead a pessimistic estimate asks


class Starved(RuntimeError):
    """Too few groups carried signal and the config says to stop then."""


def carries_signal(group: Group, reward: Reward) -> bool:
    """0 < correct < G, or raw rewards that differ. The shaped reward never decides."""
    if reward.correct == "spread":
        return bool(np.ptp(group.raw_rewards) > reward.min_spread)
    return 0 < int(group.correct.sum()) < len(group.correct)


def next_kept_fraction(before: float, kept: int, judged: int, wanted: int) -> float:
    """Running estimate of the share of kept groups; the past weighs as half a batch."""
    weight = wanted / 2
    return (kept + weight * before) / (judged + weight)


class Prompts(Protocol):
    """The endless data order; `position` is the place of its next prompt."""

    position: int

    def __next__(self) -> Prompt: ...


class Sampler(Protocol):
    """Draws groups, as `rollout.scheduler.Scheduler` does."""

    @property
    def idle(self) -> bool: ...

    @property
    def room(self) -> int: ...

    def submit(self, prompt: Prompt, samples: int, carried: Carried | None = None) -> None: ...

    def decode_burst(self) -> list[tuple[Prompt, tuple[Completion, ...]]]: ...

    def suspend(self) -> list[Carried]: ...

    def abandon(self) -> None: ...


class Judge(Protocol[Pending]):
    """Rewards groups, as `rewards.judge.Judge` does."""

    def submit(self, prompt: Prompt, completions: tuple[Completion, ...]) -> Pending: ...

    def groups(self, pending: list[Pending]) -> list[Group]: ...


class _Collection(Generic[Pending]):
    """One step's prompts in the order they were asked for, and what became of each.

    Args:
        carried: what the step before left, which is asked first.
        position: place in the data of the first prompt after those.
    """

    def __init__(
        self,
        config: Config,
        kept_fraction: float,
        step: int,
        carried: Sequence[Carried],
        position: int,
    ):
        self._algorithm, self._wanted = config.algorithm, config.rollout.prompts_per_step
        self._reward, self._rollout = config.reward, config.rollout
        self._carries = config.rollout.carry_over != "none"
        self._step, self._start = step, position
        self._steps = {one.prompt.index: one.step for one in carried if one.tokens}
        self._limit = self._wanted * config.rollout.max_sample_rounds
        # As are prefilled at once: later one can tell better how many it takes.
        self._most_waiting = config.sampler.prefill_prompts * config.rollout.samples_per_prompt
        self._kept_fraction = kept_fraction
        self._order = [one.prompt for one in carried]
        # Of a pod's thousands of groups each is looked at once; by places in the data.
        self._judged: dict[int, Group] = {}
        self._kept: set[int] = set()
        self._all_right = self._all_wrong = 0
        for group in (one.judged for one in carried if one.judged):
            self._note(group)
        self._reused = frozenset(self._judged)
        self._unread: list[Pending] = []
        self._untold: list[Group] = []

    def _note(self, group: Group) -> None:
        index, right = group.prompt.index, int(group.correct.sum())
        self._judged[index] = group
        self._all_right += right == len(group.correct)
        self._all_wrong += right == 0
        every = not self._algorithm.dynamic_sampling
        if not group.broken and (every or carries_signal(group, self._reward)):
            self._kept.add(index)

    def estimate(self, judged: Set[int]) -> float:
        if not self._algorithm.dynamic_sampling:
            return 1.0
        kept = len(self._kept & judged)
        return next_kept_fraction(self._kept_fraction, kept, len(judged), self._wanted)

    def wants_more(self, sampler: Sampler) -> bool:
        """Whether the prompts in flight are too few to fill the batch, as far as one can tell.

        With carry-over also whether a slot would be idle: up to a batch ahead.
        """
        kept, share = len(self._kept), self.estimate(self._new())
        target = math.ceil((self._wanted - kept) / max(share, SMALLEST_KEPT_FRACTION))
        in_flight = len(self._order) - len(self._judged)
        goes_on = self._carries and (kept < self._wanted or self._rollout.carry_over == "all")
        if goes_on and sampler.room > 0 and kept + in_flight * share < 2 * self._wanted:
            target = in_flight + 1
        few = in_flight < target and len(self._order) < self._limit
        return few and sampler.room > -self._most_waiting

    def _new(self) -> Set[int]:
        """Those that this step has judged."""
        return self._judged.keys() - self._reused

    def ask(self, prompt: Prompt, known: Known) -> Prompt | None:
        """The prompt, where responses to it are still to be drawn."""
        self._order.append(prompt)
        if group := recall(known, prompt):
            self._note(group)
        return None if group else prompt

    def finish(self, pending: Pending) -> None:
        self._unread.append(pending)

    def read_verdicts(self, judge: Judge[Pending]) -> None:
        """Waits for the verdicts on all groups finished so far."""
        for group in judge.groups(self._unread):
            self._note(group)
            self._untold.append(group)
        self._unread.clear()

    def untold(self) -> list[Group]:
        """Groups whose verdicts were read since this was asked last."""
        groups, self._untold = self._untold, []
        return groups

    def first_kept(self) -> list[Group]:
        """The first kept groups in data order, at most as many as are wanted.

        Without carry-over those of the judged head: whoever is slow is waited for.
        """
        groups: list[Group] = []
        for prompt in self._order:
            group = self._judged.get(prompt.index)
            if len(groups) == self._wanted or (group is None and not self._carries):
                break
            if group is not None and prompt.index in self._kept:
                groups.append(group)
        return groups

    def full(self) -> bool:
        """Whether the step has its groups, and with carry-over none that must end in it."""
        oldest = self._step - self._rollout.carry_over_max_age
        late = (i for i, begun in self._steps.items() if begun <= oldest and i not in self._judged)
        return len(self.first_kept()) == self._wanted and next(late, None) is None

    def describe(self) -> str:
        """The state in a line, for people."""
        told = f"all right {self._all_right}, all wrong {self._all_wrong}"
        return f"{len(self._kept)}/{self._wanted} groups kept ({told})"

    def all_broken(self) -> bool:
        """Whether a whole batch was judged and no reward worked: more would not help."""
        judged = self._judged.values()
        return len(judged) >= self._wanted and all(group.broken for group in judged)

    def exhausted(self) -> bool:
        return len(self._judged) == len(self._order) >= self._limit

    def end(self, sampler: Sampler, judge: Judge[Pending], position: int) -> Collected:
        """What the step has; nothing is decoded or judged any more."""
        if not self._carries:
            sampler.abandon()
            return self.result(position)
        self.read_verdicts(judge)
        return self.result_with(sampler.suspend())

    def result(self, position: int) -> Collected:
        """Without carry-over: surplus prompts are asked again."""
        groups = self.first_kept()
        following = groups[-1].prompt.index + 1 if len(groups) == self._wanted else position
        surplus = [group for i, group in self._judged.items() if i >= following]
        return self._describe(groups, surplus, following)

    def result_with(self, unfinished: list[Carried]) -> Collected:
        """With carry-over: `unfinished` and, where so configured, the surplus are for later."""
        groups = self.first_kept()
        used = {group.prompt.index for group in groups}
        left = self._kept - used
        surplus = [group for i, group in self._judged.items() if i in left]
        begun = [one.prompt.index for one in unfinished if one.tokens]
        following = max([self._start, *(i + 1 for i in (*self._judged, *begun))])
        carried, expired = carry_on(self._rollout, self._step, surplus, unfinished, self._steps)
        return dataclasses.replace(
            self._describe(groups, surplus, following),
            carried=tuple(one for one in carried if one.prompt.index < following),
            expired=expired,
            reused=self._reused,
        )

    def _describe(self, groups: list[Group], surplus: list[Group], following: int) -> Collected:
        left = {group.prompt.index for group in surplus}
        judged = [self._judged[p.index] for p in self._order if p.index in self._judged]
        passed = [prompt for prompt in self._order if self._start <= prompt.index < following]
        used = [group for group in judged if group.prompt.index not in left]
        whole = [group for group in used if not group.broken]
        fair = {group.prompt.index for group in used}
        return Collected(
            groups=groups,
            judged=whole,
            surplus=[g for g in judged if g.prompt.index in left and not g.broken],
            with_signal=sum(carries_signal(group, self._reward) for group in whole),
            broken=[group for group in judged if group.broken],
            asked_prompts=len(self._order),
            # Without carry-over of the head alone: the same whatever the slots, whoever is fast.
            kept_fraction=self.estimate(self._new() if self._carries else fair),
            next_position=following,
            dropped_prompts=sum(prompt.skipped for prompt in passed),
            truncated_prompts=sum(prompt.truncated for prompt in passed),
            starved=len(groups) < self._wanted,
        )


def _check_starved(config: Config, collected: Collected) -> None:
    """Raises `Starved` as `collect` says."""
    if collected.broken and not collected.judged:
        raise Starved(f"the reward failed in every group, first: {collected.broken[0].broken}")
    if collected.starved and config.rollout.when_starved == "stop":
        raise Starved(
            f"only {len(collected.groups)} of {config.rollout.prompts_per_step} groups carried "
            f"signal after config.rollout.max_sample_rounds = {config.rollout.max_sample_rounds}: "
            f"of {len(collected.judged)} groups {collected.all_right} were all right and "
            f"{collected.all_wrong} all wrong. Change the data's difficulty or samples_per_prompt, "
            "or set config.rollout.when_starved=partial to train on what there is"
        )


def collect(
    config: Config,
    prompts: Prompts,
    sampler: Sampler,
    judge: Judge[Pending],
    kept_fraction: float,
    *,
    step: int = 0,
    carried: Sequence[Carried] = (),
    known: Known = NOTHING,
    on_judged: Callable[[list[Group]], None] = lambda _: None,
    on_burst: Callable[["_Collection"], None] = lambda _: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Collected:
    """Samples, judges and filters until prompts_per_step groups are kept.

    Verdicts on groups of one burst are read after the next one, so judging overlaps decoding and
    yet every decision is a function of burst counts, never of the clock.

    Args:
        step, carried: which one this is, and what the one before left (`rollout.carry_over`).
        known: what an earlier try of this step has finished.
        on_judged: is told of groups when their verdicts are final.

    Raises:
        Starved: max_sample_rounds were not enough and `rollout.when_starved` is 'stop', or no
            group has a reward.
        Interrupted: `interrupted()` said so between two bursts, or the judge while it waited.
    """
    samples = config.rollout.samples_per_prompt
    collection = _Collection[Pending](config, kept_fraction, step, carried, prompts.position)
    for one in carried:
        if one.judged is None:
            sampler.submit(one.prompt, samples, one)
    while not collection.full():
        if interrupted():
            raise Interrupted
        on_judged(collection.untold())
        while collection.wants_more(sampler):
            if prompt := collection.ask(next(prompts), known):
                sampler.submit(prompt, samples)
        finished = sampler.decode_burst()
        collection.read_verdicts(judge)
        for prompt, completions in finished:
            collection.finish(judge.submit(prompt, completions))
        if collection.all_broken():
            break
        if sampler.idle:
            collection.read_verdicts(judge)
            if collection.exhausted():
                break
        on_burst(collection)
    if interrupted():  # verdicts on the last groups may already be the interruption's
        raise Interrupted
    on_judged(collection.untold())
    collected = collection.end(sampler, judge, prompts.position)
    prompts.position = collected.next_position
    _check_starved(config, collected)
    return collected

"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): collect groups that carry signal.

A group whose answers are all right or all wrong has no advantage and so no gradient. `collect`
asks for prompts until enough groups are left, keeping the first that qualify in DATA order: order
of arrival would favour short responses and depend on timing.
"""

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar

import numpy as np

from dapo_jax.experiment.config import Config, Reward
from dapo_jax.structs import Completion, Group, Interrupted, Prompt, Trace

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
    """Draws groups, as `sampler.rollout.RolloutSampler` does."""

    @property
    def idle(self) -> bool: ...

    def submit(self, prompt: Prompt, samples: int) -> None: ...

    def decode_burst(self) -> list[tuple[Prompt, tuple[Completion, ...]]]: ...

    def abandon(self) -> None: ...


class Judge(Protocol[Pending]):
    """Rewards groups, as `rewards.judge.Judge` does."""

    def submit(self, prompt: Prompt, completions: tuple[Completion, ...]) -> Pending: ...

    def groups(self, pending: list[Pending]) -> list[Group]: ...


@dataclasses.dataclass
class Collected:
    """What a rollout gave, in data order, and what it cost."""

    groups: list[Group]  # the kept ones, at most prompts_per_step
    judged: list[Group]  # every group before next_position
    surplus: list[Group]  # judged beyond it: those that finish fast, no fair sample
    with_signal: int  # how many of `judged` could teach
    broken: list[Group]  # those that a failing reward took out, wherever; in neither list
    asked_prompts: int
    kept_fraction: float  # the estimate for the next step
    next_position: int  # where the data goes on; surplus prompts are asked again
    dropped_prompts: int  # over the limit or held out, before next_position
    truncated_prompts: int  # cut to the limit, before next_position
    starved: bool
    # Of the responses of each group that was trained, by the group's place in the data.
    traces: dict[int, list[Trace]] = dataclasses.field(default_factory=dict)

    @property
    def all_right(self) -> int:
        return sum(bool(group.correct.all()) for group in self.judged)

    @property
    def all_wrong(self) -> int:
        return sum(not group.correct.any() for group in self.judged)


class _Collection(Generic[Pending]):
    """One step's prompts in the order they were asked for, and what became of each."""

    def __init__(self, config: Config, kept_fraction: float):
        self._algorithm, self._wanted = config.algorithm, config.rollout.prompts_per_step
        self._reward = config.reward
        self._limit = self._wanted * config.rollout.max_sample_rounds
        self._kept_fraction = kept_fraction
        self._order: list[Prompt] = []
        self._judged: dict[int, Group] = {}
        self._unread: list[Pending] = []

    def _is_kept(self, group: Group) -> bool:
        filtering = self._algorithm.dynamic_sampling
        return not group.broken and (not filtering or carries_signal(group, self._reward))

    def kept(self) -> int:
        return sum(map(self._is_kept, self._judged.values()))

    def estimate(self, judged: Collection[Group]) -> float:
        if not self._algorithm.dynamic_sampling:
            return 1.0
        kept = sum(map(self._is_kept, judged))
        return next_kept_fraction(self._kept_fraction, kept, len(judged), self._wanted)

    def wants_more(self) -> bool:
        """Whether the prompts in flight are too few to fill the batch, as far as one can tell."""
        missing = self._wanted - self.kept()
        share = self.estimate(self._judged.values())
        target = math.ceil(missing / max(share, SMALLEST_KEPT_FRACTION))
        in_flight = len(self._order) - len(self._judged)
        return in_flight < target and len(self._order) < self._limit

    def ask(self, prompt: Prompt) -> None:
        self._order.append(prompt)

    def finish(self, pending: Pending) -> None:
        self._unread.append(pending)

    def read_verdicts(self, judge: Judge[Pending]) -> None:
        """Waits for the verdicts on all groups finished so far."""
        self._judged |= {group.prompt.index: group for group in judge.groups(self._unread)}
        self._unread.clear()

    def first_kept(self) -> list[Group]:
        """The kept groups of the judged head of the order, at most as many as are wanted."""
        groups: list[Group] = []
        for prompt in self._order:
            if prompt.index not in self._judged or len(groups) == self._wanted:
                break
            if self._is_kept(self._judged[prompt.index]):
                groups.append(self._judged[prompt.index])
        return groups

    def describe(self) -> str:
        """The state in a line, for people."""
        groups = list(self._judged.values())
        right = sum(bool(group.correct.all()) for group in groups)
        wrong = sum(not group.correct.any() for group in groups)
        return f"{self.kept()}/{self._wanted} groups kept (all right {right}, all wrong {wrong})"

    def all_broken(self) -> bool:
        """Whether a whole batch was judged and no reward worked: more would not help."""
        judged = self._judged.values()
        return len(judged) >= self._wanted and all(group.broken for group in judged)

    def exhausted(self) -> bool:
        return len(self._judged) == len(self._order) >= self._limit

    def result(self, position: int) -> Collected:
        groups = self.first_kept()
        full = len(groups) == self._wanted
        following = groups[-1].prompt.index + 1 if full else position
        judged = [self._judged[p.index] for p in self._order if p.index in self._judged]
        passed = [prompt for prompt in self._order if prompt.index < following]
        head = [group for group in judged if group.prompt.index < following]
        whole = [group for group in head if not group.broken]
        return Collected(
            groups=groups,
            judged=whole,
            surplus=[group for group in judged[len(head) :] if not group.broken],
            with_signal=sum(carries_signal(group, self._reward) for group in whole),
            broken=[group for group in judged if group.broken],
            asked_prompts=len(self._order),
            # Of the head alone: the same whatever the slots and whoever finishes first.
            kept_fraction=self.estimate(head),
            next_position=following,
            dropped_prompts=sum(prompt.skipped for prompt in passed),
            truncated_prompts=sum(prompt.truncated for prompt in passed),
            starved=not full,
        )


def collect(
    config: Config,
    prompts: Prompts,
    sampler: Sampler,
    judge: Judge[Pending],
    kept_fraction: float,
    *,
    on_burst: Callable[["_Collection"], None] = lambda _: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Collected:
    """Samples, judges and filters until prompts_per_step groups are kept.

    Verdicts on groups of one burst are read after the next one, so judging overlaps decoding and
    yet every decision is a function of burst counts, never of the clock.

    Raises:
        Starved: max_sample_rounds were not enough and `rollout.when_starved` is 'stop', or no
            group has a reward.
        Interrupted: `interrupted()` said so between two bursts, or the judge while it waited.
    """
    collection: _Collection[Pending] = _Collection(config, kept_fraction)
    while len(collection.first_kept()) < config.rollout.prompts_per_step:
        if interrupted():
            raise Interrupted
        while collection.wants_more():
            prompt = next(prompts)
            collection.ask(prompt)
            sampler.submit(prompt, config.rollout.samples_per_prompt)
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
    sampler.abandon()
    collected = collection.result(prompts.position)
    prompts.position = collected.next_position
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
    return collected

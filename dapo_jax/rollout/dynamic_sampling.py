"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): collect groups that carry signal.

A group whose answers are all right or all wrong has no advantage and so no gradient. `collect`
asks for prompts until enough groups are left, keeping the first that qualify in DATA order: order
of arrival would favour short responses and depend on timing. A broken group, whose reward failed,
is never kept. In `carry_over.py` groups go on in the next step (`rollout.carry_over`).
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Set
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

import numpy as np

from dapo_jax.config.experiment import Config, Reward
from dapo_jax.structs import CollectedGroups, Completion, Group, Interrupted, PartialGroup, Prompt

Pending = TypeVar("Pending")  # a judge's handle of a group whose verdicts are under way
SMALLEST_KEPT_FRACTION = 1 / 16  # bounds how far ahead a pessimistic estimate asks

FinishedResponses = tuple[Prompt, tuple[Completion, ...]]
# Judged groups by place in the data, each with the digest of its prompt's tokens.
FinishedGroups = Mapping[int, tuple[str, Group]]
NOTHING: FinishedGroups = MappingProxyType({})


def digest_tokens(tokens: np.ndarray) -> str:
    """Digest that tells prompts from others."""
    return hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).hexdigest()[:16]


def recall(finished: FinishedGroups, prompt: Prompt) -> Group | None:
    """The finished group of a prompt, where the place in the data still has that prompt.

    The caller gives groups of this step only: the policy that drew them is not checked.
    """
    digest, group = finished.get(prompt.index, ("", None))
    if group is None or digest != digest_tokens(prompt.tokens):
        return None
    return dataclasses.replace(group, prompt=prompt)


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

    def submit(self, prompt: Prompt, samples: int, carried: PartialGroup | None = None) -> None: ...

    def decode_burst(
        self, meanwhile: Callable[[], None] = lambda: None
    ) -> list[FinishedResponses]: ...

    def suspend(self) -> list[PartialGroup]: ...

    def abandon(self) -> None: ...


class Judge(Protocol[Pending]):
    """Rewards groups, as `rewards.judge.Judge` does."""

    def submit(self, prompt: Prompt, completions: tuple[Completion, ...]) -> Pending: ...

    def groups(self, pending: list[Pending]) -> list[Group]: ...


class Collection(Generic[Pending]):
    """Prompts of one step in the order they were asked for, with the verdicts on their groups.

    Args:
        kept_fraction: running estimate from the steps before.
        position: place in the data of the first prompt.
    """

    def __init__(self, config: Config, kept_fraction: float, position: int):
        self.config, self._kept_fraction, self._start = config, kept_fraction, position
        self._wanted = config.rollout.prompts_per_step
        self._limit = self._wanted * config.rollout.max_sample_rounds
        # As are prefilled at once: later one can tell better how many it takes.
        self._most_waiting = config.sampler.prefill_prompts * config.rollout.samples_per_prompt
        self._asked: list[Prompt] = []
        # Of a pod's thousands of groups each is looked at once; by places in the data.
        self._judged: dict[int, Group] = {}
        self._kept: set[int] = set()
        self._all_right = self._all_wrong = 0
        self._unread: list[Pending] = []
        self._unwritten: list[Group] = []

    def resume(self, sampler: Sampler) -> None:
        """Hands the sampler the groups that earlier steps began."""

    def wants_more(self, sampler: Sampler) -> bool:
        """True if the prompts in flight are too few to fill the batch, by the estimate."""
        in_flight = len(self._asked) - len(self._judged)
        few = in_flight < self._target(sampler, in_flight) and len(self._asked) < self._limit
        return few and sampler.room > -self._most_waiting

    def _target(self, sampler: Sampler, in_flight: int) -> int:
        """Prompts in flight that fill the batch if the estimate holds."""
        missing = self._wanted - len(self._kept)
        return math.ceil(missing / max(self._estimate(self._fresh()), SMALLEST_KEPT_FRACTION))

    def _fresh(self) -> Set[int]:
        """Places of the groups that this step has judged."""
        return self._judged.keys()

    def _estimate(self, judged: Set[int]) -> float:
        if not self.config.algorithm.dynamic_sampling:
            return 1.0
        kept = len(self._kept & judged)
        return next_kept_fraction(self._kept_fraction, kept, len(judged), self._wanted)

    def ask(self, prompt: Prompt, finished: FinishedGroups) -> bool:
        """Adds a prompt; whether responses to it are still to be drawn."""
        self._asked.append(prompt)
        group = recall(finished, prompt)
        if group:
            self._note(group)
        return group is None

    def submit(self, judge: Judge[Pending], ended: list[FinishedResponses]) -> None:
        """Hands finished groups to the judge, whose verdicts are then under way."""
        self._unread += [judge.submit(*group) for group in ended]
        ended.clear()

    def read_verdicts(self, judge: Judge[Pending]) -> None:
        """Waits for the verdicts on all groups finished so far."""
        for group in judge.groups(self._unread):
            self._note(group)
            self._unwritten.append(group)
        self._unread.clear()

    def _note(self, group: Group) -> None:
        index, right = group.prompt.index, int(group.correct.sum())
        self._judged[index] = group
        self._all_right += right == len(group.correct)
        self._all_wrong += right == 0
        every = not self.config.algorithm.dynamic_sampling
        if not group.broken and (every or carries_signal(group, self.config.reward)):
            self._kept.add(index)

    def take_unwritten(self) -> list[Group]:
        """Groups whose verdicts were read since the last call."""
        groups, self._unwritten = self._unwritten, []
        return groups

    def first_kept(self) -> list[Group]:
        """The first kept groups in data order, at most as many as are wanted.

        A prompt whose group is not judged yet ends them: slow responses are waited for.
        """
        groups: list[Group] = []
        for prompt in self._asked:
            group = self._judged.get(prompt.index)
            if len(groups) == self._wanted or group is None:
                break
            if prompt.index in self._kept:
                groups.append(group)
        return groups

    def full(self) -> bool:
        """True if the step has its groups."""
        return len(self.first_kept()) == self._wanted

    def describe(self) -> str:
        """The state in a line, for people."""
        counts = f"all right {self._all_right}, all wrong {self._all_wrong}"
        return f"{len(self._kept)}/{self._wanted} groups kept ({counts})"

    def all_broken(self) -> bool:
        """True if a whole batch was judged and no reward worked: more would not help."""
        judged = self._judged.values()
        return len(judged) >= self._wanted and all(group.broken for group in judged)

    def exhausted(self) -> bool:
        """True if every prompt that a step may ask for is judged."""
        return len(self._judged) == len(self._asked) >= self._limit

    def end(self, sampler: Sampler, judge: Judge[Pending], position: int) -> CollectedGroups:
        """The rollout batch; nothing is decoded or judged any more.

        Surplus groups are not trained on: the next step asks their prompts again, of its policy.

        Args:
            position: place in the data of the first prompt that was not asked for.
        """
        sampler.abandon()
        groups = self.first_kept()
        following = groups[-1].prompt.index + 1 if len(groups) == self._wanted else position
        surplus = {i for i in self._judged if i >= following}
        # Of the head alone: the same whatever the slots, however fast a response ends.
        head = self._judged.keys() - surplus
        return self._batch(groups, surplus, following, self._estimate(head))

    def _batch(
        self, groups: list[Group], surplus: Set[int], following: int, kept_fraction: float
    ) -> CollectedGroups:
        judged = [self._judged[p.index] for p in self._asked if p.index in self._judged]
        passed = [prompt for prompt in self._asked if self._start <= prompt.index < following]
        whole = [group for group in judged if not group.broken]
        used = [group for group in whole if group.prompt.index not in surplus]
        return CollectedGroups(
            groups=groups,
            judged=used,
            surplus=[group for group in whole if group.prompt.index in surplus],
            with_signal=sum(carries_signal(group, self.config.reward) for group in used),
            broken=[group for group in judged if group.broken],
            asked_prompts=len(self._asked),
            kept_fraction=kept_fraction,
            next_position=following,
            dropped_prompts=sum(prompt.skipped for prompt in passed),
            truncated_prompts=sum(prompt.truncated for prompt in passed),
            starved=len(groups) < self._wanted,
        )


def _check_starved(config: Config, batch: CollectedGroups) -> None:
    """Raises `Starved` where too few groups can teach, or none has a reward."""
    if batch.broken and not batch.judged:
        raise Starved(f"the reward failed in every group, first: {batch.broken[0].broken}")
    if batch.starved and config.rollout.when_starved == "stop":
        raise Starved(
            f"only {len(batch.groups)} of {config.rollout.prompts_per_step} groups carried "
            f"signal after config.rollout.max_sample_rounds = {config.rollout.max_sample_rounds}: "
            f"of {len(batch.judged)} groups {batch.all_right} were all right and "
            f"{batch.all_wrong} all wrong. Change the data's difficulty or samples_per_prompt, "
            "or set config.rollout.when_starved=partial to train on what there is"
        )


def collect(
    collection: Collection[Pending],
    prompts: Prompts,
    sampler: Sampler,
    judge: Judge[Pending],
    *,
    finished: FinishedGroups = NOTHING,
    on_judged: Callable[[list[Group]], None] = lambda _: None,
    on_burst: Callable[[Collection], None] = lambda _: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> CollectedGroups:
    """Samples, judges and filters until `collection` has its groups.

    It ends without them where max_sample_rounds batches of prompts are judged, or a whole batch
    has no reward.

    Groups of one burst are decoded to text and judged while the next one runs, and their verdicts
    read after it: every decision is a function of burst counts, never of the clock.

    Args:
        finished: groups that an earlier try of this step has judged, as `on_judged` wrote them.
        on_judged: is given groups when their verdicts are final, to write them down.

    Raises:
        Starved: max_sample_rounds were not enough and `rollout.when_starved` is 'stop', or no
            group has a reward.
        Interrupted: `interrupted()` was True between two bursts, or the judge gave up waiting.
    """
    samples = collection.config.rollout.samples_per_prompt
    ended: list[FinishedResponses] = []  # in the last burst
    judge_ended = functools.partial(collection.submit, judge, ended)
    collection.resume(sampler)
    while not collection.full():
        if interrupted():
            raise Interrupted
        on_judged(collection.take_unwritten())
        while collection.wants_more(sampler):
            prompt = next(prompts)
            if collection.ask(prompt, finished):
                sampler.submit(prompt, samples)
        ended += sampler.decode_burst(judge_ended)
        collection.read_verdicts(judge)
        if collection.all_broken():
            break
        if sampler.idle:
            judge_ended()
            collection.read_verdicts(judge)
            if collection.exhausted():
                break
        on_burst(collection)
    if interrupted():  # verdicts on the last groups may already be the interruption's
        raise Interrupted
    on_judged(collection.take_unwritten())
    judge_ended()
    batch = collection.end(sampler, judge, prompts.position)
    _check_starved(collection.config, batch)
    return batch

"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): collect groups that carry signal.

A group with only correct or only incorrect answers has no advantage and so no gradient. `collect`
requests prompts until enough groups are left, and keeps the first ones that qualify in DATA order:
order of arrival would favour short responses and depend on timing. So decoding never waits for
rewards: the clock decides only how many prompts are sampled in vain. A broken group, with too few
rewards, is dropped or sampled again (`rollout.when_broken`). See also `carry_over.py`.
"""

import collections
import itertools
import math
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, Protocol

from dapo_jax.config.experiment import Config, Reward
from dapo_jax.types.contracts import Sampler
from dapo_jax.types.structs import (
    CollectedGroups,
    Completion,
    Group,
    Interrupted,
    PartialGroup,
    Prompt,
)

INITIAL_KEPT_FRACTION = 0.5  # estimate before any group is scored
MIN_KEPT_FRACTION = 1 / 16  # bounds how many prompts a pessimistic estimate requests


class Starved(RuntimeError):
    """Too few groups carried signal, and the config asks to stop; or too many rewards failed."""

    exit_code = 3  # of a command that it ends


def carries_signal(group: Group, reward: Reward) -> bool:
    """Return True if 0 < correct < G, or raw rewards differ; the shaped reward is not used."""
    if reward.correct == "spread":
        return group.has_spread(reward.min_spread)
    return 0 < int(group.correct.sum()) < len(group.correct)


def next_kept_fraction(before: float, kept: int, scored: int, wanted: int) -> float:
    """Update the running estimate of the kept fraction; the past weighs as half a batch."""
    weight = wanted / 2
    return (kept + weight * before) / (scored + weight)


class Judge(Protocol):
    """Scorer of groups, as `rewards.group_rewards` has; each pending group has a handle."""

    def submit(self, prompt: Prompt, completions: tuple[Completion, ...]) -> Any: ...

    def read(self, pending: Sequence[Any], least: int) -> tuple[list[Group], list[Any]]: ...

    def cancel(self, pending: Sequence[Any]) -> None: ...


class Collection:
    """Prompts of one step in the order of their requests, with their scored groups."""

    def __init__(
        self,
        config: Config,
        kept_fraction: float,
        position: int,  # of the first new prompt in the data
        step: int = 0,  # the current step
        partial: Sequence[PartialGroup] = (),  # groups of earlier steps (`rollout.carry_over`)
    ):
        self.config = config
        self.start = position
        self._step = step
        self._partial = partial
        self._kept_fraction = kept_fraction
        self._wanted = config.rollout.prompts_per_step
        self._limit = self._wanted * config.rollout.max_sample_rounds
        # One prefill batch: waiting longer gives a better estimate of how many are needed.
        self._max_waiting = config.sampler.prefill_prompts * config.rollout.samples_per_prompt
        self._requested = [group.prompt for group in partial]
        # By position in the data. A pod collects thousands of groups, so each is checked once.
        self._scored: dict[int, Group] = {}
        self._kept: set[int] = set()
        self._uniform: collections.Counter[bool] = collections.Counter()  # by correctness
        # Not submitted to the judge yet.
        self._ended: list[tuple[Prompt, tuple[Completion, ...]]] = []
        self._unread: list[tuple[int, Any]] = []  # with the burst of their submission
        self._burst = 0
        self._resampled: dict[int, Group] = {}  # groups that were broken at first
        self._again: list[Prompt] = []
        self._parts: dict[int, list[Completion]] = {}  # responses of groups that are sampled again
        for group in partial:
            if group.judged:
                self._add(group.judged)
        self._reused = frozenset(self._scored)

    def resume(self, sampler: Sampler) -> None:
        """Submit the groups that earlier steps started."""
        for group in self._partial:
            if group.judged is None:
                samples = self.config.rollout.samples_per_prompt
                sampler.submit(group.prompt, samples, carried=group)

    def wants_more(self, sampler: Sampler) -> bool:
        """Return True if too few prompts are in flight to fill the batch, by the estimate."""
        in_flight = len(self._requested) - len(self._scored)
        few = in_flight < self._target(sampler, in_flight) and len(self._requested) < self._limit
        return few and sampler.room > -self._max_waiting

    def _target(self, sampler: Sampler, in_flight: int) -> int:
        """Return the number of prompts in flight that fills the batch if the estimate holds."""
        missing = self._wanted - len(self._kept)
        return math.ceil(missing / max(self._estimate(self._scored_now()), MIN_KEPT_FRACTION))

    def _scored_now(self) -> Set[int]:
        """Return the positions of the groups that this step has scored."""
        return self._scored.keys() - self._reused

    def _estimate(self, scored: Set[int]) -> float:
        if not self.config.algorithm.dynamic_sampling:
            return 1.0
        kept = len(self._kept & scored)
        return next_kept_fraction(self._kept_fraction, kept, len(scored), self._wanted)

    def request(self, prompt: Prompt, finished: Group | None) -> bool:
        """Add a prompt; return True if its responses must be sampled."""
        self._requested.append(prompt)
        if finished:
            self._add(finished)
        return finished is None

    def decode(self, sampler: Sampler, judge: Judge) -> None:
        """Decode a burst; meanwhile submit the groups that ended before it to the judge."""
        for request, done in sampler.step(lambda: self.submit_ended(judge)):
            prompt = request.prompt
            if prompt.index in self._parts:  # responses that are sampled again come one by one
                parts = self._parts[prompt.index] = [*self._parts[prompt.index], *done]
                if len(parts) < self.config.rollout.samples_per_prompt:
                    continue
                del self._parts[prompt.index]
                done = tuple(sorted(parts, key=lambda completion: completion.sample))
            self._ended.append((prompt, done))

    def submit_ended(self, judge: Judge) -> None:
        """Submit the groups that have ended to the judge."""
        self._unread += [(self._burst, judge.submit(*group)) for group in self._ended]
        self._ended.clear()

    def read_verdicts(self, judge: Judge, wait: bool) -> list[Group]:
        """Add and return the groups that are scored, or due; with `wait`, at least one."""
        bursts, self._burst = self.config.reward_bursts(), self._burst + 1
        last, least = self._burst - bursts, int(wait and bool(self._unread))
        if bursts and least:
            last = max(last, self._unread[0][0])
        return self._read(judge, last, None if bursts else least)

    def _read(self, judge: Judge, last: int, least: int | None = None) -> list[Group]:
        """Add groups submitted until the burst `last`, at least so many (None: all of these)."""
        due = [pending for burst, pending in self._unread if burst <= last]
        groups, pending = judge.read(due, len(due) if least is None else least)
        left = set(map(id, pending))
        self._unread = [entry for entry in self._unread if entry[0] > last or id(entry[1]) in left]
        for group in groups:
            self._add(group)
        return groups

    def _add(self, group: Group) -> None:
        index, correct = group.prompt.index, int(group.correct.sum())
        resamples = self.config.rollout.when_broken == "resample"
        if group.is_broken and resamples and index not in self._resampled:
            self._resampled[index] = group
            self._again.append(group.prompt)
            return
        self._scored[index] = group
        if group.is_broken:
            return
        has_signal = carries_signal(group, self.config.reward)
        if not has_signal:
            self._uniform[correct > 0] += 1
        if has_signal or not self.config.algorithm.dynamic_sampling:
            self._kept.add(index)

    def sample_again(self, sampler: Sampler) -> None:
        """Request responses with further sample indices, and so random keys, of broken groups."""
        samples = self.config.rollout.samples_per_prompt
        for prompt in self._again:
            self._parts[prompt.index] = []
            sampler.submit(prompt, range(samples, 2 * samples))
        self._again.clear()

    def _head(self) -> list[Group]:
        """Return the scored groups in data order, up to the first that is not scored yet."""
        indices = (prompt.index for prompt in self._requested)
        return [self._scored[i] for i in itertools.takewhile(self._scored.__contains__, indices)]

    def first_kept(self) -> list[Group]:
        """Return the first kept groups in data order, at most as many as are wanted."""
        kept = [group for group in self._head() if group.prompt.index in self._kept]
        return kept[: self._wanted]

    def full(self) -> bool:
        """Return True if the step has its groups."""
        return len(self.first_kept()) == self._wanted

    def describe(self) -> str:
        """Return the progress as a line for the console."""
        counts = f"all right {self._uniform[True]}, all wrong {self._uniform[False]}"
        if self.config.reward.correct == "spread":
            counts = f"no spread {self._uniform.total()}"
        return f"{len(self._kept)}/{self._wanted} groups kept ({counts})"

    def too_many_failed(self) -> bool:
        """Return True if of a batch, or more, no group or too few responses have rewards."""
        kept = whole = failed = scored = 0
        for count, group in enumerate(self._head(), 1):
            index = group.prompt.index
            for attempt in filter(None, (group, self._resampled.get(index))):
                failed += len(attempt.failed)
                scored += len(attempt.completions)
            whole += not group.is_broken
            exceeds = exceeds_failures(self.config, failed, failed + scored)
            if count >= self._wanted and (exceeds or not whole):
                return True
            kept += index in self._kept
            if kept == self._wanted:
                break
        return False

    def exhausted(self) -> bool:
        """Return True if every prompt that a step may request is scored."""
        return len(self._scored) == len(self._requested) >= self._limit

    def end(self, sampler: Sampler, judge: Judge) -> CollectedGroups:
        """Return the collected groups; nothing is sampled or scored any more.

        Surplus groups are not trained on: the next step requests their prompts from its policy.
        """
        sampler.stop(keep=False)
        judge.cancel([pending for _, pending in self._unread])
        groups = self.first_kept()
        last = groups[-1].prompt if len(groups) == self._wanted else self._requested[-1]
        following = last.index + 1
        surplus = {i for i in self._scored if i >= following}
        # The estimate uses groups before `following` only, so it depends neither on the number of
        # slots nor on the order in which responses end.
        head = self._scored.keys() - surplus
        return self._collected(groups, surplus, following, self._estimate(head))

    def _collected(
        self, groups: list[Group], surplus: Set[int], following: int, kept_fraction: float
    ) -> CollectedGroups:
        scored = [self._scored[p.index] for p in self._requested if p.index in self._scored]
        passed = [prompt for prompt in self._requested if self.start <= prompt.index < following]
        whole = [group for group in scored if not group.is_broken]
        trained = [group for group in whole if group.prompt.index not in surplus]
        return CollectedGroups(
            groups=groups,
            judged=trained,
            surplus=[group for group in whole if group.prompt.index in surplus],
            with_signal=sum(carries_signal(group, self.config.reward) for group in trained),
            broken=[group for group in scored if group.is_broken],
            asked_prompts=len(self._requested),
            kept_fraction=kept_fraction,
            next_position=following,
            dropped_prompts=sum(prompt.skipped for prompt in passed),
            truncated_prompts=sum(prompt.truncated for prompt in passed),
            starved=len(groups) < self._wanted,
            resampled=tuple(self._resampled.values()),
            reused=self._reused,
        )


def exceeds_failures(config: Config, failed: int, responses: int) -> bool:
    """Return True if the fraction of failed rewards is above `watch.max_failed_rewards`."""
    limit = config.watch.max_failed_rewards
    return 0 < limit * responses < failed


def _check_starved(config: Config, batch: CollectedGroups, failed: bool) -> None:
    """Raise `Starved` if too few groups carry signal, or too many rewards `failed`."""
    first = next((group.first_failure for group in batch.scored if group.failed), "")
    if failed and not batch.judged:
        raise Starved(f"the reward failed in every group, first: {first}")
    responses = batch.outcomes.total()
    if failed:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in batch.failures.items())
        raise Starved(
            f"{batch.failures.total()} of {responses} rewards failed ({counts}), more than "
            f"config.watch.max_failed_rewards = {config.watch.max_failed_rewards:g}, first: {first}"
        )
    if batch.starved and config.rollout.when_starved == "stop":
        counts = f"{batch.all_right} were all right and {batch.all_wrong} all wrong"
        if config.reward.correct == "spread":
            counts = f"{len(batch.judged) - batch.with_signal} had no spread of rewards"
        raise Starved(
            f"only {len(batch.groups)} of {config.rollout.prompts_per_step} groups carried "
            f"signal after config.rollout.max_sample_rounds = {config.rollout.max_sample_rounds}: "
            f"of {len(batch.judged)} groups {counts}. Change the data's difficulty or "
            "samples_per_prompt, or set config.rollout.when_starved=partial to train on the groups "
            "there are"
        )


def collect(
    collection: Collection,
    prompts: Iterator[Prompt],
    sampler: Sampler,
    judge: Judge,
    recall: Callable[[Prompt], Group | None] = lambda _: None,
    on_scored: Callable[[list[Group]], None] = lambda _: None,
    on_burst: Callable[[Collection], None] = lambda _: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> CollectedGroups:
    """Sample, score and filter groups until `collection` is full.

    It ends early if max_sample_rounds batches of prompts are scored, or if too many rewards of a
    whole batch failed.

    Args:
        prompts: the data order, from the position of the collection on.
        recall: returns the group of a prompt that an earlier try of this step has finished.
        on_scored: receives groups with final rewards.
        on_burst: receives the collection after every burst.
        interrupted: asked between bursts; True ends the collection.

    Raises:
        Starved: max_sample_rounds were not enough and `rollout.when_starved` is 'stop', or no
            group has a reward, or more failed than `watch.max_failed_rewards`.
        Interrupted: `interrupted()` was True between two bursts, or the judge stopped waiting.
    """
    samples = collection.config.rollout.samples_per_prompt
    collection.resume(sampler)
    failed, scored = False, []
    while not collection.full():
        if interrupted():
            raise Interrupted
        on_scored(scored)
        collection.sample_again(sampler)
        while collection.wants_more(sampler):
            prompt = next(prompts)
            if collection.request(prompt, recall(prompt)):
                sampler.submit(prompt, samples)
        nothing_to_decode = sampler.idle
        if not nothing_to_decode:
            collection.decode(sampler, judge)
        if sampler.idle:
            collection.submit_ended(judge)
        scored = collection.read_verdicts(judge, wait=nothing_to_decode)
        failed = collection.too_many_failed()
        if failed or collection.exhausted():
            break
        on_burst(collection)
    if interrupted():  # an interruption may have changed the last rewards
        raise Interrupted
    on_scored(scored)
    batch = collection.end(sampler, judge)
    _check_starved(collection.config, batch, failed)
    return batch

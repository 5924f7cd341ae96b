"""Dynamic sampling with scripted lengths and rewards: which groups are kept, in which order."""

import collections
import dataclasses
import random
from concurrent.futures import Future

import pytest
from samplers import TOKENIZER, make_sampler
from scripted_sampler import ScriptedSampler

from dapo_jax import algorithms
from dapo_jax.config.experiment import Config, Data, Reward, Rollout, Watch
from dapo_jax.data.prompt_stream import PromptStream
from dapo_jax.extras.arithmetic import arithmetic_tokenizer
from dapo_jax.rewards.group_rewards import Judge
from dapo_jax.rollout.dynamic_sampling import (
    Collection,
    Starved,
    collect,
    next_kept_fraction,
)
from dapo_jax.run.metrics import rollout_metrics
from dapo_jax.runtime.workers import pool as worker_pool
from dapo_jax.types.structs import Failure, Interrupted, Outcome, RolloutKey, SamplingRule, Verdict

LOST = Verdict(False, None, Failure(Outcome.CRASH, "the worker died"))


class ScriptedPool:
    """Decides that the first `right(index)` responses of each group are correct.

    The rewards of the last `failing(index, tries)` fail; `tries` counts the groups of the prompt. A
    reward is there after up to `most` looks at the rewards.
    """

    def __init__(self, right, failing=lambda index, tries: 0, most=0):
        self._right, self._failing = right, failing
        self._tries = collections.Counter()
        self._random, self._most = random.Random(most), most
        self._due, self._looks, self._bursts = [], 0, 0

    def submit_group(self, prompt, completions):
        whole = len(completions) - self._failing(prompt.index, self._tries[prompt.index])
        self._tries[prompt.index] += 1
        right, future = self._right(prompt.index), Future()
        verdicts = [Verdict(i < right, "1", decided="direct") for i in range(whole)]
        verdicts += [LOST] * (len(completions) - whole)
        if looks := self._random.randint(0, self._most):
            self._due.append((self._looks + looks, future, verdicts))
        else:
            future.set_result(verdicts)
        return future

    def look(self, counts, idle) -> bool:
        """Decide what is due. A second look after a burst is a wait: nothing may be left to do."""
        assert idle() or counts.bursts > self._bursts
        self._bursts, self._looks = counts.bursts, self._looks + 1
        for due, future, verdicts in self._due:
            if due < self._looks and not future.done():
                future.set_result(verdicts)
        return False


def run(
    right,
    *,
    wanted=4,
    bursts=lambda i: 1,
    algorithm=None,
    fraction=0.5,
    prompts=None,
    slots=128,
    samples=2,
    failing=lambda index, tries: 0,
    limit=0.5,
    late=0,
    **rollout,
):
    config = Config(
        algorithm=algorithm or algorithms.dapo(),
        data=Data(train_problems=100),
        rollout=Rollout(
            prompts_per_step=wanted, samples_per_prompt=samples, updates_per_rollout=1, **rollout
        ),
        watch=Watch(max_failed_rewards=limit),
    )
    prompts = prompts or PromptStream(config.data, 0, arithmetic_tokenizer())
    sampler, pool = ScriptedSampler(bursts, slots), ScriptedPool(right, failing, late)
    judge = Judge(config, pool, None, lambda: pool.look(sampler.counts, lambda: sampler.idle))
    collected = collect(Collection(config, fraction, prompts.position), prompts, sampler, judge)
    prompts.position = collected.next_position
    assert all(future.done() for _, future, _ in pool._due)  # nobody reads those that are cancelled
    return collected, prompts, sampler


def indices(collected):
    return [group.prompt.index for group in collected.groups]


def test_the_first_qualifying_groups_in_data_order_are_kept():
    """Even prompts are slow; odd ones at once. Every third one is all right."""
    collected, prompts, _ = run(
        lambda i: 2 if i % 3 == 0 else 1, bursts=lambda i: 9 if i % 2 == 0 else 1
    )
    assert indices(collected) == [1, 2, 4, 5]
    assert collected.next_position == prompts.position == 6
    assert not collected.starved


@pytest.mark.parametrize("failing", [lambda index, tries: 0, lambda index, tries: index % 5 == 2])
def test_when_a_reward_arrives_decides_nothing_but_the_surplus(failing, monkeypatch):
    """And decoding never waits for one: see `ScriptedPool.look`."""
    monkeypatch.setattr(worker_pool, "POLL_SECONDS", 0.0)
    settings = {"bursts": lambda i: 1 + i % 4, "slots": 16, "failing": failing, "samples": 4}
    settings |= {"when_broken": "resample", "wanted": 8}
    runs = [run(lambda i: i % 3, late=late, **settings) for late in (0, 3, 40)]
    steps = [collected for collected, _, _ in runs]
    assert len({sampler.counts.bursts for *_, sampler in runs}) > 1  # it decoded while they came
    first, *others = steps
    for step in others:
        assert indices(step) == indices(first)
        assert [g.prompt.index for g in step.judged] == [g.prompt.index for g in first.judged]
        assert step.next_position == first.next_position
        assert step.kept_fraction == first.kept_fraction


def test_too_many_failures_in_data_order_stop_the_run_however_late_rewards_are(monkeypatch):
    """Of the first four groups none fails; only the surplus would be too much."""
    monkeypatch.setattr(worker_pool, "POLL_SECONDS", 0.0)
    for late in 0, 9:
        collected, *_ = run(lambda i: 1, failing=lambda index, tries: 2 * (index > 3), late=late)
        assert indices(collected) == [0, 1, 2, 3] and collected.failures
        with pytest.raises(Starved, match="crash: the worker died"):
            run(lambda i: 1, failing=lambda index, tries: 2 * (index < 4), late=late, wanted=5)


@pytest.mark.parametrize("again_fails", [False, True])
def test_a_broken_group_is_sampled_again_with_other_tokens(tiny_params, one_device, again_fails):
    settings = Rollout(3, 4, updates_per_rollout=1, when_broken="resample", max_sample_rounds=2)
    data = Data(train_problems=20, max_prompt_tokens=8, min_terms=2, max_terms=2)
    config = Config(algorithm=algorithms.grpo(), rollout=settings, data=data)
    prompts, sampler = PromptStream(data, 0, TOKENIZER), make_sampler(one_device)
    fails = lambda index, tries: 4 * (index == 1 and (not tries or again_fails))  # noqa: E731
    sampler.begin(tiny_params, RolloutKey(0, 2), SamplingRule())
    judge = Judge(config, ScriptedPool(lambda i: 2, fails))
    collected = collect(Collection(config, 1.0, 0), prompts, sampler, judge)
    (first,) = collected.resampled
    again = collected.broken[0] if again_fails else collected.groups[1]
    tokens, others = ([done.tokens.tolist() for done in responses(g)] for g in (first, again))
    assert [done.sample for done in responses(again)] == [4, 5, 6, 7]
    assert tokens != others


def responses(group):
    return [*group.completions, *(response.completion for response in group.failed)]


def test_the_number_of_requests_follows_the_estimate():
    _, _, eager = run(lambda i: 1, fraction=0.25, bursts=lambda i: 3)
    _, _, frugal = run(lambda i: 1, fraction=1.0, bursts=lambda i: 3)
    assert len(frugal.submitted) == 4 < len(eager.submitted) <= 16
    assert next_kept_fraction(0.5, 0, 8, 8) == pytest.approx(2 / 12)


def test_a_wrong_estimate_requests_little_before_rewards_correct_it():
    """At most eight prompts wait for a slot; without that, all 64 of the estimate would."""
    wrong = {"fraction": 1 / 16, "wanted": 4, "max_sample_rounds": 100}
    collected, _, sampler = run(lambda i: 1, slots=4, **wrong)
    assert indices(collected) == [0, 1, 2, 3]
    assert len(sampler.submitted) <= 2 + 8 + 3
    _, _, eager = run(lambda i: 1, **wrong)
    assert len(eager.submitted) == 64


@pytest.mark.parametrize(("right", "kind"), [(2, "all_right"), (0, "all_wrong")])
def test_starved_sampling_stops_after_its_rounds(right, kind):
    collected, prompts, sampler = run(lambda i: right, max_sample_rounds=3)
    assert collected.groups == [] and collected.starved
    assert getattr(collected, kind) == collected.asked_prompts == 12 == len(sampler.submitted)
    assert prompts.position == 12


def test_a_starved_step_trains_on_the_groups_there_are():
    collected, _, _ = run(
        lambda i: 1 if i in (3, 7) else 2, bursts=lambda i: 1 + i % 3, max_sample_rounds=2
    )
    assert indices(collected) == [3, 7] and collected.starved
    assert collected.next_position == 8
    assert not collected.surplus and len(collected.judged) == 8


def test_a_starved_run_stops_with_its_counts_if_configured():
    with pytest.raises(Starved, match="only 0 of 4 .* 8 were all right and 0 all wrong"):
        run(lambda i: 2, max_sample_rounds=2, when_starved="stop")
    own = Config(reward=Reward(parts="mine:score=1", correct="spread"))
    assert Collection(own, 0.5, 0).describe().endswith(" groups kept (no spread 0)")


# --- failed rewards -----------------------------------------------------------------------------


def test_a_failed_response_leaves_its_group_and_decides_nothing():
    """Two of four are right in each group; without the last two, all of group 1 are right."""
    failing = lambda index, tries: [0, 2, 1, 1, 0, 0, 0, 0][index % 8]  # noqa: E731
    collected, _, _ = run(lambda i: 2, samples=4, failing=failing)
    assert indices(collected) == [0, 2, 3, 4]
    assert [len(group.completions) for group in collected.groups] == [4, 3, 3, 4]
    assert collected.all_right == 1 and not collected.broken
    failed = sum(len(group.failed) for group in collected.scored)
    assert collected.failures == {Outcome.CRASH: failed} and failed >= 4
    metrics = rollout_metrics(collected, ScriptedSampler(lambda i: 1).counts)
    responses = 4 * len(collected.scored)
    assert metrics["outcomes/crash"] == failed == metrics["failed_rewards"] * responses
    assert metrics["accuracy"] > 0.5  # failed ones are not wrong


@pytest.mark.parametrize("when_broken", ["drop", "resample"])
def test_a_group_with_too_few_rewards_is_dropped_or_sampled_again_once(when_broken):
    """Prompt 1 fails in its first try, prompt 2 always."""
    failing = lambda index, tries: int(index == 2 or (index == 1 and tries == 0))  # noqa: E731
    settings = {"fraction": 1.0, "bursts": lambda i: 2, "when_broken": when_broken}
    collected, _, sampler = run(lambda i: 1, failing=failing, **settings)
    again = when_broken == "resample"
    assert indices(collected) == ([0, 1, 3, 4] if again else [0, 3, 4, 5])
    assert [group.prompt.index for group in collected.broken] == ([2] if again else [1, 2])
    assert [group.prompt.index for group in collected.resampled] == ([1, 2] if again else [])
    counts = collections.Counter(sampler.submitted)
    assert {i for i, count in counts.items() if count > 1} == ({1, 2} if again else set())
    first = collected.broken[0].first_failure
    assert first.startswith("crash: the worker died; prompt ")
    metrics = rollout_metrics(collected, sampler.counts)
    names = "broken_groups", "resampled_groups", "outcomes/crash"
    assert [metrics[name] for name in names] == ([1, 2, 3] if again else [2, 0, 2])


def test_a_step_of_which_too_many_rewards_failed_stops_the_run():
    failing = lambda index, tries: int(index % 2)  # noqa: E731
    with pytest.raises(Starved, match=r"\d of \d+ rewards failed \(\d crash\), more than conf"):
        run(lambda i: 1, samples=3, failing=failing, limit=0.1)
    collected, _, _ = run(lambda i: 1, samples=3, failing=failing, limit=0.0)
    assert indices(collected) == [0, 1, 2, 3]
    for limit in 0.0, 1.0:
        with pytest.raises(Starved, match="failed in every group, first: crash: the worker died"):
            run(lambda i: 1, failing=lambda index, tries: 2, limit=limit)


def test_an_interruption_takes_effect_between_bursts():
    config = Config(data=Data(train_problems=50))
    prompts = PromptStream(config.data, 0, arithmetic_tokenizer())
    with pytest.raises(Interrupted):
        sampler, collection = ScriptedSampler(lambda i: 1), Collection(config, 0.5, 0)
        collect(collection, prompts, sampler, None, interrupted=lambda: True)


def test_dropped_and_truncated_prompts_are_counted_once():
    short = Data(train_problems=100, max_prompt_tokens=9)
    drop = dataclasses.replace(short, overlong_prompts="drop")
    whole, cut = (PromptStream(data, 0, arithmetic_tokenizer()) for data in (drop, short))
    collected = [run(lambda i: 1, prompts=whole)[0] for _ in range(3)]
    assert all(step.asked_prompts > 4 for step in collected)  # the surplus is asked for again
    dropped = sum(step.dropped_prompts for step in collected)
    assert whole.position == 12 + dropped and dropped > 0
    collected = run(lambda i: 1, prompts=cut)[0]
    truncated = sum(group.prompt.truncated for group in collected.groups)
    assert collected.truncated_prompts == truncated > 0 == collected.dropped_prompts


# --- the surplus: groups that were finished past the last one used ---------------------------


def with_fast_finishers():
    """The first six prompts are slow and half right, the others short and all right."""
    slow = lambda i: i < 6  # noqa: E731
    return run(lambda i: 1 if slow(i) else 2, bursts=lambda i: 9 if slow(i) else 1, fraction=0.25)


def test_surplus_groups_change_no_mean_of_the_step():
    collected, _, sampler = with_fast_finishers()
    assert [group.prompt.index for group in collected.judged] == [0, 1, 2, 3] == indices(collected)
    surplus = [group.prompt.index for group in collected.surplus]
    assert {4, 5, 6, 15} <= set(surplus) and min(surplus) == 4
    sampler.counts.tokens = 1000
    actual = rollout_metrics(collected, sampler.counts)
    assert actual["accuracy"] == 0.5 and actual["reward"] == 0 and actual["kept_fraction"] == 1
    assert actual["all_right_fraction"] == actual["all_wrong_fraction"] == 0
    assert actual["response_tokens_mean"] == actual["response_tokens_right"] == 10
    assert actual["reward_parts/rule"] == 0
    # What judging cost counts whole.
    assert actual["surplus_groups"] == len(surplus) > 10
    assert actual["verdicts/direct"] == 2 * (4 + len(surplus))
    assert actual["sampled_to_kept_tokens"] == 1000 / (4 * 2 * 10)


def test_the_next_estimate_does_not_depend_on_order_of_arrival():
    """Nor on the slots, which may change between the parts of a run."""
    hurried, _, _ = with_fast_finishers()
    even, _, _ = run(lambda i: 1 if i < 6 else 2, fraction=0.25)
    assert hurried.kept_fraction == even.kept_fraction == next_kept_fraction(0.25, 4, 4, 4)

"""Newer advantage estimators and their scales against loops and enumerations, from the papers."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from policy_loops import mean
from row_files import read_table

from dapo_jax.algorithms import dapo
from dapo_jax.learner.advantages import ESTIMATORS, SCALES, estimate, gather_feedback

EXACT = {"rtol": 1e-6, "atol": 1e-9}

# Groups of 5, 1, 4, 2 and 3: mixed, alone, all right, all wrong, of equal rewards that are
# neither; one response is empty and two are filtered, which count in the statistics.
SIZES = [5, 1, 4, 2, 3]
GROUPS = np.repeat([11, 3, 8, 5, 6], SIZES)
REWARDS = np.array([1, 0, 0, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0.25, 0.25, 0.25])
CORRECT = REWARDS >= 0.5
LENGTHS = [3, 1, 0, 5, 2, 4, 1, 2, 6, 1, 3, 2, 2, 1, 4]
FILTERED = (3, 9)
ALL = range(len(REWARDS))
ORDER = np.random.default_rng(0).permutation(len(REWARDS))  # members of a group stand apart


def of_order(values):
    return np.asarray(values)[ORDER]


def make_feedback(rewards=REWARDS, parts=None, weights=None):
    """Feedback of packed responses, NaN-free; tokens of the filtered ones carry no loss."""
    index = np.concatenate([[-1, *[i] * LENGTHS[j]] for i, j in enumerate(ORDER)])[None, None]
    filtered = [i for i, j in enumerate(ORDER) if j in FILTERED]
    known = {"groups": of_order(GROUPS), "correct": of_order(CORRECT)}
    if parts is not None:
        known |= {"reward_parts": np.asarray(parts)[:, ORDER], "part_weights": np.array(weights)}
    trained = (index >= 0) & ~np.isin(index, filtered)
    return gather_feedback(index, of_order(np.float64(rewards)), trained=trained, **known)


def per_response(algorithm, feedback):
    """The advantage of each response, in this file's order; None where it has no token."""
    actual, result = ESTIMATORS[algorithm.advantage](algorithm, feedback), [None] * len(REWARDS)
    assert actual.dtype == np.float64 and not actual[feedback.response_index < 0].any()
    rounded = estimate(algorithm, feedback)[0]
    np.testing.assert_array_equal(rounded, actual.astype(np.float32))
    for i, j in enumerate(ORDER):
        own = set(actual[feedback.response_index == i].tolist())
        assert len(own) == (LENGTHS[j] > 0)
        result[j] = own.pop() if own else None
    return result


def assert_advantages(algorithm, feedback, expected):
    actual = per_response(algorithm, feedback)
    for i in ALL:
        if actual[i] is not None:
            np.testing.assert_allclose(actual[i], expected[i], **EXACT, err_msg=str(i))


def estimator(name, **changes):
    return dataclasses.replace(dapo(), advantage=name, **changes)


def sample_std(numbers):
    if len(numbers) < 2:
        return 0.0
    return math.sqrt(math.fsum((x - mean(numbers)) ** 2 for x in numbers) / (len(numbers) - 1))


def members(i):
    return [j for j in ALL if GROUPS[j] == GROUPS[i]]


def loop_centred(rewards=REWARDS):
    return [rewards[i] - mean([rewards[j] for j in members(i)]) for i in ALL]


# --- estimators ----------------------------------------------------------------------------


def test_opo_weighs_the_baseline_by_length():
    """2505.23585: R - sum(n R) / sum(n), over all responses of the prompt."""
    expected = []
    for i in ALL:
        group = members(i)
        total = math.fsum(LENGTHS[j] for j in group)
        baseline = math.fsum(LENGTHS[j] * REWARDS[j] for j in group) / total
        expected.append(REWARDS[i] - baseline)
    assert_advantages(estimator("length_weighted_centre"), make_feedback(), expected)


PARTS = np.random.default_rng(3).normal(size=(3, len(REWARDS)))
PARTS[0] = REWARDS
PARTS[2, 5:10] = 0.125  # equal in two groups


def loop_zscores(part):
    result = []
    for i in ALL:
        group = [part[j] for j in members(i)]
        result.append((part[i] - mean(group)) / (sample_std(group) + 1e-6))
    return result


def test_gdpo_adds_the_zscores_of_the_parts_and_whitens_responses():
    """2601.05242, equations 4 to 6."""
    weights = [1.0, -0.5, 0.25]
    # Parts of the feedback are weighted already; their weights only say how.
    weighted = [w * part for w, part in zip(weights, PARTS, strict=True)]
    scores = [loop_zscores(part) for part in PARTS]
    sums = [math.fsum(w * s[i] for w, s in zip(weights, scores, strict=True)) for i in ALL]
    centre, scale = mean(sums), sample_std(sums)
    expected = [(x - centre) / scale for x in sums]
    actual = per_response(estimator("reward_parts"), make_feedback(parts=weighted, weights=weights))
    for i in ALL:
        if actual[i] is not None:
            np.testing.assert_allclose(actual[i], expected[i], rtol=1e-4, atol=1e-5)


def enumerated_sets(group, k):
    """2508.10751: the mean over a response's sets of the set's normalised reward."""
    sets = list(itertools.combinations(group, k))
    rewards = [float(any(CORRECT[j] for j in own)) for own in sets]
    spread = math.sqrt(mean([(r - mean(rewards)) ** 2 for r in rewards]))
    if spread < 1e-9:
        return dict.fromkeys(group, 0.0)
    scores = [(r - mean(rewards)) / spread for r in rewards]
    return {j: mean([s for own, s in zip(sets, scores, strict=True) if j in own]) for j in group}


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_pass_at_k_is_the_mean_over_all_sets_of_k(k):
    expected = {}
    for group in {tuple(members(i)) for i in ALL}:
        expected |= enumerated_sets(group, min(k, len(group)))
    feedback = make_feedback()
    assert_advantages(estimator("pass_at_k", pass_k=k), feedback, expected)


def test_the_best_has_its_lead_over_the_second_best():
    """2503.19595: max over the group minus max over the others, which is 0 but for the best."""
    rewards = np.random.default_rng(5).normal(size=len(REWARDS))
    rewards[GROUPS == 8] = [0.5, 0.5, -1.0, 0.0]  # the best two are equal
    expected = []
    for i in ALL:
        others = [rewards[j] for j in members(i) if j != i]
        best = max([*others, rewards[i]])
        expected.append(best - max(others) if others else 0.0)
    assert_advantages(estimator("best_minus_second"), make_feedback(rewards), expected)


# --- scales --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["group_centre", "leave_one_out", "length_weighted_centre"])
def test_lite_ppo_divides_by_the_batchs_standard_deviation(name):
    """2508.08221: the standard deviation of all rewards of the batch."""
    plain = ESTIMATORS[name](estimator(name), make_feedback())
    scaled = ESTIMATORS[name](estimator(name, advantage_scale="batch"), make_feedback())
    expected = plain / sample_std(list(REWARDS))
    np.testing.assert_allclose(scaled, expected, rtol=1e-5, atol=1e-9)


def test_a_batch_of_equal_rewards_has_scaled_advantages_of_zero():
    for scale in SCALES:
        for reward in (0.0, 1.0, -1.0):
            feedback = make_feedback(np.full(len(REWARDS), reward))
            actual = per_response(estimator("group_centre", advantage_scale=scale), feedback)
            assert not any(actual)
    feedback = make_feedback(parts=[np.ones(len(REWARDS))], weights=[2.0])
    assert not any(per_response(estimator("reward_parts"), feedback))


@pytest.mark.parametrize("shift", [0.0, 0.5, -1.0])
def test_maxrl_divides_by_the_groups_mean_reward(shift):
    """2602.02710: (R - m) / m; a mean of 0 or less gives 0 and never turns a sign."""
    rewards = REWARDS + shift
    rewards[GROUPS == 11] *= 2
    centred, expected = loop_centred(rewards), []
    for i in ALL:
        m = mean([rewards[j] for j in members(i)])
        expected.append(centred[i] / m if m > 0 else 0.0)
    algorithm = estimator("group_centre", advantage_scale="mean")
    assert_advantages(algorithm, make_feedback(rewards), expected)
    actual = per_response(algorithm, make_feedback(rewards))
    assert all(actual[i] is None or actual[i] * centred[i] >= 0 for i in ALL)


def test_gpg_scales_by_the_groups_with_signal():
    """2504.02546: times all groups over those whose rewards differ."""
    expected = [a * 5 / 1 for a in loop_centred()]
    algorithm = estimator("group_centre", advantage_scale="informative")
    assert_advantages(algorithm, make_feedback(), expected)


@pytest.mark.parametrize(("scale", "rewards", "groups", "expected"), read_table(__file__, "means"))
def test_a_rounded_mean_counts_as_exact(scale, rewards, groups, expected):
    rewards = np.float64(rewards)
    index = np.arange(len(rewards))[None, None]
    known = gather_feedback(index, rewards, groups=np.array(groups), correct=rewards > 0.6)
    actual = ESTIMATORS["group_centre"](estimator("group_centre", advantage_scale=scale), known)
    np.testing.assert_allclose(actual[0, 0], expected, atol=1e-6)

"""Every advantage estimator against a loop over responses and tokens, written from its paper."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from policy_loops import mean
from row_files import read_table

from dapo_jax.algorithms import dapo
from dapo_jax.learner.advantages import ESTIMATORS, SCALES, estimate, gather_feedback, whiten
from dapo_jax.reporting.metrics import feedback_metrics

RNG = np.random.default_rng(0)
EXACT = {"rtol": 1e-6, "atol": 1e-12}

# One-token and empty responses, and a group whose rewards don't differ (the second).
LENGTHS = [3, 1, 0, 5, 2, 4, 1, 2]
GROUPS = np.array([4, 4, 4, 4, 7, 7, 2, 2])
EARNED = np.array([1.0, -1.0, -1.0, 0.25, 0.5, 0.5, -1.0, -1.75])
CORRECT = np.array([True, False, False, True, False, True, False, True])
# Row and first column of each response, of [2, 2, 9]. Responses 5 and 6 adjoin, 4 ends its row;
# elsewhere prompts stand between them.
STARTS = [(0, 2), (2, 7), (1, 8), (1, 2), (0, 7), (2, 1), (2, 5), (3, 3)]
SHAPE, ALL = (2, 2, 9), range(len(LENGTHS))


def placed(per_token, fill):
    """Lists of the responses' tokens at their places; `fill` off the responses."""
    array = np.full((4, 9), fill)
    for (row, start), values in zip(STARTS, per_token, strict=True):
        array[row, start : start + len(values)] = values
    return array.reshape(SHAPE)


def draws(scale=1.0):
    return [[float(x) for x in RNG.normal(0, scale, n)] for n in LENGTHS]


INDEX = placed([[i] * n for i, n in enumerate(LENGTHS)], -1)
PENALTIES, VALUES, LOG_RATIOS = draws(0.3), draws(), draws(3.0)
ENERGIES = [[abs(x) for x in own] for own in draws()]


def feedback(penalties=None, values=None, rubbish=np.nan, **changes):
    """Feedback with NaN (or other rubbish) wherever no response stands."""
    parts = {"reward_parts": EARNED[None], "part_weights": np.ones(1)}
    known = parts | {"groups": GROUPS, "correct": CORRECT} | changes
    return gather_feedback(
        INDEX,
        EARNED,
        penalties=None if penalties is None else placed(penalties, rubbish),
        values=None if values is None else placed(values, rubbish),
        **known,
    )


def estimated(name, known, **changes):
    """The estimator's own float64 value; `estimate` must be that, rounded to float32."""
    algorithm = dataclasses.replace(dapo(), advantage=name, **changes)
    exact = ESTIMATORS[name](algorithm, known)
    assert exact.dtype == np.float64
    rounded = estimate(algorithm, known)[0]
    assert rounded.dtype == np.float32
    if not algorithm.whiten:
        np.testing.assert_array_equal(rounded, exact.astype(np.float32))
    return exact


def loop_returns(penalties):
    """What each response earned, less what its tokens cost."""
    return [EARNED[i] - math.fsum(penalties[i] if penalties else []) for i in ALL]


def loop_token_rewards(penalties):
    """Per response: minus the penalty on each token, what it earned on the last."""
    rewards = [[-x for x in penalties[i]] if penalties else [0.0] * LENGTHS[i] for i in ALL]
    for i, own in enumerate(rewards):
        if own:
            own[-1] += EARNED[i]
    return rewards


def loop_response_advantage(name, rewards, i):
    """The advantage of response i, from the rewards of all."""
    group = [rewards[j] for j in ALL if GROUPS[j] == GROUPS[i]]
    if name == "group_zscore":
        squares = math.fsum((r - mean(group)) ** 2 for r in group)
        return (rewards[i] - mean(group)) / (math.sqrt(squares / (len(group) - 1)) + 1e-6)
    if name == "leave_one_out":
        return rewards[i] - mean([rewards[j] for j in ALL if GROUPS[j] == GROUPS[i] and j != i])
    return rewards[i] - LOOP_BASELINES[name](group, rewards)


LOOP_BASELINES = {
    "group_centre": lambda group, batch: mean(group),
    "batch_centre": lambda group, batch: mean(batch),
    "reward": lambda group, batch: 0.0,
}
OF_RESPONSES = ["group_zscore", "leave_one_out", *LOOP_BASELINES]


@pytest.mark.parametrize("penalties", [None, PENALTIES], ids=["bare", "with KL in the reward"])
@pytest.mark.parametrize("name", OF_RESPONSES)
def test_a_response_has_the_papers_advantage_on_all_its_tokens(name, penalties):
    rewards = loop_returns(penalties)
    expected = [[loop_response_advantage(name, rewards, i)] * LENGTHS[i] for i in ALL]
    actual = estimated(name, feedback(penalties))
    np.testing.assert_allclose(actual, placed(expected, 0.0), **EXACT)


def loop_token_baseline(returns, i, t):
    """2602.07078: sum(G W) / sum(W) over the responses of the group that reach the token."""
    group = [j for j in ALL if GROUPS[j] == GROUPS[i] and LENGTHS[j] > t]
    if len(group) == 1:
        return 0.0
    weights = [math.fsum(ENERGIES[j][: t + 1]) for j in group]
    products = [w * returns[j][t] for w, j in zip(weights, group, strict=True)]
    return math.fsum(products) / math.fsum(weights)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_token_baseline_weighs_returns_by_their_energies(gamma):
    returns = [loop_discounted(own, gamma) for own in loop_token_rewards(PENALTIES)]
    expected = [
        [returns[i][t] - loop_token_baseline(returns, i, t) for t in range(LENGTHS[i])] for i in ALL
    ]
    known = feedback(PENALTIES, energies=placed(ENERGIES, np.nan))
    actual = estimated("token_baseline", known, gamma=gamma)
    np.testing.assert_allclose(actual, placed(expected, 0.0), **EXACT)


def loop_discounted(values, factor):
    """sum over l of factor^l x[t + l], for each t, sum by sum."""
    n = len(values)
    return [math.fsum(factor**k * values[t + k] for k in range(n - t)) for t in range(n)]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("penalties", [None, PENALTIES], ids=["bare", "with KL in the reward"])
def test_reward_to_go_sums_the_rewards_that_follow(gamma, penalties):
    expected = [loop_discounted(own, gamma) for own in loop_token_rewards(penalties)]
    actual = estimated("reward_to_go", feedback(penalties), gamma=gamma)
    np.testing.assert_allclose(actual, placed(expected, 0.0), **EXACT)


def loop_gae(rewards, values, gamma, lam):
    """GAE's equation 16; the value after the last token is 0."""
    following = [*values[1:], 0.0][: len(values)]
    errors = [r + gamma * f - v for r, f, v in zip(rewards, following, values, strict=True)]
    return loop_discounted(errors, gamma * lam)


@pytest.mark.parametrize(
    ("gamma", "policy", "value"),
    [(1.0, 0.95, 0.95), (1.0, 0.9, 1.0), (0.97, 0.5, 0.8), (1.0, 0.0, 0.0)],
)
def test_gae_and_returns_have_a_lambda_each(gamma, policy, value):
    known, rewards = feedback(PENALTIES, VALUES), loop_token_rewards(PENALTIES)
    changes = {"gamma": gamma, "lambda_policy": policy, "lambda_value": value}
    actual = estimated("gae", known, **changes)
    advantages = [loop_gae(rewards[i], VALUES[i], gamma, policy) for i in ALL]
    np.testing.assert_allclose(actual, placed(advantages, 0.0), **EXACT)
    gains = [loop_gae(rewards[i], VALUES[i], gamma, value) for i in ALL]
    expected = [[g + v for g, v in zip(gains[i], VALUES[i], strict=True)] for i in ALL]
    for whitened in (False, True):  # which returns never are
        algorithm = dataclasses.replace(dapo(), advantage="gae", whiten=whitened, **changes)
        returns = estimate(algorithm, known)[1]
        assert returns.dtype == np.float32
        np.testing.assert_allclose(returns, placed(expected, 0.0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.6])
def test_length_adaptive_lambda_grows_with_the_response_and_is_never_negative(alpha):
    lambdas = [max(0.0, 1 - 1 / (alpha * n)) if n else 0.0 for n in LENGTHS]
    assert min(lambdas) == 0 and (alpha < 0.2 or max(lambdas) > 0.3)
    rewards = loop_token_rewards(PENALTIES)
    expected = [loop_gae(rewards[i], VALUES[i], 0.99, lambdas[i]) for i in ALL]
    known = feedback(PENALTIES, VALUES)
    actual = estimated("length_adaptive_gae", known, gamma=0.99, lambda_alpha=alpha)
    np.testing.assert_allclose(actual, placed(expected, 0.0), **EXACT)


def test_imitation_has_coefficient_one_on_responses_only():
    np.testing.assert_array_equal(estimated("one", feedback()), np.where(INDEX >= 0, 1.0, 0.0))


# --- preference ----------------------------------------------------------------------------


def loop_pairs(tokens):
    """The group's first right response with its first wrong one, and so on, while both last."""
    pairs = []
    for group in (4, 7, 2):
        own = [i for i in ALL if GROUPS[i] == group and tokens[i]]
        right, wrong = [i for i in own if CORRECT[i]], [i for i in own if not CORRECT[i]]
        while right and wrong:
            pairs.append((right.pop(0), wrong.pop(0)))
    return pairs


def loop_preference_losses(log_ratios, pairs, beta):
    """-log sigmoid(beta (sum of the right one's log-ratios - sum of the wrong one's))."""
    margins = [math.fsum(log_ratios[r]) - math.fsum(log_ratios[w]) for r, w in pairs]
    return [math.log1p(math.exp(-beta * margin)) for margin in margins]


def numerical_coefficients(pairs, beta, step=1e-4):
    """Minus the derivative of each pair's loss by each token's log-prob."""
    result = [[0.0] * n for n in LENGTHS]
    for i in ALL:
        for t in range(LENGTHS[i]):
            ends = []
            for sign in (1, -1):
                moved = [list(own) for own in LOG_RATIOS]
                moved[i][t] += sign * step
                ends.append(loop_preference_losses(moved, pairs, beta))
            difference = math.fsum(a - b for a, b in zip(*ends, strict=True))
            result[i][t] = -difference / (2 * step)
    return result


@pytest.mark.parametrize("rubbish", [np.nan, np.inf])
@pytest.mark.parametrize("tokens", [LENGTHS, [0, 1, 0, 5, 2, 4, 1, 0]], ids=["all", "filtered"])
def test_preference_is_minus_the_gradient_of_dpos_loss(tokens, rubbish):
    pairs = loop_pairs(tokens)
    assert len(pairs) == (3 if tokens is LENGTHS else 2)
    trained = np.isin(INDEX, np.flatnonzero(tokens))
    known = feedback(trained=trained, log_ratios=placed(LOG_RATIOS, rubbish))
    assert known.tokens.tolist() == tokens
    actual = estimated("preference", known, preference_beta=0.3)
    expected = placed(numerical_coefficients(pairs, 0.3), 0.0)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-11)
    for right, wrong in pairs:
        assert (actual[INDEX == right] > 0).all() and (actual[INDEX == wrong] < 0).all()


def test_a_preference_without_any_pair_has_no_coefficient():
    known = feedback(correct=np.ones(8, bool), log_ratios=placed(LOG_RATIOS, np.nan))
    assert not estimated("preference", known).any()


def test_a_tied_preference_counts_half():
    known = feedback(log_ratios=placed([[0.0] * n for n in LENGTHS], np.nan))
    algorithm = estimator("preference", trained_responses="pairs")
    values = feedback_metrics(algorithm, known, placed([[0.0] * n for n in LENGTHS], 0.0), None)
    assert values["preference_accuracy"] == 0.5


@pytest.mark.parametrize("margin", [1e5, -1e5])
def test_a_huge_margin_neither_overflows_nor_pulls_more_than_beta(margin):
    log_ratios = [[margin if CORRECT[i] else -margin] * LENGTHS[i] for i in ALL]
    actual = estimated("preference", feedback(log_ratios=placed(log_ratios, np.nan)))
    expected = 0.0 if margin > 0 else 0.1
    np.testing.assert_allclose(np.abs(actual[INDEX == 0]), expected)
    assert np.isfinite(actual).all()


# --- whitening -----------------------------------------------------------------------------


def loop_whitened(per_token):
    every = [x for own in per_token for x in own]
    variance = math.fsum((x - mean(every)) ** 2 for x in every) / (len(every) - 1)
    return [[(x - mean(every)) / math.sqrt(variance + 1e-8) for x in own] for own in per_token]


def test_whitening_makes_response_tokens_standard_and_leaves_the_rest_zero():
    values = draws(5.0)
    actual = whiten(placed(values, 1e9), INDEX >= 0)
    np.testing.assert_allclose(actual, placed(loop_whitened(values), 0.0), **EXACT)


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_whitening_equal_advantages_or_less_than_two_tokens_gives_zeros(tokens):
    on = np.arange(4)[None] < tokens
    np.testing.assert_array_equal(whiten(np.where(on, 0.5, 0.0), on), np.zeros((1, 4)))


@pytest.mark.parametrize("name", ["reward_to_go", "group_centre"])
def test_reinforce_pp_whitens_over_tokens(name):
    """Long responses weigh more in the batch's mean and variance: once per token."""
    if name == "reward_to_go":
        values = [loop_discounted(own, 0.98) for own in loop_token_rewards(PENALTIES)]
    else:
        rewards = loop_returns(PENALTIES)
        values = [[loop_response_advantage(name, rewards, i)] * LENGTHS[i] for i in ALL]
    algorithm = dataclasses.replace(dapo(), advantage=name, gamma=0.98, whiten=True)
    actual = estimate(algorithm, feedback(PENALTIES))[0]
    np.testing.assert_allclose(actual, placed(loop_whitened(values), 0.0), rtol=1e-6, atol=1e-7)


# --- feedback ------------------------------------------------------------------------------


@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf])
def test_rubbish_off_the_responses_reaches_no_estimator(rubbish):
    """Nor the rewards, nor the returns."""

    def known(fill):
        log_ratios = placed(LOG_RATIOS, fill)
        energies = placed(ENERGIES, fill)
        return feedback(PENALTIES, VALUES, rubbish=fill, log_ratios=log_ratios, energies=energies)

    np.testing.assert_array_equal(known(rubbish).rewards, known(0.0).rewards)
    for name in ESTIMATORS:
        for whitened in (False, True):
            algorithm = dataclasses.replace(dapo(), advantage=name, whiten=whitened)
            actual, clean = estimate(algorithm, known(rubbish)), estimate(algorithm, known(0.0))
            np.testing.assert_array_equal(actual, clean, err_msg=name)
            assert not actual[0][INDEX < 0].any() and not actual[1][INDEX < 0].any()


# --- newer estimators ----------------------------------------------------------------------------

NEWER_EXACT = {"rtol": 1e-6, "atol": 1e-9}

# Groups of 5, 1, 4, 2 and 3: mixed, alone, all right, all wrong, of equal rewards that are
# neither; one response is empty and two are filtered, which count in the statistics.
SIZES = [5, 1, 4, 2, 3]
NEWER_GROUPS = np.repeat([11, 3, 8, 5, 6], SIZES)
REWARDS = np.array([1, 0, 0, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0.25, 0.25, 0.25])
NEWER_CORRECT = REWARDS >= 0.5
NEWER_LENGTHS = [3, 1, 0, 5, 2, 4, 1, 2, 6, 1, 3, 2, 2, 1, 4]
FILTERED = (3, 9)
NEWER_ALL = range(len(REWARDS))
ORDER = np.random.default_rng(0).permutation(len(REWARDS))  # members of a group stand apart


def of_order(values):
    return np.asarray(values)[ORDER]


def make_feedback(rewards=REWARDS, parts=None, weights=None):
    """Feedback of packed responses, NaN-free; tokens of the filtered ones carry no loss."""
    index = np.concatenate([[-1, *[i] * NEWER_LENGTHS[j]] for i, j in enumerate(ORDER)])[None, None]
    filtered = [i for i, j in enumerate(ORDER) if j in FILTERED]
    known = {"groups": of_order(NEWER_GROUPS), "correct": of_order(NEWER_CORRECT)}
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
        assert len(own) == (NEWER_LENGTHS[j] > 0)
        result[j] = own.pop() if own else None
    return result


def assert_advantages(algorithm, feedback, expected):
    actual = per_response(algorithm, feedback)
    for i in NEWER_ALL:
        if actual[i] is not None:
            np.testing.assert_allclose(actual[i], expected[i], **NEWER_EXACT, err_msg=str(i))


def estimator(name, **changes):
    return dataclasses.replace(dapo(), advantage=name, **changes)


def sample_std(numbers):
    if len(numbers) < 2:
        return 0.0
    return math.sqrt(math.fsum((x - mean(numbers)) ** 2 for x in numbers) / (len(numbers) - 1))


def members(i):
    return [j for j in NEWER_ALL if NEWER_GROUPS[j] == NEWER_GROUPS[i]]


def loop_centred(rewards=REWARDS):
    return [rewards[i] - mean([rewards[j] for j in members(i)]) for i in NEWER_ALL]


# --- estimators ----------------------------------------------------------------------------


def test_opo_weighs_the_baseline_by_length():
    """2505.23585: R - sum(n R) / sum(n), over all responses of the prompt."""
    expected = []
    for i in NEWER_ALL:
        group = members(i)
        total = math.fsum(NEWER_LENGTHS[j] for j in group)
        baseline = math.fsum(NEWER_LENGTHS[j] * REWARDS[j] for j in group) / total
        expected.append(REWARDS[i] - baseline)
    assert_advantages(estimator("length_weighted_centre"), make_feedback(), expected)


PARTS = np.random.default_rng(3).normal(size=(3, len(REWARDS)))
PARTS[0] = REWARDS
PARTS[2, 5:10] = 0.125  # equal in two groups


def loop_zscores(part):
    result = []
    for i in NEWER_ALL:
        group = [part[j] for j in members(i)]
        result.append((part[i] - mean(group)) / (sample_std(group) + 1e-6))
    return result


def test_gdpo_adds_the_zscores_of_the_parts_and_whitens_responses():
    """2601.05242, equations 4 to 6."""
    weights = [1.0, -0.5, 0.25]
    # Parts of the feedback are weighted already; their weights only say how.
    weighted = [w * part for w, part in zip(weights, PARTS, strict=True)]
    scores = [loop_zscores(part) for part in PARTS]
    sums = [math.fsum(w * s[i] for w, s in zip(weights, scores, strict=True)) for i in NEWER_ALL]
    centre, scale = mean(sums), sample_std(sums)
    expected = [(x - centre) / scale for x in sums]
    actual = per_response(estimator("reward_parts"), make_feedback(parts=weighted, weights=weights))
    for i in NEWER_ALL:
        if actual[i] is not None:
            np.testing.assert_allclose(actual[i], expected[i], rtol=1e-4, atol=1e-5)


def enumerated_sets(group, k):
    """2508.10751: the mean over a response's sets of the set's normalised reward."""
    sets = list(itertools.combinations(group, k))
    rewards = [float(any(NEWER_CORRECT[j] for j in own)) for own in sets]
    spread = math.sqrt(mean([(r - mean(rewards)) ** 2 for r in rewards]))
    if spread < 1e-9:
        return dict.fromkeys(group, 0.0)
    scores = [(r - mean(rewards)) / spread for r in rewards]
    return {j: mean([s for own, s in zip(sets, scores, strict=True) if j in own]) for j in group}


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_pass_at_k_is_the_mean_over_all_sets_of_k(k):
    expected = {}
    for group in {tuple(members(i)) for i in NEWER_ALL}:
        expected |= enumerated_sets(group, min(k, len(group)))
    feedback = make_feedback()
    assert_advantages(estimator("pass_at_k", pass_k=k), feedback, expected)


def test_the_best_has_its_lead_over_the_second_best():
    """2503.19595: max over the group minus max over the others, which is 0 but for the best."""
    rewards = np.random.default_rng(5).normal(size=len(REWARDS))
    rewards[NEWER_GROUPS == 8] = [0.5, 0.5, -1.0, 0.0]  # the best two are equal
    expected = []
    for i in NEWER_ALL:
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
    rewards[NEWER_GROUPS == 11] *= 2
    centred, expected = loop_centred(rewards), []
    for i in NEWER_ALL:
        m = mean([rewards[j] for j in members(i)])
        expected.append(centred[i] / m if m > 0 else 0.0)
    algorithm = estimator("group_centre", advantage_scale="mean")
    assert_advantages(algorithm, make_feedback(rewards), expected)
    actual = per_response(algorithm, make_feedback(rewards))
    assert all(actual[i] is None or actual[i] * centred[i] >= 0 for i in NEWER_ALL)


def test_gpg_scales_by_the_groups_with_signal():
    """2504.02546: times all groups over those whose rewards differ."""
    expected = [a * 5 / 1 for a in loop_centred()]
    algorithm = estimator("group_centre", advantage_scale="informative")
    assert_advantages(algorithm, make_feedback(), expected)
    rounded = REWARDS * (1 + 1e-15 * np.arange(len(REWARDS)))  # of the others, sums round
    assert_advantages(algorithm, make_feedback(rounded), expected)


@pytest.mark.parametrize(("scale", "rewards", "groups", "expected"), read_table(__file__, "means"))
def test_a_rounded_mean_counts_as_exact(scale, rewards, groups, expected):
    rewards = np.float64(rewards)
    index = np.arange(len(rewards))[None, None]
    known = gather_feedback(index, rewards, groups=np.array(groups), correct=rewards > 0.6)
    actual = ESTIMATORS["group_centre"](estimator("group_centre", advantage_scale=scale), known)
    np.testing.assert_allclose(actual[0, 0], expected, atol=1e-6)

"""Every advantage estimator against a loop over responses and tokens, written from its paper."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from policy_loops import mean
from row_files import read_table

from dapo_jax.config.algorithms import dapo
from dapo_jax.learner.advantages import (
    ESTIMATORS,
    SCALES,
    estimate,
    estimate_exactly,
    gather_feedback,
    whiten,
)
from dapo_jax.run.metrics import feedback_metrics

RNG = np.random.default_rng(0)
EXACT = {"rtol": 1e-6, "atol": 1e-9}

# Groups of 5, 4, 2 and 3 whose members stand apart, and a lone response: mixed, all right, all
# wrong, of equal rewards that are neither. One-token and empty responses are among them.
ORDER = np.random.default_rng(0).permutation(15)
GROUPS = np.repeat([11, 3, 8, 5, 6], [5, 1, 4, 2, 3])[ORDER]
REWARDS = np.array([1, 0, 0, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0.25, 0.25, 0.25])[ORDER]
LENGTHS = np.array([3, 1, 0, 5, 2, 4, 1, 2, 6, 1, 3, 2, 2, 1, 4])[ORDER].tolist()
CORRECT, ALL = REWARDS >= 0.5, range(len(LENGTHS))
MEMBERS = [[j for j in ALL if GROUPS[j] == GROUPS[i]] for i in ALL]
SEVERAL = [i for i in ALL if len(MEMBERS[i]) > 1]


def lay_out():
    """Index of the response at each place of [2, 2, T]: some adjoin, others follow a prompt."""
    rows: list[list[int]] = [[], [], [], []]
    for i, n in enumerate(LENGTHS):
        rows[i % 4] += [-1] * (2 * (i % 3 > 0)) + [i] * n
    width = max(map(len, rows))
    return np.array([row + [-1] * (width - len(row)) for row in rows]).reshape(2, 2, width)


INDEX = lay_out()


def placed(per_token, fill=0.0):
    """Lists of the responses' tokens at their places; `fill` off the responses."""
    array = np.full(INDEX.shape, fill)
    for i in ALL:
        array[INDEX == i] = per_token[i]
    return array


def draws(scale=1.0):
    return [RNG.normal(0, scale, n).tolist() for n in LENGTHS]


def spread(per_response):
    return placed([[x] * n for x, n in zip(per_response, LENGTHS, strict=True)])


PENALTIES, VALUES, LOG_RATIOS = draws(0.3), draws(), draws(3.0)
ENERGIES = [[abs(x) for x in own] for own in draws()]


def feedback(penalties=None, values=None, rubbish=np.nan, rewards=REWARDS, **changes):
    """Feedback with NaN (or other rubbish) wherever no response stands."""
    per_token = {"penalties": penalties, "values": values} | {
        name: changes.pop(name, None) for name in ("log_ratios", "energies", "sampler_log_ratios")
    }
    per_token = {k: placed(v, rubbish) for k, v in per_token.items() if v is not None}
    parts = {"reward_parts": rewards[None], "part_weights": np.ones(1)}
    known = parts | {"groups": GROUPS, "correct": CORRECT} | per_token | changes
    return gather_feedback(INDEX, np.float64(rewards), **known)


def estimator(name, **changes):
    return dataclasses.replace(dapo(), advantage=name, **changes)


def assert_advantages(algorithm, known, expected, responses=ALL, **tolerance):
    """The estimator's float64 value is that expected; `estimate` must be it, rounded."""
    exact = estimate_exactly(algorithm, known)
    assert exact.dtype == np.float64 and not exact[INDEX < 0].any()
    chosen = np.isin(INDEX, responses)
    np.testing.assert_allclose(exact[chosen], expected[chosen], **EXACT | tolerance)
    rounded = estimate(algorithm, known)[0]
    assert rounded.dtype == np.float32
    np.testing.assert_array_equal(rounded, exact.astype(np.float32))


# --- one value per response ----------------------------------------------------------------


def sample_std(numbers):
    squares = math.fsum((x - mean(numbers)) ** 2 for x in numbers)
    return math.sqrt(squares / (len(numbers) - 1)) if len(numbers) > 1 else 0.0


def loop_zscore(r, i):
    group = [r[j] for j in MEMBERS[i]]
    return (r[i] - mean(group)) / (sample_std(group) + 1e-6)


def loop_opo(r, i):
    """2505.23585: R - sum(n R) / sum(n), over all responses of the prompt."""
    total = math.fsum(LENGTHS[j] * r[j] for j in MEMBERS[i])
    return r[i] - total / sum(LENGTHS[j] for j in MEMBERS[i])


def loop_best(r, i):
    """2503.19595: max over the group minus max over the others, which is 0 but for the best."""
    others = [r[j] for j in MEMBERS[i] if j != i]
    return max([*others, r[i]]) - max(others, default=r[i])


OF_RESPONSES = {
    "group_zscore": loop_zscore,
    "group_centre": lambda r, i: r[i] - mean([r[j] for j in MEMBERS[i]]),
    "leave_one_out": lambda r, i: r[i] - mean([r[j] for j in MEMBERS[i] if j != i]),
    "length_weighted_centre": loop_opo,
    "best_minus_second": loop_best,
    "batch_centre": lambda r, i: r[i] - mean(r),
    "reward": lambda r, i: r[i],
}


def loop_returns(penalties):
    """What each response earned, less what its tokens cost."""
    return [REWARDS[i] - math.fsum(penalties[i] if penalties else []) for i in ALL]


@pytest.mark.parametrize("penalties", [None, PENALTIES], ids=["bare", "with KL in the reward"])
@pytest.mark.parametrize("name", OF_RESPONSES)
def test_a_response_has_the_papers_advantage_on_all_its_tokens(name, penalties):
    rewards = loop_returns(penalties)
    if name == "best_minus_second" and not penalties:  # of equal bests, any may be the best
        rewards = np.arange(15.0)
    expected = [OF_RESPONSES[name](rewards, i) if i in SEVERAL else 0.0 for i in ALL]
    known = feedback(penalties, rewards=REWARDS if penalties else np.array(rewards))
    assert_advantages(estimator(name), known, spread(expected), SEVERAL)


def test_gdpo_adds_the_zscores_of_the_parts_and_whitens_responses():
    """2601.05242, equations 4 to 6."""
    parts = np.random.default_rng(3).normal(size=(3, 15))
    parts[0], parts[2, (GROUPS == 8) | (GROUPS == 3)] = REWARDS, 0.125  # equal in two groups
    weights = np.array([1.0, -0.5, 0.25])
    scores = [[loop_zscore(part, i) for i in ALL] for part in parts]
    sums = [math.fsum(w * s[i] for w, s in zip(weights, scores, strict=True)) for i in ALL]
    expected = spread([(x - mean(sums)) / sample_std(sums) for x in sums])
    # Parts of the feedback are weighted already; their weights only say how.
    known = feedback(reward_parts=weights[:, None] * parts, part_weights=weights)
    assert_advantages(estimator("reward_parts"), known, expected, rtol=1e-4, atol=1e-5)


def enumerated_sets(group, k):
    """2508.10751: the mean over a response's sets of the set's normalised reward."""
    sets = list(itertools.combinations(group, k))
    rewards = [float(any(CORRECT[j] for j in own)) for own in sets]
    deviation = math.sqrt(mean([(r - mean(rewards)) ** 2 for r in rewards]))
    if deviation < 1e-9:
        return dict.fromkeys(group, 0.0)
    scores = [(r - mean(rewards)) / deviation for r in rewards]
    return {j: mean([s for own, s in zip(sets, scores, strict=True) if j in own]) for j in group}


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_pass_at_k_is_the_mean_over_all_sets_of_k(k):
    expected = [enumerated_sets(group, min(k, len(group)))[i] for i, group in enumerate(MEMBERS)]
    assert_advantages(estimator("pass_at_k", pass_k=k), feedback(), spread(expected))


# --- scales --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["group_centre", "leave_one_out", "length_weighted_centre"])
def test_lite_ppo_divides_by_the_batchs_standard_deviation(name):
    """2508.08221: the standard deviation of all rewards of the batch."""
    expected = estimate_exactly(estimator(name), feedback()) / sample_std(REWARDS)
    scaled = estimator(name, advantage_scale="batch")
    assert_advantages(scaled, feedback(), expected, rtol=1e-5)


def test_a_batch_of_equal_rewards_has_scaled_advantages_of_zero():
    for scale, reward in itertools.product(SCALES, (0.0, 1.0, -1.0)):
        known = feedback(rewards=np.full(15, reward))
        assert_advantages(estimator("group_centre", advantage_scale=scale), known, placed([0] * 15))
    known = feedback(reward_parts=np.ones((1, 15)), part_weights=np.array([2.0]))
    assert_advantages(estimator("reward_parts"), known, placed([0] * 15))


@pytest.mark.parametrize("shift", [0.0, 0.5, -1.0])
def test_maxrl_divides_by_the_groups_mean_reward(shift):
    """2602.02710: (R - m) / m; a mean of 0 or less gives 0 and never turns a sign."""
    rewards = (REWARDS + shift) * np.where(GROUPS == 11, 2, 1)
    means = [mean([rewards[j] for j in group]) for group in MEMBERS]
    expected = [(r - m) / m if m > 0 else 0.0 for r, m in zip(rewards, means, strict=True)]
    algorithm = estimator("group_centre", advantage_scale="mean")
    assert_advantages(algorithm, feedback(rewards=rewards), spread(expected))


def test_gpg_scales_by_the_groups_with_signal():
    """2504.02546: times all groups over those whose rewards differ."""
    expected = spread([OF_RESPONSES["group_centre"](REWARDS, i) * 5 / 1 for i in ALL])
    algorithm = estimator("group_centre", advantage_scale="informative")
    for rewards in (REWARDS, REWARDS * (1 + 1e-15 * np.arange(15))):  # of the others, sums round
        assert_advantages(algorithm, feedback(rewards=rewards), expected)


@pytest.mark.parametrize(("scale", "rewards", "groups", "expected"), read_table(__file__, "means"))
def test_a_rounded_mean_counts_as_exact(scale, rewards, groups, expected):
    rewards = np.float64(rewards)
    index = np.arange(len(rewards))[None, None]
    known = gather_feedback(index, rewards, groups=np.array(groups), correct=rewards > 0.6)
    actual = estimate_exactly(estimator("group_centre", advantage_scale=scale), known)
    np.testing.assert_allclose(actual[0, 0], expected, atol=1e-6)


# --- one value per token -------------------------------------------------------------------


def loop_token_rewards(penalties):
    """Per response: minus the penalty on each token, what it earned on the last."""
    rewards = [[-x for x in penalties[i]] if penalties else [0.0] * LENGTHS[i] for i in ALL]
    for i, own in enumerate(rewards):
        if own:
            own[-1] += REWARDS[i]
    return rewards


def loop_discounted(values, factor):
    """sum over l of factor^l x[t + l], for each t, sum by sum."""
    n = len(values)
    return [math.fsum(factor**k * values[t + k] for k in range(n - t)) for t in range(n)]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("penalties", [None, PENALTIES], ids=["bare", "with KL in the reward"])
def test_reward_to_go_sums_the_rewards_that_follow(gamma, penalties):
    expected = [loop_discounted(own, gamma) for own in loop_token_rewards(penalties)]
    assert_advantages(estimator("reward_to_go", gamma=gamma), feedback(penalties), placed(expected))


def loop_token_baseline(returns, i, t):
    """2602.07078: sum(G W) / sum(W) over the responses of the group that reach the token."""
    group = [j for j in MEMBERS[i] if LENGTHS[j] > t]
    if len(group) == 1:
        return 0.0
    weights = [math.fsum(ENERGIES[j][: t + 1]) for j in group]
    products = [w * returns[j][t] for w, j in zip(weights, group, strict=True)]
    return math.fsum(products) / math.fsum(weights)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_token_baseline_weighs_returns_by_their_energies(gamma):
    returns = [loop_discounted(own, gamma) for own in loop_token_rewards(PENALTIES)]
    expected = [
        [r - loop_token_baseline(returns, i, t) for t, r in enumerate(returns[i])] for i in ALL
    ]
    known = feedback(PENALTIES, energies=ENERGIES)
    assert_advantages(estimator("token_baseline", gamma=gamma), known, placed(expected))


def loop_gae(i, gamma, lam):
    """GAE's equation 16; the value after the last token is 0."""
    values, rewards = VALUES[i], loop_token_rewards(PENALTIES)[i]
    following = [*values[1:], 0.0][: len(values)]
    errors = [r + gamma * f - v for r, f, v in zip(rewards, following, values, strict=True)]
    return loop_discounted(errors, gamma * lam)


@pytest.mark.parametrize(
    ("gamma", "policy", "value"),
    [(1.0, 0.95, 0.95), (1.0, 0.9, 1.0), (0.97, 0.5, 0.8), (1.0, 0.0, 0.0)],
)
def test_gae_and_returns_have_a_lambda_each(gamma, policy, value):
    known = feedback(PENALTIES, VALUES)
    algorithm = estimator("gae", gamma=gamma, lambda_policy=policy, lambda_value=value)
    assert_advantages(algorithm, known, placed([loop_gae(i, gamma, policy) for i in ALL]))
    expected = placed([np.add(loop_gae(i, gamma, value), VALUES[i]) for i in ALL])
    for whitened in (False, True):  # which returns never are
        returns = estimate(dataclasses.replace(algorithm, whiten=whitened), known)[1]
        assert returns.dtype == np.float32
        np.testing.assert_allclose(returns, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.6])
def test_length_adaptive_lambda_grows_with_the_response_and_is_never_negative(alpha):
    lambdas = [max(0.0, 1 - 1 / (alpha * n)) if n else 0.0 for n in LENGTHS]
    assert min(lambdas) == 0 and (alpha < 0.2 or max(lambdas) > 0.3)
    expected = placed([loop_gae(i, 0.99, lambdas[i]) for i in ALL])
    algorithm = estimator("length_adaptive_gae", gamma=0.99, lambda_alpha=alpha)
    assert_advantages(algorithm, feedback(PENALTIES, VALUES), expected)


def test_imitation_has_coefficient_one_on_responses_only():
    assert_advantages(estimator("one"), feedback(), np.where(INDEX >= 0, 1.0, 0.0))


# --- preference ----------------------------------------------------------------------------


def loop_pairs(tokens):
    """The group's first right response with its first wrong one, and so on, while both last."""
    pairs = []
    for group in np.unique(GROUPS):
        own = [i for i in ALL if GROUPS[i] == group and tokens[i]]
        right, wrong = [i for i in own if CORRECT[i]], [i for i in own if not CORRECT[i]]
        pairs += zip(right, wrong, strict=False)
    return pairs


def loop_preference_loss(log_ratios, pairs, beta):
    """-log sigmoid(beta (sum of the right one's log-ratios - sum of the wrong one's))."""
    margins = [math.fsum(log_ratios[r]) - math.fsum(log_ratios[w]) for r, w in pairs]
    return math.fsum(math.log1p(math.exp(-beta * margin)) for margin in margins)


def numerical_coefficients(pairs, beta, step=1e-4):
    """Minus the derivative of the pairs' losses by each token's log-prob."""
    result = [[0.0] * n for n in LENGTHS]
    for i in ALL:
        for t in range(LENGTHS[i]):
            ends = []
            for sign in (1, -1):
                moved = [list(own) for own in LOG_RATIOS]
                moved[i][t] += sign * step
                ends.append(loop_preference_loss(moved, pairs, beta))
            result[i][t] = (ends[1] - ends[0]) / (2 * step)
    return result


@pytest.mark.parametrize("filtered", [False, True])
def test_preference_is_minus_the_gradient_of_dpos_loss(filtered):
    tokens = list(LENGTHS)
    if filtered:
        tokens[loop_pairs(tokens)[0][0]] = 0
    pairs = loop_pairs(tokens)
    assert len(pairs) == 2 - filtered
    known = feedback(trained=np.isin(INDEX, np.flatnonzero(tokens)), log_ratios=LOG_RATIOS)
    assert known.tokens.tolist() == tokens
    expected = placed(numerical_coefficients(pairs, 0.3))
    algorithm = estimator("preference", preference_beta=0.3)
    assert_advantages(algorithm, known, expected, rtol=1e-6, atol=1e-9)
    none = feedback(correct=np.ones(15, bool), log_ratios=LOG_RATIOS)
    assert_advantages(algorithm, none, placed([0] * 15))


def test_a_tied_preference_counts_half():
    zeros = [[0.0] * n for n in LENGTHS]
    algorithm = estimator("preference", trained_responses="pairs")
    values = feedback_metrics(algorithm, feedback(log_ratios=zeros), placed(zeros), None)
    assert values["preference_accuracy"] == 0.5


@pytest.mark.parametrize(("margin", "pull"), [(1e5, 0.0), (-1e5, 0.1)])
def test_a_huge_margin_neither_overflows_nor_pulls_more_than_beta(margin, pull):
    known = feedback(log_ratios=[[margin if CORRECT[i] else -margin] * LENGTHS[i] for i in ALL])
    coefficients = [0.0] * 15
    for right, wrong in loop_pairs(LENGTHS):
        coefficients[right], coefficients[wrong] = pull, -pull
    assert_advantages(estimator("preference"), known, spread(coefficients))


# --- whitening -----------------------------------------------------------------------------


def loop_whitened(per_token):
    every = [x for own in per_token for x in own]
    scale = math.sqrt(sample_std(every) ** 2 + 1e-8)
    return placed([[(x - mean(every)) / scale for x in own] for own in per_token])


def test_whitening_makes_response_tokens_standard_and_leaves_the_rest_zero():
    values = draws(5.0)
    actual = whiten(placed(values, 1e9), INDEX >= 0)
    np.testing.assert_allclose(actual, loop_whitened(values), **EXACT)
    for tokens in (0, 1, 4):  # less than two, or equal ones
        on = np.arange(4)[None] < tokens
        np.testing.assert_array_equal(whiten(np.where(on, 0.5, 0.0), on), np.zeros((1, 4)))


@pytest.mark.parametrize("name", ["reward_to_go", "group_centre"])
def test_reinforce_pp_whitens_over_tokens(name):
    """Long responses weigh more in the batch's mean and variance: once per token."""
    if name == "reward_to_go":
        values = [loop_discounted(own, 0.98) for own in loop_token_rewards(PENALTIES)]
    else:
        rewards = loop_returns(PENALTIES)
        values = [[OF_RESPONSES[name](rewards, i)] * LENGTHS[i] for i in ALL]
    actual = estimate(estimator(name, gamma=0.98, whiten=True), feedback(PENALTIES))[0]
    np.testing.assert_allclose(actual, loop_whitened(values), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf])
def test_rubbish_off_the_responses_reaches_no_estimator(rubbish):
    """Nor the rewards, nor the returns."""
    options = {"log_ratios": LOG_RATIOS, "energies": ENERGIES, "sampler_log_ratios": LOG_RATIOS}
    known, clean = (feedback(PENALTIES, VALUES, fill, **options) for fill in (rubbish, 0.0))
    np.testing.assert_array_equal(known.rewards, clean.rewards)
    for name, whitened in itertools.product(ESTIMATORS, (False, True)):
        algorithm = estimator(name, whiten=whitened)
        actual = estimate(algorithm, known)
        np.testing.assert_array_equal(actual, estimate(algorithm, clean), err_msg=name)
        assert not actual[0][INDEX < 0].any() and not actual[1][INDEX < 0].any()

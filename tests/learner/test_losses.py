"""Ratios, clips, KL and value losses against loops written from the papers, in float64."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
from policy_loops import cut
from row_files import read_table

from dapo_jax import algorithms
from dapo_jax.algorithms import dapo
from dapo_jax.learner.batches import PackedRows, ScoredBatch, TrainBatch
from dapo_jax.learner.critic import critic_objective
from dapo_jax.learner.losses import KL_ESTIMATORS, policy_loss, value_loss
from dapo_jax.learner.policy import policy_objective

EXACT = {"rtol": 1e-6, "atol": 1e-12}
STEP = 1e-5  # of central differences

# (row, segment, first column, tokens): row 1 holds a one-token and an empty response, row 2 only
# responses that are masked as a whole, row 3 nothing.
RESPONSES = [(0, 1, 2, 6), (0, 2, 9, 3), (1, 1, 1, 1), (1, 2, 4, 5), (1, 3, 10, 0), (1, 4, 11, 1)]
MASKED = [(2, 1, 3, 4), (2, 2, 8, 2)]
SHAPE = (4, 12)
SKIPPED = (1, 6)  # a token of weight 0 inside a trained response


def segment_ids():
    ids = np.zeros(SHAPE, int)
    for row, segment, start, n in sorted(RESPONSES + MASKED, reverse=True):
        ids[row, : start + n] = segment  # with its prompt; earlier segments overwrite the left
    return ids


def trained_places(response):
    row, _, start, n = response
    return [(row, start + t) for t in range(n) if (row, start + t) != SKIPPED]


TRAINED = [place for response in RESPONSES for place in trained_places(response)]


def on_trained(values, fill=np.nan):
    """The values on the trained tokens; rubbish everywhere else."""
    array = np.full(SHAPE, fill)
    for place, value in zip(TRAINED, values, strict=True):
        array[place] = value
    return array


def make_case(log_ratios, seed=0, rubbish=np.nan, old=True):
    """A microbatch whose trained tokens have these log-ratios, with its log-probs and entropy."""
    rng, count = np.random.default_rng(seed), len(TRAINED)
    logprobs = rng.normal(-2, 1, count)
    reference = logprobs + np.resize([0.3, -0.2, 2.9, -12.0, 1.1, 30.0, -0.9], count)
    sampler = logprobs - log_ratios + np.resize([0.1, -0.3, -2.0, -40.0, 40.0], count)
    advantages = np.zeros(SHAPE)
    for row, _, start, n in RESPONSES + MASKED:
        advantages[row, start : start + n] = rng.normal(size=n)
    integers, fill = np.zeros(SHAPE, int), rubbish
    rollouts = PackedRows(
        integers, segment_ids(), integers, integers - 1, on_trained(sampler, fill)
    )
    olds = on_trained(logprobs - log_ratios, fill) if old else None
    scored = ScoredBatch(rollouts, olds, {"reference": on_trained(reference, fill)})
    weights = on_trained(rng.uniform(0.1, 1, count), 0.0)
    nll_weights = on_trained(rng.uniform(0, 0.3, count) * (np.arange(count) % 3 > 0), 0.0)
    batch = TrainBatch(scored, advantages, weights, nll_weights)
    return batch, on_trained(logprobs, fill), on_trained(rng.uniform(0, 2, count), fill)


def loop_surrogate(algorithm, ratio, advantage):
    """PPO's equation 7 with DAPO's two bounds, then dual-clip PPO's equation 4, as a loss."""
    gain = ratio * advantage
    if algorithm.region == "ratio":
        bounded = cut(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
        gain = min(gain, bounded * advantage)
    if advantage < 0 and algorithm.dual_clip:
        gain = max(gain, algorithm.dual_clip * advantage)
    return -gain


def loop_ratio(algorithm, place, logprobs, old, start):
    """Ratio of one token; `start` are the log-probs where the differentiation began."""
    before = start if algorithm.ratio == "none" else old
    return math.exp(cut(logprobs[place] - before[place], -20, 20))


def loop_kl(name, logprob, reference):
    if name in ("k3", "k3+"):
        d = cut(reference - logprob, -20, 20)
        return cut(math.exp(d) - d - 1, -10, 10)
    difference = logprob - reference
    return {"k1": difference, "k2": difference**2 / 2, "abs": abs(difference)}[name]


def loop_terms(algorithm, batch, logprobs, entropy, start):
    """Every summand of the loss, token by token of response by response."""
    scored, terms = batch.scored, []
    old = start if scored.old_logprobs is None else scored.old_logprobs
    for response in RESPONSES:
        for p in trained_places(response):
            ratio = loop_ratio(algorithm, p, logprobs, old, start)
            loss, weight = loop_surrogate(algorithm, ratio, batch.advantages[p]), 1.0
            if algorithm.importance_cap:
                drift = cut(old[p] - scored.rollouts.sampler_logprobs[p], -20, 20)
                weight = min(math.exp(drift), algorithm.importance_cap)
            terms.append(batch.loss_weights[p] * weight * loss)
            if algorithm.kl == "loss":
                reference = scored.scores["reference"][p]
                kl = loop_kl(algorithm.kl_estimator, logprobs[p], reference)
                terms.append(batch.loss_weights[p] * algorithm.kl_coefficient * kl)
            terms.append(-batch.loss_weights[p] * algorithm.entropy_coefficient * entropy[p])
            if batch.nll_weights is not None:
                terms.append(-batch.nll_weights[p] * logprobs[p])
    return terms


def numerical_gradient(terms, x):
    """Central differences of the sum, summand by summand, so that large ones hide no small ones."""
    gradient = np.zeros(x.shape)
    for place in TRAINED:
        ends = []
        for sign in (1, -1):
            moved = x.copy()
            moved[place] += sign * STEP
            ends.append(terms(moved))
        gradient[place] = math.fsum((a - b) / (2 * STEP) for a, b in zip(*ends, strict=True))
    return gradient


def assert_objective_is_the_loop(algorithm, case):
    batch, logprobs, entropy = case
    if not algorithm.positive_nll_coefficient:
        batch = dataclasses.replace(batch, nll_weights=None)

    def total(logprobs, entropy):
        return policy_objective(algorithm, batch, logprobs, entropy)[0]

    with jax.enable_x64(True):
        value, actual = jax.value_and_grad(total, argnums=(0, 1))(logprobs, entropy)
        assert value.dtype == np.float64
    terms = loop_terms(algorithm, batch, logprobs, entropy, logprobs)
    np.testing.assert_allclose(value, math.fsum(terms), **EXACT)
    by_logprobs = numerical_gradient(
        lambda x: loop_terms(algorithm, batch, x, entropy, logprobs), logprobs
    )
    by_entropy = numerical_gradient(
        lambda x: loop_terms(algorithm, batch, logprobs, x, logprobs), entropy
    )
    # Zeros too: the numerical gradient is 0 off the trained tokens, where rubbish stands.
    np.testing.assert_allclose(actual[0], by_logprobs, rtol=1e-6, atol=1e-11)
    np.testing.assert_allclose(actual[1], by_entropy, rtol=1e-6, atol=1e-11)


# Inside and outside either clip, beyond the dual clip, and beyond what exp survives.
WILD = np.resize([0.1, -0.5, 0.4, 3.0, -25.0, 0.26, 19.0, -0.2, 700.0, 0.23, -0.1], len(TRAINED))
OBJECTIVES = dict(read_table(__file__, "objectives"))


@pytest.mark.filterwarnings("ignore:invalid value")  # metrics of the rubbish: inf - inf
@pytest.mark.parametrize("changes", OBJECTIVES.values(), ids=OBJECTIVES)
def test_the_policy_objective_and_its_gradient_are_the_papers_loop(changes):
    algorithm = dataclasses.replace(dapo(), **changes)
    for seed, rubbish in enumerate((np.nan, np.inf)):
        assert_objective_is_the_loop(algorithm, make_case(WILD, seed, rubbish))
    # Without old log-probs the policy is its own old one.
    assert_objective_is_the_loop(algorithm, make_case(0 * WILD, old=False))


def test_tokens_that_trainer_and_sampler_find_equally_likely_are_counted():
    """To MLPerf's band, also beside rubbish on untrained tokens."""
    batch, logprobs, entropy = make_case(0 * WILD)
    ratios = np.resize([0.9989, 0.9991, 1.0, 1.0019, 1.0021], len(TRAINED))
    sampler = logprobs - on_trained(np.log(ratios))
    rollouts = dataclasses.replace(batch.scored.rollouts, sampler_logprobs=sampler)
    batch = dataclasses.replace(batch, scored=dataclasses.replace(batch.scored, rollouts=rollouts))
    _, metrics = policy_objective(dapo(), batch, logprobs, entropy)
    expected = np.mean(abs(ratios - 1.0005) < 0.0015)
    assert metrics["sampler_match_fraction"].value() == pytest.approx(expected)


def test_the_clip_is_reported_where_it_cut_the_gradient():
    ratios = [1e-3, 0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 1.27, 1.29, 5.0, 50.0]
    cases = list(itertools.product(ratios, [-2.0, 0.0, 1.5]))
    ratio, advantage = (np.array([column]) for column in zip(*cases, strict=True))
    old, ones = np.full(ratio.shape, -60.0), np.ones(ratio.shape)
    for algorithm in (dapo(), algorithms.grpo(), dataclasses.replace(dapo(), region="none")):
        _, clipped = policy_loss(algorithm, old + np.log(ratio), old, advantage, ones, ones > 0)
        top, bottom = 1 + algorithm.clip_high, 1 - algorithm.clip_low
        clips = algorithm.region != "none"
        high = [[clips and a > 0 and r > top for r, a in cases]]
        low = [[clips and a < 0 and r < bottom for r, a in cases]]
        np.testing.assert_array_equal(clipped["clipped_high"], high)
        np.testing.assert_array_equal(clipped["clipped_low"], low)
        dual = algorithm.dual_clip
        capped = [[dual > 0 and a < 0 and r > dual for r, a in cases]]
        np.testing.assert_array_equal(clipped["clipped_dual"], capped)
        assert np.any(capped) == (dual > 0)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_estimates_and_their_gradients_are_the_formulas(name):
    distances = [-700, -30, -15, -11.5, -5, -0.3, -1e-3, 0, 0.2, 1, 2.5, 2.7, 10, 25, 700]
    reference = -1.5
    for distance in distances:
        at = reference - distance
        with jax.enable_x64(True):
            value, slope = jax.value_and_grad(KL_ESTIMATORS[name])(np.float64(at), reference)
        np.testing.assert_allclose(value, loop_kl(name, at, reference), **EXACT)
        inside = math.exp(min(distance, 700.0)) - distance - 1 < 10
        slopes = {"k1": 1.0, "k2": -distance, "k3": -math.expm1(distance) if inside else 0.0}
        slopes["k3+"] = slopes["k2"]
        slopes["abs"] = -np.sign(distance)
        np.testing.assert_allclose(slope, slopes[name], **EXACT)


# --- value loss ----------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.0, 0.2, 0.5])
def test_the_value_loss_and_its_gradient_are_ppos_loop(clip):
    algorithm = dataclasses.replace(dapo(), value_clip=clip)
    cases = itertools.product([-1.0, -0.31, -0.1, 0.0, 0.15, 0.45, 2.0], [-1.5, -0.12, 0.07, 1.0])
    moves, targets = np.array(list(cases)).T[:, None]
    rng = np.random.default_rng(0)
    old, weights = rng.normal(size=moves.shape), rng.uniform(0, 1, moves.shape)
    weights[0, ::5] = 0
    values, returns = old + moves, old + targets
    batch = TrainBatch(
        ScoredBatch(None, None, {"critic": old}), None, None, None, returns, value_weights=weights
    )

    def loop_loss(i, value):
        loss = (value - returns[0, i]) ** 2
        if clip:
            limited = cut(value, old[0, i] - clip, old[0, i] + clip)
            loss = max(loss, (limited - returns[0, i]) ** 2)
        return weights[0, i] * loss / 2

    with jax.enable_x64(True):
        actual, gradient = jax.value_and_grad(
            lambda values: critic_objective(algorithm, batch, values)[0]
        )(values)
    places = range(values.shape[1])
    np.testing.assert_allclose(
        actual, math.fsum(loop_loss(i, values[0, i]) for i in places), **EXACT
    )
    for i in places:
        ends = [loop_loss(i, values[0, i] + sign * STEP) for sign in (1, -1)]
        slope = (ends[0] - ends[1]) / (2 * STEP)
        np.testing.assert_allclose(gradient[0, i], slope, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("rubbish", [np.nan, np.inf])
def test_rubbish_on_padding_reaches_neither_value_loss_nor_gradient(rubbish):
    weights = np.float32([[0.5, 0.5, 0.0, 0.0]])
    numbers = np.float32([[0.3, -0.2, 0.0, 0.0]])
    filled = np.where(weights > 0, numbers, np.float32(rubbish))

    def run(array):
        scored = ScoredBatch(None, None, {"critic": array - 0.1})
        batch = TrainBatch(scored, None, None, None, array + 1, value_weights=weights)
        return jax.value_and_grad(lambda x: critic_objective(dapo(), batch, x)[0])(array)

    assert jax.tree.map(np.array_equal, run(filled), run(numbers)) == (True, True)


@pytest.mark.parametrize("clip", [0.2, 1e4])
def test_a_value_within_the_clip_is_not_clipped_not_even_by_rounding(clip):
    """old + (value - old) is not the value in float32, where one of them is the larger."""
    rng = np.random.default_rng(0)
    old = np.float32(clip * (1 + 0.05 * rng.uniform(size=(8, 512))))
    values = np.float32(rng.uniform(0.1, 1.0, old.shape) * old)
    returns = np.float32(values + rng.normal(size=old.shape))
    _, clipped = value_loss(values, old, returns, clip)
    assert not np.any(clipped)
    moved = np.float32(old + 1.01 * clip)
    _, clipped = value_loss(moved, old, moved + clip, clip)  # the clipped value is farther off
    assert np.all(clipped)

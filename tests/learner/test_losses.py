"""Ratios, clips, KL and value losses against loops written from the papers, in float64."""

import dataclasses
import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_loops import (
    COUNT,
    EXACT,
    KINDS,
    bounded_exp,
    case,
    cut,
    differences,
    drifts_of,
    gradient,
    log_ratios,
    plain,
    pool_ratios,
    pushes_out,
    scatter,
    spread_coefficients,
)
from row_files import read_table

from dapo_jax import algorithms
from dapo_jax.config.algorithms import dapo
from dapo_jax.learner.batches import ScoredBatch, TrainBatch
from dapo_jax.learner.critic import critic_objective
from dapo_jax.learner.losses import KL_ESTIMATORS, policy_loss, value_loss
from dapo_jax.learner.policy import policy_objective

STEP = 1e-5  # of central differences


def loop_kl(name, distance):
    """Estimate of a KL and its slope by the log-prob, which is `distance` below the reference's."""
    k3 = math.exp(cut(distance, -20, 20)) - cut(distance, -20, 20) - 1
    values = {"k1": -distance, "k2": distance**2 / 2, "abs": abs(distance)}
    values["k3"] = values["k3+"] = cut(k3, -10, 10)
    inside = math.exp(min(distance, 700.0)) - distance - 1 < 10
    slopes = {"k1": 1.0, "k2": -distance, "k3": -math.expm1(distance) if inside else 0.0}
    slopes |= {"k3+": -distance, "abs": -np.sign(distance)}
    return values[name], slopes[name]


def loop_rejected(algorithm, response):
    """Whether each token is rejected by a ratio to the sampler, its own or the response's."""
    if algorithm.rejection == "none":
        return [False for _ in response.p]
    new = algorithm.rejection_of == "new"
    xs = differences(response.p, response.q) if new else drifts_of(response)
    high = algorithm.rejection_high or math.inf
    ratios = pool_ratios(algorithm.rejection, xs)
    outside = [not algorithm.rejection_low <= ratio <= high for ratio in ratios]
    if algorithm.rejection == "worst":
        outside = [any(outside)] * len(outside)
    every = algorithm.rejection_sign == "all"
    return [out and (every or a < 0) for out, a in zip(outside, response.advantages, strict=True)]


def loop_objective(algorithm, response):
    """Coefficients of PPO's equation 7 with DAPO's two bounds, dual-clip PPO's equation 4, a KL.

    Corrected by importance weights between floor and cap, and by rejection.
    """
    result, xs, rejected = [], log_ratios(response), loop_rejected(algorithm, response)
    drifts = pool_ratios(algorithm.importance_ratio, drifts_of(response))
    if algorithm.ratio == "none":  # the policy is its own old one
        xs = [0.0 for _ in xs]
    for i, (a, x) in enumerate(zip(response.advantages, xs, strict=True)):
        ratio, bounds = bounded_exp(x), (1 - algorithm.clip_low, 1 + algorithm.clip_high)
        outside = not bounds[0] <= ratio <= bounds[1]
        outside &= algorithm.region_sides == "both" or pushes_out(a, ratio, *bounds)
        clipped = algorithm.region == "ratio" and outside
        clipped |= rejected[i] or (a < 0 and 0 < algorithm.dual_clip < ratio)
        weight = 1.0
        if algorithm.importance_cap:
            weight = cut(drifts[i], algorithm.importance_floor, algorithm.importance_cap)
        pull = 0.0
        if algorithm.kl == "loss":
            distance = response.reference[i] - response.p[i]
            pull = algorithm.kl_coefficient * loop_kl(algorithm.kl_estimator, distance)[1]
        result.append((0.0 if clipped else a * plain(x) * weight) - pull)
    return result


OBJECTIVES = dict(read_table(__file__, "objectives"))


@pytest.mark.filterwarnings("ignore:invalid value")  # metrics of the rubbish: inf - inf
@pytest.mark.parametrize("changes", OBJECTIVES.values(), ids=OBJECTIVES)
def test_the_gradient_of_the_policy_objective_is_the_papers_loop(changes):
    algorithm = dataclasses.replace(dapo(), **changes)
    for kind in KINDS:
        rubbish = np.inf if kind == "far" else np.nan
        batch, logprobs, responses = case(kind, rubbish=rubbish, off=8.0)
        if kind == "near":  # without old log-probs the policy is its own old one
            batch = batch.replace(scored=batch.scored.replace(old_logprobs=None))
            responses = [types.SimpleNamespace(**vars(r) | {"old": r.p}) for r in responses]
        nll = 0 * batch.loss_weights
        if algorithm.positive_nll_coefficient:
            nll = batch.loss_weights * (np.arange(nll.shape[1]) % 3)
            batch = batch.replace(nll_weights=nll)
        expected = spread_coefficients(lambda own: loop_objective(algorithm, own), batch, responses)
        actual = gradient(algorithm, batch, logprobs)
        np.testing.assert_allclose(actual, expected + nll, **EXACT, err_msg=kind)
    with jax.enable_x64(True):
        bonus = jax.grad(lambda *x: policy_objective(*x)[0], argnums=3)
        actual = -bonus(algorithm, batch, logprobs, np.zeros(logprobs.shape))
    np.testing.assert_allclose(actual, algorithm.entropy_coefficient * batch.loss_weights)


def test_tokens_that_trainer_and_sampler_find_equally_likely_are_counted():
    """To MLPerf's band, also beside rubbish on untrained tokens."""
    batch, logprobs, _ = case("near")
    ratios = np.resize([0.9989, 0.9991, 1.0, 1.0019, 1.0021], COUNT)
    sampler = logprobs - scatter(np.log(ratios), np.nan)
    rollouts = dataclasses.replace(batch.scored.rollouts, sampler_logprobs=sampler)
    batch = batch.replace(scored=batch.scored.replace(rollouts=rollouts, old_logprobs=logprobs))
    _, metrics = policy_objective(dapo(), batch, logprobs, jnp.zeros_like(logprobs))
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
    reference = -1.5
    for distance in [-700, -30, -15, -11.5, -5, -0.3, -1e-3, 0, 0.2, 1, 2.5, 2.7, 10, 25, 700]:
        with jax.enable_x64(True):
            at = np.float64(reference - distance)
            actual = jax.value_and_grad(KL_ESTIMATORS[name])(at, reference)
        np.testing.assert_allclose(actual, loop_kl(name, distance), rtol=1e-6, atol=1e-12)


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
    for array, rubbish in ((old, np.nan), (values, np.inf), (returns, np.nan)):  # of padding
        array[weights == 0] = rubbish
    batch = TrainBatch(
        ScoredBatch(None, None, {"critic": old}), None, None, None, returns, value_weights=weights
    )

    def loop_loss(i, value):
        if not weights[0, i]:
            return 0.0
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

"""Policy terms of the newer methods against loops written from their papers, in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_loops import (
    CASES,
    COUNT,
    LOOPS,
    OF_SAMPLER,
    assert_gradient_is_the_loop,
    binary_kl,
    case,
    changed,
    drifts_of,
    gradient,
    of_responses,
    pool_ratios,
    spread_coefficients,
)

from dapo_jax import algorithms
from dapo_jax.config.algorithms import PRESETS
from dapo_jax.learner.losses import policy_loss, rejections
from dapo_jax.learner.policy import policy_objective


@pytest.mark.filterwarnings("ignore:invalid value")  # metrics of the rubbish: inf - inf
@pytest.mark.parametrize("name", LOOPS)
def test_the_gradient_of_a_preset_is_the_papers_loop(name):
    moved = sum(
        assert_gradient_is_the_loop(name, kind)
        for kind in CASES
        if name != "deepseek_v3p2" or "extremes" not in kind  # whose KL is clamped there
    )
    assert moved > COUNT / 2
    assert_gradient_is_the_loop(name, "apart", seed=1, rubbish=np.inf, off=5.0)
    if name not in ("gmpo", "vespo"):  # their papers have advantages of responses only
        for kind in ("near", "apart"):
            assert_gradient_is_the_loop(name, kind, per_token=True)


@pytest.mark.parametrize("name", OF_SAMPLER)
def test_a_probability_of_one_has_a_divergence(name):
    """The other probability is 1 too, a little less, or next to nothing."""
    CASES["certain"] = (of_responses([0.0, -0.01, 0.01, -0.3, 0.3, -2.0, 2.0, 40.0, -40.0]),) * 2
    assert assert_gradient_is_the_loop(name, "certain", certain=True) > COUNT / 4


def test_a_probability_that_rounds_to_one_has_the_kl_of_its_neighbours():
    """In float32 1 - p is 0 there, and the KL of any older probability would be infinite."""
    old = np.log(np.float32([0.9999, 0.999, 0.99, 0.98, 0.9]))
    new = np.float32([-1e-9] * len(old))
    outside = [binary_kl(*np.exp(np.float64(pair))) > 0.05 for pair in zip(new, old, strict=True)]
    ones = np.ones((1, len(old)), np.float32)
    _, info = policy_loss(PRESETS["dppo_kl"](), new[None], old[None], ones, ones, ones.astype(int))
    assert info["clipped_high"][0].tolist() == outside == [False, False, True, True, True]


@pytest.mark.parametrize("name", LOOPS)
def test_in_float32_a_gradient_is_finite_and_close(name):
    algorithm = PRESETS[name]()
    for kind in ("whole extremes", "apart"):
        batch, logprobs, responses = case(kind, name in OF_SAMPLER)
        narrow = jax.tree.map(
            lambda x: np.float32(x) if x.dtype == np.float64 else x, (batch, logprobs)
        )
        actual = jax.grad(
            lambda x, batch=narrow[0]: policy_objective(algorithm, batch, x, jnp.zeros_like(x))[0]
        )(narrow[1])
        assert np.isfinite(actual).all()
        if kind == "apart":
            expected = spread_coefficients(LOOPS[name], batch, responses)
            np.testing.assert_allclose(-actual, expected, rtol=1e-4, atol=1e-6)


# --- methods that coincide -----------------------------------------------------------------


NO_KL = {"kl": "none", "kl_coefficient": 0.0, "reference": False}
PLAIN = dataclasses.replace(algorithms.reinforce(), advantage="reward")


@pytest.mark.parametrize("region", ["ratio", "log_ratio", "tv", "kl"])
def test_on_the_bounds_of_a_region_a_gradient_is_whole(region):
    known, logprobs, _ = case("apart")
    scored = dataclasses.replace(known.scored, old_logprobs=logprobs)
    batch = dataclasses.replace(known, scored=scored)
    for sides in ("sign", "both"):
        bounds = {"region": region, "region_sides": sides, "clip_low": 0.0, "clip_high": 0.0}
        pair = changed("grpo", **bounds, **NO_KL), PLAIN
        actual, expected = (gradient(algorithm, batch, logprobs) for algorithm in pair)
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)
        assert np.count_nonzero(actual) > COUNT / 4


# --- corrections; test_losses.py has their gradients ----------------------------------------------


def test_each_bound_reports_the_tokens_that_it_rejected():
    batch, logprobs, responses = case("apart")
    rollouts, trained = batch.scored.rollouts, batch.loss_weights > 0
    log_ratios = np.where(trained, batch.scored.old_logprobs - rollouts.sampler_logprobs, 0.0)
    for pool in ("token", "product", "sequence", "worst"):
        algorithm = changed("icepop", rejection=pool, rejection_low=0.8, rejection_high=1.3)
        with jax.enable_x64(True):
            below, above = rejections(algorithm, log_ratios, rollouts.segment_ids, trained, trained)
        expected = np.zeros((2, *trained.shape), bool)
        for response in filter(lambda own: own.places, responses):
            ratios = pool_ratios(pool, drifts_of(response))
            low, high = [r < 0.8 for r in ratios], [r > 1.3 for r in ratios]
            if pool == "worst":
                low, high = [any(low)] * len(low), [any(high)] * len(high)
            for place, under, over in zip(response.places, low, high, strict=True):
                expected[:, *place] = under, over and not under
        np.testing.assert_array_equal(below, expected[0])
        np.testing.assert_array_equal(above, expected[1])
        assert below.any() and above.any()

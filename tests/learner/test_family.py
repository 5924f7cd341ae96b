"""Policy terms of the newer methods against loops written from their papers, in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_cases import (
    CASES,
    COUNT,
    EXACT,
    case,
    changed,
    gradient,
    of_responses,
    spread_coefficients,
)
from policy_loops import LOOPS, OF_SAMPLER, assert_gradient_is_the_loop, loop_both_sides

from dapo_jax import algorithms
from dapo_jax.algorithms import PRESETS
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
    assert_gradient_is_the_loop(name, "apart", seed=1, rubbish=np.inf)
    if name not in ("gmpo", "vespo"):  # their papers have advantages of responses only
        for kind in ("near", "apart"):
            assert_gradient_is_the_loop(name, kind, per_token=True)


@pytest.mark.parametrize("name", OF_SAMPLER)
def test_a_probability_of_one_has_a_divergence(name):
    """The other probability is 1 too, a little less, or next to nothing."""
    CASES["certain"] = (of_responses([0.0, -0.01, 0.01, -0.3, 0.3, -2.0, 2.0, 40.0, -40.0]),) * 2
    assert assert_gradient_is_the_loop(name, "certain", certain=True) > COUNT / 4


def test_unbiased_kl_pulls_towards_a_distant_reference():
    """2512.02556, equation 7: r (log p - log ref), however far the reference is."""
    assert_gradient_is_the_loop("deepseek_v3p2", "apart", off=5.0)


@pytest.mark.parametrize("name", LOOPS)
def test_in_float32_a_gradient_is_finite_and_close(name):
    algorithm = PRESETS[name]()
    for kind in ("extremes", "whole extremes", "apart"):
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


# --- methods that coincide -------------------------------------------------------------------


def assert_same(left, right, kind="apart", batch=None):
    """Two algorithms have the same gradient."""
    known, logprobs, _ = case(kind)
    batch = batch or known
    actual, expected = (gradient(algorithm, batch, logprobs) for algorithm in (left, right))
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)
    assert np.count_nonzero(actual) > COUNT / 4


NO_KL = {"kl": "none", "kl_coefficient": 0.0, "reference": False}
PLAIN = dataclasses.replace(algorithms.reinforce(), advantage="reward")


@pytest.mark.parametrize("region", ["ratio", "log_ratio", "tv", "kl"])
def test_on_the_bounds_of_a_region_a_gradient_is_whole(region):
    known, logprobs, _ = case("apart")
    scored = dataclasses.replace(known.scored, old_logprobs=logprobs)
    batch = dataclasses.replace(known, scored=scored)
    for sides in ("sign", "both"):
        bounds = {"region": region, "region_sides": sides, "clip_low": 0.0, "clip_high": 0.0}
        assert_same(changed("grpo", **bounds, **NO_KL), PLAIN, batch=batch)


@pytest.mark.parametrize("bounds", [(0.2, 0.2), (0.1, 0.5)])
def test_a_region_of_both_sides_is_the_loop(bounds):
    low, high = bounds
    batch, logprobs, responses = case("far")
    algorithm = changed("grpo", region_sides="both", clip_low=low, clip_high=high, **NO_KL)
    expected = spread_coefficients(lambda own: loop_both_sides(own, low, high), batch, responses)
    np.testing.assert_allclose(gradient(algorithm, batch, logprobs), expected, **EXACT)

"""Policy terms of the newer methods against loops written from their papers, in float64."""

import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learners import ADVANTAGES, BUDGET, SEGMENTS, assert_close
from learners import LENGTHS as LENGTHS_OF_SEGMENTS
from policy_cases import (
    CASES,
    COLUMNS,
    COUNT,
    EXACT,
    ROWS,
    case,
    changed,
    gradient,
    of_responses,
    spread_coefficients,
)
from policy_loops import (
    LOOPS,
    OF_SAMPLER,
    assert_gradient_is_the_loop,
    log_ratios,
    loop_both_sides,
)

from dapo_jax import algorithms
from dapo_jax.algorithms import PRESETS
from dapo_jax.config.experiment import Compute, Optimizer
from dapo_jax.learner.advantages import Estimates, broadcast_to_tokens
from dapo_jax.learner.batches import ScoredBatch
from dapo_jax.learner.losses import KL_ESTIMATORS, policy_loss, response_weights
from dapo_jax.learner.minibatches import make_batch
from dapo_jax.learner.packing import pack, place_tokens
from dapo_jax.learner.policy import PolicySettings, policy_learner, policy_objective
from dapo_jax.model.decoder import DecoderConfig, init_params

SMALL = DecoderConfig(
    vocab=32, layers=1, embed=16, heads=2, kv_heads=2, head_dim=8, mlp=32, tie_embeddings=True
)


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


OF_TOKENS = [name for name in LOOPS if name not in ("gmpo", "vespo")]


@pytest.mark.parametrize("name", OF_TOKENS)
def test_advantages_may_differ_inside_a_response(name):
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
        found = jax.grad(
            lambda x, batch=narrow[0]: policy_objective(algorithm, batch, x, jnp.zeros_like(x))[0]
        )(narrow[1])
        assert np.isfinite(found).all()
        if kind == "apart":
            expected = spread_coefficients(LOOPS[name], batch, responses)
            np.testing.assert_allclose(-found, expected, rtol=1e-4, atol=1e-6)


# --- methods that coincide -------------------------------------------------------------------


def assert_same(left, right, kind="apart", batch=None, **options):
    """Two algorithms have one gradient."""
    known, logprobs, _ = case(kind, **options)
    batch = batch or known
    found, expected = (gradient(one, batch, logprobs) for one in (left, right))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    assert np.count_nonzero(found) > COUNT / 4


PLAIN = dataclasses.replace(algorithms.reinforce(), advantage="reward")


@pytest.mark.parametrize("name", ["cispo", "topr", "vespo", "sapo", "gmpo", "luspo", "dppo_tv"])
def test_at_ratio_one_a_method_is_reinforce(name):
    assert name in LOOPS
    known, logprobs, _ = case("apart")
    scored = dataclasses.replace(known.scored, old_logprobs=logprobs)
    batch = dataclasses.replace(known, scored=scored)
    assert_same(PRESETS[name](), PLAIN, batch=batch)


@pytest.mark.parametrize("region", ["ratio", "log_ratio", "tv", "kl"])
def test_on_the_bounds_of_a_region_a_gradient_is_whole(region):
    known, logprobs, _ = case("apart")
    scored = dataclasses.replace(known.scored, old_logprobs=logprobs)
    batch = dataclasses.replace(known, scored=scored)
    for sides in ("sign", "both"):
        bounds = {"region": region, "region_sides": sides, "clip_low": 0.0, "clip_high": 0.0}
        assert_same(changed("grpo", **bounds, **NO_KL), PLAIN, batch=batch)


def test_dppo_without_a_region_is_truncated_importance_sampling():
    """Even a region that ends at 1 on either side holds every move of a probability."""
    wide = {"clip_low": 1.0, "clip_high": 1e9}
    truncated = changed("cispo", weight_high=20.0)
    for kind in ("apart", "far"):
        assert_same(changed("dppo_tv", **wide), truncated, kind)
        assert_same(changed("dppo_kl", **wide | {"region": "tv"}), truncated, kind)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("tau", [0.3, 1.0, 4.0])
def test_sapos_gate_has_slope_one_at_ratio_one(tau, advantage):
    algorithm = changed("sapo", decay_positive=tau, decay_negative=tau)
    ones = np.ones((1, 1))
    with jax.enable_x64(True):
        found = jax.grad(
            lambda x: policy_loss(algorithm, x, -ones, advantage * ones, ones, ones > 0)[0].sum()
        )(-ones)
    np.testing.assert_allclose(found, -advantage * ones, rtol=1e-12)


def test_sapo_of_low_temperature_has_the_plain_ratio():
    gentle = changed("sapo", decay_positive=1e-9, decay_negative=1e-9)
    assert_same(gentle, changed("grpo", region="none", **NO_KL))


NO_KL = {"kl": "none", "kl_coefficient": 0.0, "reference": False}


def test_gmpo_of_one_token_is_ppo_with_bounds_on_the_log_ratio():
    batch, logprobs, responses = case("far")
    alone = np.zeros((ROWS, COLUMNS))
    for response in responses:
        if len(response.places) == 1:
            alone[response.places[0]] = batch.loss_weights[response.places[0]]
    batch = dataclasses.replace(batch, loss_weights=alone)
    ppo = changed(
        "gmpo",
        ratio="token",
        region="ratio",
        clip_low=1 - math.exp(-0.4),
        clip_high=math.expm1(0.4),
    )
    found, expected = (gradient(one, batch, logprobs) for one in (algorithms.gmpo(), ppo))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    assert np.count_nonzero(found) > 20


@pytest.mark.parametrize("bounds", [(0.2, 0.2), (0.1, 0.5)])
def test_a_region_of_both_sides_is_ppos_where_the_advantage_pushes_outwards(bounds):
    clip = dict(zip(("clip_low", "clip_high"), bounds, strict=True))
    batch, logprobs, responses = case("far")
    found, ppo = (
        gradient(changed("grpo", region_sides=sides, **clip, **NO_KL), batch, logprobs)
        for sides in ("both", "sign")
    )
    expected = spread_coefficients(lambda one: loop_both_sides(one, *bounds), batch, responses)
    np.testing.assert_allclose(found, expected, **EXACT)
    differing = 0
    for response in responses:
        signed = zip(response.places, log_ratios(response), response.advantages, strict=True)
        for place, x, a in signed:
            if (x > 0) == (a > 0):
                np.testing.assert_allclose(found[place], ppo[place], rtol=1e-12)
            differing += found[place] != ppo[place]
    assert differing > 50


def test_rejecting_nothing_is_nothing():
    plain = changed("grpo", **NO_KL)
    for pool in ("token", "product", "sequence", "worst"):
        for of in ("old", "new"):
            rejecting = {"rejection": pool, "rejection_low": 0.0, "rejection_high": 0.0}
            assert_same(changed("grpo", rejection_of=of, **rejecting, **NO_KL), plain, "far")


def test_importance_of_the_same_policy_is_nothing():
    known, _, _ = case("apart")
    rollouts = dataclasses.replace(
        known.scored.rollouts, sampler_logprobs=known.scored.old_logprobs
    )
    batch = dataclasses.replace(known, scored=dataclasses.replace(known.scored, rollouts=rollouts))
    for pool in ("token", "product", "sequence"):
        assert_same(changed("tis", importance_ratio=pool), changed("grpo", **NO_KL), batch=batch)


def test_luspo_is_gspo_times_the_length():
    lengths, groups, right = np.array([3, 1, 0, 7]), np.zeros(4, int), np.ones(4, bool)
    luspo, gspo = (
        response_weights(one, lengths, groups, right, 9)
        for one in (algorithms.luspo(), algorithms.gspo())
    )
    np.testing.assert_allclose(luspo, gspo * lengths, rtol=1e-12)
    narrow = changed("luspo", clip_low=3e-4, clip_high=4e-4)
    assert_same(narrow, algorithms.gspo(), "near")


def test_kl_times_the_ratio_has_k2s_gradient_on_policy():
    known, logprobs, _ = case("apart")
    scored = dataclasses.replace(known.scored, old_logprobs=None)
    batch = dataclasses.replace(known, scored=scored)
    unbiased = changed("deepseek_v3p2", rejection="none")
    assert_same(unbiased, changed("grpo", kl_estimator="k2"), batch=batch)


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2():
    p = np.linspace(-30, 0, 101)
    with jax.enable_x64(True):
        values, slopes = (
            {name: f(p) for name, f in of.items()}
            for of in (
                {name: lambda x, f=f: f(x, -4.0) for name, f in KL_ESTIMATORS.items()},
                {
                    name: jax.grad(lambda x, f=f: f(x, -4.0).sum())
                    for name, f in KL_ESTIMATORS.items()
                },
            )
        )
    np.testing.assert_allclose(values["k3+"], values["k3"], rtol=1e-12)
    np.testing.assert_allclose(slopes["k3+"], slopes["k2"], rtol=1e-12)


# --- microbatches and devices ----------------------------------------------------------------

# Terms only add up: what breaks one of them shows in the sum.
SPLIT = {
    "product": algorithms.vespo(),
    "geometric mean, region, corrections of responses, KL to the sampler": changed(
        "gmpo",
        clip_low=1.0,
        clip_high=1.0,
        importance_cap=2.0,
        importance_ratio="product",
        rejection="sequence",
        rejection_low=0.8,
        rejection_of="new",
        kl="loss",
        kl_to="sampler",
        kl_importance=True,
        kl_coefficient=0.1,
    ),
}


@pytest.mark.parametrize("name", ["vespo", "gmpo", "prime_rl", "sequence_tis", "deepseek_v3p2"])
def test_microbatches_of_any_rows_add_up(name):
    """Rows in another order, two microbatches of unequal advantages in place of one."""
    algorithm = PRESETS[name]()
    batch, logprobs, _ = case("apart", name in OF_SAMPLER)
    whole, order = gradient(algorithm, batch, logprobs), np.random.default_rng(0).permutation(ROWS)
    for rows in np.split(order, 2):
        part = jax.tree.map(lambda array, rows=rows: array[rows], batch)
        found = gradient(algorithm, part, logprobs[rows])
        np.testing.assert_allclose(found, whole[rows], rtol=1e-9, atol=1e-12)


@functools.cache
def small_learner(name, mesh):
    return policy_learner(
        PolicySettings(SPLIT[name], Compute()), Optimizer(learning_rate=1e-3), SMALL, mesh
    )


@pytest.fixture(scope="module")
def small_params():
    params = nn.unbox(init_params(SMALL, jax.random.key(0)))
    return params | {"embedding": params["embedding"] * 20}


def split_batch(algorithm, scores, rows, microbatches, row_tokens):
    """The same responses in other rows; the other policies lie near the policy itself."""
    rollouts, used = pack(SEGMENTS, row_tokens, rows, microbatches)
    index, rng = rollouts.response_index, np.random.default_rng(0)
    near = {
        name: np.float32(
            place_tokens([own + rng.normal(0, 0.2, len(own)) for own in scores], index)
        )
        for name in ("old", "sampler", "reference")
    }
    rollouts = dataclasses.replace(rollouts, sampler_logprobs=near["sampler"])
    reference = near["reference"] if algorithm.reference else None
    scored = ScoredBatch(rollouts, near["old"], reference)
    advantages = broadcast_to_tokens(ADVANTAGES, index)
    return make_batch(scored, SEGMENTS, Estimates(advantages), algorithm, BUDGET), used


@pytest.mark.parametrize("name", SPLIT)
def test_no_split_or_device_count_changes_the_gradient(
    name, small_params, one_device, eight_devices
):
    rng = np.random.default_rng(1)
    scores = [rng.normal(-3, 0.1, n) for n in LENGTHS_OF_SEGMENTS]
    found = []
    for mesh, shape in ((one_device, (16, 1, 20)), (eight_devices, (4, 3, 20))):
        learner = small_learner(name, mesh)
        batch, used = split_batch(SPLIT[name], scores, *shape)
        params = jax.device_put(small_params, learner.shardings.params)
        found.append(jax.device_get(learner.gradient(params, batch, used)))
    assert_close(found[1], found[0], 1e-5)

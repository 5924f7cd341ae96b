"""Advantages, ratios, clips and weights against loops written from the papers."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.advantages import normalise_in_groups, spread
from dapo_jax.algorithms import dapo, grpo, sft
from dapo_jax.losses import LOSS_WEIGHTS, policy_loss, response_weights

RNG = np.random.default_rng(0)


def test_advantages_are_the_papers_zscore():
    rewards = np.array([1.0, -1, -1, 1, 0.5, 0.5, -1, -2])
    groups = np.array([0, 0, 0, 0, 1, 1, 2, 2])
    found = normalise_in_groups(rewards, groups)
    for g in range(3):
        own = rewards[groups == g]
        mean = sum(own) / len(own)
        std = math.sqrt(sum((r - mean) ** 2 for r in own) / (len(own) - 1))
        np.testing.assert_allclose(found[groups == g], [(r - mean) / (std + 1e-6) for r in own])
    assert np.all(found[4:6] == 0)


def test_advantages_are_spread_over_the_response_only():
    index = np.array([[-1, 0, 0, -1, 1, -1]])
    np.testing.assert_array_equal(spread(np.array([2.0, -3.0]), index), [[0, 2, 2, 0, -3, 0]])


def clipped_loss(algorithm, ratio, advantage):
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    surrogate = min(ratio * advantage, min(max(ratio, low), high) * advantage)
    if advantage < 0 and algorithm.dual_clip:
        surrogate = max(surrogate, algorithm.dual_clip * advantage)
    return -surrogate


@pytest.mark.parametrize("algorithm", [dapo(), grpo()], ids=["dapo", "grpo"])
def test_policy_loss_is_the_clipped_surrogate(algorithm):
    ratios = [1e-3, 0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 1.27, 1.29, 5.0, 50.0]
    cases = list(itertools.product(ratios, [-2.0, 0.0, 1.5]))
    old = RNG.normal(-2, 1, (1, len(cases)))
    ratio, advantage = (np.array([column]) for column in zip(*cases, strict=True))
    loss, clipped = policy_loss(
        algorithm, jnp.array(old + np.log(ratio)), jnp.array(old), advantage, np.ones_like(ratio)
    )
    expected = [[clipped_loss(algorithm, r, a) for r, a in cases]]
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    high = [[a > 0 and r > 1 + algorithm.clip_high for r, a in cases]]
    low = [[a < 0 and r < 1 - algorithm.clip_low for r, a in cases]]
    np.testing.assert_array_equal(clipped["clipped_high"], high)
    np.testing.assert_array_equal(clipped["clipped_low"], low)


def test_on_policy_gradient_is_minus_the_advantage():
    logprobs, advantages = RNG.normal(-2, 1, (2, 5)), RNG.normal(size=(2, 5))
    unclipped = dataclasses.replace(dapo(), clip_low=0.0, clip_high=0.0)
    for algorithm in (dapo(), grpo(), sft(), unclipped):

        def total(x, algorithm=algorithm):
            return policy_loss(algorithm, x, logprobs, advantages, np.ones((2, 5)))[0].sum()

        np.testing.assert_allclose(jax.grad(total)(jnp.array(logprobs)), -advantages, rtol=1e-5)


@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf, 1e30])
def test_padding_gets_no_loss_and_no_gradient(rubbish):
    logprobs = np.array([[-1.0, rubbish, -2.0]])
    mask = np.array([[1.0, 0.0, 1.0]])

    def total(x):
        loss, _ = policy_loss(dapo(), x, logprobs * 0.9, np.array([[1.0, 1.0, -1.0]]), mask)
        return loss.sum()

    value, gradient = jax.value_and_grad(total)(jnp.array(logprobs))
    assert np.isfinite(value) and np.all(np.isfinite(gradient)) and gradient[0, 1] == 0


def test_a_huge_log_ratio_stays_finite():
    for old in (-500.0, 500.0):
        loss = policy_loss(
            dapo(), jnp.zeros((1, 1)), jnp.full((1, 1), old), -np.ones((1, 1)), np.ones((1, 1))
        )[0]
        assert np.isfinite(loss).all()
    assert loss[0, 0] >= 0


TOKENS = np.array([4, 1, 0, 7])
GROUPS = np.array([3, 3, 8, 8])


def test_weights_reproduce_the_nested_means():
    """Each aggregate as its paper nests it, for arbitrary token losses and an empty response."""
    losses = [RNG.normal(size=n) for n in TOKENS]
    real = [part for part in losses if len(part)]
    expected = {
        "token_mean": np.concatenate(losses).mean(),
        "token_mean_per_group": np.mean(
            [np.concatenate(losses[:2]).mean(), np.concatenate(losses[2:]).mean()]
        ),
        "sequence_mean": np.mean([part.mean() for part in real]),
        "sequence_sum": np.mean([part.sum() for part in real]),
        "token_sum_over_budget": np.mean([part.sum() / 9 for part in real]),
    }
    assert set(expected) == set(LOSS_WEIGHTS)
    for name, value in expected.items():
        algorithm = dapo()
        algorithm.aggregate = name
        weights = response_weights(algorithm, TOKENS, GROUPS, np.zeros(4, bool), budget=9)
        found = sum(w * part.sum() for w, part in zip(weights, losses, strict=True))
        np.testing.assert_allclose(found, value, err_msg=name)
        assert weights[2] == 0


def test_overlong_filtering_leaves_loss_and_counts():
    algorithm = dapo()
    truncated = np.array([False, False, False, True])
    np.testing.assert_allclose(
        response_weights(algorithm, TOKENS, GROUPS, truncated, 9), [1 / 12, 1 / 12, 0, 1 / 12]
    )
    algorithm.overlong_filtering = True
    np.testing.assert_allclose(
        response_weights(algorithm, TOKENS, GROUPS, truncated, 9), [1 / 5, 1 / 5, 0, 0]
    )
    assert not response_weights(algorithm, TOKENS, GROUPS, np.ones(4, bool), 9).any()

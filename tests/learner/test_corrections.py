"""Importance weights and rejections for a sampler that is not the trainer, against loops."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from policy_cases import COUNT, EXACT, case, changed, gradient, spread_coefficients
from policy_loops import drifts_of, loop_ppo, pool_ratios

from dapo_jax.learner.losses import rejections

NO_KL = {"kl": "none", "kl_coefficient": 0.0, "reference": False}
KINDS = ("near", "apart", "far", "edges", "edges of products", "extremes", "whole extremes")


def loop_rejected(algorithm, response):
    of_new = zip(response.p, response.q, strict=True)
    xs = [p - q for p, q in of_new] if algorithm.rejection_of == "new" else drifts_of(response)
    high = algorithm.rejection_high or math.inf
    ratios = pool_ratios(algorithm.rejection, xs)
    outside = [not algorithm.rejection_low <= ratio <= high for ratio in ratios]
    if algorithm.rejection == "worst":
        outside = [any(outside)] * len(outside)
    every = algorithm.rejection_sign == "all"
    pairs = zip(outside, response.advantages, strict=True)
    return [out and (every or a < 0) for out, a in pairs]


def loop_corrected(algorithm, response):
    coefficients = loop_ppo(response)
    if algorithm.importance_cap:
        weights = pool_ratios(algorithm.importance_ratio, drifts_of(response))
        capped = [min(weight, algorithm.importance_cap) for weight in weights]
        coefficients = [c * w for c, w in zip(coefficients, capped, strict=True)]
    if algorithm.rejection != "none":
        rejected = loop_rejected(algorithm, response)
        coefficients = [0.0 if r else c for c, r in zip(coefficients, rejected, strict=True)]
    return coefficients


def assert_corrected(algorithm, kinds=KINDS):
    for kind in kinds:
        batch, logprobs, responses = case(kind)
        expected = spread_coefficients(lambda own: loop_corrected(algorithm, own), batch, responses)
        actual = gradient(algorithm, batch, logprobs)
        np.testing.assert_allclose(actual, expected, **EXACT, err_msg=kind)
        assert not actual[batch.loss_weights == 0].any()


@pytest.mark.parametrize("pool", ["token", "product", "sequence"])
def test_importance_weights_are_capped_ratios_of_tokens_or_responses(pool):
    for cap, kinds in ((2.0, KINDS), (1.0, ("apart",)), (20.0, ("far",))):
        assert_corrected(changed("tis", importance_ratio=pool, importance_cap=cap), kinds)


REJECTIONS = [
    (0.5, 5.0, "old", "all"),
    (0.999, 1.001, "new", "negative"),
    (0.9, 0.0, "new", "all"),
    (0.0, 2.0, "old", "negative"),
]


@pytest.mark.parametrize("pool", ["token", "product", "sequence", "worst"])
def test_rejection_removes_ratios_beyond_its_bounds(pool):
    for low, high, of, sign in REJECTIONS:
        algorithm = changed(
            "grpo",
            **NO_KL,
            rejection=pool,
            rejection_low=low,
            rejection_high=high,
            rejection_of=of,
            rejection_sign=sign,
        )
        assert_corrected(algorithm, ("apart", "edges", "extremes"))


def test_rejected_tokens_keep_their_kl():
    batch, logprobs, _ = case("apart")
    nothing = {"rejection": "sequence", "rejection_low": 1e3, "rejection_high": 0.0}
    silent = dataclasses.replace(batch, advantages=np.zeros_like(batch.advantages))
    actual = gradient(changed("grpo", **nothing), batch, logprobs)
    np.testing.assert_allclose(actual, gradient(changed("grpo"), silent, logprobs), rtol=1e-12)
    assert np.count_nonzero(actual) > COUNT / 2


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

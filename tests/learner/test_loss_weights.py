"""Loss weights, of responses and on packed rows, against the means that the papers nest."""

import dataclasses
import math
import types

import numpy as np
import pytest
from conftest import make_prompt
from policy_loops import mean

from dapo_jax import algorithms
from dapo_jax.config.algorithms import dapo
from dapo_jax.learner.advantages import Estimates, estimate
from dapo_jax.learner.batches import ScoredBatch
from dapo_jax.learner.losses import LOSS_WEIGHTS, TRAINED_RESPONSES, response_weights
from dapo_jax.learner.minibatches import Minibatches, make_batch
from dapo_jax.learner.packing import Segment, pack
from dapo_jax.learner.score_pass import make_feedback
from dapo_jax.run.metrics import feedback_metrics
from dapo_jax.types.structs import Completion

EXACT = {"rtol": 1e-6, "atol": 1e-12}

TOKENS = [4, 1, 0, 7, 2, 0, 3]  # the group of 5 has no trained token at all
GROUPS = [3, 3, 8, 8, 8, 5, 3]
CORRECT = [True, False, True, True, False, True, False]
BUDGET = 9


def loop_chosen(trained_responses):
    """Numbers of the responses that carry loss."""
    alive = [i for i in range(7) if TOKENS[i]]
    if trained_responses == "pairs":  # first right with first wrong, while both last
        return [0, 1, 3, 4]
    return [i for i in alive if CORRECT[i] or trained_responses == "all"]


def loop_aggregate(name, losses, chosen):
    """The aggregate of the responses' token losses as its paper nests it."""
    parts = [losses[i] for i in chosen]
    if name == "token_mean":
        return mean([x for part in parts for x in part])
    if name == "token_mean_per_group":
        groups = sorted({GROUPS[i] for i in chosen})
        return mean(
            [mean([x for i in chosen if GROUPS[i] == g for x in losses[i]]) for g in groups]
        )
    if name == "sequence_mean":
        return mean([mean(part) for part in parts])
    if name == "token_sum_over_budget":
        return mean([math.fsum(part) / BUDGET for part in parts])
    sums = [math.fsum(part) for part in parts]
    if name == "pair_sum":
        return mean([sums[0] + sums[1], sums[2] + sums[3]])
    return mean(sums)


# A mean over pairs is of pairs only; the config refuses the rest.
MEANS = [
    (aggregate, trained)
    for aggregate in LOSS_WEIGHTS
    for trained in TRAINED_RESPONSES
    if aggregate != "pair_sum" or trained == "pairs"
]


@pytest.mark.parametrize(("aggregate", "trained"), MEANS)
def test_weights_reproduce_the_nested_means(aggregate, trained):
    algorithm = dataclasses.replace(dapo(), aggregate=aggregate, trained_responses=trained)
    rng = np.random.default_rng(0)
    losses = [rng.normal(size=n).tolist() for n in TOKENS]
    arrays = [np.array(column) for column in (TOKENS, GROUPS, CORRECT)]
    weights = response_weights(algorithm, *arrays, BUDGET)
    actual = math.fsum(w * x for w, part in zip(weights, losses, strict=True) for x in part)
    chosen = loop_chosen(trained)
    np.testing.assert_allclose(actual, loop_aggregate(aggregate, losses, chosen), **EXACT)
    assert np.flatnonzero(weights).tolist() == chosen
    tokens, groups, correct = arrays
    assert not response_weights(algorithm, 0 * tokens, groups, correct, BUDGET).any()
    if trained != "all":  # no response is correct
        assert not response_weights(algorithm, tokens, groups, 0 * tokens > 0, BUDGET).any()


# --- packed minibatches --------------------------------------------------------------------


def make_segments(truncated=(), weights=None, first=0):
    rng, segments = np.random.default_rng(1), []
    for i, n in enumerate(TOKENS):
        prompt = make_prompt(GROUPS[i], [2] * (1 + i % 3))
        done = Completion(np.full(n, 3), np.zeros(n, np.float32), i in truncated, 0, "")
        own = None if weights is None else rng.choice(weights, n)
        segments.append(Segment(prompt, done, first + i, CORRECT[i], own))
    return segments


def packed(segments, algorithm, returns=False, advantages=0.0):
    rollouts, _ = pack(segments, 11, 2, 4)
    everywhere = np.full(rollouts.tokens.shape, advantages)
    targets = everywhere if returns else None
    scored = ScoredBatch(rollouts, None)
    return make_batch(scored, segments, Estimates(everywhere, targets), algorithm, BUDGET)


def of_responses(array, batch, first=0):
    """What stands on each response's tokens; nothing may stand elsewhere."""
    index = batch.scored.rollouts.response_index
    assert not array[index < 0].any() and array.dtype == np.float32
    return [array[index == first + i].tolist() for i in range(7)]


def assert_responses(actual, expected):
    for left, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6)


@pytest.mark.parametrize("first", [0, 21])  # the minibatch's place in the rollout batch
@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "token_mean_per_group"])
def test_packed_rows_carry_each_responses_weight_on_its_tokens(aggregate, first):
    algorithm = dataclasses.replace(dapo(), aggregate=aggregate)
    batch = packed(make_segments(first=first), algorithm)
    arrays = np.array(TOKENS), np.array(GROUPS), np.array(CORRECT)
    weights = response_weights(algorithm, *arrays, BUDGET)
    expected = [[w] * n for w, n in zip(weights, TOKENS, strict=True)]
    assert_responses(of_responses(batch.loss_weights, batch, first), expected)
    assert batch.nll_weights is None and batch.value_weights is None and batch.returns is None


def test_truncated_responses_leave_loss_and_counts_only_with_overlong_filtering():
    algorithm = dapo()
    for filtering, counted in ((False, 17), (True, 10)):
        algorithm.overlong_filtering = filtering
        batch = packed(make_segments(truncated={3}), algorithm)
        expected = [[1 / counted] * n for n in TOKENS]
        if filtering:
            expected[3] = [0.0] * 7
        assert_responses(of_responses(batch.loss_weights, batch), expected)


def test_token_weights_stand_on_their_tokens_and_zeros_leave_the_counts():
    """A token of weight 2 counts once in the means' denominators, like one of weight 0.5."""
    segments = make_segments(weights=[0.0, 0.5, 2.0], truncated={3})
    algorithm = dataclasses.replace(dapo(), token_weights="a:hook", aggregate="sequence_mean")
    alive = [s.token_weights for s in segments if np.any(s.token_weights)]
    batch = packed(segments, algorithm)
    expected = []
    for segment in segments:
        own = segment.token_weights
        count = sum(1 for w in own if w)
        expected.append([w / count / len(alive) if w else 0.0 for w in own])
    assert any(0.0 in own and any(own) for own in expected)
    assert_responses(of_responses(batch.loss_weights, batch), expected)


def test_positive_nll_is_a_mean_over_the_trained_tokens_of_right_responses():
    """As VAPO (arXiv 2504.05118) adds it; truncated and zero-weighted tokens are not among them."""
    algorithm = algorithms.vapo()
    algorithm.overlong_filtering = True
    batch = packed(make_segments(truncated={3}), algorithm)
    expected = [[0.1 / 4 if i == 0 else 0.0] * n for i, n in enumerate(TOKENS)]
    assert_responses(of_responses(batch.nll_weights, batch), expected)
    algorithm.token_weights = "a:hook"
    segments = make_segments(weights=[0.0, 2.0])
    batch = packed(segments, algorithm)
    right = [i for i in range(7) if CORRECT[i]]
    count = sum(1 for i in right for w in segments[i].token_weights if w)
    expected = [
        [0.1 / count if w and i in right else 0.0 for w in s.token_weights]
        for i, s in enumerate(segments)
    ]
    assert_responses(of_responses(batch.nll_weights, batch), expected)
    wrong = packed([s._replace(correct=False) for s in segments], algorithm)
    assert not wrong.nll_weights.any()


def test_the_value_loss_is_a_mean_over_trained_tokens_whatever_the_aggregate():
    algorithm = dataclasses.replace(
        algorithms.ppo(), aggregate="sequence_mean", overlong_filtering=True
    )
    batch = packed(make_segments(truncated={3}), algorithm, returns=True)
    expected = [[0.0 if i == 3 else 1 / 10] * n for i, n in enumerate(TOKENS)]
    assert_responses(of_responses(batch.value_weights, batch), expected)


# --- a last minibatch with fewer groups than planned -------------------------------------------

PLANNED = 8  # groups of a minibatch, of two responses with three tokens each


def planned_batch(algorithm, groups, planned=PLANNED):
    """The minibatch of those groups, with advantages, returns and weights of every kind."""
    segments = [
        Segment(
            make_prompt(g, [2]),
            Completion(np.full(3, 3), np.zeros(3, np.float32), False, 0, ""),
            2 * g + j,
            j == 0,
            np.full(3, 0.5 + j) if algorithm.token_weights else None,
        )
        for g in groups
        for j in range(2)
    ]
    rollouts, _ = pack(segments, 11, 2, 8)
    zeros, scored = np.zeros(rollouts.tokens.shape), ScoredBatch(rollouts, None)
    return make_batch(scored, segments, Estimates(zeros, zeros), algorithm, BUDGET, planned)


WEIGHED = ("loss_weights", "nll_weights", "value_weights")


@pytest.mark.parametrize("aggregate", LOSS_WEIGHTS)
def test_a_group_weighs_the_same_in_a_minibatch_with_fewer_groups_than_planned(aggregate):
    """Of nine groups, eight are planned for a minibatch: the ninth has an eighth of its weight."""
    algorithm = dataclasses.replace(algorithms.vapo(), aggregate=aggregate, token_weights="a:hook")
    full, lone = planned_batch(algorithm, range(8)), planned_batch(algorithm, [8])
    unplanned = planned_batch(algorithm, range(8), None)
    for name in WEIGHED:
        weights = getattr(full, name)
        np.testing.assert_allclose(getattr(lone, name).sum(), weights.sum() / PLANNED, rtol=1e-6)
        np.testing.assert_array_equal(getattr(unplanned, name), weights)


# --- what the feedback is made of ------------------------------------------------------------


def gathered(algorithm, earned, weights=None):
    """Feedback on the packed minibatch, its old and reference log-probs, with NaN off responses."""
    segments = make_segments(truncated={3}, weights=weights)
    rollouts, _ = pack(segments, 11, 2, 4)
    rng, on = np.random.default_rng(2), rollouts.response_index >= 0
    old, reference, values = (
        np.float32(np.where(on, rng.normal(size=on.shape), np.nan)) for _ in range(3)
    )
    config = types.SimpleNamespace(
        algorithm=algorithm,
        rollout=types.SimpleNamespace(samples_per_prompt=7),
        reward=types.SimpleNamespace(weights=lambda: {"rule": 1.0}),
    )
    rewards = np.array(earned)
    known = {"correct": np.array(CORRECT), "reward_parts": {"rule": rewards}, "token_rewards": None}
    groups = [types.SimpleNamespace(rewards=rewards, baseline=None, **known)]
    scored = ScoredBatch(rollouts, old, {"reference": reference, "critic": values})
    return make_feedback(
        config, Minibatches([segments], rollouts, [1]), scored, groups
    ), np.float64(old) - reference


EARNED = [1.0, -1.0, -1.0, 0.5, 2.0, -0.25, 0.0]


def test_a_kl_in_the_reward_costs_every_token_its_k1():
    for preset, coefficient in ((algorithms.rloo(), 0.03), (algorithms.reinforce_pp(), 0.01)):
        actual, log_ratios = gathered(preset, EARNED)
        for i, n in enumerate(TOKENS):
            costs = coefficient * log_ratios[actual.response_index == i]
            expected = -costs
            expected[n - 1 :] += EARNED[i]
            own = actual.token_rewards[actual.response_index == i]
            np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-8)
            np.testing.assert_allclose(actual.rewards[i], EARNED[i] - math.fsum(costs), rtol=1e-6)
        assert actual.tokens.tolist() == TOKENS
        assert not actual.token_rewards[actual.response_index < 0].any()


def test_whitening_is_over_the_tokens_that_carry_loss():
    """Response 3, the longest, is truncated and filtered; its advantage is far from the others'."""
    algorithm = dataclasses.replace(
        algorithms.reinforce_pp_baseline(), overlong_filtering=True, token_weights="a:hook"
    )
    weights = [0.0, 2.0]
    actual, _ = gathered(algorithm, [*EARNED[:3], 1e3, *EARNED[4:]], weights)
    own = [s.token_weights for s in make_segments(weights=weights)]
    alive = [[i != 3 and w > 0 for w in weights] for i, weights in enumerate(own)]
    for i, mask in enumerate(alive):
        np.testing.assert_array_equal(actual.trained[actual.response_index == i], mask)
    advantages, _ = estimate(algorithm, actual)
    trained = advantages[actual.trained]
    assert len(trained) == sum(map(sum, alive)) and not advantages[~actual.trained].any()
    np.testing.assert_allclose([trained.mean(), trained.std(ddof=1)], [0, 1], atol=1e-6)
    assert feedback_metrics(algorithm, actual, advantages, None)["advantage_std"] == pytest.approx(
        trained.std()
    )


# --- token weights of a user function -------------------------------------------------------------

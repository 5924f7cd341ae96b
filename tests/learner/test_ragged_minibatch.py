"""A last minibatch with fewer groups than planned: each weighs as much as in a full one."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import make_prompt

from dapo_jax import algorithms
from dapo_jax.learner.advantages import Estimates, broadcast_to_tokens
from dapo_jax.learner.batches import ScoredBatch
from dapo_jax.learner.losses import LOSS_WEIGHTS
from dapo_jax.learner.minibatches import make_batch
from dapo_jax.learner.packing import Segment, pack
from dapo_jax.learner.policy import policy_objective
from dapo_jax.structs import Completion

BUDGET = 9
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
    rng = np.random.default_rng(0)
    advantages = broadcast_to_tokens(rng.normal(size=2 * PLANNED + 2), rollouts.response_index)
    scored = ScoredBatch(rollouts, None)
    return make_batch(
        scored, segments, Estimates(advantages, advantages), algorithm, BUDGET, planned
    )


WEIGHED = ("loss_weights", "nll_weights", "value_weights")


@pytest.mark.parametrize("aggregate", LOSS_WEIGHTS)
def test_a_group_weighs_the_same_in_a_minibatch_with_fewer_groups_than_planned(aggregate):
    """Of nine groups where eight are planned: the ninth is alone, its weight an eighth."""
    algorithm = dataclasses.replace(algorithms.vapo(), aggregate=aggregate, token_weights="a:hook")
    full, lone = planned_batch(algorithm, range(8)), planned_batch(algorithm, [8])
    for name in WEIGHED:
        whole, alone = getattr(full, name), getattr(lone, name)
        np.testing.assert_allclose(alone.sum(), whole.sum() / PLANNED, rtol=1e-6)
    unweighed = dataclasses.replace(algorithm, token_weights="")
    total = {"token_sum_over_budget": 3 / BUDGET, "sequence_sum": 3, "pair_sum": 6}
    found = planned_batch(unweighed, [8]).loss_weights.sum()
    np.testing.assert_allclose(found, total.get(aggregate, 1) / PLANNED, rtol=1e-6)


def test_a_lone_groups_gradient_is_its_part_in_a_full_minibatch():
    algorithm = dataclasses.replace(algorithms.vapo(), region="none")

    def gradient(batch):
        """By the log-prob of each token of group 7: the last of a full minibatch, or alone."""
        index = batch.scored.rollouts.response_index

        def loss(logprobs):
            parts = [
                policy_objective(algorithm, jax.tree.map(lambda x, i=i: x[i], batch), row, row)[0]
                for i, row in enumerate(logprobs)
            ]
            return sum(parts)

        found = jax.grad(loss)(np.full(index.shape, -1.0, np.float32))
        return [found[index == i].tolist() for i in (14, 15)]

    full, lone = planned_batch(algorithm, range(8)), planned_batch(algorithm, [7])
    assert np.any(gradient(full))
    np.testing.assert_allclose(gradient(lone), gradient(full), rtol=1e-6)


def test_a_full_minibatch_has_the_same_weights_bit_for_bit():
    algorithm = algorithms.vapo()
    left, right = (planned_batch(algorithm, range(8), n) for n in (None, PLANNED))
    for name in WEIGHED:
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))

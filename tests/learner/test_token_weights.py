"""The user's weights per token: what they change of the loss weights, and when they are refused."""

import dataclasses

import numpy as np
import pytest
from conftest import make_completion, make_prompt
from small_runs import make_quick_config

from dapo_jax import algorithms
from dapo_jax.learner.advantages import Estimates
from dapo_jax.learner.batches import ScoredBatch, TrainBatch
from dapo_jax.learner.minibatches import make_batch, split_groups
from dapo_jax.learner.packing import pack
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.run.components import Components, build
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.structs import Verdict

OWN = """
import numpy as np

def first_only(group, sample):
    return np.arange(len(group.completions[sample])) < 1

def by_place(group, sample):
    return [0.5 * (i + 1) for i in range(len(group.completions[sample]))]

def only_wrong(group, sample):
    return np.full(len(group.completions[sample]), float(not group.correct[sample]))

def too_short(group, sample):
    return np.ones(len(group.completions[sample]) - 1)

def one_number(group, sample):
    return 1.0

def negative(group, sample):
    return -np.ones(len(group.completions[sample]))

def endless(group, sample):
    return np.full(len(group.completions[sample]), np.inf)
"""
LENGTHS = [5, 1, 3, 0, 7, 2, 4, 6]


@pytest.fixture
def open_parts(write_module, tiny_folder, alone, tmp_path):
    """Builds the parts of a run with that hook."""
    write_module("own", OWN)
    opened: list[Components] = []

    def open_with(hook: str, **changes) -> Components:
        algorithm = dataclasses.replace(
            algorithms.dapo(), token_weights=hook and f"own:{hook}", **changes
        )
        config = make_quick_config(tiny_folder, tmp_path, updates=1, algorithm=algorithm)
        opened.append(build(config))
        return opened[-1]

    yield open_with
    for parts in opened:
        parts.close()


def make_lengths(parts: Components, truncated=()):
    """Two groups whose responses have those lengths; every other one is right."""
    groups = []
    for i in (0, 4):
        done = tuple(
            make_completion([5 + k for k in range(LENGTHS[i + j])], truncated=i + j in truncated)
            for j in range(4)
        )
        verdicts = tuple(Verdict(j % 2 == 0, "1") for j in range(4))
        groups.append(reward_group(parts.config, make_prompt(i, [3, 4]), done, verdicts))
    return groups


def batch_of(parts: Components, groups) -> TrainBatch:
    (segments,) = split_groups(parts.config, groups, parts.token_weights)
    rollouts, _ = pack(segments, 20, 2, 4)
    advantages = np.ones(rollouts.tokens.shape, np.float32)
    budget = parts.config.sampler.max_response_tokens
    scored = ScoredBatch(rollouts, None)
    return make_batch(scored, segments, Estimates(advantages), parts.config.algorithm, budget)


def by_response(batch: TrainBatch) -> dict[int, np.ndarray]:
    """The loss weights of each response's tokens, in order."""
    index = batch.scored.rollouts.response_index
    assert not batch.loss_weights[index < 0].any()
    return {i: batch.loss_weights[index == i] for i in range(len(LENGTHS)) if LENGTHS[i]}


def test_a_mask_of_the_first_tokens_leaves_one_weight_per_response(open_parts):
    parts = open_parts("first_only")
    weights = by_response(batch_of(parts, make_lengths(parts)))
    for i, found in weights.items():  # a token mean over the seven tokens that are left
        np.testing.assert_allclose(found, [1 / 7] + [0] * (LENGTHS[i] - 1), rtol=1e-6)


def test_weights_multiply_those_of_the_aggregate(open_parts):
    plain, hooked = (
        open_parts(hook, aggregate="sequence_mean", overlong_filtering=True)
        for hook in ("", "by_place")
    )
    groups = make_lengths(plain, truncated={4})
    expected, found = (by_response(batch_of(parts, groups)) for parts in (plain, hooked))
    for i, weights in expected.items():
        factors = 0.5 * np.arange(1, LENGTHS[i] + 1)
        np.testing.assert_allclose(found[i], weights * factors, rtol=1e-6)
    assert not found[4].any() and found[5].all()


def test_a_response_of_weight_zero_leaves_every_mean(open_parts):
    parts = open_parts("only_wrong", aggregate="sequence_mean")
    weights = by_response(batch_of(parts, make_lengths(parts)))
    wrong = [i for i in weights if i % 2]
    assert wrong == [1, 5, 7]
    for i, found in weights.items():
        share = 1 / LENGTHS[i] / len(wrong) if i in wrong else 0
        np.testing.assert_allclose(found, np.full(LENGTHS[i], share), rtol=1e-6)


@pytest.mark.parametrize(
    ("hook", "shape"),
    [("too_short", (4,)), ("one_number", ()), ("negative", (5,)), ("endless", (5,))],
)
def test_weights_that_do_not_fit_a_response_say_whose_and_why(hook, shape, open_parts):
    parts = open_parts(hook)
    with pytest.raises(ValueError) as caught:
        split_groups(parts.config, make_lengths(parts), parts.token_weights)
    message = str(caught.value)
    assert f"config.algorithm.token_weights = 'own:{hook}'" in message
    assert "5 finite numbers, none below 0, for response 0 to prompt p0" in message
    assert f"got shape {shape}" in message


@pytest.mark.parametrize("name", ["own:absent", "no_such_module:f", "first_only", "own:np"])
def test_a_hook_that_can_not_be_found_stops_at_the_door(
    name, write_module, tiny_folder, alone, tmp_path
):
    write_module("own", OWN)
    algorithm = dataclasses.replace(algorithms.dapo(), token_weights=name)
    with pytest.raises(ConfigError, match=f"config.algorithm.token_weights = '{name}': "):
        make_quick_config(tiny_folder, tmp_path, algorithm=algorithm)  # checks as a command does

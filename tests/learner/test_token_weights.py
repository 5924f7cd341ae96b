"""Weights per token from a user function: their effect on loss weights, and rejected ones."""

import dataclasses

import numpy as np
import pytest
from conftest import make_completion, make_prompt
from small_runs import make_quick_config

from dapo_jax import algorithms
from dapo_jax.config.experiment import Config, Rollout
from dapo_jax.learner.advantages import Estimates
from dapo_jax.learner.batches import ScoredBatch
from dapo_jax.learner.minibatches import make_batch, split_groups
from dapo_jax.learner.packing import pack
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.structs import Verdict

LENGTHS = [5, 1, 3, 0, 7, 2, 4, 6]
CONFIG = Config(
    algorithm=dataclasses.replace(
        algorithms.dapo(), token_weights="own:hook", aggregate="sequence_mean"
    ),
    rollout=Rollout(prompts_per_step=2, samples_per_prompt=4, updates_per_rollout=1),
)


def make_groups():
    """Two groups whose responses have those lengths; every other one is right."""
    verdicts = tuple(Verdict(j % 2 == 0, "1") for j in range(4))
    groups = []
    for i in (0, 4):
        done = tuple(make_completion([5] * length) for length in LENGTHS[i : i + 4])
        groups.append(reward_group(CONFIG, make_prompt(i, [3, 4]), done, verdicts))
    return groups


def test_the_hook_sees_a_group_and_the_number_of_a_response():
    """It gives wrong responses the weights 0.5, 1, 1.5, ...; those of weight 0 leave the mean."""

    def hook(group, sample):
        places = np.arange(1, len(group.completions[sample]) + 1)
        return 0.5 * places * (not group.correct[sample])

    (segments,) = split_groups(CONFIG, make_groups(), hook)
    rollouts, _ = pack(segments, 20, 2, 4)
    estimates, scored = Estimates(np.ones(rollouts.tokens.shape)), ScoredBatch(rollouts, None)
    batch = make_batch(scored, segments, estimates, CONFIG.algorithm, 20)
    wrong = (1, 5, 7)  # number 3 is empty
    for i, n in enumerate(LENGTHS):
        expected = 0.5 * np.arange(1, n + 1) / n / len(wrong) if i in wrong else np.zeros(n)
        actual = batch.loss_weights[rollouts.response_index == i]
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("weights", "shape"), [(np.ones(4), (4,)), (1.0, ()), (-np.ones(5), (5,)), ([np.inf] * 5, (5,))]
)
def test_weights_that_do_not_fit_a_response_are_rejected(weights, shape):
    with pytest.raises(ConfigError) as caught:
        split_groups(CONFIG, make_groups(), lambda group, sample: weights)
    message = str(caught.value)
    assert "config.algorithm.token_weights = 'own:hook'" in message
    assert "5 finite numbers, none below 0, for response 0 to prompt p0" in message
    assert f"got shape {shape}" in message


@pytest.mark.parametrize("name", ["own:absent", "no_such_module:f", "hook", "own:number"])
def test_a_hook_must_be_a_function(name, write_module, tiny_folder, alone, tmp_path):
    write_module("own", "number = 3\n")
    algorithm = dataclasses.replace(algorithms.dapo(), token_weights=name)
    with pytest.raises(ConfigError, match=f"config.algorithm.token_weights = '{name}': "):
        make_quick_config(tiny_folder, tmp_path, algorithm=algorithm)  # checks as a command does

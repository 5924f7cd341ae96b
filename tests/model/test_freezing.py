"""Frozen first layers have no gradient, no moments and do not move; all else is unchanged."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import TINY
from frozen_samplers import make_sampler, sample
from learners import assert_close, make_batch, make_learner, place
from small_runs import make_quick_config

from dapo_jax import algorithms
from dapo_jax.config.experiment import Compute, Model, Optimizer
from dapo_jax.learner.policy import PolicySettings, policy_learner
from dapo_jax.model.trainable import frozen_layers, join, without
from dapo_jax.run.components import build, load_frozen
from dapo_jax.runtime.settings import ConfigError

HALF = dataclasses.replace(TINY, frozen_layers=1)


def split(params):
    """Return parameters with the first layer moved into the frozen stack."""
    layers = params["layers"]
    return params | {
        "frozen_layers": jax.tree.map(lambda leaf: leaf[:1], layers),
        "layers": jax.tree.map(lambda leaf: leaf[1:], layers),
    }


def make_half_learner(folder, mesh):
    score, frozen = PolicySettings(algorithms.dapo(), Compute()), load_frozen(folder, HALF, mesh)
    settings = Optimizer(learning_rate=1e-3, weight_decay=0.5)
    return policy_learner(score, settings, HALF, mesh, frozen)


def test_the_gradient_is_the_unfrozen_ones_without_the_frozen_layers(
    tiny_params, tiny_folder, one_device
):
    whole, half = make_learner(one_device), make_half_learner(tiny_folder, one_device)
    batch, used = make_batch()
    expected = split(whole.gradient(place(tiny_params, whole), batch, used))
    expected.pop("frozen_layers")
    actual = half.gradient(place(without(split(tiny_params), half.frozen), half), batch, used)

    assert_close(actual, expected, 1e-4)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(actual))


def test_a_state_is_without_the_frozen_layers_and_an_update_moves_the_rest(
    tiny_params, tiny_folder, eight_devices
):
    learner, (batch, used) = make_half_learner(tiny_folder, eight_devices), make_batch()
    frozen = {"frozen_layers": split(tiny_params)["frozen_layers"]}
    jax.tree.map(np.testing.assert_array_equal, learner.frozen, frozen)
    before = without(split(jax.device_get(tiny_params)), learner.frozen)
    state = learner.start(place(before, learner))
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim)
    assert shapes == sorted(2 * [leaf.shape for leaf in jax.tree.leaves(before)])  # two moments
    state, (metrics, _) = learner.update(state, batch, used, 1e-2)
    assert metrics["gradient_norm"].value() > 0
    after = jax.device_get(state.params)
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, after, before)))


def test_decoding_draws_what_the_unfrozen_decoder_draws(tiny_params, one_device, eight_devices):
    apart = split(tiny_params)
    frozen = {"frozen_layers": apart.pop("frozen_layers")}
    actual = sample(make_sampler(HALF, eight_devices, frozen), apart)
    expected = sample(make_sampler(TINY, one_device), tiny_params)
    for a, b in zip(actual, expected, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        np.testing.assert_allclose(a.sampler_logprobs, b.sampler_logprobs, atol=1e-5)


@pytest.mark.parametrize(
    ("fraction", "layers", "frozen"), [(0.0, 2, 0), (0.99, 2, 1), (1 / 3, 3, 1), (0.7, 10, 7)]
)
def test_a_fraction_of_layers_is_rounded_down(fraction, layers, frozen):
    assert frozen_layers(fraction, layers) == frozen


@pytest.mark.parametrize(("fraction", "layers"), [(0.4, 2), (1 - 1e-12, 2), (0.9, 1)])
def test_a_fraction_that_freezes_nothing_or_everything_is_rejected(fraction, layers):
    with pytest.raises(ConfigError, match=rf"model.freeze_layers = .*from 1/{layers}"):
        frozen_layers(fraction, layers)


def test_a_run_freezes_the_fraction_of_its_config(tiny_folder, tiny_params, alone, tmp_path):
    model = Model(folder=str(tiny_folder), freeze_layers=0.5)
    parts = build(make_quick_config(tiny_folder, tmp_path, "grpo", model=model))
    parts.close()
    for params in (join(parts.frozen, parts.first_params()), parts.learners.reference):
        jax.tree.map(np.testing.assert_array_equal, params, split(tiny_params))
    frozen, kept = (x["frozen_layers"] for x in (parts.learners.reference, parts.frozen))
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (frozen, kept)), strict=True))
    moments = parts.learners.policy.abstract_state.opt_state[1].mu
    assert set(moments) == set(tiny_params) and moments["layers"]["up"]["kernel"].shape[0] == 1

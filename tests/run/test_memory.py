"""Memory that a device lacks is an error of one line; estimates of weights and caches."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from conftest import TINY
from samplers import make_engine

from dapo_jax import algorithms
from dapo_jax.config.experiment import Compute, Optimizer, Sampler
from dapo_jax.extras.serve import policy
from dapo_jax.extras.serve.settings import ServeConfig
from dapo_jax.learner import update
from dapo_jax.learner.batches import PackedRows, ScoredBatch, TrainBatch
from dapo_jax.learner.policy import PolicySettings, policy_learner
from dapo_jax.model.decoder import init_params
from dapo_jax.run import memory
from dapo_jax.runtime.sharding import unbox
from dapo_jax.types.errors import ConfigError


def test_an_update_beyond_a_devices_memory_is_rejected_by_the_compilers_count(
    tiny_params, one_device, monkeypatch
):
    settings = PolicySettings(algorithms.sft(), Compute())
    learner = policy_learner(settings, Optimizer(), TINY, one_device)
    state = learner.start(jax.device_put(tiny_params, learner.shardings.params))
    tokens = np.ones((1, 2, 8), np.int32)
    rows = PackedRows(tokens, tokens, tokens, tokens * 0, tokens.astype(np.float32))
    weights = tokens.astype(np.float32)
    batch = TrainBatch(ScoredBatch(rows, None), weights, weights)
    monkeypatch.setattr(update, "device_memory", lambda mesh: 1e5)
    message = "packing.rows_per_microbatch = 2: must be smaller, or packing.row_tokens = 8 or .*: "
    with pytest.raises(ConfigError, match=f"{message}an update takes .* GB .* temporary"):
        learner.update(state, batch, 1, 1e-3)
    monkeypatch.setattr(update, "device_memory", lambda mesh: 1e9)
    _, outputs = learner.update(state, batch, 1, 1e-3)  # the state was not donated
    assert outputs.means["loss"].total != 0


def test_serving_refuses_slots_beyond_memory(byte_folder, alone):
    config = ServeConfig(model=str(byte_folder), slots=10**8)
    with pytest.raises(ConfigError, match="config.slots = 100000000 .* serving takes at least"):
        policy.load_served(config)


def sizes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_estimate_equals_the_size_of_the_arrays(one_device, eight_devices):
    params = sizes(jax.eval_shape(lambda: unbox(init_params(TINY, jax.random.key(0)))))
    assert memory.params_bytes(TINY, one_device) == params
    assert params / 8 < memory.params_bytes(TINY, eight_devices) < params / 2
    config = dataclasses.replace(TINY, window=7, sliding=(True, False))
    for changes in ({}, {"speculate": 3}, {"top_k": 4}):
        engine = make_engine(one_device, 6, prompt=10, response=30, config=config, **changes)
        empty = functools.partial(engine.programs.empty, window=engine.cache_tokens)
        state = jax.eval_shape(empty)
        texts = state.texts and state.texts.tokens
        held = sizes((state.caches, state.tokens, state.logprobs, state.supports, texts))
        estimate = memory.cache_bytes(config, Sampler(**changes), one_device, 6, 10, 30)
        assert estimate == held, changes

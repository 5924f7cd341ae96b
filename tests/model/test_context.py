"""Rows whose length is cut over devices: attention, log-probs, loss and gradient of one device."""

import dataclasses

import jax
import pytest
from conftest import MOE, TINY
from learners import assert_close, make_batch, place
from test_attention import assert_equal, inputs, ragged_ids, results
from test_windows import GEMMA

from dapo_jax import algorithms
from dapo_jax.config.experiment import Compute, Config, Data, Mesh, Optimizer, Packing, Sampler
from dapo_jax.learner.policy import PolicySettings, policy_learner
from dapo_jax.model import blockwise_attention, splash_attention
from dapo_jax.model.decoder import init_params
from dapo_jax.model.training_attention import Window
from dapo_jax.run.compute import numerics, open_mesh
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.sharding import make_mesh, unbox

LENGTH = 48
slow = pytest.mark.slow


@pytest.mark.parametrize("tokens", [None, 7])
@pytest.mark.parametrize(("tensor", "context"), [(2, 2), (1, 4)])
def test_attention_over_cut_rows_equals_plain(tensor, context, tokens, monkeypatch):
    monkeypatch.setattr(blockwise_attention, "BLOCK", 5)  # divides no piece
    arrays, ids = inputs(LENGTH), ragged_ids(LENGTH)
    window = None if tokens is None else Window(tokens)
    expected = results("plain", arrays, ids, window=window)
    mesh = make_mesh(1, -1, tensor, context=context)
    assert_equal(results("blocked", arrays, ids, mesh, window), expected)


@slow
@pytest.mark.parametrize("window", [None, Window(100), Window(100, jax.numpy.array(True))])
def test_splash_over_cut_rows_equals_plain(window, monkeypatch):
    monkeypatch.setattr(splash_attention, "MAX_BLOCK", 128)
    arrays, ids = inputs(512), ragged_ids(512)
    expected = results("plain", arrays, ids, window=window)
    mesh = make_mesh(1, 2, 2, context=2)
    assert_equal(results("splash", arrays, ids, mesh, window), expected)


def train(config, mesh):
    """Return log-probs, loss and gradient of packed rows."""
    learner = policy_learner(
        PolicySettings(algorithms.dapo(), Compute()), Optimizer(), config, mesh
    )
    params = place(unbox(init_params(config, jax.random.key(0))), learner)
    batch, used = make_batch(row_tokens=32)
    scores = learner.score(params, batch.scored.rollouts, used).values
    return jax.device_get((scores, *learner.loss_and_gradient(params, batch, used)))


WINDOWS = dataclasses.replace(GEMMA, attention="blocked", remat="attention")
BLOCKED = dataclasses.replace(TINY, attention="blocked", remat="full")
EXPERTS = dataclasses.replace(MOE, attention="blocked")


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        pytest.param(TINY, {"context": 4}, id="plain", marks=slow),
        pytest.param(BLOCKED, {"tensor": 2, "context": 2}, id="blocked, tensor", marks=slow),
        pytest.param(WINDOWS, {"context": 4}, id="windows"),
        pytest.param(EXPERTS, {"context": 2, "expert": 2}, id="experts", marks=slow),
    ],
)
def test_packed_rows_cut_by_length_train_as_on_one_device(config, sizes, one_device, monkeypatch):
    monkeypatch.setattr(blockwise_attention, "BLOCK", 4)
    mesh = make_mesh(1, -1, **{"tensor": 1} | sizes)
    assert_close(train(config, mesh), train(config, one_device), 1e-5)


def test_rows_that_the_mesh_can_not_cut_are_rejected():
    mesh = open_mesh(Mesh(context=4), rows_per_microbatch=2)
    with pytest.raises(ConfigError, match="row_tokens = 60: must be a multiple of 8 with mesh.con"):
        numerics(Compute(), mesh, 60)
    assert numerics(Compute(), mesh, 64)["attention"] == "plain"
    with pytest.raises(ConfigError, match="a factorisation of the 8 devices"):
        open_mesh(Mesh(context=3), rows_per_microbatch=8)
    with pytest.raises(ConfigError, match="rows_per_microbatch = 3.*decode_tensor = 2"):
        open_mesh(Mesh(context=4), rows_per_microbatch=3)


def test_automatic_rows_can_be_cut():
    config = Config(
        data=Data(max_prompt_tokens=100),
        sampler=Sampler(max_response_tokens=500),
        packing=Packing(row_tokens=-1),
        mesh=Mesh(context=4),
    )
    assert config.rows().row_tokens == 1024

"""Gradients of decoders of every kind on meshes of eight devices equal those on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import test_delta_net
import test_mixed_layers
from conftest import DELTA, MOE, TINY
from learners import assert_close
from test_attention import GEMMA
from test_mixed_layers import GEMMA_4
from test_windows import GPT_OSS, random_params

from dapo_jax.model import blockwise_attention
from dapo_jax.model.decoder import Decoder, abstract_params
from dapo_jax.runtime import sharding
from dapo_jax.runtime.sharding import make_mesh

CASES = {  # config, sizes of the mesh, and what makes the parameters
    "blocked, length cut": (TINY, {"fsdp": 2, "tensor": 2, "context": 2}, random_params),
    "windows, length cut": (GEMMA, {"fsdp": 2, "tensor": 1, "context": 4}, random_params),
    "experts, length cut": (
        MOE,
        {"fsdp": 2, "tensor": 1, "context": 2, "expert": 2},
        random_params,
    ),
    "experts": (MOE, {"fsdp": 2, "tensor": 1, "expert": 2, "decode_tensor": 2}, random_params),
    "experts with biases": (GPT_OSS, {"fsdp": 1, "tensor": 2, "expert": 4}, random_params),
    "delta net": (DELTA, {"fsdp": 4, "tensor": 2}, test_delta_net.random_params),
    "delta net, heads cut": (
        DELTA,
        {"fsdp": 2, "tensor": 2, "decode_tensor": 2},
        test_delta_net.random_params,
    ),
    "mixed layers": (GEMMA_4, {"fsdp": 4, "tensor": 2}, lambda _: test_mixed_layers.make_params()),
}
IN_CI = ("experts with biases",)  # each bias is added once


@pytest.mark.parametrize(
    ("config", "sizes", "make_params"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name not in IN_CI))
        for name, case in CASES.items()
    ],
)
def test_gradients_on_a_mesh_equal_those_on_one_device(
    config, sizes, make_params, one_device, monkeypatch
):
    """Rows are packed; layers are recomputed in the backward pass."""
    monkeypatch.setattr(blockwise_attention, "BLOCK", 4)
    tokens = jax.random.randint(jax.random.key(1), (8, 16), 2, 32)
    segments = jnp.repeat(jnp.array([[1] * 9 + [2] * 5 + [0] * 2]), 8, axis=0)
    places = jnp.broadcast_to(jnp.arange(16), (8, 16))
    params = make_params(config)

    def gradient(config, mesh):
        def loss(params):
            states = Decoder(config).apply({"params": params}, tokens, segments, places)
            return jnp.sum(jnp.sin(states) * (segments > 0)[..., None])

        shardings = sharding.tree_shardings(mesh, abstract_params(config))
        placed = jax.device_put(params, shardings)
        if config.experts:
            gate = placed["layers"]["moe"]["expert_gate"]["kernel"].addressable_shards[0].data
            assert gate.shape[1] == config.experts // mesh.shape["expert"]
        with sharding.activate(mesh):
            return jax.jit(jax.grad(loss))(placed)

    remat = dataclasses.replace(config, attention="blocked", remat="full")
    assert_close(gradient(remat, make_mesh(1, **sizes)), gradient(config, one_device), 2e-5)

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


def recomputed(config):
    return dataclasses.replace(config, attention="blocked", remat="full")


MAKE_PARAMS = {  # by family
    DELTA.family: test_delta_net.random_params,
    GEMMA_4.family: lambda _: test_mixed_layers.make_params(),
}
TOLERANCES = {GEMMA_4.family: 2e-3}  # its gradients, of up to 150, multiply rounding
CASES = {  # config, sizes of fsdp and tensor, and of other axes
    "blocked, length cut": (recomputed(TINY), (2, 2), {"context": 2}),
    "windows, length cut": (recomputed(GEMMA), (2, 1), {"context": 4}),
    "experts, length cut": (recomputed(MOE), (2, 1), {"context": 2, "expert": 2}),
    "experts": (MOE, (2, 1), {"expert": 2, "decode_tensor": 2}),
    "experts with biases": (GPT_OSS, (1, 2), {"expert": 4}),
    "delta net": (recomputed(DELTA), (4, 2), {}),
    "delta net, heads cut": (recomputed(DELTA), (2, 2), {"decode_tensor": 2}),
    "mixed layers": (recomputed(GEMMA_4), (4, 2), {}),
}
IN_CI = ("experts with biases",)  # each bias is added once


@pytest.mark.parametrize(
    ("config", "sizes", "cut"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name not in IN_CI))
        for name, case in CASES.items()
    ],
)
def test_gradients_on_a_mesh_equal_those_on_one_device(config, sizes, cut, one_device, monkeypatch):
    monkeypatch.setattr(blockwise_attention, "BLOCK", 4)
    tokens = jax.random.randint(jax.random.key(1), (8, 16), 2, 32)
    segments = jnp.repeat(jnp.array([[1] * 9 + [2] * 5 + [0] * 2]), 8, axis=0)
    places = jnp.broadcast_to(jnp.arange(16), (8, 16))
    plain = dataclasses.replace(config, attention="plain", remat="none")
    params = MAKE_PARAMS.get(config.family, random_params)(plain)

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

    actual, expected = gradient(config, make_mesh(1, *sizes, **cut)), gradient(plain, one_device)
    assert_close(actual, expected, TOLERANCES.get(config.family, 2e-5))

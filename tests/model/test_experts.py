"""Mixture of experts against a loop over tokens, on one device and on eight."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MOE
from learners import assert_close

from dapo_jax.model.decoder import Decoder, init_params
from dapo_jax.model.experts import NAMES, mix, route
from dapo_jax.model.layers import ACTIVATIONS, SCALE
from dapo_jax.model.param_paths import scaled_axes
from dapo_jax.model.quantisation import quantise
from dapo_jax.runtime import sharding
from dapo_jax.runtime.sharding import make_mesh, unbox

MOE = dataclasses.replace(MOE, experts_per_token=3, normalise_experts=True)
SILU = ACTIVATIONS["silu"]
RNG = np.random.default_rng(0)
TOKENS, PER_TOKEN, EXPERTS, WIDTH, INNER = 12, 3, 8, 6, 5
SHAPES = [(EXPERTS, WIDTH, INNER), (EXPERTS, WIDTH, INNER), (EXPERTS, INNER, WIDTH)]


def arrays():
    """Return tokens, logits and matrices of experts; no token takes expert 2, all take 5."""
    draws = (0.3 * RNG.normal(size=shape).astype("f") for shape in SHAPES)
    matrices = dict(zip(NAMES, draws, strict=True))
    logits = RNG.normal(size=(1, TOKENS, EXPERTS)).astype("f")
    logits[..., 2], logits[..., 5] = -9, 9
    return RNG.normal(size=(TOKENS, WIDTH)).astype("f"), logits, matrices


def gradients(function, *arrays):
    """Return value and gradients of a function of arrays, as a program."""

    def loss(*arrays):
        return jnp.sum(jnp.sin(function(*arrays)))

    argnums = tuple(range(len(arrays)))
    return jax.device_get(jax.jit(jax.value_and_grad(loss, argnums=argnums))(*arrays))


@pytest.mark.parametrize("normalise", [True, False])
def test_experts_and_their_gradients_are_those_of_a_loop(normalise):
    x, logits, matrices = arrays()
    best = np.argsort(-logits[0], axis=1)[:, :PER_TOKEN]

    def grouped(x, logits, matrices):
        weights, chosen, _ = route(logits, PER_TOKEN, normalise)
        return mix(x, weights[0], chosen[0], matrices, SILU)

    def loop(x, logits, matrices):
        gate, up, down = (matrices[name] for name in NAMES)
        out = []
        for token, row, own in zip(x, logits[0], best, strict=True):
            weights = jax.nn.softmax(row)[own]
            weights = weights / weights.sum() if normalise else weights
            each = [(jax.nn.silu(token @ gate[e]) * (token @ up[e])) @ down[e] for e in own]
            out.append(sum(weight * part for weight, part in zip(weights, each, strict=True)))
        return jnp.stack(out)

    expected = gradients(loop, x, logits, matrices)
    assert_close(gradients(grouped, x, logits, matrices), expected, 1e-5)


def test_int8_experts_have_a_scale_for_each_of_their_channels():
    x, logits, matrices = arrays()
    weights, chosen, _ = (array[0] for array in route(jnp.asarray(logits), PER_TOKEN, True))
    (axis,) = scaled_axes("layers/moe/expert_up/kernel")
    whole, rounded = {}, {}
    for name, matrix in matrices.items():
        whole[name], whole[name + SCALE] = quantise(jnp.asarray(matrix), jnp.int8, axis)
        rounded[name] = whole[name] * jnp.expand_dims(whole[name + SCALE], axis)
    assert whole[NAMES[2] + SCALE].shape == (EXPERTS, WIDTH)
    mixed, expected = (mix(x, weights, chosen, m, SILU) for m in (whole, rounded))
    np.testing.assert_allclose(mixed, expected, atol=1e-4)
    assert scaled_axes("layers/moe/router/kernel") == ()


@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 2, "tensor": 1, "expert": 2, "decode_tensor": 2},
        pytest.param({"fsdp": 1, "tensor": 2, "expert": 4}, marks=pytest.mark.slow),
    ],
)
def test_gradients_on_eight_devices_with_cut_experts_equal_one_device(sizes, one_device):
    tokens = jax.random.randint(jax.random.key(1), (8, 16), 2, 32)
    segments = jnp.repeat(jnp.array([[1] * 9 + [2] * 5 + [0] * 2]), 8, axis=0)
    places = jnp.broadcast_to(jnp.arange(16), (8, 16))

    def hidden(params):
        states = Decoder(MOE).apply({"params": params}, tokens, segments, places)
        return states * (segments > 0)[..., None]

    boxed, mesh = init_params(MOE, jax.random.key(0)), make_mesh(1, **sizes)
    with sharding.activate(one_device):
        expected = gradients(hidden, unbox(boxed))
    params = jax.device_put(unbox(boxed), sharding.tree_shardings(mesh, boxed))
    gate = params["layers"]["moe"]["expert_gate"]["kernel"].addressable_shards[0].data.shape
    assert gate[1] == MOE.experts // sizes["expert"]
    with sharding.activate(mesh):
        assert_close(gradients(hidden, params), expected, 1e-5)


def test_no_array_has_a_place_for_each_pair_of_token_and_expert():
    """In the program as it is compiled here, and as it is traced for others."""
    tokens, experts, taken, width, inner = 96, 64, 2, 8, 8
    draws = (RNG.normal(size=(experts, *pair)).astype("f") for pair in [(width, inner)] * 3)
    logits = jnp.asarray(RNG.normal(size=(1, tokens, experts)).astype("f"))
    weights, chosen, _ = (array[0] for array in route(logits, taken, True))

    def loss(x, weights, matrices):
        return jnp.sum(mix(x, weights, chosen, matrices, SILU))

    arrays = jnp.ones((tokens, width)), weights, dict(zip(NAMES, draws, strict=True))
    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*arrays)
    shapes = re.findall(r"[fs]\d+\[([\d,]+)\]", traced.lower().compile().as_text())
    sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
    assert len(sizes) > 100 and max(sizes) < tokens * experts * inner / 4
    assert "ragged_dot" in str(traced.jaxpr)

"""Mixture of experts against a loop over tokens, on one device and on eight."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY

from dapo_jax.model.decoder import Decoder, init_params
from dapo_jax.model.experts import NAMES, mix, route
from dapo_jax.model.layers import ACTIVATIONS, SCALE
from dapo_jax.model.param_paths import scaled_axes
from dapo_jax.model.quantisation import quantise
from dapo_jax.runtime import sharding
from dapo_jax.runtime.sharding import make_mesh, unbox

MOE = dataclasses.replace(
    TINY, mlp=16, experts=8, experts_per_token=3, normalise_experts=True, family="qwen3_moe"
)
SILU = ACTIVATIONS["silu"]
RNG, KEY = np.random.default_rng(0), jax.random.key(0)
TOKENS, PER_TOKEN, EXPERTS, WIDTH, INNER = 12, 3, 8, 6, 5
SHAPES = [(EXPERTS, WIDTH, INNER), (EXPERTS, WIDTH, INNER), (EXPERTS, INNER, WIDTH)]


def arrays():
    """Tokens, logits and matrices of experts, of which one is nobody's and one is everybody's."""
    draws = (0.3 * RNG.normal(size=shape).astype("f") for shape in SHAPES)
    matrices = dict(zip(NAMES, draws, strict=True))
    logits = RNG.normal(size=(1, TOKENS, EXPERTS)).astype("f")
    logits[..., 2], logits[..., 5] = -9, 9
    return RNG.normal(size=(TOKENS, WIDTH)).astype("f"), logits, matrices


def assert_near(found, expected, tolerance=1e-5):
    def check(a, b):
        assert np.abs(np.asarray(a) - b).max() <= tolerance * np.abs(b).max()

    jax.tree.map(check, jax.device_get(found), jax.device_get(expected))


def loop(x, chances, matrices, logits, normalise):
    """Each token through its likeliest experts, one after another; `logits` are no tracers."""
    best = np.argsort(-logits[0], axis=1)[:, :PER_TOKEN]
    out = []
    for token, row, own in zip(x, chances[0], best, strict=True):
        weights = jax.nn.softmax(row)[own]
        weights = weights / weights.sum() if normalise else weights
        gate, up, down = (matrices[name] for name in NAMES)
        each = [(jax.nn.silu(token @ gate[e]) * (token @ up[e])) @ down[e] for e in own]
        out.append(sum(w * one for w, one in zip(weights, each, strict=True)))
    return jnp.stack(out)


@pytest.mark.parametrize("normalise", [True, False])
def test_experts_and_their_gradients_are_those_of_a_loop(normalise):
    x, logits, matrices = arrays()

    def grouped(x, logits, matrices):
        weights, chosen, _ = route(logits, PER_TOKEN, normalise)
        return mix(x, weights[0], chosen[0], matrices, SILU)

    def gradients(function):
        def loss(*arrays):
            return jnp.sum(jnp.sin(function(*arrays)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, logits, matrices)

    found, expected = (
        gradients(grouped),
        gradients(lambda x, chances, matrices: loop(x, chances, matrices, logits, normalise)),
    )
    assert_near(found, expected)


def test_int8_experts_have_a_scale_for_each_of_their_channels():
    x, logits, matrices = arrays()
    weights, chosen, _ = (array[0] for array in route(jnp.asarray(logits), PER_TOKEN, True))
    (axis,) = scaled_axes("layers/moe/expert_up/kernel")
    whole, rounded = {}, {}
    for name, matrix in matrices.items():
        whole[name], whole[name + SCALE] = quantise(jnp.asarray(matrix), jnp.int8, axis)
        rounded[name] = whole[name] * jnp.expand_dims(whole[name + SCALE], axis)
    assert whole[NAMES[2] + SCALE].shape == (EXPERTS, WIDTH)
    found, expected = (mix(x, weights, chosen, m, SILU) for m in (whole, rounded))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert scaled_axes("layers/moe/router/kernel") == ()


@pytest.fixture(scope="module")
def moe_params():
    return unbox(init_params(MOE, jax.random.key(0)))


def gradients_on(mesh, params):
    tokens = jax.random.randint(jax.random.key(1), (8, 16), 2, 32)
    segments = jnp.repeat(jnp.array([[1] * 9 + [2] * 5 + [0] * 2]), 8, axis=0)
    places = jnp.broadcast_to(jnp.arange(16), (8, 16))

    def loss(params):
        hidden = Decoder(MOE).apply({"params": params}, tokens, segments, places)
        return jnp.sum(jnp.sin(hidden) * (segments > 0)[..., None])

    with sharding.activate(mesh):
        return jax.jit(jax.value_and_grad(loss))(params)


@pytest.fixture(scope="module")
def on_one_device(one_device, moe_params):
    return gradients_on(one_device, moe_params)


@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 2, "tensor": 1, "expert": 2, "decode_tensor": 2},
        pytest.param({"fsdp": 1, "tensor": 2, "expert": 4}, marks=pytest.mark.slow),
    ],
)
def test_eight_devices_with_experts_apart_equal_one(sizes, moe_params, on_one_device):
    mesh = make_mesh(1, **sizes)
    places = sharding.tree_shardings(mesh, jax.eval_shape(lambda: init_params(MOE, KEY)))
    params = jax.device_put(moe_params, places)
    gate = params["layers"]["moe"]["expert_gate"]["kernel"].addressable_shards[0].data.shape
    assert gate[1] == MOE.experts // sizes["expert"]
    assert_near(gradients_on(mesh, params), on_one_device)


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

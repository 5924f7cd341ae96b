"""Mixture of experts against a loop over tokens, on one device and on eight; routes replayed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MOE
from learners import assert_close

from dapo_jax.model.decoder import init_params
from dapo_jax.model.experts import (
    BALANCE,
    NAMES,
    REPLACED,
    ROUTES,
    Experts,
    mix,
    route,
    route_dtype,
)
from dapo_jax.model.grouped_products import grouped_product, product_by_blocks
from dapo_jax.model.layers import ACTIVATIONS, BIAS
from dapo_jax.model.logprobs import Rows, hidden_states
from dapo_jax.model.training_attention import Context
from dapo_jax.runtime import sharding
from dapo_jax.runtime.sharding import make_mesh, unbox

MOE = dataclasses.replace(MOE, experts_per_token=3, normalise_experts=True)
RNG = np.random.default_rng(0)
TOKENS, PER_TOKEN, EXPERTS, WIDTH, INNER = 6, 3, 8, 6, 5
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


def silu(gate, up):
    return jax.nn.silu(gate) * up


def clipped_swish(gate, up):
    gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
    return gate / (1 + jnp.exp(-1.702 * gate)) * (up + 1)


@pytest.mark.parametrize(
    ("inner", "normalise"), [(silu, True), (silu, False), (clipped_swish, True)]
)
def test_experts_and_their_gradients_are_those_of_a_loop(inner, normalise):
    x, logits, matrices = arrays()
    best = np.argsort(-logits[0], axis=1)[:, :PER_TOKEN]
    if inner is clipped_swish:  # as in gpt-oss, with biases and some values beyond 7
        for name in NAMES:
            matrices[name] = 10 * matrices[name]
            shape = EXPERTS, matrices[name].shape[2]
            matrices[name + BIAS] = RNG.normal(size=shape).astype("f")

    def grouped(x, logits, matrices):
        weights, chosen, _ = route(logits, PER_TOKEN, normalise)
        return mix(x, weights[0], chosen[0], matrices, ACTIVATIONS[inner.__name__])

    def loop(x, logits, matrices):
        def product(x, name, expert):
            bias = matrices[name + BIAS][expert] if name + BIAS in matrices else 0
            return x @ matrices[name][expert] + bias

        out = []
        for token, row, own in zip(x, logits[0], best, strict=True):
            weights = jax.nn.softmax(row)[own]
            weights = weights / weights.sum() if normalise else weights
            gate, up, down = NAMES
            mixed = 0
            for weight, expert in zip(weights, own, strict=True):
                hidden = inner(product(token, gate, expert), product(token, up, expert))
                mixed += weight * product(hidden, down, expert)
            out.append(mixed)
        return jnp.stack(out)

    expected = gradients(loop, x, logits, matrices)
    tolerance = 1e-4 if inner is clipped_swish else 1e-5
    assert_close(gradients(grouped, x, logits, matrices), expected, tolerance)


# --- products of sorted rows ----------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(3, 0, 40, 1), (0, 0, 0, 0), (0, 0, 0, 50)], ids=str)
def test_blocks_give_the_products_and_gradients_of_ragged_dot(sizes):
    rng, inside = np.random.default_rng(0), sum(sizes)
    rows, matrices = rng.normal(size=(50, 6)).astype("f"), rng.normal(size=(4, 6, 5)).astype("f")

    def products(function):
        return lambda rows, matrices: function(rows, matrices, jnp.array(sizes))[:inside]

    expected = gradients(products(jax.lax.ragged_dot), rows, matrices)
    for function in product_by_blocks, grouped_product:
        assert_close(gradients(products(function), rows, matrices), expected, 1e-5)


def test_the_gradient_by_matrices_is_a_kernel_on_tpu():
    arrays = jnp.zeros((256, 128)), jnp.zeros((4, 128, 128)), jnp.zeros(4, jnp.int32)

    def loss(rows, matrices, sizes):
        return jnp.sum(grouped_product(rows, matrices, sizes))

    traced = jax.jit(jax.grad(loss, argnums=1)).trace(*arrays)
    tpu, cpu = (
        traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("tpu", "cpu")
    )
    assert "tpu_custom_call" in tpu and "custom_call" not in cpu
    assert "ragged_dot" not in cpu


# --- routes --------------------------------------------------------------------------------------

ROWS, LENGTH = 2, 12
ROUTES_TOKENS = RNG.integers(2, 32, (ROWS, LENGTH)).astype(np.int32)
SEGMENTS = np.array([[1] * 6 + [2] * 4 + [0] * 2] * ROWS, np.int32)
PLACES = np.array([range(LENGTH)] * ROWS, np.int32)


@functools.cache  # not while tests are collected
def make_params():
    return unbox(jax.jit(init_params, static_argnums=0)(MOE, jax.random.key(0)))


def run(params=None, config=MOE, routes=None, record=()):
    rows = Rows(ROUTES_TOKENS, SEGMENTS, PLACES, routes)
    return jax.jit(lambda p: hidden_states(p, config, rows, record))(params or make_params())


@functools.cache
def recorded():
    hidden, records = run(record=[ROUTES])
    return hidden, records.routes


def others(routes):
    """Experts that no token's router chose first: the next ones by number."""
    return (routes + 1) % MOE.experts


def test_routes_that_are_known_are_taken_and_those_of_the_same_parameters_change_no_bit():
    hidden, routes = recorded()
    assert routes.shape == (ROWS, LENGTH, MOE.layers, 3) and routes.dtype == jnp.int8
    assert route_dtype(128) == jnp.int8 and route_dtype(129) == jnp.int16
    half = jnp.where(jnp.arange(LENGTH)[:, None, None] < 3, others(routes), -1)
    replay = jax.jit(lambda p, known: run(p, routes=known, record=[ROUTES, REPLACED]))
    for known in routes, jnp.full_like(routes, -1):
        again, records = replay(make_params(), known)
        np.testing.assert_array_equal(again, hidden)
        assert not records.replaced.any()
    found, records = replay(make_params(), half)
    np.testing.assert_array_equal(records.routes[:, :3], others(routes)[:, :3])
    assert (records.replaced[:, :, :3] > 0).any() and not records.replaced[:, :, 3:].any()
    assert np.abs(found - hidden)[:, :3].max() > 1e-3


@pytest.mark.parametrize("normalise", [True, False])
def test_weights_of_replayed_experts_are_their_probabilities_with_a_gradient(normalise):
    given = RNG.normal(size=(1, 4, 8)).astype("f")
    logits = jnp.asarray(given)
    replayed = np.array([[[0, 5], [7, 1], [-1, -1], [3, 3]]], np.int8)

    def by_loop(logits):
        rows = []
        for token in range(4):
            chances = jax.nn.softmax(logits[0, token])
            own = np.argsort(-given[0, token])[:2]
            taken = chances[own if token == 2 else replayed[0, token]]
            rows.append(taken / taken.sum() if normalise else taken)
        return jnp.stack(rows)

    (value, slope), (expected, wanted) = (
        gradients(lambda x, f=f: 3 * f(x), logits)
        for f in (lambda x: route(x, 2, normalise, jnp.asarray(replayed))[0][0], by_loop)
    )
    assert np.abs(wanted[0]).max() > 1e-3
    np.testing.assert_allclose(value, expected, 1e-6)
    np.testing.assert_allclose(slope[0], wanted[0], atol=1e-6)


def test_balance_is_the_load_balance_loss_and_one_where_the_load_is_even():
    layer = jax.tree.map(lambda x: x[0], jax.device_get(make_params()["layers"]["moe"]))
    x = RNG.normal(size=(ROWS, LENGTH, MOE.embed)).astype("f")

    @jax.jit
    def balance(layer):
        arguments = {"params": layer}, jnp.asarray(x), Context(PLACES, SEGMENTS)
        return Experts(MOE).apply(*arguments, mutable=[BALANCE])[1][BALANCE]["layer"]

    real, logits = np.asarray(SEGMENTS) > 0, x @ layer["router"]["kernel"]
    taken = np.argsort(-logits[real], axis=-1)[:, :3]
    share = [np.mean((taken == expert).any(axis=1)) / 3 for expert in range(8)]
    expected = 8 * np.sum(share * np.asarray(jax.nn.softmax(logits)[real].mean(axis=0)))
    np.testing.assert_allclose(balance(layer)[real].mean(), expected, rtol=1e-5)
    even = layer | {"router": {"kernel": np.zeros((MOE.embed, 8), "f")}}
    np.testing.assert_allclose(balance(even), 1, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"expert": 4, "tensor": 2, "fsdp": 1}, {"fsdp": 4, "tensor": 2}])
def test_replay_is_the_same_on_a_mesh(sizes):
    hidden, routes = recorded()
    collections = [ROUTES, REPLACED, BALANCE]
    expected, wanted = run(routes=others(routes), record=collections)
    assert np.abs(expected - hidden).max() > 1e-3
    with sharding.activate(make_mesh(**({"data": 1} | sizes))):
        arrays = ROUTES_TOKENS, SEGMENTS, PLACES, others(routes)
        rows = Rows(*(jnp.tile(x, (4,) + (1,) * (x.ndim - 1)) for x in arrays))
        found, records = jax.jit(lambda p: hidden_states(p, MOE, rows, collections))(make_params())
    np.testing.assert_allclose(found[:ROWS], expected, atol=1e-5)
    np.testing.assert_array_equal(records.routes[:ROWS], wanted.routes)
    np.testing.assert_allclose(records.replaced[:, :ROWS], wanted.replaced, atol=1e-5)
    np.testing.assert_allclose(records.balance[:, :ROWS], wanted.balance, atol=1e-5)

"""Routes: recorded in one pass of experts, replayed in another; the routers' load-balance loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MOE

from dapo_jax.model.decoder import init_params
from dapo_jax.model.experts import BALANCE, REPLACED, ROUTES, Experts, route, route_dtype
from dapo_jax.model.logprobs import Rows, hidden_states
from dapo_jax.model.training_attention import Context
from dapo_jax.runtime import sharding
from dapo_jax.runtime.sharding import make_mesh, unbox

MOE = dataclasses.replace(MOE, experts_per_token=3, normalise_experts=True)
ROWS, LENGTH = 2, 12
TOKENS = jax.random.randint(jax.random.key(1), (ROWS, LENGTH), 2, 32)
SEGMENTS = jnp.repeat(jnp.array([[1] * 6 + [2] * 4 + [0] * 2]), ROWS, axis=0)
PLACES = jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH))
PARAMS = unbox(init_params(MOE, jax.random.key(0)))


def run(params=PARAMS, config=MOE, routes=None, record=()):
    rows = Rows(TOKENS, SEGMENTS, PLACES, routes)
    return jax.jit(lambda p: hidden_states(p, config, rows, record))(params)


def record(*arguments):
    hidden, records = run(*arguments, record=[ROUTES])
    return hidden, records.routes


def others(routes):
    """Experts that no token's router chose first: the next ones by number."""
    return (routes + 1) % MOE.experts


def test_replayed_routes_of_the_same_parameters_change_no_bit():
    hidden, routes = record()
    assert routes.shape == (ROWS, LENGTH, MOE.layers, 3) and routes.dtype == jnp.int8
    assert route_dtype(128) == jnp.int8 and route_dtype(129) == jnp.int16
    again, records = run(routes=routes, record=[REPLACED])
    np.testing.assert_array_equal(again, hidden)
    assert not records.replaced.any()


def test_frozen_layers_record_and_replay_theirs():
    apart = jax.tree.map(lambda x: x[:1], PARAMS["layers"])
    rest = jax.tree.map(lambda x: x[1:], PARAMS["layers"])
    params = PARAMS | {"frozen_layers": apart, "layers": rest}
    frozen = dataclasses.replace(MOE, frozen_layers=1)
    _, whole = record()
    np.testing.assert_array_equal(record(params, frozen)[1], whole)
    taken, _ = run(params, frozen, routes=others(whole))
    np.testing.assert_allclose(taken, run(routes=others(whole))[0], atol=1e-5)


def test_unknown_routes_are_the_routers_own_and_known_ones_are_taken():
    hidden, routes = record()
    np.testing.assert_array_equal(run(routes=jnp.full_like(routes, -1))[0], hidden)
    half = jnp.where(jnp.arange(LENGTH)[:, None, None] < 3, others(routes), -1)
    found, records = run(routes=half, record=[ROUTES, REPLACED])
    np.testing.assert_array_equal(records.routes[:, :3], others(routes)[:, :3])
    assert (records.replaced[:, :, :3] > 0).any() and not records.replaced[:, :, 3:].any()
    assert np.abs(found - hidden)[:, :3].max() > 1e-3


@pytest.mark.parametrize("normalise", [True, False])
def test_weights_of_replayed_experts_are_their_probabilities_with_a_gradient(normalise):
    logits = jax.random.normal(jax.random.key(2), (1, 4, 8))
    given = np.asarray(logits)  # no tracer
    replayed = jnp.array([[[0, 5], [7, 1], [-1, -1], [3, 3]]], jnp.int8)

    def by_loop(logits):
        rows = []
        for token in range(4):
            chances = jax.nn.softmax(logits[0, token])
            own = np.argsort(-np.asarray(given[0, token]))[:2]
            taken = chances[own if token == 2 else np.asarray(replayed[0, token])]
            rows.append(taken / taken.sum() if normalise else taken)
        return jnp.stack(rows)

    np.testing.assert_allclose(route(logits, 2, normalise, replayed)[0][0], by_loop(logits), 1e-6)
    found, expected = (
        jax.grad(lambda x, f=f: jnp.sum(jnp.sin(3 * f(x))))(logits)
        for f in (lambda x: route(x, 2, normalise, replayed)[0][0], by_loop)
    )
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_balance_is_the_load_balance_loss_and_one_where_the_load_is_even():
    layer = jax.tree.map(lambda x: x[0], PARAMS["layers"]["moe"])
    x = jax.random.normal(jax.random.key(3), (ROWS, LENGTH, MOE.embed))

    def balance(layer):
        arguments = {"params": layer}, x, Context(PLACES, SEGMENTS)
        return Experts(MOE).apply(*arguments, mutable=[BALANCE])[1][BALANCE]["layer"]

    real, logits = np.asarray(SEGMENTS) > 0, x @ layer["router"]["kernel"]
    taken = np.argsort(-logits[real], axis=-1)[:, :3]
    share = [np.mean((taken == expert).any(axis=1)) / 3 for expert in range(8)]
    expected = 8 * np.sum(share * np.asarray(jax.nn.softmax(logits)[real].mean(axis=0)))
    np.testing.assert_allclose(balance(layer)[real].mean(), expected, rtol=1e-5)
    even = layer | {"router": {"kernel": jnp.zeros((MOE.embed, 8))}}
    np.testing.assert_allclose(balance(even), 1, atol=1e-6)


@pytest.mark.parametrize("sizes", [{"expert": 4, "tensor": 2, "fsdp": 1}, {"fsdp": 4, "tensor": 2}])
def test_replay_is_the_same_on_a_mesh(sizes):
    hidden, routes = record()
    recorded = [ROUTES, REPLACED, BALANCE]
    expected, wanted = run(routes=others(routes), record=recorded)
    assert np.abs(expected - hidden).max() > 1e-3
    with sharding.activate(make_mesh(**({"data": 1} | sizes))):
        arrays = TOKENS, SEGMENTS, PLACES, others(routes)
        rows = Rows(*(jnp.tile(x, (4,) + (1,) * (x.ndim - 1)) for x in arrays))
        found, records = jax.jit(lambda p: hidden_states(p, MOE, rows, recorded))(PARAMS)
    np.testing.assert_allclose(found[:ROWS], expected, atol=1e-5)
    np.testing.assert_array_equal(records.routes[:ROWS], wanted.routes)
    np.testing.assert_allclose(records.replaced[:, :ROWS], wanted.replaced, atol=1e-5)
    np.testing.assert_allclose(records.balance[:, :ROWS], wanted.balance, atol=1e-5)

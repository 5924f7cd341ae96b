"""Divergence of two output heads, sharded and in chunks, against whole softmaxes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from teachers import divergence_by_definition

from dapo_jax.model.divergence import Divergence, head_divergence
from dapo_jax.runtime import sharding
from dapo_jax.runtime.sharding import make_mesh

ROWS, LENGTH, VOCAB = 8, 5, 48
KEYS = jax.random.split(jax.random.key(7), 5)
HIDDEN = jax.random.normal(KEYS[0], (ROWS, LENGTH, 16))
HEAD = jax.random.normal(KEYS[1], (16, VOCAB)) / 2
TEACHER = jax.random.normal(KEYS[2], (ROWS, LENGTH, 24))
TEACHER_HEAD = jax.random.normal(KEYS[3], (24, VOCAB)) / 4
WEIGHTS = jax.random.normal(KEYS[4], (ROWS, LENGTH)).at[2, 1:3].set(0.0)
KINDS = [Divergence(beta, k, 0.7) for beta in (0.0, 0.5, 1.0) for k in (0, 5)]


def by_definition(hidden, head, kind):
    return divergence_by_definition(TEACHER @ TEACHER_HEAD, hidden @ head, kind)


def with_gradients(function):
    def loss(hidden, head):
        values = function(hidden, head)
        return jnp.sum(values * WEIGHTS), values

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


def chunked(kind, chunk_tokens, teacher=TEACHER, teacher_head=TEACHER_HEAD):
    def function(hidden, head):
        return head_divergence(hidden, head, teacher, teacher_head, kind, chunk_tokens)

    return with_gradients(function)


def assert_same(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_values_and_gradients_equal_the_papers_equation(kind):
    actual = chunked(kind, 7)(HIDDEN, HEAD)  # chunks cross rows, the last one is padded
    assert_same(actual, with_gradients(lambda *a: by_definition(*a, kind))(HIDDEN, HEAD))
    (back, _), values = actual
    assert (np.asarray(values) > 0).all() and not back[2, 1:3].any()


@pytest.mark.parametrize("sizes", [(2, 2, 1, 2), (1, 1, 1, 8)], ids=str)
@pytest.mark.parametrize("top_k", [0, 9])
def test_sharding_does_not_change_the_results(sizes, top_k):
    data, fsdp, decode_tensor, tensor = sizes
    mesh, kind = make_mesh(data, fsdp, tensor, decode_tensor=decode_tensor), Divergence(0.3, top_k)
    heads = (sharding.sharding(mesh, "embed", "vocab"),) * 2
    head, teacher_head = jax.device_put((HEAD, TEACHER_HEAD), heads)
    hidden, teacher = sharding.put(mesh, (HIDDEN, TEACHER), "batch")
    with sharding.activate(mesh):
        actual = chunked(kind, 3, teacher, teacher_head)(hidden, head)
    assert_same(actual, with_gradients(lambda *a: by_definition(*a, kind))(HIDDEN, HEAD))

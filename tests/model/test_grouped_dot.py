"""Products of groups of rows: on a CPU, by blocks, those of `jax.lax.ragged_dot`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.model.grouped_dot import dot_of_blocks, grouped_dot

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    "sizes", [[3, 0, 40, 1], [0, 0, 0, 0], [0, 0, 0, 50], [50, 0, 0, 0], [13, 12, 13, 12]], ids=str
)
def test_blocks_give_the_products_and_gradients_of_ragged_dot(sizes):
    rows, matrices = RNG.normal(size=(50, 6)).astype("f"), RNG.normal(size=(4, 6, 5)).astype("f")
    sizes, inside = jnp.array(sizes), sum(sizes)

    def gradients(function):
        def loss(rows, matrices):
            found = function(rows, matrices, sizes)[:inside]
            return jnp.sum(jnp.sin(found)), found

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(rows, matrices)

    expected = gradients(jax.lax.ragged_dot)
    for function in dot_of_blocks, grouped_dot:
        found = gradients(function)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


def test_a_cpu_has_blocks_and_a_tpu_the_operation():
    arrays = jnp.zeros((64, 8)), jnp.zeros((4, 8, 8)), jnp.zeros(4, jnp.int32)
    traced = jax.jit(grouped_dot).trace(*arrays)
    assert "ragged_dot" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "ragged_dot" in traced.lower(lowering_platforms=("tpu",)).as_text()

"""Products of sorted rows with their groups' matrices, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.model.grouped_products import grouped_product, product_by_blocks


@pytest.mark.parametrize(
    "sizes", [(3, 0, 40, 1), (0, 0, 0, 0), (0, 0, 0, 50), (50, 0, 0, 0), (13, 12, 13, 12)], ids=str
)
def test_blocks_give_the_products_and_gradients_of_ragged_dot(sizes):
    rng, inside = np.random.default_rng(0), sum(sizes)
    rows, matrices = rng.normal(size=(50, 6)).astype("f"), rng.normal(size=(4, 6, 5)).astype("f")

    def gradients(function):
        def loss(rows, matrices):
            products = function(rows, matrices, jnp.array(sizes))[:inside]
            return jnp.sum(jnp.sin(products)), products

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(rows, matrices)

    expected = gradients(jax.lax.ragged_dot)
    for function in product_by_blocks, grouped_product:
        actual = gradients(function)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), actual, expected)


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

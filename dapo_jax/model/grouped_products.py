"""Products of sorted rows with the matrices of their groups, and gradients that cost as much.

On TPU `jax.lax.ragged_dot` is a kernel, but its gradient by the matrices is not (jax 0.10.2, libtpu
0.0.42): by the compiled text it is a product of all rows with each group's mask, so as many times
the operations as there are groups. There that gradient is megablox' kernel.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

TILE = 512  # of rows, and of both sides of a matrix
SMALLEST_TILE = 128  # of rows; it has to divide them


@jax.custom_vjp
def grouped_product(
    rows: Float[Array, "n I"], matrices: Float[Array, "x I O"], sizes: Int[Array, "x"]
) -> Float[Array, "n O"]:
    """Product of each row with its group's matrix; rows past the groups may hold anything."""
    return jax.lax.ragged_dot(rows, matrices, sizes)


def _forward(rows: Array, matrices: Array, sizes: Array) -> tuple[Array, tuple]:
    return grouped_product(rows, matrices, sizes), (rows, matrices, sizes)


def _backward(kept: tuple, gradient: Array) -> tuple[Array, Array, None]:
    rows, matrices, sizes = kept
    by_rows = jax.lax.ragged_dot(gradient, matrices.swapaxes(1, 2), sizes)
    grouped = jnp.arange(len(rows)) < sizes.sum()
    by_rows = jnp.where(grouped[:, None], by_rows, 0)  # rows are added up again: nothing of others
    mesh = jax.sharding.get_abstract_mesh()
    on_tpu = not mesh.empty and mesh.abstract_device.platform == "tpu"
    if on_tpu and len(rows) % SMALLEST_TILE == 0:
        return by_rows, matrices_gradient(rows, gradient, sizes), None
    _, transpose = jax.vjp(lambda m: jax.lax.ragged_dot(rows, m, sizes), matrices)
    return by_rows, transpose(gradient)[0], None


grouped_product.defvjp(_forward, _backward)


def matrices_gradient(
    rows: Float[Array, "n I"],
    gradient: Float[Array, "n O"],
    sizes: Int[Array, "x"],
    *,
    interpret: bool = False,
) -> Float[Array, "x I O"]:
    """Sum over each group of the outer products of its rows, by the TPU's kernel.

    Args:
        interpret: runs the kernel as plain operations, slowly, where there is no TPU (for tests).
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiles = (math.gcd(len(rows), TILE), min(rows.shape[1], TILE), min(gradient.shape[1], TILE))
    return tgmm(rows.swapaxes(0, 1), gradient, sizes, rows.dtype, tiles, interpret=interpret)

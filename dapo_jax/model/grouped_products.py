"""Products of sorted rows with the matrices of their groups, and gradients of the same cost.

The cost of `jax.lax.ragged_dot` is proportional to the rows only in its TPU kernel, and not in its
gradient by the matrices: the compiled text (jax 0.10.2, libtpu 0.0.42) multiplies all rows with
each group's mask. So megablox' kernel computes that gradient. A CPU, which would multiply all rows
with all matrices, cuts groups into blocks.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

TILE = 512  # of the kernel's rows, and of both sides of a matrix
MIN_TILE = 128  # of rows; it has to divide them
MIN_ROWS, MAX_ROWS = 8, 64  # of a block


@jax.custom_vjp
def grouped_product(
    rows: Float[Array, "n I"], matrices: Float[Array, "x I O"], sizes: Int[Array, "x"]
) -> Float[Array, "n O"]:
    """Return the product of each row with its group's matrix; undefined past the groups."""
    return jax.lax.platform_dependent(
        rows, matrices, sizes, cpu=product_by_blocks, default=jax.lax.ragged_dot
    )


def _forward(rows: Array, matrices: Array, sizes: Array) -> tuple[Array, tuple]:
    return grouped_product(rows, matrices, sizes), (rows, matrices, sizes)


def _backward(residuals: tuple, gradient: Array) -> tuple[Array, Array, None]:
    rows, matrices, sizes = residuals
    by_rows = grouped_product(gradient, matrices.swapaxes(1, 2), sizes)
    grouped = jnp.arange(len(rows)) < sizes.sum()
    by_rows = jnp.where(grouped[:, None], by_rows, 0)  # undefined rows are summed later

    def transposed(product):
        def by_matrices(rows, matrices, sizes, gradient):
            _, transpose = jax.vjp(lambda m: product(rows, m, sizes), matrices)
            return transpose(gradient)[0]

        return by_matrices

    kinds: dict[str, Callable]
    kinds = {"cpu": transposed(product_by_blocks), "default": transposed(jax.lax.ragged_dot)}
    if len(rows) % MIN_TILE == 0:
        kinds["tpu"] = lambda rows, _, sizes, gradient: matrices_gradient(rows, gradient, sizes)
    return by_rows, jax.lax.platform_dependent(rows, matrices, sizes, gradient, **kinds), None


grouped_product.defvjp(_forward, _backward)


def matrices_gradient(
    rows: Float[Array, "n I"],
    gradient: Float[Array, "n O"],
    sizes: Int[Array, "x"],
    *,
    interpret: bool = False,
) -> Float[Array, "x I O"]:
    """Return each group's sum of the outer products of its rows, by the TPU's kernel."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiles = (math.gcd(len(rows), TILE), min(rows.shape[1], TILE), min(gradient.shape[1], TILE))
    return tgmm(rows.swapaxes(0, 1), gradient, sizes, rows.dtype, tiles, interpret=interpret)


def product_by_blocks(
    rows: Float[Array, "n I"], matrices: Float[Array, "x I O"], sizes: Int[Array, "x"]
) -> Float[Array, "n O"]:
    """Return the product with groups padded to whole blocks of rows, each with one matrix."""
    count, groups = len(rows), len(sizes)
    block = min(MAX_ROWS, max(MIN_ROWS, 1 << (count // groups).bit_length()))
    places = (-(-count // block) + groups) * block
    padded = -(-sizes // block) * block
    ends, padded_ends = jnp.cumsum(sizes), jnp.cumsum(padded)
    row = jnp.arange(count)
    group = jnp.minimum(jnp.searchsorted(ends, row, side="right"), groups - 1)
    place = row + ((padded_ends - padded) - (ends - sizes))[group]
    place = jnp.where(row < ends[-1], place, places)  # a place past the last is dropped
    padded_rows = jnp.zeros((places, rows.shape[1]), rows.dtype)
    padded_rows = padded_rows.at[place].set(rows, mode="drop", unique_indices=True)
    first = jnp.arange(0, places, block)
    owner = jnp.minimum(jnp.searchsorted(padded_ends, first, side="right"), groups - 1)
    blocks = padded_rows.reshape(len(first), block, -1)
    product = jnp.einsum("bri,bio->bro", blocks, matrices[owner]).reshape(places, -1)
    return product.at[place].get(mode="fill", fill_value=0)

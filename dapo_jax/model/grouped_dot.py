"""Products of groups of rows with a matrix each."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MOST_ROWS, FEWEST_ROWS = 64, 8  # of a block


@jax.custom_vjp
def grouped_dot(
    rows: Float[Array, "n I"], matrices: Float[Array, "X I O"], sizes: Int[Array, "X"]
) -> Float[Array, "n O"]:
    """Product of the first sizes[0] rows with matrices[0], of the next with matrices[1], and so on.

    Rows past all groups give anything. XLA has the operation for TPU; on a CPU it would multiply
    every row with every matrix, so there groups are cut into blocks.
    """
    return jax.lax.platform_dependent(
        rows, matrices, sizes, cpu=dot_of_blocks, default=jax.lax.ragged_dot
    )


def _forward(*arrays: Array) -> tuple[Array, tuple[Array, ...]]:
    return grouped_dot(*arrays), arrays


def _backward(arrays: tuple[Array, ...], cotangent: Array) -> tuple[Array, Array, None]:
    """By a rule of its own: else a platform would keep what the other's gradient needs."""

    def pull(product: Callable) -> Callable:
        def back(rows, matrices, sizes, cotangent):
            return jax.vjp(lambda *pair: product(*pair, sizes), rows, matrices)[1](cotangent)

        return back

    kinds = {"cpu": pull(dot_of_blocks), "default": pull(jax.lax.ragged_dot)}
    return *jax.lax.platform_dependent(*arrays, cotangent, **kinds), None


def dot_of_blocks(
    rows: Float[Array, "n I"], matrices: Float[Array, "X I O"], sizes: Int[Array, "X"]
) -> Float[Array, "n O"]:
    """The same: each group is padded to whole blocks, and each block has one matrix."""
    count, groups = len(rows), len(sizes)
    block = min(MOST_ROWS, max(FEWEST_ROWS, 1 << (count // groups).bit_length()))
    places = (-(-count // block) + groups) * block
    padded = -(-sizes // block) * block
    ends, padded_ends = jnp.cumsum(sizes), jnp.cumsum(padded)
    row = jnp.arange(count)
    group = jnp.minimum(jnp.searchsorted(ends, row, side="right"), groups - 1)
    place = row + ((padded_ends - padded) - (ends - sizes))[group]
    place = jnp.where(row < ends[-1], place, places)  # a place past the last is dropped
    spread = jnp.zeros((places, rows.shape[1]), rows.dtype)
    spread = spread.at[place].set(rows, mode="drop", unique_indices=True)
    first = jnp.arange(0, places, block)
    owner = jnp.minimum(jnp.searchsorted(padded_ends, first, side="right"), groups - 1)
    blocks = spread.reshape(len(first), block, -1)
    product = jnp.einsum("bri,bio->bro", blocks, matrices[owner]).reshape(places, -1)
    return product.at[place].get(mode="fill", fill_value=0)


grouped_dot.defvjp(_forward, _backward)

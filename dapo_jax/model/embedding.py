"""Lookup of token embeddings in a table that is cut by vocabulary and by width.

Each device looks its own tokens up in its part of the vocabulary. Left to itself, the compiler
gathers rows of other devices for the table's gradient.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dapo_jax.runtime import sharding


def look_up(table: Float[Array, "V D"], tokens: Int[Array, "R T"], dtype: Any) -> Array:
    """Embeddings [R T D] of packed rows; the table is gathered over its width in `dtype`."""
    if sharding.active_mesh() is None:
        return table.astype(dtype)[tokens]
    vocab, embed = sharding.active_axes("vocab"), sharding.active_axes("embed")

    def on_device(table: Float[Array, "v d"], tokens: Int[Array, "r t"]) -> Float[Array, "r t D"]:
        table = table.astype(dtype)
        if embed:
            table = jax.lax.all_gather(table, embed, axis=1, tiled=True)
        if not vocab:
            return table[tokens]
        places = tokens - jax.lax.axis_index(vocab) * len(table)
        here = (places >= 0) & (places < len(table))
        found = jnp.where(here[..., None], table[jnp.where(here, places, 0)], 0)
        return jax.lax.psum(found, vocab)

    rows = sharding.active_spec("batch", "sequence")
    return jax.shard_map(
        on_device,
        in_specs=(sharding.active_spec("vocab", "embed"), rows),
        out_specs=sharding.active_spec("batch", "sequence", None),
    )(table, tokens)

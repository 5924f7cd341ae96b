"""Symmetric int8: arrays with float32 scales, and products of such arrays."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

LARGEST_INT8 = 127


def to_int8(x: Array, axis: int | tuple[int, ...] = -1) -> tuple[Array, Array]:
    """Return the rounded array and its float32 scales over `axis`."""
    scale = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axis) / LARGEST_INT8
    whole = jnp.round(x / jnp.expand_dims(jnp.where(scale > 0, scale, 1), axis))
    return whole.astype(jnp.int8), scale


def quantise(x: Array, dtype: Any, axis: int | tuple[int, ...] = -1) -> tuple[Array, Array | None]:
    """Return the array in another dtype, with scales if that is int8 (else None)."""
    return to_int8(x, axis) if dtype == jnp.int8 else (x.astype(dtype), None)


def to_int8_by(x: Array, scale: Array) -> Array:
    """Round an array by known scales over its last axis, clipping values beyond them."""
    whole = jnp.round(x.astype(jnp.float32) / scale[..., None])
    return jnp.clip(whole, -LARGEST_INT8, LARGEST_INT8).astype(jnp.int8)


def int8_product(
    rows: Float[Array, "N I"],
    matrix: Int8[Array, "I O"],
    scale: Float[Array, "O"],
    dtype: Any,
    pieces: int = 1,  # of the summed dimension, each converted to `dtype` on its device
) -> Float[Array, "N O"]:
    """Return the product of rows, each rounded to int8 by its own scale, and an int8 matrix.

    Sums are 32-bit integers, exact up to 133,000 terms; a row's result depends on no other row.
    """
    whole, row_scale = to_int8(rows)
    sums = jnp.einsum(
        "npi,pio->pno",
        whole.reshape(len(rows), pieces, -1),
        matrix.reshape(pieces, -1, matrix.shape[1]),
        preferred_element_type=jnp.int32,
    )
    products = (sums * row_scale[:, None] * scale).astype(dtype)
    # Not jnp.sum, which would send bfloat16 as float32.
    return jax.lax.reduce(products, jnp.zeros((), dtype), jax.lax.add, (0,))

"""Attention over packed rows, while training; `decode_attention.py` has what samples.

`Block` calls `attend(queries, keys, values, context, cache)`; these are the things that may stand
there. All take [batch, time, heads, head_dim] and return that with the cache, here None.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int


@struct.dataclass
class Context:
    """What every layer shares: token positions, and which keys each query may see."""

    positions: Int[Array, "B T"]
    mask: Bool[Array, "B Q T"]


def packed_mask(segment_ids: Int[Array, "R T"]) -> Bool[Array, "R T T"]:
    """Causal inside a segment; padding (segment 0) sees padding only, so no row is empty."""
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    causal = jnp.tril(jnp.ones(segment_ids.shape[-1:] * 2, bool))
    return same & causal[None]


def choose(requested: str, platform: str, dtype: Any) -> str:
    """Resolves 'auto': cuDNN where it exists (GPU, bfloat16), plain attention elsewhere."""
    if requested != "auto":
        return requested
    return "cudnn" if platform == "gpu" and dtype == jnp.bfloat16 else "plain"


def grouped_attention(
    queries: Float[Array, "B Q H E"],
    keys: Float[Array, "B K E T"],
    values: Float[Array, "B K T E"],
    mask: Bool[Array, "B Q T"],
) -> Float[Array, "B Q H E"]:
    """Grouped-query attention with a float32 softmax; query heads of a group are neighbours."""
    batch, count, heads, width = queries.shape
    groups = keys.shape[1]
    grouped = queries.reshape(batch, count, groups, heads // groups, width) * width**-0.5
    grouped = grouped.transpose(0, 2, 3, 1, 4)
    scores = jnp.einsum("bkgqe,bket->bkgqt", grouped, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    mixed = jnp.einsum("bkgqt,bkte->bkgqe", weights, values)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, count, heads, width)


def attend_plain(queries, keys, values, context: Context, cache):
    """Training attention that every platform can run."""
    mixed = grouped_attention(
        queries, keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 1, 3), context.mask
    )
    return mixed, cache


def attend_cudnn(queries, keys, values, context: Context, cache):
    """Training attention by cuDNN's fused kernel (bfloat16 on GPU)."""
    mixed = jax.nn.dot_product_attention(
        queries, keys, values, mask=context.mask[:, None], implementation="cudnn"
    )
    return mixed, cache


TRAINING_ATTENTION = {"plain": attend_plain, "cudnn": attend_cudnn}

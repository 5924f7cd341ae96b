"""Attention over packed rows, while training; `decode_attention.py` has what samples.

`Block` calls `attend(queries, keys, values, context, cache)`; these are the things that may stand
there. All take [batch, time, heads, head_dim] and return that with the cache, here None. Who needs
a dense mask builds it: what layers share is one number per token.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.model.blockwise_attention import blocked_attention
from dapo_jax.model.splash_attention import LANES, splash_attention
from dapo_jax.runtime import sharding

# Up to here all scores at once are faster than blocks of them, and small (measured on CPU).
SHORT_ROW_TOKENS = 1024


@struct.dataclass
class Context:
    """What every layer shares: places in the text, and which text it is (decoding has one)."""

    positions: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"] | None = None


def packed_mask(segment_ids: Int[Array, "R T"]) -> Bool[Array, "R T T"]:
    """Causal inside a segment; padding (segment 0) sees padding only, so no row is empty."""
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    causal = jnp.tril(jnp.ones(segment_ids.shape[-1:] * 2, bool))
    return same & causal[None]


def choose(requested: str, platform: str, row_tokens: int) -> str:
    """The key of TRAINING_ATTENTION that is meant, 'auto' by platform and length of a row.

    Long rows are never plain: its scores are [T, T] for every head.
    """
    if requested != "auto":
        return requested
    if platform == "tpu" and (row_tokens % LANES == 0 or row_tokens > SHORT_ROW_TOKENS):
        return "splash"
    return "blocked" if row_tokens > SHORT_ROW_TOKENS else "plain"


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
    """Training attention for short rows."""
    assert context.segment_ids is not None  # of packed rows
    mask = packed_mask(context.segment_ids)
    mixed = grouped_attention(
        queries, keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 1, 3), mask
    )
    return mixed, cache


def _on_each_device(attention: Callable, queries, keys, values, segment_ids):
    """Every device attends with its own rows and heads; nothing is exchanged."""
    if sharding.active_mesh() is None:
        return attention(queries, keys, values, segment_ids)
    of_queries = sharding.spec("batch", None, "heads", None)
    of_keys, rows = sharding.spec("batch", None, "kv_heads", None), sharding.spec("batch", None)
    return jax.shard_map(
        attention,
        in_specs=(of_queries, of_keys, of_keys, rows),
        out_specs=of_queries,
        check_vma=False,
    )(queries, keys, values, segment_ids)


def attend_blocked(queries, keys, values, context: Context, cache):
    """Training attention without a [T, T] array, for every platform."""
    return _on_each_device(blocked_attention, queries, keys, values, context.segment_ids), cache


def attend_splash(queries, keys, values, context: Context, cache):
    """Training attention by the TPU's kernel; plain where no mesh says what it runs on."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return attend_plain(queries, keys, values, context, cache)
    interpret = mesh.abstract_device.platform != "tpu"
    attention = functools.partial(splash_attention, interpret=interpret)
    return _on_each_device(attention, queries, keys, values, context.segment_ids), cache


TRAINING_ATTENTION = {
    "plain": attend_plain,
    "blocked": attend_blocked,
    "splash": attend_splash,
}

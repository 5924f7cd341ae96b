"""Training attention by JAX's splash kernel for TPU, over packed rows and one device's heads."""

import functools
import sys
from typing import Any, cast

import jax
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Float, Int

from dapo_jax.model.blockwise_attention import ATTENTION_RESIDUALS

LANES = 128  # of a TPU's vector unit: rows and blocks are multiples of it
MAX_BLOCK = 1024  # tokens; with blocks of 2048 the scores overflow a core's memory
MAX_COMPUTE_BLOCK = 512


@functools.cache
def _constant(seen: bool, shape: tuple[int, int]) -> np.ndarray:
    return np.full(shape, seen)


class _Lazy(splash.Mask):
    """Causal mask that computes only blocks neither all true nor all false.

    To compute each block takes minutes for rows of 131,072 tokens.
    """

    window = sys.maxsize

    def __getitem__(self, idx: Any) -> np.ndarray:
        queries, keys = idx
        # Of the pairs of query and key the smallest distance and the largest.
        least, most = queries.start - keys.stop + 1, queries.stop - keys.start - 1
        if (least >= 0 and most < self.window) or most < 0 or least >= self.window:
            shape = queries.stop - queries.start, keys.stop - keys.start
            return _constant(0 <= least < self.window, shape)
        return super().__getitem__(idx)


class _Causal(_Lazy, splash.CausalMask):
    """Mask in which a token sees all before it."""


class _Sliding(_Lazy, splash.LocalMask):
    """Mask in which a token sees `window` tokens, itself counted."""

    def __init__(self, shape: tuple[int, int], window: int):
        super().__init__(shape, (window - 1, 0), offset=0)
        self.window = window


def _largest_divisor(length: int, limit: int) -> int:
    """Largest multiple of LANES up to `limit` that divides `length`."""
    lanes = length // LANES
    return LANES * max(n for n in range(1, limit // LANES + 1) if lanes % n == 0)


def _block_sizes(row_tokens: int) -> splash.BlockSizes:
    """Block sizes for rows of that many tokens, with an unfused backward pass.

    The fused one holds five times as much memory.
    """
    block = _largest_divisor(row_tokens, MAX_BLOCK)
    compute = _largest_divisor(block, MAX_COMPUTE_BLOCK)
    return splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=compute,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=compute,
        block_q_dq=block,
        block_kv_dq=block,
    )


def splash_attention(
    queries: Float[Array, "B t H E"],
    keys: Float[Array, "B T K E"],
    values: Float[Array, "B T K E"],
    segment_ids: Int[Array, "B T"],
    sinks: Float[Array, "H"] | None = None,
    *,
    interpret: bool,
    window: int | None = None,
    first: Int[Array, ""] | None = None,
) -> Float[Array, "B t H E"]:
    """Causal attention inside segments; t, a multiple of 128, divides T.

    Args:
        sinks: logits that heads add to each softmax's sum; float32.
        interpret: runs the kernel as plain operations, slowly, where there is no TPU (for tests).
        window: tokens that a token sees, itself counted; None: all before it.
        first: place of the first query, a multiple of t; None: the queries are all of the row's.
    """
    _, mine, heads, width = queries.shape
    length = keys.shape[1]
    mask = _Causal((length, length))
    if window is not None and window < length:
        mask = _Sliding((length, length), window)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        head_shards=1,
        q_seq_shards=length // mine,
        block_sizes=_block_sizes(mine),
        residual_checkpoint_name=ATTENTION_RESIDUALS,
        interpret=interpret,
    )
    heads_first = (array.swapaxes(1, 2) for array in (queries * width**-0.5, keys, values))
    segments = splash.SegmentIds(q=segment_ids, kv=segment_ids)
    if first is not None:

        def own(leaf: Array) -> Array:  # the place of a query block is axis 1 of [head, q, kv]
            axis = min(leaf.ndim - 1, 1)
            size = leaf.shape[axis] * mine // length
            return jax.lax.dynamic_slice_in_dim(leaf, first // mine * size, size, axis)

        kernel = jax.tree.map(own, kernel)
        ids = jax.lax.dynamic_slice_in_dim(segment_ids, first, mine, 1)
        segments = splash.SegmentIds(q=ids, kv=segment_ids)
    # Without `save_residuals` a kernel returns one array, which its type does not say.
    each_row = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))
    return cast(Array, each_row(*heads_first, segments, sinks)).swapaxes(1, 2)

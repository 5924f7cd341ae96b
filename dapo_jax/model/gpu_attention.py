"""Attention on GPUs by JAX's Triton kernels, over packed rows and over slot caches.

The kernels were not run on a GPU so far: tests use Pallas' interpreter, and `dapo-jax plan`
compiles them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dapo_jax.model.blockwise_attention import RowIds

PLATFORMS = ("gpu", "cuda")  # names of local devices and of compilation targets
ROW_MULTIPLE = 128  # tokens; both kernels' blocks divide it
SPLITS, BLOCKS = (16, 8, 4, 2, 1), (128, 64, 32, 16)  # of a cache's tokens, best first


def has_kernels(platform: str, head_dim: int, dtype: Any = None) -> bool:
    """Return True if the kernels support heads of that width and a cache of that dtype."""
    fits = head_dim >= 16 and head_dim & (head_dim - 1) == 0
    return platform in PLATFORMS and fits and (dtype is None or jnp.dtype(dtype) != jnp.int8)


def rows_attention(queries, keys, values, ids: RowIds, sinks: None, *, interpret: bool) -> Array:
    """Return causal attention inside segments without a [T, T] array; ROW_MULTIPLE divides T."""
    assert sinks is None and ids.prompts is None, "the kernel has no sinks and no shared prompts"
    from jax.experimental.pallas.ops.gpu.attention import mha

    groups = queries.shape[2] // keys.shape[2]
    keys, values = (jnp.repeat(array, groups, axis=2) for array in (keys, values))
    scale = queries.shape[-1] ** -0.5
    return mha(queries, keys, values, ids.segments, scale, True, interpret=interpret)


def split_of(length: int) -> tuple[int, int] | None:
    """Return the kernel's (pieces, block) for a cache of `length`; None if it can't read it."""
    pairs = ((pieces, block) for block in BLOCKS for pieces in SPLITS)
    return next((pair for pair in pairs if length % (pair[0] * pair[1]) == 0), None)


def slots_attention(
    queries: Float[Array, "S H E"], keys, values, lengths: Int[Array, "S"], *, interpret: bool
) -> Float[Array, "S H E"]:
    """Return the attention of one query per slot over the first `lengths` tokens of its cache.

    Blocks beyond them are not read.
    """
    from jax.experimental.pallas.ops.gpu.decode_attention import decode_attn_unbatched

    slots, heads, width = queries.shape
    pieces, block = split_of(keys.shape[2]) or (1, keys.shape[2])
    kernel = functools.partial(
        decode_attn_unbatched,
        start_idx=None,
        sm_scale=width**-0.5,
        block_h=16,
        block_k=block,
        k_splits=pieces,
        num_warps=None,
        num_stages=2,
        grid=None,
        interpret=interpret,
        debug=False,
        return_residuals=False,
        normalize_output=True,
    )
    each_head = jax.vmap(
        lambda q, k, v, length: kernel(q, k, v, kv_seq_len=length), (0, 0, 0, None)
    )
    split = queries.reshape(slots, keys.shape[1], -1, width)
    mixed: Any = jax.vmap(each_head)(split, keys, values, lengths)
    return mixed.reshape(slots, heads, width)

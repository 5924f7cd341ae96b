"""Training attention by JAX's splash kernel for TPU, over packed rows and one device's heads."""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.model.blockwise_attention import ATTENTION_RESIDUALS, RowIds

LANES = 128  # of a TPU's vector unit; rows and blocks are multiples of it
MAX_BLOCK = 1024  # tokens; with blocks of 2048 the scores overflow a core's memory
MAX_COMPUTE_BLOCK = 512
CODE_BITS = 16  # for the number of a response in its row
MASKED = -(2**15)  # score of an invisible key; exact in bfloat16


@functools.cache
def _constant(seen: bool, shape: tuple[int, int]) -> np.ndarray:
    return np.full(shape, seen)


class _Lazy(splash.Mask):
    """Causal mask that computes only blocks with both true and false entries.

    Computing every block takes minutes for rows of 131,072 tokens.
    """

    window = sys.maxsize

    def __getitem__(self, idx: Any) -> np.ndarray:
        queries, keys = idx
        # Smallest and largest distance from a query to a key.
        least, most = queries.start - keys.stop + 1, queries.stop - keys.start - 1
        if (least >= 0 and most < self.window) or most < 0 or least >= self.window:
            shape = queries.stop - queries.start, keys.stop - keys.start
            return _constant(0 <= least < self.window, shape)
        return super().__getitem__(idx)


class _Causal(_Lazy, splash.CausalMask):
    """Mask of full causal attention."""


class _Sliding(_Lazy, splash.LocalMask):
    """Mask with `window` visible tokens, including the query's own."""

    def __init__(self, shape: tuple[int, int], window: int):
        super().__init__(shape, (window - 1, 0), offset=0)
        self.window = window


def _largest_divisor(length: int, limit: int) -> int:
    """Return the largest multiple of LANES up to `limit` that divides `length`."""
    lanes = length // LANES
    return LANES * max(n for n in range(1, limit // LANES + 1) if lanes % n == 0)


def _block_sizes(row_tokens: int) -> splash.BlockSizes:
    """Return block sizes with an unfused backward pass; a fused one needs 5 times the memory."""
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


def _may_see(ids: RowIds, block: int) -> Bool[Array, "N N"]:
    """Return True for pairs of blocks of a row that may share a segment or a prompt.

    A block of padding is paired with itself only, so that its output is finite.
    """
    padding = jnp.iinfo(ids.segments.dtype).max // 2  # above all ids, since it is at a row's end

    def limits(numbers: Int[Array, "T"]) -> tuple[Array, Array]:
        blocks = jnp.where(numbers > 0, numbers, padding).reshape(-1, block)
        low, high = blocks.min(axis=1), blocks.max(axis=1)
        alone = jnp.where(low == padding, jnp.arange(len(low), dtype=low.dtype), 0)
        return low + alone, high + alone

    low, high = limits(ids.segments)
    sees = (low[:, None] <= high) & (low <= high[:, None])
    if ids.prompts is not None:
        first, last = limits(ids.prompts)
        sees |= (first[:, None] <= high) & (low <= last[:, None])
    return sees


def shared_cost(head_dim: int) -> float:
    """Return the work of attention with shared prompts, relative to separate ones.

    Half of the products, those of queries and keys, have the width with codes.
    """
    blocks = -(-head_dim // LANES)
    return (1 + -(-(head_dim + 2 * CODE_BITS) // LANES) / blocks) / 2


def _with_codes(
    queries: Float[Array, "B t H E"], keys: Float[Array, "B T K E"], ids: RowIds, first: Any
) -> tuple[Array, Array]:
    """Append features that make the score of another response to the same prompt very low.

    The kernel compares one number per token, that of the prompt, so it can't tell the responses of
    a prompt apart. Two features for each bit of a response's number add MASKED to the score for a
    bit that differs. All products of visible pairs are 0, so that their scores stay exact.
    """
    assert ids.prompts is not None
    number = ids.segments - ids.prompts  # 0: the prompt, or a response alone
    bits = number[..., None] >> jnp.arange(CODE_BITS) & 1
    pairs = jnp.concatenate([bits, 1 - bits], axis=-1)
    opposite = jnp.concatenate([1 - bits, bits], axis=-1) * (MASKED * (number > 0)[..., None])
    if first is not None:
        pairs = jax.lax.dynamic_slice_in_dim(pairs, first, queries.shape[1], 1)

    def append(vectors: Array, codes: Array) -> Array:
        codes = jnp.pad(
            codes, ((0, 0), (0, 0), (0, -(vectors.shape[-1] + codes.shape[-1]) % LANES))
        )
        shape = (*vectors.shape[:3], codes.shape[-1])
        each_head = jnp.broadcast_to(codes[:, :, None], shape).astype(vectors.dtype)
        return jnp.concatenate([vectors, each_head], axis=-1)

    return append(queries, pairs), append(keys, opposite)


def _skip(info: Any, shares: Bool[Array, "n N"], inner: int) -> Any:
    """Return the mask of a kernel that also skips pairs of blocks without a shared segment."""
    indices, kinds = jnp.asarray(info.data_next), jnp.asarray(info.block_mask)
    computed = jnp.take_along_axis(shares[None], indices.astype(jnp.int32), axis=inner)
    kinds = jnp.where(computed, kinds, 0)  # 0: nothing is seen
    # A skipped step fetches the block of the next computed step; the last ones that of the first.
    in_turn = kinds.swapaxes(inner, -1)
    computed = in_turn.reshape(-1) > 0
    steps = jnp.where(computed, jnp.arange(computed.size), computed.size)
    following = jax.lax.cummin(steps, reverse=True)
    following = jnp.where(following == computed.size, following[0], following)
    fetched = jnp.take(indices.swapaxes(inner, -1), following).reshape(in_turn.shape)
    return info._replace(data_next=fetched.swapaxes(inner, -1), block_mask=kinds)


def splash_attention(
    queries: Float[Array, "B t H E"],
    keys: Float[Array, "B T K E"],
    values: Float[Array, "B T K E"],
    ids: RowIds,
    sinks: Float[Array, "H"] | None = None,  # logits that heads add to each softmax's sum; float32
    *,
    interpret: bool,  # run the kernel as plain operations, slowly, without a TPU (for tests)
    window: int | None = None,  # tokens that a token sees, itself included; None: all before it
    first: Int[Array, ""] | None = None,
) -> Float[Array, "B t H E"]:
    """Return causal attention inside segments; t, a multiple of 128, divides T."""
    _, local, heads, width = queries.shape
    length = keys.shape[1]
    mask = _Causal((length, length))
    if window is not None and window < length:
        mask = _Sliding((length, length), window)
    sizes = _block_sizes(local)
    block = sizes.block_q
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        head_shards=1,
        q_seq_shards=length // local,
        block_sizes=sizes,
        residual_checkpoint_name=ATTENTION_RESIDUALS,
        interpret=interpret,
    )
    start = jnp.zeros((), jnp.int32) if first is None else first
    if first is not None:

        def cut_queries(leaf: Array) -> Array:  # query blocks are axis 1 of [head, q, kv]
            axis = min(leaf.ndim - 1, 1)
            size = leaf.shape[axis] * local // length
            return jax.lax.dynamic_slice_in_dim(leaf, first // local * size, size, axis)

        kernel = jax.tree.map(cut_queries, kernel)

    def attend_row(queries: Array, keys: Array, values: Array, ids: RowIds) -> Array:
        shares = _may_see(ids, block)
        shares = jax.lax.dynamic_slice_in_dim(shares, start // block, local // block, 0)
        masks = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
        masks = [_skip(mask, shares, inner) for mask, inner in zip(masks, (2, 2, 1), strict=True)]
        together = ids.segments if ids.prompts is None else ids.prompts
        shard = jax.lax.dynamic_slice_in_dim(together, start, local, 0)
        segments = splash.SegmentIds(shard, together)
        kind: Any = type(kernel)  # not exported by the module
        return kind(*masks, **kernel.kwargs)(queries, keys, values, segments, sinks)

    queries *= width**-0.5
    if ids.prompts is not None:
        queries, keys = _with_codes(queries, keys, ids, first)
    heads_first = (array.swapaxes(1, 2) for array in (queries, keys, values))
    queries, keys, values = heads_first
    return jax.vmap(attend_row)(queries, keys, values, ids).swapaxes(1, 2)

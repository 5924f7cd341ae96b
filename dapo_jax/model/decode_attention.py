"""Decoding attention over prompts during prefill, over slot caches and over pages.

`Block` calls `attend(queries, keys, values, context, cache, options)` with arrays [batch, time,
heads, head_dim]. It writes the new keys and values into the cache, reads it, and returns output and
cache. Without keys and values it only reads. The slot cache of a layer with a window is a ring of
the window's length. All writes are in place: compiled programs hold no second cache (tests check
them).
"""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from dapo_jax.model.caches import KVCache, PageCache, PromptCache
from dapo_jax.model.quantisation import quantise, to_int8_by
from dapo_jax.model.training_attention import CAUSAL, AttentionOptions, Window, grouped_attention
from dapo_jax.runtime import sharding

LANES = 128  # of a TPU's vector registers; its paged kernel needs head widths of a multiple
# Pages and slots that the paged kernel processes at a time. The kernel's own table depends on the
# TPU of this process, and plans are made without one.
PAGES_AT_A_TIME, SLOTS_AT_A_TIME, KERNEL_BYTES = 8, 8, 64 * 1024 * 1024


@struct.dataclass
class PromptContext:
    """Positions of a prompt's tokens, and their first index in the cache."""

    positions: Int[Array, "B T"]
    start: Int[Array, ""]
    ends: Int[Array, "B"] | None = None  # tokens that reach the state of delta-net layers


@struct.dataclass
class SlotContext:
    """Positions of each slot's tokens, which are adjacent, active slots, and page tables."""

    positions: Int[Array, "S Q"]
    active: Bool[Array, "S"]
    tables: Int[Array, "S W"] | None  # None without pages


def _visible(
    length: int, last: Int[Array, "B ... 1"], window: Window | None
) -> Bool[Array, "B ... T"]:
    """Return the mask of cached tokens that queries at positions `last` see."""
    position = jnp.arange(length)
    mask = position <= last
    return mask if window is None else mask & (position > last - window.tokens)


def in_ring(length: int, last: Int[Array, "B 1"]) -> Int[Array, "B T"]:
    """Return the positions of tokens in a ring of `length` up to `last`; below 0: empty."""
    return last - (last - jnp.arange(length)) % length


def attend_prompt(
    queries, keys, values, context: PromptContext, cache, options: AttentionOptions = CAUSAL
) -> tuple[Array, PromptCache]:
    """Attend over whole prompts (without a cache) or over their next chunk."""
    if cache is None:
        cache = PromptCache(keys, values)
    elif keys is not None:
        start = (0, context.start, 0, 0)
        cache = PromptCache(
            jax.lax.dynamic_update_slice(cache.keys, keys, start),
            jax.lax.dynamic_update_slice(cache.values, values, start),
        )
    mask = _visible(cache.keys.shape[1], context.positions[:, :, None], options.window)
    return grouped_attention(queries, cache, mask, options.sinks), cache


def at_each(array: Array, at: Array, new: Array, axis: int = 0) -> Array:
    """Set the entries `at[i]` along an axis of `array[i]` to `new[i]`, for every slot i.

    Indices past the end are dropped. It maps over slots, since a mesh would gather `new` for every
    replica if slots were indexed.
    """

    def set_row(row: Array, at: Array, new: Array) -> Array:
        return row.at[(slice(None),) * axis + (at,)].set(new, mode="drop")

    return jax.vmap(set_row)(array, at, new)


# --- slots -----------------------------------------------------------------------------------


def attend_slots(
    queries, keys, values, context: SlotContext, cache, options: AttentionOptions = CAUSAL
) -> tuple[Array, KVCache]:
    """Attend with the next tokens of each slot over slot caches of one length.

    With a window the cache is a ring: a token overwrites one that is no longer visible.
    """
    window, length = options.window, cache.values.shape[2]
    at, last = context.positions, context.positions[:, :, None]
    if window is not None and length >= window.tokens:
        at %= length
    if keys is not None:
        for i in range(keys.shape[1]):
            cache = _write_slots(cache, keys[:, i], values[:, i], at[:, i])
    if window is None:
        mask = _visible(length, last, None)
    else:
        cached = in_ring(length, context.positions[:, -1:])[:, None]
        mask = (cached >= 0) & (cached > last - window.tokens) & (cached <= last)
    return grouped_attention(queries, cache, mask, options.sinks), cache


def _write_slots(cache: KVCache, keys: Array, values: Array, at: Int[Array, "S"]) -> KVCache:
    """Write a token's keys and values [S, K, E] to position `at` of each slot."""
    (keys, key_scale), (values, value_scale) = (
        quantise(new, cache.values.dtype) for new in (keys, values)
    )

    def scaled(scales, new):
        return None if scales is None else at_each(scales, at, new, 1)

    if cache.time_last:
        written_keys = at_each(cache.keys, at, keys, 2)
        written_values = at_each(cache.values, at, values, 1)
    else:
        # XLA:TPU gives a scatter another layout than the products, and copies the cache twice;
        # slices of single slots are written in place.
        write = jax.vmap(lambda old, new, at: jax.lax.dynamic_update_slice(old, new, (0, at, 0)))
        written_keys = write(cache.keys, keys[:, :, None], at)
        written_values = write(cache.values, values[:, :, None], at)
    return cache.replace(
        keys=written_keys,
        values=written_values,
        key_scale=scaled(cache.key_scale, key_scale),
        value_scale=scaled(cache.value_scale, value_scale),
    )


# --- pages -----------------------------------------------------------------------------------


def interleave(keys: Array, values: Array, axis: int) -> Array:
    """Return keys and values with alternating heads, as in pages: a shard has whole pairs."""
    pairs = jnp.stack([keys, values], axis=axis + 1)
    return pairs.reshape(*keys.shape[:axis], -1, *keys.shape[axis + 1 :])


def rounded(cache: PageCache, pairs: Array) -> tuple[Array, Array | None]:
    """Return keys and values in the dtype of the pages, and their scales if pages store them."""
    if cache.calibrated:
        return to_int8_by(pairs, cast(Array, cache.scales)), None
    return quantise(pairs, cache.pages.dtype)


def has_kernel(platform: str, head_dim: int, page_tokens: int, kv_heads: int, dtype: Any) -> bool:
    """Return True if the TPU's ragged kernel can read pages of that shape and dtype."""
    rows = 2 * kv_heads * jnp.dtype(dtype).itemsize / 4
    tiled = rows in (1, 2, 4) or rows % 8 == 0
    return platform == "tpu" and head_dim % LANES == 0 and page_tokens % 8 == 0 and tiled


def _gather_pages(queries, cache: PageCache, tables, lengths, window, sinks) -> Array:
    """Attend with the last tokens of `lengths`, on any platform, over a gathered copy of pages."""
    slots, width = tables.shape
    _, page_tokens, double, head_dim = cache.pages.shape
    pages = cache.pages[tables].reshape(slots, width * page_tokens, double, head_dim)
    gathered = PromptCache(pages[:, :, 0::2], pages[:, :, 1::2])
    if cache.scales is not None:
        scales = cache.scales[None, :, None]
        if not cache.calibrated:
            scales = cache.scales[tables].reshape(slots, -1, double).transpose(0, 2, 1)
        gathered = gathered.replace(key_scale=scales[:, 0::2], value_scale=scales[:, 1::2])
    count = queries.shape[1]
    last = (lengths[:, None] - count + jnp.arange(count))[:, :, None]
    return grouped_attention(queries, gathered, _visible(pages.shape[1], last, window), sinks)


def read_pages_by_kernel(queries, cache: PageCache, tables, lengths, window, sinks=None) -> Array:
    """Attend by the TPU's ragged kernel; it reads only the pages of a slot.

    The kernel takes one constant scale for all heads, so the scales per head are applied outside.
    """
    assert sinks is None, "layouts choose this kernel only for decoders without sinks"
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    slots, width = tables.shape
    count, unit, value_scales = queries.shape[1], None, None
    queries = queries.reshape(slots * count, *queries.shape[2:])
    if cache.scales is not None:
        unit = 1.0  # the kernel reads int8 as integers
        groups = queries.shape[1] // (len(cache.scales) // 2)
        key_scales = jnp.repeat(cache.scales[0::2], groups)[:, None]
        value_scales = jnp.repeat(cache.scales[1::2], groups)[:, None]
        queries = (queries * key_scales).astype(queries.dtype)
    mixed = ragged_paged_attention(
        queries,
        cache.pages,
        lengths,
        tables,
        count * jnp.arange(slots + 1, dtype=jnp.int32),  # first query of each slot
        jnp.array([slots], jnp.int32),
        sm_scale=queries.shape[-1] ** -0.5,
        sliding_window=None if window is None else window.tokens,
        num_kv_pages_per_block=min(PAGES_AT_A_TIME, width),
        num_queries_per_block=min(SLOTS_AT_A_TIME, slots),
        vmem_limit_bytes=KERNEL_BYTES,
        k_scale=unit,
        v_scale=unit,
    )
    if value_scales is not None:
        mixed = (mixed * value_scales).astype(mixed.dtype)
    return mixed.reshape(slots, count, *mixed.shape[1:])


def _write_pages(cache: PageCache, keys, values, context: SlotContext) -> PageCache:
    """Write the tokens of each slot of a replica to the replica's own pages."""
    _, page_tokens, *heads = cache.pages.shape
    tables, positions = cast(Array, context.tables), context.positions
    page = jnp.take_along_axis(tables, positions // page_tokens, axis=1)
    # A slot without pages has zeros in its table: it writes to page 0, which no slot owns.
    at = page * page_tokens + positions % page_tokens
    new, scales = rounded(cache, interleave(keys, values, 2))
    # Flat, so that XLA scatters whole rows in the layout of the pages.
    flat = cache.pages.reshape(-1, *heads).at[at].set(new)
    cache = cache.replace(pages=flat.reshape(cache.pages.shape))
    if scales is None:
        return cache
    before = cast(Array, cache.scales)
    flat = before.reshape(-1, heads[0]).at[at].set(scales)
    return cache.replace(scales=flat.reshape(before.shape))


@dataclasses.dataclass(frozen=True)
class PagedAttention:
    """Decoding attention over pages on a mesh; each replica numbers its own pages from 0.

    Layers with a window shorter than a slot have slot caches.
    """

    mesh: jax.sharding.Mesh
    kernel: bool

    def __call__(
        self, queries, keys, values, context: SlotContext, cache, options: AttentionOptions = CAUSAL
    ):
        if isinstance(cache, KVCache):
            return attend_slots(queries, keys, values, context, cache, options)
        read = read_pages_by_kernel if self.kernel else _gather_pages

        def attend(queries, keys, values, cache, context, sinks):
            if keys is not None:
                cache = _write_pages(cache, keys, values, context)
            lengths = jnp.where(context.active, context.positions[:, -1] + 1, queries.shape[1])
            return read(queries, cache, context.tables, lengths, options.window, sinks), cache

        spec = functools.partial(sharding.spec, column=sharding.DECODING)
        heads, pages = spec("batch", None, "kv_heads"), page_specs(cache)
        return jax.shard_map(
            attend,
            mesh=self.mesh,
            in_specs=(heads, heads, heads, pages, spec("batch"), spec("kv_heads")),
            out_specs=(heads, pages),
            check_vma=False,
        )(queries, keys, values, cache, context, options.sinks)


def page_specs(cache: PageCache) -> PageCache:
    """Return the partition specs of one layer's pages: over replicas, and heads over tensor."""
    spec: Any = functools.partial(sharding.spec, column=sharding.DECODING)
    pages = spec("batch", None, "kv_heads")
    scales = spec("kv_heads") if cache.calibrated else pages
    return PageCache(pages, None if cache.scales is None else scales)

"""Decoding attention: over a prompt being prefilled, over caches of slots, over pages.

`Block` calls `attend(queries, keys, values, context, cache, window, sinks)` with [batch, time,
heads, head_dim]. It writes the new keys and values into the cache, reads it, and returns output and
cache. The slot cache of a layer with a window is a ring that holds no more than it sees.
Every write is in place: compiled programs hold no second cache (tests read them).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from dapo_jax.model import gpu_attention
from dapo_jax.model.blockwise_attention import Sinks
from dapo_jax.model.caches import KVCache, PageCache, PromptCache
from dapo_jax.model.quantisation import quantise, to_int8_by
from dapo_jax.model.training_attention import Window, grouped_attention
from dapo_jax.runtime import sharding
from dapo_jax.structs import present

LANES = 128  # of a TPU's vector registers; its paged kernel takes heads of a multiple of them
# Pages and slots that the paged kernel works on at a time. The kernel's own table of them asks
# which TPU this process has, and plans are made without one.
PAGES_AT_A_TIME, SLOTS_AT_A_TIME, KERNEL_BYTES = 8, 8, 64 * 1024 * 1024


@struct.dataclass
class PromptContext:
    """Positions of a prompt's tokens, which are written into the cache from `start` on."""

    positions: Int[Array, "B T"]
    start: Int[Array, ""]


@struct.dataclass
class SlotContext:
    """Position of each slot's token, which slots are active, and the slots' page tables."""

    positions: Int[Array, "S 1"]
    active: Bool[Array, "S"]
    tables: Int[Array, "S W"] | None  # None without pages


def _seen(
    length: int, last: Int[Array, "B ... 1"], window: Window | None
) -> Bool[Array, "B ... T"]:
    """Mask of the cached tokens that queries at positions `last` see."""
    place = jnp.arange(length)
    mask = place <= last
    return mask if window is None else mask & (place > last - window.tokens)


def in_ring(length: int, last: Int[Array, "B 1"]) -> Int[Array, "B T"]:
    """Positions of the tokens in a ring of `length` whose newest is `last`; below 0: none yet."""
    return last - (last - jnp.arange(length)) % length


def attend_prompt(
    queries,
    keys,
    values,
    context: PromptContext,
    cache: PromptCache | None,
    window: Window | None = None,
    sinks: Sinks = None,
) -> tuple[Array, PromptCache]:
    """Prefill attention over whole prompts (without a cache) or over their next chunk."""
    if cache is None:
        cache = PromptCache(keys, values)
    else:
        at = (0, context.start, 0, 0)
        cache = PromptCache(
            jax.lax.dynamic_update_slice(cache.keys, keys, at),
            jax.lax.dynamic_update_slice(cache.values, values, at),
        )
    mask = _seen(cache.keys.shape[1], context.positions[:, :, None], window)
    axes = ("btke", "btke")
    return grouped_attention(queries, cache.keys, cache.values, mask, axes, sinks=sinks), cache


def at_each(array: Array, where: tuple, new: Array) -> Array:
    """Sets `array[i][where[i]] = new[i]` for every slot i; an index past the end is dropped.

    Written slot by slot: with an index of slots, a mesh would gather `new` for every replica.

    Args:
        where: index into one slot's array; arrays in it have one entry a slot.
    """
    per_slot = [axis for axis, index in enumerate(where) if not isinstance(index, slice)]

    def set_row(row, new, *values):
        index = list(where)
        for axis, value in zip(per_slot, values, strict=True):
            index[axis] = value
        return row.at[tuple(index)].set(new, mode="drop")

    return jax.vmap(set_row)(array, new, *(where[axis] for axis in per_slot))


# --- slots -----------------------------------------------------------------------------------


def attend_slots(
    queries,
    keys,
    values,
    context: SlotContext,
    cache: KVCache,
    window: Window | None = None,
    sinks: Sinks = None,
    read: Callable[..., Array] | None = None,
) -> tuple[Array, KVCache]:
    """Decoding attention of one token per slot, over slot caches of one length.

    With a window the cache is a ring: a token takes the place of one that nothing sees any longer.

    Args:
        read: a kernel's attention over (queries [S, H, E], cache, lengths [S]), without a window.
    """
    length, at = cache.values.shape[2], context.positions[:, 0]
    if window is not None and length >= window.tokens:
        at %= length
    (keys, key_scale), (values, value_scale) = (
        quantise(new[:, 0], cache.values.dtype) for new in (keys, values)
    )

    def scaled(scales, new):
        return None if scales is None else at_each(scales, (slice(None), at), new)

    if cache.time_last:
        axes = ("bket", "bkte")
        cache = cache.replace(
            keys=at_each(cache.keys, (slice(None), slice(None), at), keys),
            values=at_each(cache.values, (slice(None), at), values),
        )
    else:
        # XLA:TPU gives a scatter here another layout than the products have, and copies the cache
        # twice; slices of single slots are written in place.
        write = jax.vmap(lambda old, new, at: jax.lax.dynamic_update_slice(old, new, (0, at, 0)))
        axes = ("bkte", "bkte")
        cache = cache.replace(
            keys=write(cache.keys, keys[:, :, None], at),
            values=write(cache.values, values[:, :, None], at),
        )
    cache = cache.replace(
        key_scale=scaled(cache.key_scale, key_scale),
        value_scale=scaled(cache.value_scale, value_scale),
    )
    if window is None:
        if read is not None:
            return read(queries[:, 0], cache, jnp.where(context.active, at + 1, 1))[:, None], cache
        mask = _seen(length, context.positions, None)
    else:
        places = in_ring(length, context.positions)
        mask = (places >= 0) & (places > context.positions - window.tokens)
    mask = mask[:, None]
    scales = (cache.key_scale, cache.value_scale)
    arrays = queries, cache.keys, cache.values, mask
    return grouped_attention(*arrays, axes, scales, sinks), cache


@dataclasses.dataclass(frozen=True)
class SlotAttention:
    """Decoding attention over slots on a mesh; the GPU's kernel reads caches as far as filled."""

    mesh: jax.sharding.Mesh
    kernel: bool

    def __call__(self, *arrays) -> tuple[Array, KVCache]:
        return attend_slots(*arrays, read=self._read if self.kernel else None)

    def _read(self, queries: Array, cache: KVCache, lengths: Array) -> Array:
        if gpu_attention.split_of(cache.values.shape[2]) is None:  # the shortest caches
            mask = _seen(cache.values.shape[2], lengths[:, None] - 1, None)[:, None]
            arrays = queries[:, None], cache.keys, cache.values, mask
            return grouped_attention(*arrays, ("bkte", "bkte"))[:, 0]
        heads, slot = (
            sharding.spec("batch", *names, column=sharding.DECODING) for names in (["kv_heads"], [])
        )
        interpret = self.mesh.devices.flat[0].platform not in gpu_attention.PLATFORMS
        return jax.shard_map(
            functools.partial(gpu_attention.slots_attention, interpret=interpret),
            mesh=self.mesh,
            in_specs=(heads, heads, heads, slot),
            out_specs=heads,
            check_vma=False,
        )(queries, cache.keys, cache.values, lengths)


# --- pages -----------------------------------------------------------------------------------


def interleave(keys: Array, values: Array, axis: int) -> Array:
    """Keys and values with their heads in turn, as pages hold them: a shard has whole pairs."""
    pairs = jnp.stack([keys, values], axis=axis + 1)
    return pairs.reshape(*keys.shape[:axis], -1, *keys.shape[axis + 1 :])


def rounded(cache: PageCache, pairs: Array) -> tuple[Array, Array | None]:
    """Keys and values as the pages hold them, and scales of their own where they have some."""
    if cache.calibrated:
        return to_int8_by(pairs, present(cache.scales, "scales")), None
    return quantise(pairs, cache.pages.dtype)


def has_kernel(platform: str, head_dim: int, page_tokens: int, kv_heads: int, dtype: Any) -> bool:
    """True where the TPU's ragged kernel can read pages of that shape and dtype.

    Args:
        kv_heads: of one device. Keys and values of a token have to fill 1, 2, 4 or a multiple of 8
            rows of 32-bit words (`get_min_heads_per_blk` of the kernel's module refuses others).
    """
    rows = 2 * kv_heads * jnp.dtype(dtype).itemsize / 4
    tiled = rows in (1, 2, 4) or rows % 8 == 0
    return platform == "tpu" and head_dim % LANES == 0 and page_tokens % 8 == 0 and tiled


def _gather_pages(queries, cache: PageCache, tables, lengths, window, sinks=None) -> Array:
    """Attention over a gathered copy of the pages, for any platform and shape."""
    slots, width = tables.shape
    _, page_tokens, double, head_dim = cache.pages.shape
    pages = cache.pages[tables].reshape(slots, width * page_tokens, double, head_dim)
    scales = (None, None)
    if cache.scales is not None:
        each = cache.scales[None, :, None]
        if not cache.calibrated:
            each = cache.scales[tables].reshape(slots, -1, double).transpose(0, 2, 1)
        scales = (each[:, 0::2], each[:, 1::2])
    mask = _seen(pages.shape[1], lengths[:, None] - 1, window)[:, None]
    keys, values = pages[:, :, 0::2], pages[:, :, 1::2]
    axes = ("btke", "btke")
    return grouped_attention(queries[:, None], keys, values, mask, axes, scales, sinks)[:, 0]


def _read_by_kernel(queries, cache: PageCache, tables, lengths, window, sinks=None) -> Array:
    """Attention by the TPU's ragged kernel, which reads only the pages that a slot has.

    Its own scales are constants of the program, one for all heads: these stay outside of it.
    """
    assert sinks is None, "a layout takes this kernel for decoders without sinks only"
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    slots, width = tables.shape
    unit, of_values = None, None
    if cache.scales is not None:  # 1 has the kernel take int8 as whole numbers
        unit, groups = 1.0, queries.shape[1] // (len(cache.scales) // 2)
        of_keys, of_values = (jnp.repeat(cache.scales[i::2], groups)[:, None] for i in (0, 1))
        queries = (queries * of_keys).astype(queries.dtype)
    mixed = ragged_paged_attention(
        queries,
        cache.pages,
        lengths,
        tables,
        jnp.arange(slots + 1, dtype=jnp.int32),  # one query each
        jnp.array([slots], jnp.int32),
        sm_scale=queries.shape[-1] ** -0.5,
        sliding_window=None if window is None else window.tokens,
        num_kv_pages_per_block=min(PAGES_AT_A_TIME, width),
        num_queries_per_block=min(SLOTS_AT_A_TIME, slots),
        vmem_limit_bytes=KERNEL_BYTES,
        k_scale=unit,
        v_scale=unit,
    )
    return mixed if of_values is None else (mixed * of_values).astype(mixed.dtype)


def _attend_pages_of_replica(
    queries, keys, values, cache: PageCache, tables, positions, active, sinks, *, kernel, window
):
    """Decoding attention of one token per slot of a replica, over the replica's own pages."""
    _, page_tokens, *heads = cache.pages.shape
    page = jnp.take_along_axis(tables, positions[:, None] // page_tokens, axis=1)[:, 0]
    # A slot without pages has zeros in its table: it writes to page 0, which belongs to no slot.
    at = page * page_tokens + positions % page_tokens
    new, scales = rounded(cache, interleave(keys, values, 1))
    # Flat, so that XLA scatters whole rows in the layout that the pages have.
    flat = cache.pages.reshape(-1, *heads).at[at].set(new)
    cache = cache.replace(pages=flat.reshape(cache.pages.shape))
    if scales is not None:
        before = present(cache.scales, "scales")
        flat = before.reshape(-1, heads[0]).at[at].set(scales)
        cache = cache.replace(scales=flat.reshape(before.shape))
    lengths = jnp.where(active, positions + 1, 1)
    read = _read_by_kernel if kernel else _gather_pages
    return read(queries, cache, tables, lengths, window, sinks), cache


@dataclasses.dataclass(frozen=True)
class PagedAttention:
    """Decoding attention over pages on a mesh; each replica numbers its own pages from 0.

    Layers whose window is shorter than a slot have slot caches.
    """

    mesh: jax.sharding.Mesh
    kernel: bool

    def __call__(
        self,
        queries,
        keys,
        values,
        context: SlotContext,
        cache: PageCache | KVCache,
        window: Window | None = None,
        sinks: Sinks = None,
    ):
        if isinstance(cache, KVCache):
            return attend_slots(queries, keys, values, context, cache, window, sinks)
        spec = functools.partial(sharding.spec, column=sharding.DECODING)
        heads, slot = spec("batch", "kv_heads"), spec("batch")
        pages = page_specs(cache)
        mixed, cache = jax.shard_map(
            functools.partial(_attend_pages_of_replica, kernel=self.kernel, window=window),
            mesh=self.mesh,
            in_specs=(heads, heads, heads, pages, slot, slot, slot, spec("kv_heads")),
            out_specs=(heads, pages),
            check_vma=False,
        )(
            queries[:, 0],
            keys[:, 0],
            values[:, 0],
            cache,
            context.tables,
            context.positions[:, 0],
            context.active,
            sinks,
        )
        return mixed[:, None], cache


def page_specs(cache: PageCache) -> PageCache:
    """Partition specs of one layer's pages: split over replicas, heads over tensor."""
    place: Any = functools.partial(sharding.spec, column=sharding.DECODING)
    pages = place("batch", None, "kv_heads")
    scales = place("kv_heads") if cache.calibrated else pages
    return PageCache(pages, None if cache.scales is None else scales)

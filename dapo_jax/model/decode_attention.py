"""Attention while sampling: over a prompt being prefilled, over a slot's cache, over pages.

`Block` calls `attend(queries, keys, values, context, cache)` with [batch, time, heads, head_dim];
each of these writes the new keys and values into the cache, reads it, and returns both results.
Every write is in place: compiled programs hold no second cache (tests read them).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.model.caches import KVCache, PageCache, PromptCache
from dapo_jax.runtime import sharding

LARGEST_INT8 = 127
LANES = 128  # of a TPU's vector registers; its paged kernel takes heads of a multiple of them
# Of the kernel's pipeline: pages fetched, and slots worked on, at a time. Given, because its own
# table asks which TPU this process has.
PAGES_AT_A_TIME, SLOTS_AT_A_TIME, KERNEL_BYTES = 8, 8, 64 * 1024 * 1024


@struct.dataclass
class PromptContext:
    """Positions of the tokens at hand; they are written into the cache from `start` on."""

    positions: Int[Array, "B T"]
    start: Int[Array, ""]


@struct.dataclass
class SlotContext:
    """Where each slot's token stands, whether it counts, and which pages the slot has."""

    positions: Int[Array, "S 1"]
    active: Bool[Array, "S"]
    tables: Int[Array, "S W"] | None  # None without pages


def quantise(x: Array, dtype: Any, axis: int | tuple[int, ...] = -1) -> tuple[Array, Array | None]:
    """`x` in that dtype; int8 is symmetric, with a float32 scale for all that lies along `axis`."""
    if dtype != jnp.int8:
        return x.astype(dtype), None
    scale = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axis) / LARGEST_INT8
    whole = jnp.round(x / jnp.expand_dims(jnp.where(scale > 0, scale, 1), axis))
    return whole.astype(jnp.int8), scale


def grouped(
    queries: Float[Array, "B Q H E"],
    keys: Array,
    values: Array,
    mask: Bool[Array, "B Q T"],
    axes: tuple[str, str],
    scales: tuple[Float[Array, "B K T"] | None, Float[Array, "B K T"] | None] = (None, None),
) -> Float[Array, "B Q H E"]:
    """Grouped-query attention with a float32 softmax; query heads of a group are neighbours.

    Args:
        axes: the order of b, k, t, e in `keys` and in `values`.
        scales: of int8 keys and values; a product with them is scaled, not they themselves.
    """
    batch, count, heads, width = queries.shape
    groups, dtype = keys.shape[axes[0].index("k")], queries.dtype
    split = queries.reshape(batch, count, groups, heads // groups, width) * width**-0.5
    scores = jnp.einsum(
        f"bkgqe,{axes[0]}->bkgqt",
        split.transpose(0, 2, 3, 1, 4),
        keys.astype(dtype),
        preferred_element_type=jnp.float32,
    )
    if scales[0] is not None:
        scores *= scales[0][:, :, None, None]
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if scales[1] is not None:
        weights *= scales[1][:, :, None, None]
    mixed = jnp.einsum(f"bkgqt,{axes[1]}->bkgqe", weights.astype(dtype), values.astype(dtype))
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, count, heads, width)


def attend_prompt(
    queries, keys, values, context: PromptContext, cache: PromptCache | None
) -> tuple[Array, PromptCache]:
    """Prefill of whole prompts (no cache yet), or of their next chunk."""
    if cache is None:
        cache = PromptCache(keys, values)
    else:
        at = (0, context.start, 0, 0)
        cache = PromptCache(
            jax.lax.dynamic_update_slice(cache.keys, keys, at),
            jax.lax.dynamic_update_slice(cache.values, values, at),
        )
    mask = jnp.arange(cache.keys.shape[1]) <= context.positions[:, :, None]
    return grouped(queries, cache.keys, cache.values, mask, ("btke", "btke")), cache


def at_each(array: Array, where: tuple, new: Array) -> Array:
    """`array[i][where[i]] = new[i]` for every slot i; an index past the end is dropped.

    Slot by slot: indexed by slot as well, a mesh would gather what is new for every replica.

    Args:
        where: indices of an element without the slots; arrays in it have one entry a slot.
    """
    moving = [i for i, index in enumerate(where) if not isinstance(index, slice)]

    def one(row, new, *found):
        index = list(where)
        for place, value in zip(moving, found, strict=True):
            index[place] = value
        return row.at[tuple(index)].set(new, mode="drop")

    return jax.vmap(one)(array, new, *(where[i] for i in moving))


# --- slots -----------------------------------------------------------------------------------


def attend_slots(
    queries, keys, values, context: SlotContext, cache: KVCache
) -> tuple[Array, KVCache]:
    """One token per slot, over caches of one length."""
    at = context.positions[:, 0]
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
        # XLA:TPU gives a scatter here another layout than the products, and copies the cache
        # there and back; slices of single slots are written where they are.
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
    mask = (jnp.arange(cache.values.shape[2]) <= context.positions)[:, None]
    scales = (cache.key_scale, cache.value_scale)
    return grouped(queries, cache.keys, cache.values, mask, axes, scales), cache


# --- pages -----------------------------------------------------------------------------------


def interleave(keys: Array, values: Array, axis: int) -> Array:
    """Key and value heads in turn, as pages hold them: a shard of them has whole pairs."""
    pairs = jnp.stack([keys, values], axis=axis + 1)
    return pairs.reshape(*keys.shape[:axis], -1, *keys.shape[axis + 1 :])


def has_kernel(platform: str, head_dim: int, page_tokens: int) -> bool:
    """Whether the TPU's ragged kernel can read such pages."""
    return platform == "tpu" and head_dim % LANES == 0 and page_tokens % 8 == 0


def _gather_pages(queries, cache: PageCache, tables, lengths) -> Array:
    """What the kernel computes, from a copy of the pages: any platform, any shape."""
    slots, width = tables.shape
    _, page_tokens, double, head_dim = cache.pages.shape
    pages = cache.pages[tables].reshape(slots, width * page_tokens, double, head_dim)
    scales = (None, None)
    if cache.scales is not None:
        found = cache.scales[tables].reshape(slots, -1, double).transpose(0, 2, 1)
        scales = (found[:, 0::2], found[:, 1::2])
    mask = (jnp.arange(pages.shape[1]) < lengths[:, None])[:, None]
    keys, values = pages[:, :, 0::2], pages[:, :, 1::2]
    return grouped(queries[:, None], keys, values, mask, ("btke", "btke"), scales)[:, 0]


def _read_by_kernel(queries, cache: PageCache, tables, lengths) -> Array:
    """Reads the pages that a slot has, and no others."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    slots, width = tables.shape
    return ragged_paged_attention(
        queries,
        cache.pages,
        lengths,
        tables,
        jnp.arange(slots + 1, dtype=jnp.int32),  # one query each
        jnp.array([slots], jnp.int32),
        sm_scale=queries.shape[-1] ** -0.5,
        num_kv_pages_per_block=min(PAGES_AT_A_TIME, width),
        num_queries_per_block=min(SLOTS_AT_A_TIME, slots),
        vmem_limit_bytes=KERNEL_BYTES,
    )


def _attend_pages_of_replica(
    queries, keys, values, cache: PageCache, tables, positions, active, *, kernel: bool
):
    """One token per slot of a replica, whose pages are all here."""
    _, page_tokens, *heads = cache.pages.shape
    page = jnp.take_along_axis(tables, positions[:, None] // page_tokens, axis=1)[:, 0]
    # A slot whose pages were taken back has zeros in its table: it writes to page 0, nobody's.
    at = page * page_tokens + positions % page_tokens
    new, scales = quantise(interleave(keys, values, 1), cache.pages.dtype)
    # Flat, so that XLA scatters whole rows in the layout that the pages have.
    flat = cache.pages.reshape(-1, *heads).at[at].set(new)
    cache = cache.replace(pages=flat.reshape(cache.pages.shape))
    if scales is not None:
        assert cache.scales is not None  # of int8 pages
        flat = cache.scales.reshape(-1, heads[0]).at[at].set(scales)
        cache = cache.replace(scales=flat.reshape(cache.scales.shape))
    lengths = jnp.where(active, positions + 1, 1)
    read = _read_by_kernel if kernel else _gather_pages
    return read(queries, cache, tables, lengths), cache


@dataclasses.dataclass(frozen=True)
class PagedAttention:
    """Attention over pages on a mesh: every replica has pages of its own, numbered from 0."""

    mesh: jax.sharding.Mesh
    kernel: bool

    def __call__(self, queries, keys, values, context: SlotContext, cache: PageCache):
        place = functools.partial(sharding.spec, column=sharding.DECODING)
        heads, slot = place("batch", "kv_heads"), place("batch")
        pages = page_specs(cache)
        mixed, cache = jax.shard_map(
            functools.partial(_attend_pages_of_replica, kernel=self.kernel),
            mesh=self.mesh,
            in_specs=(heads, heads, heads, pages, slot, slot, slot),
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
        )
        return mixed[:, None], cache


def page_specs(cache: PageCache) -> PageCache:
    """How one layer's pages lie on the mesh: split over replicas, heads over tensor."""
    spec = sharding.spec("batch", None, "kv_heads", column=sharding.DECODING)
    return jax.tree.map(lambda _: spec, cache)

"""Device layout of a cache in pages, allocated by the page table as responses grow."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dapo_jax.config.experiment import Sampler
from dapo_jax.model.caches import KVCache, PageCache, PromptCache
from dapo_jax.model.decode_attention import (
    PagedAttention,
    has_kernel,
    interleave,
    page_specs,
    rounded,
)
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.rollout.page_table import Fills, PageGeometry, PageTable
from dapo_jax.rollout.slot_cache import SlotLayout, window_of
from dapo_jax.runtime import sharding
from dapo_jax.runtime.settings import require

Caches = tuple[PageCache | KVCache, ...]


class PagedLayout:
    """Caches of pages, with the pages of the replicas one after the other.

    A layer with a window shorter than a slot has a ring buffer in each slot, and no pages.

    Args and attributes are as for `SlotLayout`. `settings.pages` counts the pages of all replicas
    without their pages 0 (0: as many as full slots need). `settings.first_window_tokens` is the
    first window of attention if no kernel reads only the existing tokens.

    Attributes:
        calibrated: pages are int8 with a scale per head that must be known beforehand.
    """

    takes_many = True

    def __init__(
        self,
        config: DecoderConfig,
        mesh: jax.sharding.Mesh,
        settings: Sampler,
        cache_tokens: int,
        dtype: Any,
    ):
        self._config = config
        self._mesh = mesh
        self._dtype = dtype
        self._first = settings.first_window_tokens
        self._limit = cache_tokens
        self.calibrated = settings.cache_dtype == "int8_per_head"
        self.pages = PageTable(_page_geometry(mesh, settings, cache_tokens))
        self.attend = PagedAttention(mesh, _read_by_kernel(config, mesh, settings, dtype))
        self._rings = SlotLayout(config, mesh, settings, cache_tokens, dtype)
        self._paged = [reach is None or reach >= cache_tokens for reach in config.reaches]

    # Pages do not grow: a slot always has the maximum length.

    def window(self, needed: int) -> int:
        return self._limit

    def fits(self, caches: Caches, needed: int) -> bool:
        return True

    def longest(self, caches: Caches) -> int:
        return self._limit

    def grow(self, caches: Caches, window: int) -> Caches:
        return caches

    def columns(self, needed: int) -> int:
        """Return the page table columns that attention reads for `needed` tokens of a slot."""
        window = self._limit
        if not self.attend.kernel:
            window = window_of(needed, self._first, self._limit)
        return -(-window // self.pages.geometry.page_tokens)

    def empty(self, window: int) -> Caches:
        """Return zeroed pages, or ring buffers, of every layer."""
        c, pages = self._config, self.pages.geometry
        shape = (pages.replicas * pages.pages, pages.page_tokens, 2 * c.kv_heads, c.head_dim)
        cache = PageCache(jnp.zeros(shape, self._dtype), self._scales(shape[:-1]))
        return self._by_layer(cache, self._rings.empty(self._limit))

    def _scales(self, shape: tuple[int, ...]) -> jax.Array | None:
        """Return initial scales of pages of that shape, [N, P, K2]."""
        if self.calibrated:
            return jnp.ones(shape[-1:])
        return jnp.zeros(shape) if self._dtype == jnp.int8 else None

    def _by_layer(self, pages: Any, rings: tuple) -> tuple:
        pairs = zip(self._paged, rings, strict=True)
        return tuple(pages if paged else ring for paged, ring in pairs)

    def shardings(self) -> Caches:
        """Return the shardings of the caches: pages or slots over replicas, heads over tensor."""
        named = functools.partial(jax.sharding.NamedSharding, self._mesh)
        scales = jax.eval_shape(lambda: self._scales((1, 1, 2)))
        pages = jax.tree.map(named, page_specs(PageCache(jnp.zeros(()), scales)))
        return self._by_layer(pages, self._rings.shardings())

    def write_prompts(
        self, cache: Any, new: PromptCache, slots, rows, lengths, fills: Fills
    ) -> Any:
        """Write the blocks of prompts that `fills` names into pages, or whole ones into rings."""
        if isinstance(cache, KVCache):
            return self._rings.write_prompts(cache, new, slots, rows, lengths, None)
        place = functools.partial(sharding.spec, column=sharding.DECODING)
        pages = page_specs(cache)
        prompts = jax.tree.map(lambda _: place(None, None, "kv_heads"), new)
        blocks = jax.tree.map(lambda _: place("batch"), fills)
        return jax.shard_map(
            self._fill_replica,
            mesh=self._mesh,
            in_specs=(pages, prompts, blocks),
            out_specs=pages,
            check_vma=False,
        )(cache, new, fills)

    def _fill_replica(self, cache: PageCache, new: PromptCache, fills: Fills) -> PageCache:
        pairs = interleave(new.keys, new.values, 2)
        size = self.pages.geometry.page_tokens
        pairs = jnp.pad(pairs, ((0, 0), (0, -pairs.shape[1] % size), (0, 0), (0, 0)))
        blocks = pairs.reshape(len(pairs), -1, size, *pairs.shape[2:])[fills.row[0], fills.block[0]]

        pages, scales = rounded(cache, blocks)
        if cache.calibrated:
            return cache.replace(pages=_fill_in_turn(cache.pages, pages, fills.page[0]))
        filled = PageCache(pages, scales)
        return jax.tree.map(
            lambda old, new: old.at[fills.page[0]].set(new, mode="drop"), cache, filled
        )


def _page_geometry(mesh: jax.sharding.Mesh, settings: Sampler, cache_tokens: int) -> PageGeometry:
    """Return the sizes of the pages. Raise `ConfigError` if a longest response does not fit."""
    replicas = sharding.shards(mesh, "batch", sharding.DECODING)
    full = -(-cache_tokens // settings.page_tokens)
    pages = settings.pages or settings.slots * full
    require(
        pages % replicas == 0 and pages // replicas >= full,
        "sampler.pages",
        pages,
        f"0, or a multiple of data x fsdp = {replicas} with at least {full} pages, enough for the "
        "longest response, per replica",
    )
    return PageGeometry(
        replicas=replicas,
        pages=pages // replicas + 1,
        page_tokens=settings.page_tokens,
        slots=settings.slots,
        slot_tokens=cache_tokens,
    )


def _fill_in_turn(pages: jax.Array, blocks: jax.Array, places: jax.Array) -> jax.Array:
    """Write a block to each place; an index past the last page goes to the unused page 0.

    XLA:TPU aborts if it compiles scatters of int8 blocks in more than a few layers (libtpu
    0.0.42.1, memory_bound_loop_optimizer.cc).
    """
    places = jnp.where(places < len(pages), places, 0)

    def put(i, pages):
        return jax.lax.dynamic_update_index_in_dim(pages, blocks[i], places[i], 0)

    return jax.lax.fori_loop(0, len(places), put, pages)


def with_scales(caches: Caches, scales: tuple[jax.Array, ...]) -> Caches:
    """Return the caches with the given scales of pages, [K2] of each layer."""
    return tuple(
        cache.replace(scales=own) if isinstance(cache, PageCache) else cache
        for cache, own in zip(caches, scales, strict=True)
    )


def _read_by_kernel(
    config: DecoderConfig, mesh: jax.sharding.Mesh, settings: Sampler, dtype: Any
) -> bool:
    """Return True if the TPU's kernel can read each device's pages.

    It supports neither scales per token nor attention sinks.
    """
    platform, shards = mesh.devices.flat[0].platform, sharding.shards
    kv_heads = config.kv_heads // shards(mesh, "kv_heads", sharding.DECODING)
    read = has_kernel(platform, config.head_dim, settings.page_tokens, kv_heads, dtype)
    return read and settings.cache_dtype != "int8" and not config.sinks


def choose_layout(
    config: DecoderConfig, mesh: jax.sharding.Mesh, settings: Sampler, cache_tokens: int
) -> SlotLayout | PagedLayout:
    """Return the layout for `sampler.cache`; 'auto' is pages if a kernel reads them, else slots.

    Raises:
        ConfigError: cache, its dtype and the platform don't fit together.
    """
    dtype = config.dtype if settings.cache_dtype == "auto" else jnp.int8
    kind, platform = settings.cache, mesh.devices.flat[0].platform
    by_head = settings.cache_dtype == "int8_per_head"
    read = _read_by_kernel(config, mesh, settings, dtype)
    if kind == "auto":
        kind = "paged" if read or by_head else "slots"
    require(
        kind == "slots" or platform != "tpu" or settings.cache_dtype != "int8",
        "sampler.cache",
        kind,
        "'slots' with sampler.cache_dtype = 'int8' on TPU: the paged kernel reads no scales per "
        "token; pages take 'int8_per_head'",
    )
    require(
        kind == "paged" or not by_head,
        "sampler.cache",
        kind,
        "'paged' or 'auto' with sampler.cache_dtype = 'int8_per_head'",
    )
    require(
        read or not by_head or platform != "tpu",
        "sampler.cache_dtype",
        settings.cache_dtype,
        "'auto' if the TPU's paged kernel can't read the pages: a chip must hold 2, 4, 8 or a "
        "multiple of 16 key/value heads, head_dim must be a multiple of 128, and the policy must "
        "have no sinks",
    )
    layout = SlotLayout if kind == "slots" else PagedLayout
    return layout(config, mesh, settings, cache_tokens, dtype)

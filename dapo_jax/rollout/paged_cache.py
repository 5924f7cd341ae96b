"""Device layout of a cache in pages, which the page table gives to slots as responses grow."""

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
from dapo_jax.rollout.page_table import Fills, PageTable
from dapo_jax.rollout.slot_cache import SlotLayout, window_of
from dapo_jax.runtime import sharding
from dapo_jax.runtime.settings import require

Caches = tuple[PageCache | KVCache, ...]


class PagedLayout:
    """Caches of pages, those of every replica one after the other.

    A layer whose window is shorter than a slot has a ring in each slot, and no pages.

    Args and attributes are as for `SlotLayout`; `settings.pages` are those of all replicas, their
    pages 0 not counted (0: as many as full slots need), and `settings.first_window_tokens` is how
    far attention reads where there is no kernel that reads what exists.

    Attributes:
        calibrated: pages are int8 with a scale per head, which has to be known beforehand.
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
        self._config, self._mesh, self._dtype = config, mesh, dtype
        self.calibrated = settings.cache_dtype == "int8_per_head"
        self._first, self._limit = settings.first_window_tokens, cache_tokens
        self._page_tokens = size = settings.page_tokens
        replicas = sharding.shards(mesh, "batch", sharding.DECODING)
        full = -(-cache_tokens // size)
        pages = settings.pages or settings.slots * full
        require(
            pages % replicas == 0 and pages // replicas >= full,
            "sampler.pages",
            pages,
            f"0, or a multiple of data x fsdp = {replicas} with at least {full} (a longest "
            f"response's) for each",
        )
        each = pages // replicas + 1
        self._total = replicas * each
        self.pages = PageTable(
            replicas=replicas,
            pages=each,
            page_tokens=size,
            slots=settings.slots,
            slot_tokens=cache_tokens,
        )
        self._kernel = _read_by_kernel(config, mesh, settings, dtype)
        self.attend = PagedAttention(mesh, self._kernel)
        self._rings = SlotLayout(config, mesh, settings, cache_tokens, dtype)
        self._paged = [reach is None or reach >= cache_tokens for reach in config.reaches]

    def window(self, needed: int) -> int:
        """Length of a slot: always the longest, since pages do not grow."""
        return self._limit

    def fits(self, caches: Caches, needed: int) -> bool:
        """True: pages do not grow."""
        return True

    def longest(self, caches: Caches) -> int:
        """Tokens of a slot."""
        return self._limit

    def columns(self, needed: int) -> int:
        """Columns of the page tables that attention has to read for `needed` tokens of a slot."""
        window = self._limit if self._kernel else window_of(needed, self._first, self._limit)
        return -(-window // self._page_tokens)

    def empty(self, window: int) -> Caches:
        """Zeroed pages, or rings, of every layer."""
        c = self._config
        shape = (self._total, self._page_tokens, 2 * c.kv_heads, c.head_dim)
        pages = PageCache(jnp.zeros(shape, self._dtype), self._scales(shape[:-1]))
        return self._by_layer(pages, self._rings.empty(self._limit))

    def _scales(self, shape: tuple[int, ...]) -> jax.Array | None:
        """Scales of pages of that shape, [N, P, K2], before anything is written."""
        if self.calibrated:
            return jnp.ones(shape[-1:])
        return jnp.zeros(shape) if self._dtype == jnp.int8 else None

    def _by_layer(self, pages: Any, rings: tuple) -> tuple:
        pairs = zip(self._paged, rings, strict=True)
        return tuple(pages if paged else ring for paged, ring in pairs)

    def shardings(self) -> Caches:
        """Shardings of the caches: pages, or slots, over replicas, heads over tensor."""
        named = functools.partial(jax.sharding.NamedSharding, self._mesh)
        scales = jax.eval_shape(lambda: self._scales((1, 1, 2)))
        pages = jax.tree.map(named, page_specs(PageCache(jnp.zeros(()), scales)))
        return self._by_layer(pages, self._rings.shardings())

    def grow(self, caches: Caches, window: int) -> Caches:
        """Caches as they are: pages do not grow."""
        return caches

    def write_prompts(
        self, cache: Any, new: PromptCache, slots, rows, lengths, fills: Fills
    ) -> Any:
        """Writes the blocks of prompts that `fills` names into pages, or whole ones into rings."""
        if isinstance(cache, KVCache):
            return self._rings.write_prompts(cache, new, slots, rows, lengths, None)
        place = functools.partial(sharding.spec, column=sharding.DECODING)
        pages, mine, prompts = page_specs(cache), place("batch"), place(None, None, "kv_heads")
        places = (jax.tree.map(lambda _: prompts, new), jax.tree.map(lambda _: mine, fills))
        return jax.shard_map(
            self._fill_replica,
            mesh=self._mesh,
            in_specs=(pages, *places),
            out_specs=pages,
            check_vma=False,
        )(cache, new, fills)

    def _fill_replica(self, cache: PageCache, new: PromptCache, fills: Fills) -> PageCache:
        pairs, size = interleave(new.keys, new.values, 2), self._page_tokens
        pairs = jnp.pad(pairs, ((0, 0), (0, -pairs.shape[1] % size), (0, 0), (0, 0)))
        blocks = pairs.reshape(len(pairs), -1, size, *pairs.shape[2:])[fills.row[0], fills.block[0]]

        pages, scales = rounded(cache, blocks)
        if cache.calibrated:
            return cache.replace(pages=_fill_in_turn(cache.pages, pages, fills.page[0]))
        filled = PageCache(pages, scales)
        return jax.tree.map(
            lambda old, new: old.at[fills.page[0]].set(new, mode="drop"), cache, filled
        )


def _fill_in_turn(pages: jax.Array, blocks: jax.Array, places: jax.Array) -> jax.Array:
    """Pages with a block at each place; one past the last goes to page 0, which is nobody's.

    XLA:TPU aborts where it compiles scatters of int8 blocks in more than a few layers (libtpu
    0.0.42.1, memory_bound_loop_optimizer.cc).
    """
    places = jnp.where(places < len(pages), places, 0)

    def put(i, pages):
        return jax.lax.dynamic_update_index_in_dim(pages, blocks[i], places[i], 0)

    return jax.lax.fori_loop(0, len(places), put, pages)


def with_scales(caches: Caches, scales: tuple[jax.Array, ...]) -> Caches:
    """Empty caches whose pages have these scales, [K2] of each layer."""
    return tuple(
        cache.replace(scales=own) if isinstance(cache, PageCache) else cache
        for cache, own in zip(caches, scales, strict=True)
    )


def _read_by_kernel(
    config: DecoderConfig, mesh: jax.sharding.Mesh, settings: Sampler, dtype: Any
) -> bool:
    """True where the TPU's kernel reads each device's pages: no scales of tokens, no sinks."""
    platform, shards = mesh.devices.flat[0].platform, sharding.shards
    kv_heads = config.kv_heads // shards(mesh, "kv_heads", sharding.DECODING)
    read = has_kernel(platform, config.head_dim, settings.page_tokens, kv_heads, dtype)
    return read and settings.cache_dtype != "int8" and not config.sinks


def choose_layout(
    config: DecoderConfig, mesh: jax.sharding.Mesh, settings: Sampler, cache_tokens: int
) -> SlotLayout | PagedLayout:
    """Layout that `sampler.cache` asks for; 'auto': pages where a kernel reads them, else slots."""
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
        "'slots' with sampler.cache_dtype = 'int8' on TPU, whose paged kernel reads no scales of "
        "tokens; pages take 'int8_per_head'",
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
        "'auto' where the TPU's paged kernel can't read its pages: a chip must hold 2, 4, 8 or a "
        "multiple of 16 key/value heads of a multiple of 128 numbers, and the policy no sinks",
    )
    layout = SlotLayout if kind == "slots" else PagedLayout
    return layout(config, mesh, settings, cache_tokens, dtype)

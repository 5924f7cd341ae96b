"""Layout of the caches on devices: slots of equal length, or pages of the page table."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dapo_jax.config.experiment import Sampler
from dapo_jax.model.caches import KVCache, PageCache, PromptCache, StateCache
from dapo_jax.model.decode_attention import (
    PagedAttention,
    attend_slots,
    has_kernel,
    in_ring,
    interleave,
    page_specs,
    rounded,
)
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.model.quantisation import quantise
from dapo_jax.rollout.page_table import Fills, PageGeometry, PageTable
from dapo_jax.runtime import sharding
from dapo_jax.runtime.registry import feature
from dapo_jax.types.errors import require

Caches = tuple[PageCache | KVCache | StateCache, ...]


class CacheLayout:
    """Caches of every layer: pages, or slots of one length that grow in a few sizes.

    A layer with a window shorter than a slot has a ring buffer in each slot, and no pages. A
    delta-net layer has one state in each slot.
    `settings.pages` counts the pages of all replicas without their pages 0 (0: as many as full
    slots need). `settings.first_window_tokens` is the first length of slots, or of attention over
    pages if no kernel reads only the existing tokens.

    Raises:
        ConfigError: the settings don't fit together, or not to the platform.
    """

    def __init__(
        self,
        config: DecoderConfig,
        mesh: jax.sharding.Mesh,
        settings: Sampler,
        cache_tokens: int,  # maximum tokens of a slot
    ):
        platform = mesh.devices.flat[0].platform
        # Keys and values of int8 have scales.
        dtype: Any = config.dtype if settings.cache_dtype == "auto" else jnp.int8
        read = _read_by_kernel(config, mesh, settings, dtype)
        paged = _is_paged(settings, platform, read)
        self._config = config
        self._mesh = mesh
        self._settings = settings
        self._limit = cache_tokens
        self._dtype = dtype
        self._time_last = platform == "cpu"
        # Pages are int8 with a scale per head that must be known beforehand.
        self.calibrated = paged and settings.cache_dtype == "int8_per_head"
        # Whether a call may insert the responses to several prompts: without pages, a replica also
        # gets the prompts of other replicas, and drops them.
        self.takes_many = paged or mesh.size == 1
        self.pages: PageTable | None = None
        self.attend: Any = attend_slots
        self.by_kernel = False  # else attention reads a window of every slot
        if paged:
            replicas = sharding.shards(mesh, "batch", sharding.DECODING)
            full = -(-cache_tokens // settings.page_tokens)  # pages of a longest response
            pages = settings.pages or settings.slots * full
            allowed = f"0, or a multiple of data x fsdp = {replicas} with at least {full} pages, "
            allowed += "enough for the longest response, per replica"
            fits = pages % replicas == 0 and pages // replicas >= full
            require(fits, "sampler.pages", pages, allowed)
            page_tokens, slots = settings.page_tokens, settings.slots
            each = pages // replicas + 1
            self.pages = PageTable(PageGeometry(replicas, each, page_tokens, slots, cache_tokens))
            self.by_kernel = read
            self.attend = PagedAttention(mesh, read)

    def window(self, needed: int) -> int:
        """Return the length of slots that hold `needed` tokens; with pages always the maximum."""
        return self._grown(needed) if self.pages is None else self._limit

    def _grown(self, needed: int) -> int:
        window = self._settings.first_window_tokens
        while window < needed:
            window *= 2
        return min(window, self._limit)

    def fits(self, caches: Caches, needed: int) -> bool:
        """Return True if the caches hold `needed` tokens per slot."""
        lengths = self._lengths(self.window(needed))
        pairs = zip(lengths, caches, strict=True)
        return all(not isinstance(c, KVCache) or n <= c.values.shape[2] for n, c in pairs)

    def columns(self, needed: int) -> int | None:
        """Return the page table columns that attention reads for `needed` tokens of a slot."""
        if self.pages is None:
            return None
        window = self._limit if self.by_kernel else self._grown(needed)
        return -(-window // self._settings.page_tokens)

    def _lengths(self, window: int) -> list[int]:
        """Return the tokens of each layer's slots or rings.

        A ring also holds proposed tokens, which must not overwrite one that is still visible.
        """
        more = self._settings.speculate
        return [min(window, reach + more if reach else window) for reach in self._config.reaches]

    @property
    def _layers(self) -> list[DecoderConfig]:
        """Configs of the layers with a cache."""
        return self._config.each_layer[: self._config.cached_layers]

    def empty(self, window: int) -> Caches:
        """Return zeroed caches of every layer with space for `window` tokens per slot."""
        caches = []
        for layer, tokens in zip(self._layers, self._lengths(self.window(window)), strict=True):
            if layer.is_recurrent:
                caches.append(feature("delta_net").empty_state(layer, self._settings.slots))
            elif self.pages is None or (layer.window or self._limit) < self._limit:
                caches.append(self._empty_slots(layer, tokens))
            else:
                caches.append(self._empty_pages(layer, self.pages.geometry))
        return tuple(caches)

    def _empty_pages(self, c: DecoderConfig, geometry: PageGeometry) -> PageCache:
        shape = geometry.replicas * geometry.pages, geometry.page_tokens, 2 * c.kv_heads
        scales = None
        if self.calibrated:
            scales = jnp.ones(shape[-1:])
        elif self._dtype == jnp.int8:
            scales = jnp.zeros(shape)
        return PageCache(jnp.zeros((*shape, c.head_dim), self._dtype), scales)

    def _empty_slots(self, c: DecoderConfig, length: int) -> KVCache:
        slots = self._settings.slots
        shape, turned = (c.kv_heads, length, c.head_dim), (c.kv_heads, c.head_dim, length)
        keys = jnp.zeros((slots, *(turned if self._time_last else shape)), self._dtype)
        values = jnp.zeros((slots, *shape), self._dtype)
        scales = (None, None)
        if self._dtype == jnp.int8:
            scales = (jnp.zeros((slots, c.kv_heads, length)),) * 2
        return KVCache(keys, values, *scales, time_last=self._time_last)

    def shardings(self) -> Caches:
        """Return the shardings of the caches: pages or slots over replicas, heads over tensor."""
        slots = sharding.sharding(self._mesh, "batch", "kv_heads", column=sharding.DECODING)
        named = functools.partial(jax.sharding.NamedSharding, self._mesh)

        def place(cache: Any) -> Any:
            if isinstance(cache, StateCache):
                return self._states()
            if isinstance(cache, PageCache):
                return jax.tree.map(named, page_specs(cache))
            return jax.tree.map(lambda _: slots, cache)

        return tuple(map(place, jax.eval_shape(functools.partial(self.empty, 1))))

    def _states(self) -> StateCache:
        """Return the shardings of states and windows: over replicas, and heads over tensor."""
        place: Any = functools.partial(sharding.sharding, self._mesh, column=sharding.DECODING)
        return StateCache(place("batch", "heads"), place("batch", None, "heads"))

    def prompt_shardings(self) -> tuple[PromptCache | StateCache, ...]:
        """Return the shardings of prefilled prompts of every layer."""
        names = "batch", None, "kv_heads"
        place: Any = sharding.sharding(self._mesh, *names, column=sharding.DECODING)
        prompts = PromptCache(place, place)
        return tuple(self._states() if c.is_recurrent else prompts for c in self._layers)

    def grow(self, caches: Caches, window: int) -> Caches:
        """Return copies of slot caches with space for `window` tokens per slot.

        A ring buffer that still grows has not wrapped around yet.
        """

        def longer(array: Array, length: int, last: bool = False) -> Array:
            axis = 3 if last else 2
            pad = [(0, 0)] * array.ndim
            pad[axis] = (0, length - array.shape[axis])
            return jnp.pad(array, pad)

        grown = []
        for cache, length in zip(caches, self._lengths(window), strict=True):
            if not isinstance(cache, KVCache):
                grown.append(cache)
                continue
            keys = longer(cache.keys, length, cache.time_last)
            rest = jax.tree.map(lambda x, n=length: longer(x, n), cache.replace(keys=None))
            grown.append(rest.replace(keys=keys))
        return tuple(grown)

    def write_prompts(
        self, cache: Any, new: Any, slots: Array, rows: Array, lengths: Array, fills: Any
    ) -> Any:
        """Write prompt `rows[i]`, of `lengths[i]` tokens, into `slots[i]` or the pages of `fills`.

        A slot past the last one is dropped.
        """
        if isinstance(cache, StateCache):
            return jax.tree.map(lambda old, x: old.at[slots].set(x[rows], mode="drop"), cache, new)
        if isinstance(cache, KVCache):
            return _write_slots(cache, new, slots, rows, lengths)
        place = functools.partial(sharding.spec, column=sharding.DECODING)
        pages = page_specs(cache)
        prompts = jax.tree.map(lambda _: place(None, None, "kv_heads"), new)
        blocks = jax.tree.map(lambda _: place("batch"), fills)
        return jax.shard_map(
            _fill_replica,
            mesh=self._mesh,
            in_specs=(pages, prompts, blocks),
            out_specs=pages,
            check_vma=False,
        )(cache, new, fills)


def _write_slots(
    cache: KVCache, new: PromptCache, slots: Array, rows: Array, lengths: Array
) -> KVCache:
    """Write whole prompts into slots; a ring buffer gets the end of a longer prompt."""
    time, ring = new.keys.shape[1], cache.values.shape[2]
    ends = in_ring(ring, lengths[:, None] - 1)[:, :, None, None] if time > ring else None
    time = min(time, ring)

    def written(x: Array):
        x = x[rows]
        if ends is not None:
            x = jnp.take_along_axis(x, jnp.maximum(ends, 0), axis=1)
        x, scale = quantise(x, cache.values.dtype)
        return x.transpose(0, 2, 1, 3), None if scale is None else scale.transpose(0, 2, 1)

    def put(old, new):
        return None if old is None else old.at[slots, :, :time].set(new, mode="drop")

    (keys, key_scale), (values, value_scale) = written(new.keys), written(new.values)
    if cache.time_last:
        keys = cache.keys.at[slots, :, :, :time].set(keys.swapaxes(2, 3), mode="drop")
    else:
        keys = put(cache.keys, keys)
    return cache.replace(
        keys=keys,
        values=put(cache.values, values),
        key_scale=put(cache.key_scale, key_scale),
        value_scale=put(cache.value_scale, value_scale),
    )


def _fill_replica(cache: PageCache, new: PromptCache, fills: Fills) -> PageCache:
    pairs = interleave(new.keys, new.values, 2)
    size = cache.pages.shape[1]
    pairs = jnp.pad(pairs, ((0, 0), (0, -pairs.shape[1] % size), (0, 0), (0, 0)))
    blocks = pairs.reshape(len(pairs), -1, size, *pairs.shape[2:])[fills.row[0], fills.block[0]]
    pages, scales = rounded(cache, blocks)
    if cache.calibrated:
        return cache.replace(pages=_fill_in_turn(cache.pages, pages, fills.page[0]))
    filled = PageCache(pages, scales)
    return jax.tree.map(lambda old, new: old.at[fills.page[0]].set(new, mode="drop"), cache, filled)


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
    pieces = shards(mesh, "kv_heads", sharding.DECODING)
    shapes = {(layer.head_dim, layer.kv_heads // pieces) for layer in config.each_layer}
    read = all(has_kernel(platform, e, settings.page_tokens, k, dtype) for e, k in shapes)
    return read and settings.cache_dtype != "int8" and not config.sinks


def _is_paged(settings: Sampler, platform: str, read: bool) -> bool:
    """Return whether `sampler.cache` is pages; 'auto': if a kernel can `read` them.

    Raises `ConfigError` if cache, its dtype and the platform don't fit together.
    """
    kind, by_head = settings.cache, settings.cache_dtype == "int8_per_head"
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
    return kind == "paged"

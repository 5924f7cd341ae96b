"""Device layout of a cache with slots of equal length that grow in a few sizes.

A layer with a window has a ring buffer of at most as many tokens as the window.

`SlotLayout` and `PagedLayout` (paged_cache.py) are two strategies behind one engine: they define
how caches start, are sharded, take prompts and are read by attention.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dapo_jax.config.experiment import Sampler
from dapo_jax.model.caches import KVCache, PromptCache
from dapo_jax.model.decode_attention import SlotAttention, in_ring
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.model.gpu_attention import has_kernels
from dapo_jax.model.quantisation import quantise
from dapo_jax.runtime import sharding


def window_of(needed: int, first: int, limit: int) -> int:
    """Return the first of `first`, 2 * `first`, ... that holds `needed`; at most `limit`."""
    while first < needed:
        first *= 2
    return min(first, limit)


class SlotLayout:
    """Caches of the same length for every slot.

    Attributes:
        attend: attention over these caches.
        takes_many: one call may insert the responses to several prompts.
        pages: the page table; None, since slots have no pages.
        calibrated: scales must be known beforehand.
    """

    pages = None
    calibrated = False

    def __init__(
        self,
        config: DecoderConfig,
        mesh: jax.sharding.Mesh,
        settings: Sampler,  # number of slots, and the initial length
        cache_tokens: int,  # maximum tokens of a slot
        dtype: Any,  # of keys and values; int8 ones have scales
    ):
        self._config = config
        self._mesh = mesh
        self._dtype = dtype
        self._slots = settings.slots
        self._limit = cache_tokens
        self._first = settings.first_window_tokens
        platform = mesh.devices.flat[0].platform
        self._time_last = platform == "cpu"
        kernel = has_kernels(platform, config.head_dim, dtype) and not config.sinks
        self.attend = SlotAttention(mesh, kernel)
        # A replica also gets the prompts of other replicas, and drops them.
        self.takes_many = mesh.size == 1

    def window(self, needed: int) -> int:
        """Return the length of a cache that holds `needed` tokens."""
        return window_of(needed, self._first, self._limit)

    def fits(self, caches: tuple[KVCache, ...], needed: int) -> bool:
        """Return True if the caches hold `needed` tokens per slot."""
        lengths = self._lengths(self.window(needed))
        return all(n <= c.values.shape[2] for n, c in zip(lengths, caches, strict=True))

    def longest(self, caches: tuple[KVCache, ...]) -> int:
        """Return the tokens of the longest cache."""
        return max(cache.values.shape[2] for cache in caches)

    def _lengths(self, window: int) -> list[int]:
        """Return the tokens of each layer's cache."""
        return [min(window, reach or window) for reach in self._config.reaches]

    def columns(self, needed: int) -> None:
        """Return None: there are no page tables."""

    def empty(self, window: int) -> tuple[KVCache, ...]:
        """Return zeroed caches of every layer with space for `window` tokens per slot."""
        kinds = {length: self._zeros(length) for length in self._lengths(window)}
        return tuple(kinds[length] for length in self._lengths(window))

    def _zeros(self, length: int) -> KVCache:
        c = self._config
        shape, turned = (c.kv_heads, length, c.head_dim), (c.kv_heads, c.head_dim, length)
        keys = jnp.zeros((self._slots, *(turned if self._time_last else shape)), self._dtype)
        values = jnp.zeros((self._slots, *shape), self._dtype)
        scales = (None, None)
        if self._dtype == jnp.int8:
            scales = (jnp.zeros((self._slots, c.kv_heads, length)),) * 2
        return KVCache(keys, values, *scales, time_last=self._time_last)

    def shardings(self) -> tuple[KVCache, ...]:
        """Return the shardings of the caches: slots over replicas, heads over tensor."""
        place = sharding.sharding(self._mesh, "batch", "kv_heads", column=sharding.DECODING)
        return jax.tree.map(lambda _: place, jax.eval_shape(lambda: self.empty(1)))

    def grow(self, caches: tuple[KVCache, ...], window: int) -> tuple[KVCache, ...]:
        """Return copies of the caches with space for `window` tokens per slot.

        A ring buffer that still grows has not wrapped around yet.
        """

        def longer(array: Array, length: int, last: bool = False) -> Array:
            axis = 3 if last else 2
            pad = [(0, 0)] * array.ndim
            pad[axis] = (0, length - array.shape[axis])
            return jnp.pad(array, pad)

        grown = []
        for cache, length in zip(caches, self._lengths(window), strict=True):
            keys = longer(cache.keys, length, cache.time_last)
            rest = jax.tree.map(lambda x, n=length: longer(x, n), cache.replace(keys=None))
            grown.append(rest.replace(keys=keys))
        return tuple(grown)

    def write_prompts(
        self, cache: KVCache, new: PromptCache, slots: Array, rows: Array, lengths: Array, _: Any
    ) -> KVCache:
        """Write prompt `rows[i]`, of `lengths[i]` tokens, into `slots[i]`.

        A slot past the last one is dropped. A ring buffer gets the end of a longer prompt.
        """
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

"""Device layout of a cache whose slots have one length, which grows in a few sizes.

`SlotLayout` and `PagedLayout` (paged_cache.py) are two strategies behind one engine: how caches
begin, lie on the mesh, take prompts up and are read by attention.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dapo_jax.config.experiment import Sampler
from dapo_jax.model.caches import KVCache, PromptCache
from dapo_jax.model.decode_attention import attend_slots, quantise
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.runtime import sharding


def window_of(needed: int, first: int, limit: int) -> int:
    """First of `first`, twice that and so on that holds `needed` tokens; at most `limit`."""
    while first < needed:
        first *= 2
    return min(first, limit)


class SlotLayout:
    """Caches of the same length for every slot.

    Args:
        settings: slots, and the length to begin with.
        cache_tokens: most tokens that a slot holds.
        dtype: of keys and values; int8 ones have scales.

    Attributes:
        attend: attention over these caches.
        takes_many: whether one call may take up the responses to several prompts.
        pages: the page table; None: slots have no pages.
    """

    pages = None
    attend = staticmethod(attend_slots)

    def __init__(
        self,
        config: DecoderConfig,
        mesh: jax.sharding.Mesh,
        settings: Sampler,
        cache_tokens: int,
        dtype: Any,
    ):
        self._config, self._mesh, self._dtype = config, mesh, dtype
        self._slots, self._limit = settings.slots, cache_tokens
        self._first = settings.first_window_tokens
        self._time_last = mesh.devices.flat[0].platform == "cpu"
        # A replica takes up what is for others too, and drops it.
        self.takes_many = mesh.size == 1

    def window(self, needed: int) -> int:
        """Length of the cache where `needed` tokens have to fit."""
        return window_of(needed, self._first, self._limit)

    def fits(self, caches: tuple[KVCache, ...], needed: int) -> bool:
        """True where `needed` tokens of a slot fit into the caches."""
        return self.window(needed) <= caches[0].values.shape[2]

    def columns(self, needed: int) -> None:
        """Columns of the page tables to read: None, there are no tables."""

    def empty(self, window: int) -> tuple[KVCache, ...]:
        """Zeroed caches of every layer, with room for `window` tokens per slot."""
        c = self._config
        shape, turned = (c.kv_heads, window, c.head_dim), (c.kv_heads, c.head_dim, window)
        keys = jnp.zeros((self._slots, *(turned if self._time_last else shape)), self._dtype)
        values = jnp.zeros((self._slots, *shape), self._dtype)
        scales = (None, None)
        if self._dtype == jnp.int8:
            scales = (jnp.zeros((self._slots, c.kv_heads, window)),) * 2
        return (KVCache(keys, values, *scales, time_last=self._time_last),) * c.layers

    def shardings(self) -> tuple[KVCache, ...]:
        """Shardings of the caches: slots over replicas, heads over tensor."""
        place = sharding.sharding(self._mesh, "batch", "kv_heads", column=sharding.DECODING)
        return jax.tree.map(lambda _: place, jax.eval_shape(lambda: self.empty(1)))

    def grow(self, caches: tuple[KVCache, ...], window: int) -> tuple[KVCache, ...]:
        """Copies of the caches with room for `window` tokens per slot."""

        def longer(array: Array, last: bool) -> Array:
            axis = 3 if last else 2
            pad = [(0, 0)] * array.ndim
            pad[axis] = (0, window - array.shape[axis])
            return jnp.pad(array, pad)

        return tuple(
            jax.tree.map(lambda array: longer(array, False), cache.replace(keys=None)).replace(
                keys=longer(cache.keys, cache.time_last)
            )
            for cache in caches
        )

    def take_up(self, cache: KVCache, new: PromptCache, slots: Array, rows: Array, _) -> KVCache:
        """Writes prompt `rows[i]` into `slots[i]`; a slot past the last is dropped."""
        time = new.keys.shape[1]

        def written(x: Array):
            x, scale = quantise(x[rows], cache.values.dtype)
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

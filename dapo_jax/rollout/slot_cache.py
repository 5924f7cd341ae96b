"""Keys and values of running responses in slots of one length, which grows in a few sizes.

`SlotStore` and `PageStore` (page_store.py) are two strategies behind one engine: both say how the
caches begin, lie on the mesh, take prompts up and are read; what they count on the host is theirs.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dapo_jax.model.caches import KVCache, PromptCache
from dapo_jax.model.decode_attention import attend_slots, quantise
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.runtime import sharding


def window_of(needed: int, first: int, limit: int) -> int:
    """The first of `first`, twice that and so on that holds `needed` tokens; at most `limit`."""
    while first < needed:
        first *= 2
    return min(first, limit)


class SlotStore:
    """A cache of the same length for every slot.

    Args:
        cache_tokens: the most that a slot holds.
        first_window_tokens: its length to begin with.
        dtype: of keys and values; int8 ones have scales.

    Attributes:
        attend: attention over these caches.
        takes_many: whether one call may take up the responses to several prompts.
    """

    tables = None

    def __init__(
        self,
        config: DecoderConfig,
        mesh: jax.sharding.Mesh,
        *,
        slots: int,
        cache_tokens: int,
        first_window_tokens: int,
        dtype: Any,
    ):
        self._config, self._slots, self._limit = config, slots, cache_tokens
        self._first, self._dtype = first_window_tokens, dtype
        self._mesh, self._time_last = mesh, mesh.devices.flat[0].platform == "cpu"
        self.attend = attend_slots
        # A replica takes up what is for others too, and drops it.
        self.takes_many = mesh.size == 1

    def window(self, needed: int) -> int:
        """The cache's length where `needed` tokens have to fit."""
        return window_of(needed, self._first, self._limit)

    def fits(self, caches: tuple[KVCache, ...], needed: int) -> bool:
        """Whether `needed` tokens of a slot fit into those caches."""
        return self.window(needed) <= caches[0].values.shape[2]

    def columns(self, needed: int) -> None:
        """Of the page tables; there are none."""

    def empty_tables(self) -> None:
        """There are none."""

    def empty(self, window: int) -> tuple[KVCache, ...]:
        """Every layer's, with room for `window` tokens per slot."""
        c = self._config
        shape, turned = (c.kv_heads, window, c.head_dim), (c.kv_heads, c.head_dim, window)
        keys = jnp.zeros((self._slots, *(turned if self._time_last else shape)), self._dtype)
        values = jnp.zeros((self._slots, *shape), self._dtype)
        scales = (None, None)
        if self._dtype == jnp.int8:
            scales = (jnp.zeros((self._slots, c.kv_heads, window)),) * 2
        return (KVCache(keys, values, *scales, time_last=self._time_last),) * c.layers

    def shardings(self) -> tuple[KVCache, ...]:
        """Slots over replicas, heads over tensor."""
        place = sharding.sharding(self._mesh, "batch", "kv_heads", column=sharding.DECODING)
        return jax.tree.map(lambda _: place, jax.eval_shape(lambda: self.empty(1)))

    def grow(self, caches: tuple[KVCache, ...], window: int) -> tuple[KVCache, ...]:
        """The same responses with room for `window` tokens per slot."""

        def longer(array: Array | None, axis: int) -> Array | None:
            if array is None:
                return None
            pad = [(0, 0)] * array.ndim
            pad[axis] = (0, window - array.shape[axis])
            return jnp.pad(array, pad)

        return tuple(
            cache.replace(
                keys=longer(cache.keys, 3 if cache.time_last else 2),
                values=longer(cache.values, 2),
                key_scale=longer(cache.key_scale, 2),
                value_scale=longer(cache.value_scale, 2),
            )
            for cache in caches
        )

    def take_up(self, cache: KVCache, new: PromptCache, slots: Array, rows: Array, _) -> KVCache:
        """Prompt `rows[i]` begins in `slots[i]`; a slot past the last is dropped."""
        time = new.keys.shape[1]

        def written(x: Array, dtype: Any):
            x, scale = quantise(x[rows], dtype)
            return x.transpose(0, 2, 1, 3), None if scale is None else scale.transpose(0, 2, 1)

        (keys, key_scale), (values, value_scale) = (
            written(x, cache.values.dtype) for x in (new.keys, new.values)
        )
        at = (slots, slice(None), slice(time))
        keys_at, keys = at, keys
        if cache.time_last:
            keys_at, keys = (slots, slice(None), slice(None), slice(time)), keys.swapaxes(2, 3)

        def scaled(scales, new):
            return None if scales is None else scales.at[at].set(new, mode="drop")

        return cache.replace(
            keys=cache.keys.at[keys_at].set(keys, mode="drop"),
            values=cache.values.at[at].set(values, mode="drop"),
            key_scale=scaled(cache.key_scale, key_scale),
            value_scale=scaled(cache.value_scale, value_scale),
        )

    # --- on the host: a slot is all that a response needs -----------------------------------------

    held: Sequence[int] = ()  # slots that may need room

    def reset(self) -> None:
        """Nothing runs."""

    def claim(self, slot: int, tokens: int, prompt: Hashable, *, beside: bool = True) -> bool:
        """Whether a response may start in a free slot."""
        return True

    def fills(self, slots: Iterable[int], rows: Iterable[int], *, width: int, prompts: int, time):
        """Of the slots' pages; there are none."""
        return None

    def claimed(self, slot: int) -> bool:
        """Whether the slot may be inserted into."""
        return True

    def make_room(self, slots: Sequence[int], more: int) -> list[int]:
        """Slots that were given back."""
        return []

    def advance(self, tokens: int) -> None:
        """So many tokens were drawn."""

    def release(self, slot: int) -> None:
        """The response there has ended."""

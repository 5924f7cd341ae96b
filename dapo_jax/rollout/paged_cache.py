"""Keys and values of running responses in pages, given to slots as responses grow."""

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int

from dapo_jax.config.experiment import Sampler
from dapo_jax.model.caches import PageCache, PromptCache
from dapo_jax.model.decode_attention import (
    PagedAttention,
    has_kernel,
    interleave,
    page_specs,
    quantise,
)
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.rollout.page_table import PageBook
from dapo_jax.rollout.slot_cache import SlotStore, window_of
from dapo_jax.runtime import sharding
from dapo_jax.runtime.settings import require

DROPPED = np.iinfo(np.int32).max  # an index past every end


@struct.dataclass
class Fills:
    """Pages to write: a replica's `page[i]` gets block `block[i]` of prompt `row[i]`."""

    page: Int[Array, "D M"]  # D replicas
    row: Int[Array, "D M"]
    block: Int[Array, "D M"]


class PageStore:
    """Pages, given to slots as their responses grow.

    Args:
        pages: of all replicas, their pages 0 not counted; 0: as many as full slots need.
        page_tokens: tokens in a page.
        The others are as for `SlotStore`; `first_window_tokens` is how far attention reads where
        there is no kernel that reads what exists.
    """

    def __init__(
        self,
        config: DecoderConfig,
        mesh: jax.sharding.Mesh,
        *,
        slots: int,
        cache_tokens: int,
        first_window_tokens: int,
        dtype: Any,
        pages: int,
        page_tokens: int,
    ):
        self._config, self._mesh, self._dtype, self._first = (
            config,
            mesh,
            dtype,
            first_window_tokens,
        )
        self._page_tokens, self._limit = page_tokens, cache_tokens
        replicas, full = (
            sharding.shards(mesh, "batch", sharding.DECODING),
            -(-cache_tokens // page_tokens),
        )
        pages = pages or slots * full
        require(
            pages % replicas == 0 and pages // replicas >= full,
            "sampler.pages",
            pages,
            f"0, or a multiple of data x fsdp = {replicas} with at least {full} (a longest "
            f"response's) for each",
        )
        self._each, self._replicas, self._slots_each = (
            pages // replicas + 1,
            replicas,
            slots // replicas,
        )
        self._new_book = functools.partial(
            PageBook,
            replicas=replicas,
            pages=self._each,
            page_tokens=page_tokens,
            slots=slots,
            slot_tokens=cache_tokens,
        )
        platform = mesh.devices.flat[0].platform
        self._kernel = has_kernel(platform, config.head_dim, page_tokens) and dtype != jnp.int8
        self.attend = PagedAttention(mesh, self._kernel)
        self.takes_many = True
        self._total, self._tokens = replicas * self._each, np.zeros(slots, np.int64)
        self.reset()

    def window(self, needed: int) -> int:
        """Pages do not grow."""
        return self._limit

    def fits(self, caches: tuple[PageCache, ...], needed: int) -> bool:
        """Always: pages do not grow."""
        return True

    def empty_tables(self) -> Int[Array, "S W"]:
        """As of slots without pages."""
        return jnp.zeros(self.book.tables.shape, jnp.int32)

    def columns(self, needed: int) -> int:
        """Of the page tables that attention has to read where `needed` tokens have to fit."""
        window = self._limit if self._kernel else window_of(needed, self._first, self._limit)
        return -(-window // self._page_tokens)

    def empty(self, window: int) -> tuple[PageCache, ...]:
        """Every layer's pages."""
        c = self._config
        shape = (self._total, self._page_tokens, 2 * c.kv_heads, c.head_dim)
        scales = jnp.zeros(shape[:-1]) if self._dtype == jnp.int8 else None
        return (PageCache(jnp.zeros(shape, self._dtype), scales),) * c.layers

    def shardings(self) -> tuple[PageCache, ...]:
        """Pages over replicas, heads over tensor."""
        named = functools.partial(jax.sharding.NamedSharding, self._mesh)
        shapes = jax.eval_shape(lambda: self.empty(1))
        return tuple(jax.tree.map(named, page_specs(cache)) for cache in shapes)

    def grow(self, caches: tuple[PageCache, ...], window: int) -> tuple[PageCache, ...]:
        """Pages do not grow."""
        return caches

    def take_up(self, cache: PageCache, new: PromptCache, _, __, fills: Fills) -> PageCache:
        """Writes what is still unwritten of the pages that begin with a prompt."""
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
        blocks, scales = quantise(blocks, self._dtype)
        cache = cache.replace(pages=cache.pages.at[fills.page[0]].set(blocks, mode="drop"))
        if scales is not None:
            assert cache.scales is not None  # int8 pages have them
            cache = cache.replace(scales=cache.scales.at[fills.page[0]].set(scales, mode="drop"))
        return cache

    # --- on the host ----------------------------------------------------------------------------

    @property
    def held(self) -> list[int]:
        """Slots with pages."""
        return self.book.slots

    @property
    def tables(self) -> np.ndarray | None:
        """Each slot's pages if they changed since this was last asked for, else None."""
        changed, self.book.changed = self.book.changed, False
        return self.book.tables.copy() if changed else None

    def reset(self) -> None:
        """Nothing runs."""
        self.book, self._claimed = self._new_book(), {}
        self.book.changed = True

    def claim(self, slot: int, tokens: int, prompt: Hashable, *, beside: bool = True) -> bool:
        """Takes the pages for a response that starts in a free slot; False, and none, if too few.

        Args:
            tokens: of its prompt.
            prompt: responses that say the same share its full pages.
            beside: only where those that run keep room to grow.
        """
        kept = tokens - 1  # the last one is fed by the first decode step
        if beside and not self.book.has_room(slot, kept, prompt):
            return False
        self._claimed[slot] = self.book.start(slot, kept, prompt)
        self._tokens[slot] = kept
        return True

    def claimed(self, slot: int) -> bool:
        """Whether the slot may be inserted into."""
        return slot in self._claimed

    def fills(
        self, slots: Iterable[int], rows: Iterable[int], *, width: int, prompts: int, time: int
    ) -> Fills:
        """What of the claimed slots' pages is to be written; `rows` are their prompts'.

        Args:
            width, prompts, time: slots at most, prompts at most and their padded length; the
                result's size depends on nothing else.
        """
        size = min(width, self._slots_each) + prompts * (time // self._page_tokens)
        arrays: Any = np.zeros((3, self._replicas, size), np.int32)  # until a program takes them
        arrays[0] = DROPPED
        used = [0] * self._replicas
        for slot, row in zip(map(int, slots), rows, strict=True):
            replica = self.book.replica(slot)
            for fill in self._claimed.pop(slot):
                arrays[:, replica, used[replica]] = fill.page, row, fill.block
                used[replica] += 1
        return Fills(*arrays)

    def make_room(self, slots: Sequence[int], more: int) -> list[int]:
        """Pages for `more` tokens in each of `slots`, oldest first; returns those given back."""
        return self.book.make_room(slots, (self._tokens[list(slots)] + more).tolist())

    def advance(self, tokens: int) -> None:
        """So many tokens were drawn in every slot that still draws."""
        self._tokens += tokens

    def release(self, slot: int) -> None:
        """The response there has ended: its pages are free."""
        self.book.release(slot)


def choose_store(
    config: DecoderConfig,
    mesh: jax.sharding.Mesh,
    settings: Sampler,
    *,
    slots: int,
    cache_tokens: int,
    first_window_tokens: int,
) -> SlotStore | PageStore:
    """What `sampler.cache` asks for; 'auto': pages where a kernel reads them, slots elsewhere."""
    dtype = jnp.int8 if settings.cache_dtype == "int8" else config.dtype
    kind, platform = settings.cache, mesh.devices.flat[0].platform
    if kind == "auto":
        read = has_kernel(platform, config.head_dim, settings.page_tokens) and dtype != jnp.int8
        kind = "paged" if read else "slots"
    require(
        kind == "slots" or platform != "tpu" or dtype != jnp.int8,
        "sampler.cache",
        kind,
        "'slots' with sampler.cache_dtype = 'int8' on TPU, whose paged kernel reads no scales",
    )
    sizes = {
        "slots": slots,
        "cache_tokens": cache_tokens,
        "first_window_tokens": first_window_tokens,
        "dtype": dtype,
    }
    if kind == "slots":
        return SlotStore(config, mesh, **sizes)
    return PageStore(config, mesh, **sizes, pages=settings.pages, page_tokens=settings.page_tokens)

"""Decode slots with pages, and their attention head by head in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.model.caches import PageCache
from dapo_jax.model.decode_attention import PagedAttention, SlotContext
from dapo_jax.model.training_attention import AttentionOptions, Window

SIZE, WIDTH = 16, 10  # tokens of a page, pages of a slot: more than the kernel works on at a time


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)


@dataclasses.dataclass
class Slots:
    """Slots that share two pages of a prompt, and the contents of their caches."""

    pages: np.ndarray
    tables: np.ndarray
    lengths: np.ndarray  # with the token that is written; 0: idle
    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray

    def arrays(self, dtype) -> tuple:
        arrays = self.queries, self.keys, self.values, self.pages
        cast = (jnp.asarray(array).astype(dtype) for array in arrays)
        busy = self.lengths > 0
        positions = np.where(busy, self.lengths - 1, 3)  # an idle slot's is left over
        return *cast, *map(jnp.asarray, (self.tables, positions, busy))

    def written(self) -> np.ndarray:
        pages = self.pages.copy()
        for slot in np.flatnonzero(self.lengths):
            page, place = divmod(int(self.lengths[slot]) - 1, SIZE)
            pages[self.tables[slot, page], place, 0::2] = self.keys[slot]
            pages[self.tables[slot, page], place, 1::2] = self.values[slot]
        return pages

    def mixed(self, window: int | None = None) -> np.ndarray:
        """Return the attention of each slot, head by head; zeros for idle slots."""
        pages, out = self.written().astype(np.float64), np.zeros(self.queries.shape)
        heads, kv_heads = self.queries.shape[1], self.keys.shape[1]
        for slot, head in np.ndindex(len(self.lengths), heads):
            if end := int(self.lengths[slot]):
                seen = np.arange(0 if window is None else max(0, end - window), end)
                rows = pages[self.tables[slot, seen // SIZE], seen % SIZE]
                pair = 2 * (head // (heads // kv_heads))
                scores = rows[:, pair] @ self.queries[slot, head] * self.queries.shape[2] ** -0.5
                weights = np.exp(scores - scores.max())
                out[slot, head] = weights / weights.sum() @ rows[:, pair + 1]
        return out


def make_slots(heads, kv_heads, head_dim, lengths, dtype) -> Slots:
    """Return slots of these lengths; unused entries are NaN, except page 0, read by idle slots."""
    rng = np.random.default_rng(1)

    def drawn(*shape):
        return np.asarray(normal(rng, shape, dtype), np.float32)

    slots, shape = len(lengths), (SIZE, 2 * kv_heads, head_dim)
    tables, free = np.zeros((slots, WIDTH), np.int32), iter(rng.permutation(slots * WIDTH) + 3)
    pages = np.full((slots * WIDTH + 3, *shape), np.nan, np.float32)
    pages[:3] = drawn(3, *shape)
    for slot, length in enumerate(lengths):
        for page in range(-(-length // SIZE)):
            if page < 2 and length > 2 * SIZE:
                tables[slot, page] = 2 - page  # the prompt's pages, not in the order of numbers
                continue
            tables[slot, page] = number = next(free)
            held = min(length - 1 - page * SIZE, SIZE)  # the last token is written by the step
            pages[number, :held] = drawn(held, *shape[1:])
    each = (slots, kv_heads, head_dim)
    queries = drawn(slots, heads, head_dim)
    return Slots(pages, tables, np.array(lengths, np.int32), queries, drawn(*each), drawn(*each))


def decode(mesh, window: Window | None = None, *, kernel: bool = True):
    """Return a decode step over pages that also writes the new tokens."""
    attend = PagedAttention(mesh, kernel)

    def step(queries, keys, values, pages, tables, positions, active):
        new = (array[:, None] for array in (queries, keys, values))
        context = SlotContext(positions[:, None], active, tables)
        mixed, cache = attend(*new, context, PageCache(pages), AttentionOptions(window))
        return mixed[:, 0], cache.pages

    return step

"""Host-side page table of the paged cache: which page belongs to which response.

Every replica (a share of the slots, with its shard of the batch) has pages of its own. The
responses to one prompt that run on a replica share the pages that the prompt fills; the page where
response and prompt meet, and those after it, belong to one response alone.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

NO_OWNER = 0  # the page of each replica that is never given away
DROPPED = np.iinfo(np.int32).max  # an index past every end


class Fills(NamedTuple):
    """Pages to write: a replica's `page[i]` gets block `block[i]` of prompt `row[i]`."""

    page: Int[Any, "D M"]  # D replicas
    row: Int[Any, "D M"]
    block: Int[Any, "D M"]


class PageTable:
    """Page allocator: the pages of every slot, and how many slots hold each page.

    Args:
        replicas: shares of slots and of pages.
        pages: of one replica, page 0 included.
        page_tokens: tokens in a page.
        slots: of all replicas; a replica has neighbouring ones.
        slot_tokens: the most that a slot holds.

    Attributes:
        tables: [slots, most pages of a slot] int32, a slot's pages in order, then zeros.
    """

    def __init__(
        self, *, replicas: int, pages: int, page_tokens: int, slots: int, slot_tokens: int
    ):
        self._replicas, self._pages, self._page_tokens = replicas, pages, page_tokens
        self._slots_each, self._slot_tokens = slots // replicas, slot_tokens
        self.tables = np.zeros((slots, -(-slot_tokens // page_tokens)), np.int32)
        self.reset()

    def reset(self) -> None:
        """Frees every page."""
        self._changed = True
        self.tables[:] = NO_OWNER
        self._tokens, self._count = np.zeros((2, len(self.tables)), np.int64)
        self._holders = np.zeros((self._replicas, self._pages), np.int64)
        self._free = [list(range(self._pages - 1, NO_OWNER, -1)) for _ in range(self._replicas)]
        self._shared: dict[tuple[int, Hashable], list[int]] = {}  # full pages of prompts
        self._prompts: dict[int, tuple[int, Hashable]] = {}
        self._fills: dict[int, list[tuple[int, int]]] = {}  # (page, block of the prompt) by slot
        self._drawing: list[int] = []  # slots that the next burst is for

    @property
    def slots(self) -> list[int]:
        """Slots that hold pages, the oldest first."""
        return list(self._prompts)

    def changed_tables(self) -> np.ndarray | None:
        """Copy of `tables` where they changed since the last call, else None."""
        changed, self._changed = self._changed, False
        return self.tables.copy() if changed else None

    def replica(self, slot: int) -> int:
        """Replica of a slot."""
        return slot // self._slots_each

    def claim(self, slot: int, tokens: int, prompt: Hashable, *, beside: bool = True) -> bool:
        """Gives a response that starts in a slot its first pages; False, and none, if too few.

        Args:
            tokens: of its prompt, whose last one is only fed by the first decode step.
            prompt: responses that name the same one share its full pages.
            beside: only where every response that grows on the replica still gets a page more.

        Raises ValueError where pages lack and `beside` is not asked for.
        """
        self.release(slot)
        replica, cached = self.replica(slot), tokens - 1
        shared, whole = self._shared.get((replica, prompt)), cached // self._page_tokens
        needed = 1 + (whole if shared is None else 0)
        if beside:
            counts = self._count[replica * self._slots_each :][: self._slots_each]
            needed += np.count_nonzero((counts > 0) & (counts < self.tables.shape[1]))
        if needed > len(self._free[replica]):
            if beside:
                return False
            raise ValueError(f"slot {slot}: no pages are left; raise sampler.pages")
        fills = []
        if shared is None:
            shared = [self._free[replica].pop() for _ in range(whole)]
            self._shared[replica, prompt] = shared
            fills = [(page, block) for block, page in enumerate(shared)]
        own = self._free[replica].pop()
        pages = [*shared, own]
        self._holders[replica, pages] += 1
        self._prompts[slot] = replica, prompt
        self._tokens[slot], self._count[slot] = cached, len(pages)
        self.tables[slot, : len(pages)] = pages
        self._fills[slot], self._changed = [*fills, (own, whole)], True
        return True

    def claimed(self, slot: int) -> bool:
        """True where the slot has pages whose prompt is still to be written."""
        return slot in self._fills

    def fills(
        self, slots: Iterable[int], rows: Iterable[int], *, width: int, prompts: int, time: int
    ) -> Fills:
        """Unwritten prompt blocks of claimed slots; they count as written afterwards.

        Args:
            rows: each slot's prompt.
            width, prompts, time: most slots, most prompts and their padded length; the shape of
                the result depends on nothing else.
        """
        size = min(width, self._slots_each) + prompts * (time // self._page_tokens)
        arrays = np.zeros((3, self._replicas, size), np.int32)
        arrays[0] = DROPPED
        used = [0] * self._replicas
        for slot, row in zip(map(int, slots), rows, strict=True):
            replica = self.replica(slot)
            for page, block in self._fills.pop(slot):
                arrays[:, replica, used[replica]] = page, row, block
                used[replica] += 1
        return Fills(*arrays)

    def advance(self, tokens: int) -> None:
        """Counts the tokens of a burst as drawn, in the slots that got room for it."""
        self._tokens[self._drawing] += tokens

    def make_room(self, slots: Sequence[int], tokens: int, held: Sequence[int] = ()) -> list[int]:
        """Gives slots pages for so many more tokens; where pages run out the youngest lose theirs.

        Args:
            slots: the oldest first. The oldest of a replica always gets its pages.
            held: slots that draw nothing, the oldest first; they lose theirs before all others.

        Returns the slots that lost their pages, in that order.
        """
        waiting, held, stopped = list(slots), list(held), []
        reach = np.minimum(self._tokens[waiting] + tokens, self._slot_tokens)
        lacking = np.maximum(-(-reach // self._page_tokens) - self._count[waiting], 0)
        each = np.bincount(np.array(waiting, int) // self._slots_each, lacking, self._replicas)
        if (each <= [len(free) for free in self._free]).all():  # most slots have what they need
            waiting = [slot for slot, pages in zip(waiting, lacking, strict=True) if pages]
        while waiting:
            if self._extend(waiting[0], self._tokens[waiting[0]] + tokens):
                del waiting[0]
                continue
            replica = self.replica(waiting[0])
            others = (slot for slot in reversed([*waiting, *held]) if self.replica(slot) == replica)
            youngest = next(others)
            self.release(youngest)
            (held if youngest in held else waiting).remove(youngest)
            stopped.append(youngest)
        self._drawing = [slot for slot in slots if slot not in stopped]
        return stopped

    def _extend(self, slot: int, tokens: int) -> bool:
        replica, count = self.replica(slot), self._count[slot]
        wanted = -(-min(tokens, self._slot_tokens) // self._page_tokens)
        free = self._free[replica]
        if wanted - count > len(free):
            return False
        for place in range(count, wanted):
            self.tables[slot, place] = page = free.pop()
            self._holders[replica, page] += 1
            self._changed = True
        self._count[slot] = max(count, wanted)
        return True

    def release(self, slot: int) -> None:
        """Frees the pages of a slot that no other holds; does nothing for a slot without pages."""
        if slot not in self._prompts:
            return
        key = self._prompts.pop(slot)
        replica = key[0]
        pages = self.tables[slot, : self._count[slot]].tolist()
        self._holders[replica, pages] -= 1
        self._free[replica] += [page for page in pages if not self._holders[replica, page]]
        shared = self._shared.get(key)
        if shared is not None and not self._holders[replica, shared].any():
            del self._shared[key]
        self.tables[slot], self._count[slot] = NO_OWNER, 0
        self._changed = True

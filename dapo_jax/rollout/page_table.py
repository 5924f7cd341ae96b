"""Host-side page table of the paged cache: maps pages to responses.

Every replica (a part of the slots, with its shard of the batch) has its own pages. Responses to one
prompt that run on a replica share the pages that the prompt fills. The page that holds the end of
the prompt, and the pages after it, belong to one response.
"""

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

NO_OWNER = 0  # the page of each replica that is never allocated
DROPPED = np.iinfo(np.int32).max  # an index past every end


class Fills(NamedTuple):
    """Pages to write: a replica's `page[i]` gets block `block[i]` of prompt `row[i]`."""

    page: Int[Any, "D M"]  # D replicas
    row: Int[Any, "D M"]
    block: Int[Any, "D M"]


@dataclasses.dataclass(frozen=True)
class PageGeometry:
    """Sizes of a paged cache."""

    replicas: int  # number of parts of slots and pages
    pages: int  # pages of one replica, page 0 included
    page_tokens: int  # tokens of a page
    slots: int  # slots of all replicas; the slots of a replica are adjacent
    slot_tokens: int  # maximum tokens of a slot

    @property
    def slots_per_replica(self) -> int:
        return self.slots // self.replicas


class PageTable:
    """Page allocator: the pages of every slot, and the number of slots that hold each page."""

    def __init__(self, geometry: PageGeometry):
        self.geometry = geometry
        columns = -(-geometry.slot_tokens // geometry.page_tokens)
        # [slots, maximum pages of a slot]: a slot's pages in order, then zeros.
        self.tables = np.zeros((geometry.slots, columns), np.int32)
        self.reset()

    def reset(self) -> None:
        """Free every page."""
        replicas, pages = self.geometry.replicas, self.geometry.pages
        self._changed = True
        self.tables[:] = NO_OWNER
        self._count = np.zeros(len(self.tables), np.int64)
        self._holders = np.zeros((replicas, pages), np.int64)
        self._free = [list(range(pages - 1, NO_OWNER, -1)) for _ in range(replicas)]
        self._shared: dict[tuple[int, Hashable], list[int]] = {}  # full pages of prompts
        self._prompts: dict[int, tuple[int, Hashable]] = {}
        self._fills: dict[int, list[tuple[int, int]]] = {}  # (page, block of the prompt) by slot

    @property
    def slots(self) -> list[int]:
        """Slots that hold pages, the oldest first."""
        return list(self._prompts)

    def pages_of(self, slot: int) -> list[int]:
        """Return the pages of a slot, numbered within its replica."""
        return self.tables[slot, : self._count[slot]].tolist()

    def changed_tables(self) -> np.ndarray | None:
        """Return a copy of `tables` if they changed since the last call, else None."""
        changed = self._changed
        self._changed = False
        return self.tables.copy() if changed else None

    def replica(self, slot: int) -> int:
        """Return the replica of a slot."""
        return slot // self.geometry.slots_per_replica

    def claim(self, slot: int, tokens: int, prompt: Hashable) -> bool:
        """Allocate the first pages of a response in a slot; return False if too few are free.

        The last of its `tokens` is not cached before the first decode step. Responses that name the
        same prompt share its full pages. A free page is left for every growing response of the
        replica.
        """
        self.release(slot)
        replica = self.replica(slot)
        whole = (tokens - 1) // self.geometry.page_tokens
        shared = self._shared.get((replica, prompt))
        needed = 1 + (whole if shared is None else 0)
        width = self.geometry.slots_per_replica
        counts = self._count[replica * width :][:width]
        needed += np.count_nonzero((counts > 0) & (counts < self.tables.shape[1]))
        if needed > len(self._free[replica]):
            return False
        fills = []
        if shared is None:
            shared = [self._free[replica].pop() for _ in range(whole)]
            self._shared[replica, prompt] = shared
            fills = [(page, block) for block, page in enumerate(shared)]
        own = self._free[replica].pop()
        pages = [*shared, own]
        self._holders[replica, pages] += 1
        self._prompts[slot] = replica, prompt
        self._count[slot] = len(pages)
        self.tables[slot, : len(pages)] = pages
        self._fills[slot] = [*fills, (own, whole)]
        self._changed = True
        return True

    def fills(
        self, slots: Iterable[int], rows: Iterable[int], *, width: int, prompts: int, time: int
    ) -> Fills:
        """Return the unwritten prompt blocks of claimed slots, and mark them as written.

        The result's shape depends only on the maximum slots, prompts and padded length of a call.
        """
        size = min(width, self.geometry.slots_per_replica)
        size += prompts * (time // self.geometry.page_tokens)
        arrays = np.zeros((3, self.geometry.replicas, size), np.int32)
        arrays[0] = DROPPED
        counts = [0] * self.geometry.replicas
        for slot, row in zip(map(int, slots), rows, strict=True):
            replica = self.replica(slot)
            for page, block in self._fills.pop(slot):
                arrays[:, replica, counts[replica]] = page, row, block
                counts[replica] += 1
        return Fills(*arrays)

    def reserve(
        self,
        slots: Sequence[int],
        tokens: Int[np.ndarray, "S"],  # that each slot needs space for
        held: Sequence[int] = (),
    ) -> list[int]:
        """Allocate the pages that slots lack; the youngest lose theirs if too few are free.

        Slots are given the oldest first; those `held` between turns lose their pages first. Return
        the slots that lost their pages, in that order.
        """
        geometry, held, stopped = self.geometry, list(held), []
        reach = np.minimum(tokens, geometry.slot_tokens)
        lacking = -(-reach // geometry.page_tokens) - self._count
        waiting = [slot for slot in slots if lacking[slot] > 0]
        replicas = np.array(waiting, int) // geometry.slots_per_replica
        needed = np.bincount(replicas, lacking[waiting], geometry.replicas)
        if (needed > [len(free) for free in self._free]).any():
            waiting = list(slots)  # any of them may lose its pages
        while waiting:
            slot, replica = waiting[0], self.replica(waiting[0])
            if lacking[slot] <= len(self._free[replica]):
                for place in range(self._count[slot], self._count[slot] + lacking[slot]):
                    self.tables[slot, place] = page = self._free[replica].pop()
                    self._holders[replica, page] += 1
                    self._changed = True
                self._count[slot] += max(0, lacking[slot])
                del waiting[0]
                continue
            others = (s for s in reversed([*waiting, *held]) if self.replica(s) == replica)
            youngest = next(others)
            self.release(youngest)
            (held if youngest in held else waiting).remove(youngest)
            stopped.append(youngest)
        return stopped

    def release(self, slot: int) -> None:
        """Free the pages that only this slot holds; do nothing if it has none."""
        if slot not in self._prompts:
            return
        key = self._prompts.pop(slot)
        replica = key[0]
        pages = self.pages_of(slot)
        self._holders[replica, pages] -= 1
        self._free[replica] += [page for page in pages if not self._holders[replica, page]]
        shared = self._shared.get(key)
        if shared is not None and not self._holders[replica, shared].any():
            del self._shared[key]
        self.tables[slot] = NO_OWNER
        self._count[slot] = 0
        self._changed = True

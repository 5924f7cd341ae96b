"""Which page of the cache belongs to which response: counted on the host, never by a clock.

Every replica (a share of the slots, with its shard of the batch) has pages of its own. The
responses to one prompt that run on a replica share the pages that the prompt fills; the page where
response and prompt meet, and those after it, belong to one response alone.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

NOBODYS = 0  # the page of each replica that is never given away


class Fill(NamedTuple):
    """Into a page of the slot's replica goes a page's worth of a prompt: its `block`-th."""

    page: int
    block: int


@dataclasses.dataclass
class _Shared:
    """Pages that a prompt fills, and how many slots hold them."""

    pages: list[int]
    holders: int = 0


class PageBook:
    """The pages of every slot, with how many hold each.

    Args:
        replicas: shares of slots and of pages.
        pages: of one replica, page 0 included.
        page_tokens: tokens in a page.
        slots: of all replicas; a replica has neighbouring ones.
        slot_tokens: the most that a slot holds.

    Attributes:
        tables: [slots, most pages of a slot] int32, a slot's pages in order, then zeros.
        changed: whether `tables` did since the caller last cleared it.
    """

    def __init__(
        self, *, replicas: int, pages: int, page_tokens: int, slots: int, slot_tokens: int
    ):
        self._pages, self._page_tokens = pages, page_tokens
        self._slots_each, self._slot_tokens = slots // replicas, slot_tokens
        self.tables = np.zeros((slots, -(-slot_tokens // page_tokens)), np.int32)
        self.changed = False
        self._count = np.zeros(slots, np.int64)
        self._holders = np.zeros((replicas, pages), np.int64)
        self._free = [list(range(pages - 1, NOBODYS, -1)) for _ in range(replicas)]
        self._shared: dict[tuple[int, Hashable], _Shared] = {}
        self._prompts: dict[int, tuple[int, Hashable]] = {}

    def replica(self, slot: int) -> int:
        """Whose pages the slot has."""
        return slot // self._slots_each

    @property
    def slots(self) -> list[int]:
        """Those that hold pages, the oldest first."""
        return list(self._prompts)

    def holds(self, slot: int) -> bool:
        """Whether a response has the slot."""
        return slot in self._prompts

    def has_room(self, slot: int, tokens: int, prompt: Hashable) -> bool:
        """Whether a response may start there, and all that grow beside it still get a page more."""
        replica = self.replica(slot)
        first = replica * self._slots_each
        counts = self._count[first : first + self._slots_each]
        growing = np.count_nonzero((counts > 0) & (counts < self.tables.shape[1]))
        return bool(self._needed(replica, tokens, prompt) + growing <= len(self._free[replica]))

    def start(self, slot: int, tokens: int, prompt: Hashable) -> list[Fill]:
        """Gives a response its first pages; returns those whose content is still to be written.

        Args:
            tokens: of the prompt that are in the cache before the first is drawn.
            prompt: responses that say the same one share its full pages.

        Raises ValueError where there are too few pages.
        """
        replica, whole = self.replica(slot), tokens // self._page_tokens
        if self.holds(slot):
            self.release(slot)
        if self._needed(replica, tokens, prompt) > len(self._free[replica]):
            raise ValueError(f"slot {slot}: no pages are left; raise sampler.pages")
        fills = []
        shared = self._shared.get((replica, prompt))
        if shared is None:
            pages = [self._free[replica].pop() for _ in range(whole)]
            shared = self._shared[replica, prompt] = _Shared(pages)
            fills = [Fill(page, block) for block, page in enumerate(pages)]
        own = self._free[replica].pop()
        fills.append(Fill(own, whole))
        pages = [*shared.pages, own]
        shared.holders += 1
        self._holders[replica, pages] += 1
        self._prompts[slot], self._count[slot] = (replica, prompt), len(pages)
        self.tables[slot, : len(pages)] = pages
        self.changed = True
        return fills

    def extend(self, slot: int, tokens: int) -> bool:
        """Gives a slot pages for `tokens` (at most a full slot's); False, and none, if too few."""
        replica, count = self.replica(slot), self._count[slot]
        wanted = -(-min(tokens, self._slot_tokens) // self._page_tokens)
        free = self._free[replica]
        if wanted - count > len(free):
            return False
        for place in range(count, wanted):
            page = free.pop()
            self._holders[replica, page] += 1
            self.tables[slot, place] = page
            self.changed = True
        self._count[slot] = max(count, wanted)
        return True

    def release(self, slot: int) -> None:
        """Takes the pages back that nobody else holds; a slot that holds none stays as it is."""
        if not self.holds(slot):
            return
        key = self._prompts.pop(slot)
        replica, count = key[0], self._count[slot]
        pages = self.tables[slot, :count].tolist()
        self._holders[replica, pages] -= 1
        self._free[replica] += [page for page in pages if not self._holders[replica, page]]
        shared = self._shared[key]
        shared.holders -= 1
        if not shared.holders:
            del self._shared[key]
        self.tables[slot], self._count[slot] = NOBODYS, 0
        self.changed = True

    def make_room(self, slots: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Extends slots, the oldest first; where pages run out the youngest give theirs back.

        Returns the slots that did, youngest first. The oldest of a replica always gets its pages.
        """
        wanted, gave = dict(zip(slots, tokens, strict=True)), []
        while wanted:
            slot = next(iter(wanted))
            if self.extend(slot, wanted[slot]):
                del wanted[slot]
                continue
            replica = self.replica(slot)
            youngest = next(s for s in reversed(wanted) if self.replica(s) == replica)
            self.release(youngest)
            del wanted[youngest]
            gave.append(youngest)
        return gave

    def check(self) -> None:
        """Raises AssertionError unless every page is free or held, and counted right."""
        held = np.zeros_like(self._holders)
        for slot in self._prompts:
            np.add.at(held[self.replica(slot)], self.tables[slot, : self._count[slot]], 1)
        assert (held == self._holders).all()
        assert not held[:, NOBODYS].any()
        for replica, free in enumerate(self._free):
            holding = np.flatnonzero(held[replica]).tolist()
            assert sorted(free + holding) == list(range(1, self._pages)), "lost, or given twice"

    @property
    def free(self) -> int:
        """Pages of all replicas that nobody holds."""
        return sum(map(len, self._free))

    @property
    def held(self) -> int:
        """Pages of all replicas that somebody holds."""
        return int((self._holders > 0).sum())

    def _needed(self, replica: int, tokens: int, prompt: Hashable) -> int:
        shared = (replica, prompt) in self._shared
        return 1 + (0 if shared else tokens // self._page_tokens)

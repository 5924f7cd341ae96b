"""Held trajectories: their slots and caches wait while their environments think."""

import dataclasses
from collections.abc import Iterable

from dapo_jax.rollout.requests import PendingGroup, PendingResponses


@dataclasses.dataclass
class Held:
    """Trajectory whose environment is asked: how it began, and its slot while it has one."""

    begun_as: PendingResponses
    slot: int | None


class HeldTurns:
    """Trajectories that keep their slots between two turns, in the order in which these ended."""

    def __init__(self):
        self._held: dict[tuple[PendingGroup, int], Held] = {}

    @property
    def slots(self) -> list[int]:
        """Slots that are held, the oldest first."""
        return [one.slot for one in self._held.values() if one.slot is not None]

    def hold(self, pending: PendingResponses, sample: int, slot: int) -> None:
        """Holds the slot of a trajectory whose turn ended."""
        self._held[pending.group, sample] = Held(pending, slot)

    def take(self, group: PendingGroup, sample: int) -> Held | None:
        """Takes a trajectory out; None where it was not drawn here."""
        return self._held.pop((group, sample), None)

    def evict(self, slots: Iterable[int]) -> None:
        """Takes slots away; their trajectories will be prefilled and fed again."""
        lost = set(slots)
        for one in self._held.values():
            if one.slot in lost:
                one.slot = None

    def clear(self) -> None:
        """Forgets all trajectories."""
        self._held.clear()

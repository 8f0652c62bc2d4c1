"""Whether an owner may take another of the places that all owners share.

Dynamic thresholds (Choudhury and Hahne, 1998): an owner may take another place only while it has fewer than are free. One
that asks for all it can get stops at half of them, and whoever comes next finds places; nobody has to be known in
advance, and no place is kept empty for somebody in particular. What a place is, and for how long, is the caller's.
"""

from __future__ import annotations

import enum
from typing import Final

from cached.keys import OwnerId

ALPHA: Final = 1
"""How many places an owner may have for each that is free. Larger: a lone owner gets more, a newcomer finds fewer."""


class Verdict(enum.Enum):
    """What an owner that asks for a place is told."""

    MAY_TAKE = "may take"
    OWN_SHARE_TAKEN = "own share taken"
    ALL_TAKEN = "all taken"


class FairPlaces:
    """Places taken, by owner; an owner without one is not remembered."""

    def __init__(self) -> None:
        self._taken_by: dict[OwnerId, int] = {}
        self._num_taken = 0

    def __len__(self) -> int:
        return self._num_taken

    @property
    def num_owners(self) -> int:
        """Owners that have a place."""
        return len(self._taken_by)

    def count_of(self, owner: OwnerId) -> int:
        """Places that an owner has."""
        return self._taken_by.get(owner, 0)

    def judge(self, owner: OwnerId, capacity: int) -> Verdict:
        """Whether an owner may take one more of `capacity` places."""
        free = capacity - self._num_taken
        if free <= 0:
            return Verdict.ALL_TAKEN
        return Verdict.MAY_TAKE if self.count_of(owner) < ALPHA * free else Verdict.OWN_SHARE_TAKEN

    def take(self, owner: OwnerId) -> None:
        """A place is the owner's, judged or not: one that was preempted comes back whatever the verdict."""
        self._taken_by[owner] = self.count_of(owner) + 1
        self._num_taken += 1

    def give_back(self, owner: OwnerId) -> None:
        """A place that the owner had is free."""
        left = self._taken_by[owner] - 1
        if left:
            self._taken_by[owner] = left
        else:
            del self._taken_by[owner]
        self._num_taken -= 1

    def check_invariants(self) -> None:
        assert all(count > 0 for count in self._taken_by.values())
        assert sum(self._taken_by.values()) == self._num_taken

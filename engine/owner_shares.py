"""How many blocks each owner has on the device, and how many are its share (kv-semantics 4.3).

Which block goes is the eviction order's; who is charged for which block is told by the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cached.keys import OwnerId
from engine.interning import InternTable


@dataclass(frozen=True, slots=True)
class Claim:
    """One allocation, seen by the choice between owners. Weights are those of its beginning; counts go on changing."""

    held_by: Mapping[int, int]
    owner: int
    allocating: int
    weights: Mapping[int, float]
    blocks_per_weight: float

    @property
    def has_rivals(self) -> bool:
        """Whether more than one owner holds or is allocating blocks."""
        return len(self.weights) > 1

    def held(self, owner: int) -> int:
        """Blocks of an owner; what is being allocated counts as its owner's."""
        return self.held_by.get(owner, 0) + (self.allocating if owner == self.owner else 0)

    def share(self, owner: int) -> float:
        """The blocks an owner may have before it gives first."""
        return self.weights[owner] * self.blocks_per_weight


class OwnerShares:
    """Counts by owner. An owner's number in the table lives as long as it has a block."""

    def __init__(self, num_blocks: int, owners: InternTable) -> None:
        self._num_blocks = num_blocks
        self._owners = owners
        self._held_by: dict[int, int] = {}
        self._weights: dict[OwnerId, float] = {}

    @property
    def held_by(self) -> Mapping[int, int]:
        """Blocks by owner; owners without a block are not in it."""
        return self._held_by

    def set_weights(self, weights: Mapping[OwnerId, float]) -> None:
        """Weights of owners; one that is not named has 1."""
        self._weights = dict(weights)

    def charge(self, owner: int, count: int) -> None:
        """So many blocks more (or fewer) are the owner's."""
        if not count:
            return
        before = self._held_by.get(owner, 0)
        after = before + count
        if after:
            self._held_by[owner] = after
        else:
            del self._held_by[owner]
        if after and not before:
            self._owners.acquire_index(owner)
        elif before and not after:
            self._owners.release(owner)

    def claim(self, owner: int, allocating: int) -> Claim:
        """`owner` wants so many blocks: what that means for everybody's share."""
        weights = {index: self._weight(index) for index in {*self._held_by, owner}}
        return Claim(self._held_by, owner, allocating, weights, self._num_blocks / sum(weights.values()))

    def _weight(self, owner: int) -> float:
        return self._weights.get(OwnerId(self._owners.value(owner)), 1.0) if self._weights else 1.0

"""Which block leaves a tier next: the one order that the device pool and the host tier share (kv-semantics §4, 5.3, 5.9).

`EvictionOrder` keeps the idle leaves of a tier, by owner, in the order of rule 4.2; who is an idle leaf is decided by
the tier that owns the blocks. `device_victim` decides between owners and changes nothing; on the host `givers` does.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable

_TICK_BITS = 56
_BLOCK_BITS = 32
_DEPTH_BITS = 32
_RANK_SHIFT = _DEPTH_BITS + _BLOCK_BITS
_PRIORITY_SHIFT = _RANK_SHIFT + _TICK_BITS
_MAX_DEPTH = (1 << _DEPTH_BITS) - 1
_BLOCK_MASK = (1 << _BLOCK_BITS) - 1
_TICK_MASK = (1 << _TICK_BITS) - 1
_ABSENT = -1
_SLACK = 64
"""Outdated heap entries that are tolerated beyond as many as there are live ones."""


def rank_of(priority: int, tick: int) -> int:
    """Priority and recency as one number: of two blocks with different ranks the one with the smaller goes first."""
    return priority << _TICK_BITS | tick


def place_of(rank: int, depth: int, block: int) -> int:
    """Where a block stands in the order, as one number: the smallest goes first. No two blocks have the same."""
    return rank << _RANK_SHIFT | (_MAX_DEPTH - depth) << _BLOCK_BITS | block


def rank_at(place: int) -> int:
    """The rank of the block that stands at `place`."""
    return place >> _RANK_SHIFT


def priority_at(place: int) -> int:
    """The priority of the block that stands at `place`."""
    return place >> _PRIORITY_SHIFT


def block_at(place: int) -> int:
    """The block that stands at `place`."""
    return place & _BLOCK_MASK


class EvictionOrder:
    """Idle leaves by owner, then `(priority, tick, deepest first)`.

    Two columns indexed by block, and per owner a heap of places. Removal is lazy: an entry of a heap counts only while it
    is the very object in the block's column, and a heap is rebuilt when most of it is outdated, so every operation is
    O(log n) amortised. `changed` has the owners whose leaves are others than when somebody last cleared it.
    """

    def __init__(self, capacity: int, changed: set[int] | None = None) -> None:
        self.changed: set[int] = set() if changed is None else changed
        self._owner = array("i", [_ABSENT]) * capacity
        self._place: list[int | None] = [None] * capacity  # None: not in the order
        self._heaps: dict[int, list[int]] = {}
        self._counts: dict[int, int] = {}
        self._length = 0

    def add(self, block: int, owner: int, priority: int, tick: int, depth: int) -> None:
        """Make `block` evictable; a block already in the order moves to its new place."""
        # `place_of(rank_of(priority, tick), depth, block)`, written out: every eviction from a full tier adds a leaf.
        place = (priority << _TICK_BITS | tick) << _RANK_SHIFT | (_MAX_DEPTH - depth) << _BLOCK_BITS | block
        places = self._place
        former = places[block]
        if former is not None:
            if former == place and self._owner[block] == owner:
                return
            self.discard(block)
        places[block] = place
        self._owner[block] = owner
        self._length += 1
        self.changed.add(owner)
        heap = self._heaps.get(owner)
        if heap is None:
            self._counts[owner] = 1
            self._heaps[owner] = [place]
            return
        self._counts[owner] = count = self._counts[owner] + 1
        if places[heap[0] & _BLOCK_MASK] is not heap[0]:
            heapq.heapreplace(heap, place)  # The first is outdated, as after an eviction: one sift instead of two.
            return
        heapq.heappush(heap, place)
        if len(heap) > 2 * count + _SLACK:
            self._rebuild(owner)

    def discard(self, block: int) -> None:
        """Take `block` out of the order; nothing happens when it is not in it."""
        if self._place[block] is None:
            return
        self._place[block] = None
        owner = self._owner[block]
        self._length -= 1
        self.changed.add(owner)
        left = self._counts[owner] - 1
        if left:
            self._counts[owner] = left
        else:
            del self._counts[owner]
            del self._heaps[owner]

    def __contains__(self, block: int) -> bool:
        return self._place[block] is not None

    def __len__(self) -> int:
        return self._length

    def owners(self) -> Iterable[int]:
        """Owners that have at least one evictable leaf."""
        return self._counts.keys()

    def count_of(self, owner: int) -> int:
        """How many evictable leaves `owner` has."""
        return self._counts.get(owner, 0)

    def owner_of(self, block: int) -> int:
        """Whose leaf it is. Only for blocks in the order."""
        return self._owner[block]

    def key_of(self, block: int) -> tuple[int, int, int]:
        """`(priority, tick, -depth)`: the smaller, the sooner it goes. Only for blocks in the order."""
        place = self._place[block]
        assert place is not None
        rank = place >> _RANK_SHIFT
        return rank >> _TICK_BITS, rank & _TICK_MASK, (place >> _BLOCK_BITS & _MAX_DEPTH) - _MAX_DEPTH

    def least_valuable(self, owner: int | None = None, max_priority: int | None = None) -> int | None:
        """The leaf that goes first, of one owner or of all; None when there is none at or below `max_priority`."""
        place = self.first_place(owner)
        if place is None or (max_priority is not None and place >> _PRIORITY_SHIFT > max_priority):
            return None
        return place & _BLOCK_MASK

    def first_place(self, owner: int | None = None) -> int | None:
        """The place of the leaf that goes first, of one owner or of all."""
        if owner is None:
            return min(map(self._top, self._counts), default=None)
        heap = self._heaps.get(owner)
        if heap is None:
            return None
        place = heap[0]
        return place if self._place[place & _BLOCK_MASK] is place else self._top(owner)

    def are_all_of(self, owner: int) -> bool:
        """Whether nobody else has anything to give."""
        return self._counts.get(owner, 0) == self._length

    def check_invariants(self) -> None:
        """Raise AssertionError when columns, counts and heaps disagree; slow."""
        present = [block for block, place in enumerate(self._place) if place is not None]
        assert len(present) == self._length == sum(self._counts.values())
        assert self._heaps.keys() == self._counts.keys()
        for owner, heap in self._heaps.items():
            mine = {id(self._place[block]) for block in present if self._owner[block] == owner}
            assert len(mine) == self._counts[owner]
            assert mine <= set(map(id, heap)), f"owner {owner} lacks a live entry"
            assert all(self._place[block] & _BLOCK_MASK == block for block in present)  # type: ignore[operator]

    def _top(self, owner: int) -> int:
        """The first live place of an owner that has one; outdated ones before it are dropped."""
        heap = self._heaps[owner]
        places = self._place
        while True:
            place = heap[0]
            if places[place & _BLOCK_MASK] is place:
                return place
            heapq.heappop(heap)

    def _rebuild(self, owner: int) -> None:
        places = self._place
        fresh = [place for place in self._heaps[owner] if places[place & _BLOCK_MASK] is place]
        heapq.heapify(fresh)
        self._heaps[owner] = fresh


def device_giver(
    order: EvictionOrder, held: Callable[[int], int], share: Callable[[int], float]
) -> tuple[int | None, float]:
    """Which owner gives on the device (kv-semantics 4.3), and for how long: while its excess is above the second value.

    The one furthest above its share, ties by 4.2; None when nobody is above: then the least valuable leaf of all goes.
    `held(owner)` counts blocks held and being allocated, `share(owner)` is in blocks.
    """
    best: int | None = None
    excess = rest = 0.0
    for owner in order.owners():
        this = held(owner) - share(owner)
        if this < excess or this <= 0:
            rest = max(rest, this)
        elif best is None or this > excess or _goes_before(order, owner, best):
            best, excess, rest = owner, this, excess
        else:
            rest = this
    return best, rest


def device_victim(order: EvictionOrder, held: Callable[[int], int], share: Callable[[int], float]) -> int | None:
    """The device block to evict: the first of the owner that gives. None when nothing is evictable."""
    giver, _ = device_giver(order, held, share)
    return order.least_valuable(giver)


def _goes_before(order: EvictionOrder, owner: int, other: int) -> bool:
    """Whether the first leaf of `owner` goes before that of `other`; both have one."""
    mine, theirs = order.first_place(owner), order.first_place(other)
    return theirs is None or (mine is not None and mine < theirs)

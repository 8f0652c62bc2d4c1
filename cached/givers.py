"""Which owner gives up a block of the host tier to a newcomer (kv-semantics 4.3, 5.3, 5.9), in O(log n) for any number of them.

Floors come before priorities. Which of an owner's blocks goes first is the eviction order's to say, whether anything has to
go the store's.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from cached.eviction import EvictionOrder, block_at, priority_at
from cached.retention import MAX_PRIORITY

_SLACK = 64
"""Outdated heap entries that are tolerated beyond as many as there are owners."""

_Standing = tuple[int, int, int]
"""How far an owner is above its floor, negative; the place of its first leaf; its number: the smallest gives first."""


class Givers:
    """Owners with an idle leaf, and those above their floors among them in the order in which they give, by the priority of
    their first leaf.

    `order`, `held` and `floors` are others' and are only read. Whoever changes what they say of an owner puts it into
    `changed`; it is looked at again before the next question. An entry of a heap counts only while it is the very object in
    `_standings`.
    """

    def __init__(self, order: EvictionOrder, held: Sequence[int], floors: Sequence[int], changed: set[int]) -> None:
        self._order = order
        self._held = held
        self._floors = floors
        self._changed = changed
        self._standings: dict[int, _Standing] = {}
        self._heaps: dict[int, list[_Standing]] = {}
        self._level: dict[int, int] = {}
        self._num_at_level = [0] * (MAX_PRIORITY + 1)

    def victim(self, newcomer: int, priority: int, at_ceiling: bool = False) -> int | None:
        """The block that makes room for one of owner `newcomer`, who has been counted for it; None: it is refused.

        Below its floor `newcomer` may take from owners above theirs whatever the priority; otherwise only blocks of lower
        or equal priority go. Nothing at or below its floor gives, but to its own newcomers.
        """
        if at_ceiling or self._order.are_all_of(newcomer):
            return self._order.least_valuable(newcomer, priority)
        self._refresh()
        is_entitled = self._held[newcomer] <= self._floors[newcomer]
        best: _Standing | None = None
        for level in list(self._heaps):
            if level <= priority or is_entitled:
                first = self._first(level, spared=newcomer if level > priority else None)
                if first is not None and (best is None or first < best):
                    best = first
        return block_at(best[1]) if best is not None else self._order.least_valuable(newcomer, priority)

    def are_others_guarded(self, newcomer: int, priority: int) -> bool:
        """Whether something would go for a newcomer that was refused but for its owner's floor: whatever may go of somebody
        above it would have been the victim."""
        self._refresh()
        is_entitled = self._held[newcomer] <= self._floors[newcomer]
        limit = MAX_PRIORITY if is_entitled else priority
        own = self._level.get(newcomer, MAX_PRIORITY + 1) <= limit
        return sum(self._num_at_level[: limit + 1]) > own

    def check_invariants(self) -> None:
        """Raise AssertionError when an owner's standing is not what order, held and floors say; slow."""
        self._refresh()
        levels = {owner: priority_at(self._place(owner)) for owner in self._order.owners()}
        assert levels == self._level
        assert self._num_at_level == [list(levels.values()).count(level) for level in range(MAX_PRIORITY + 1)]
        excess = {owner: self._held[owner] - self._floors[owner] for owner in levels}
        above = {owner: (-excess[owner], self._place(owner), owner) for owner in levels if excess[owner] > 0}
        assert above == self._standings
        entries = {id(entry) for heap in self._heaps.values() for entry in heap}
        assert {id(entry) for entry in self._standings.values()} <= entries

    def _refresh(self) -> None:
        for owner in self._changed:
            self._look_at(owner)
        self._changed.clear()

    def _look_at(self, owner: int) -> None:
        place = self._order.first_place(owner)
        excess = self._held[owner] - self._floors[owner]
        former = self._standings.get(owner)
        level = None if place is None else priority_at(place)
        if level != self._level.get(owner):
            self._count(owner, level)
        if place is None or level is None or excess <= 0:
            if former is not None:
                del self._standings[owner]
            return
        standing = (-excess, place, owner)
        if standing == former:
            return
        self._standings[owner] = standing
        heap = self._heaps.get(level)
        if heap is None:
            self._heaps[level] = [standing]
        elif heap[0] is former:
            heapq.heapreplace(heap, standing)  # Whoever gave last, mostly.
        else:
            heapq.heappush(heap, standing)
            if len(heap) > 2 * len(self._standings) + _SLACK:
                heap[:] = [each for each in heap if self._standings.get(each[2]) is each]
                heapq.heapify(heap)

    def _count(self, owner: int, level: int | None) -> None:
        """The first leaf of an owner has this priority now; None: it has none."""
        former = self._level.pop(owner, None)
        if former is not None:
            self._num_at_level[former] -= 1
        if level is not None:
            self._num_at_level[level] += 1
            self._level[owner] = level

    def _first(self, level: int, spared: int | None) -> _Standing | None:
        """Who gives first of those whose first leaf has this priority, but for `spared`."""
        heap = self._heaps[level]
        while heap:
            first = heap[0]
            if self._standings.get(first[2]) is not first:
                heapq.heappop(heap)
            elif first[2] == spared:
                heapq.heappop(heap)
                second = self._first(level, None)
                heapq.heappush(self._heaps.setdefault(level, heap), first)
                return second
            else:
                return first
        del self._heaps[level]
        return None

    def _place(self, owner: int) -> int:
        place = self._order.first_place(owner)
        assert place is not None
        return place

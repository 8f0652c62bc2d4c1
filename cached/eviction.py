"""Which block leaves a tier next: the one order that the device pool and the host tier share (kv-semantics §4, 5.3, 5.9).

`EvictionOrder` keeps the idle leaves of a tier, by owner, in the order of rule 4.2; who is an idle leaf is decided by
the tier that owns the blocks. `device_victim` and `host_victim` decide between owners and change nothing.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable

_TICK_BITS = 56
_DEPTH_BITS = 32
_BLOCK_BITS = 32
_KEY_BITS = _DEPTH_BITS + _BLOCK_BITS
_MAX_DEPTH = (1 << _DEPTH_BITS) - 1
_MAX_TICK = (1 << _TICK_BITS) - 1
_MAX_BLOCK = (1 << _BLOCK_BITS) - 1
_ABSENT = -1
_SLACK = 64
"""Outdated heap entries that are tolerated beyond as many as there are live ones."""


class EvictionOrder:
    """Idle leaves by owner, then `(priority, tick, deepest first)`.

    Per owner a heap of packed integers, and a column with each block's own entry, the very object that is in the heap.
    Removal is lazy: an entry counts only while it is its block's, and a heap is rebuilt when most of it is outdated,
    so every operation is O(log n) amortised.
    """

    def __init__(self, capacity: int) -> None:
        self._entry: list[int] = [_ABSENT] * capacity
        self._owner = array("i", [_ABSENT]) * capacity  # of blocks in the order
        self._heaps: dict[int, list[int]] = {}
        self._counts: dict[int, int] = {}
        self._length = 0

    def add(self, block: int, owner: int, priority: int, tick: int, depth: int) -> None:
        """Make `block` evictable; a block already in the order moves to its new place."""
        if self._entry[block] != _ABSENT:
            self.discard(block)
        # One integer that sorts as rule 4.2 does; two halves, since operations on long integers are what this costs.
        entry = (priority << _TICK_BITS | tick) << _KEY_BITS | ((_MAX_DEPTH - depth) << _BLOCK_BITS | block)
        self._entry[block] = entry
        self._owner[block] = owner
        self._length += 1
        heap = self._heaps.get(owner)
        if heap is None:
            self._heaps[owner] = [entry]
            self._counts[owner] = 1
            return
        self._counts[owner] += 1
        heapq.heappush(heap, entry)
        if len(heap) > 2 * self._counts[owner] + _SLACK:
            self._rebuild(owner)

    def discard(self, block: int) -> None:
        """Take `block` out of the order; nothing happens when it is not in it."""
        entry = self._entry[block]
        if entry == _ABSENT:
            return
        self._entry[block] = _ABSENT
        self._length -= 1
        owner = self._owner[block]
        left = self._counts[owner] - 1
        if not left:
            del self._counts[owner]
            del self._heaps[owner]
            return
        self._counts[owner] = left
        heap = self._heaps[owner]
        if heap[0] is entry:  # The usual case, eviction: what goes is what `least_valuable` has just named.
            heapq.heappop(heap)

    def __contains__(self, block: int) -> bool:
        return self._entry[block] != _ABSENT

    def __len__(self) -> int:
        return self._length

    def owners(self) -> Iterable[int]:
        """Owners that have at least one evictable leaf."""
        return self._counts.keys()

    def count_of(self, owner: int) -> int:
        """How many evictable leaves `owner` has."""
        return self._counts.get(owner, 0)

    def key_of(self, block: int) -> tuple[int, int, int]:
        """`(priority, tick, -depth)`: the smaller, the sooner it goes. Only for blocks in the order."""
        value, place = divmod(self._entry[block], 1 << _KEY_BITS)
        return value >> _TICK_BITS, value & _MAX_TICK, (place >> _BLOCK_BITS) - _MAX_DEPTH

    def least_valuable(self, owner: int | None = None, max_priority: int | None = None) -> int | None:
        """The leaf that goes first, of one owner or of all; None when there is none at or below `max_priority`."""
        if owner is None:
            top = min(map(self._top, self._counts), default=_ABSENT)
        else:
            top = self._top(owner) if owner in self._counts else _ABSENT
        if top == _ABSENT or (max_priority is not None and top >> _TICK_BITS + _KEY_BITS > max_priority):
            return None
        return top & _MAX_BLOCK

    def check_invariants(self) -> None:
        """Raise AssertionError when columns, counts and heaps disagree; slow."""
        present = [block for block, entry in enumerate(self._entry) if entry != _ABSENT]
        assert len(present) == self._length == sum(self._counts.values())
        assert self._heaps.keys() == self._counts.keys()
        for owner, heap in self._heaps.items():
            mine = {self._entry[block] for block in present if self._owner[block] == owner}
            assert len(mine) == self._counts[owner]
            assert mine <= set(heap), f"owner {owner} lacks a live entry"
        assert all(self._entry[block] & _MAX_BLOCK == block for block in present)

    def _top(self, owner: int) -> int:
        """The smallest entry of an owner that has one; outdated ones above it go."""
        heap, entry = self._heaps[owner], self._entry
        while entry[heap[0] & _MAX_BLOCK] is not heap[0]:
            heapq.heappop(heap)
        return heap[0]

    def _rebuild(self, owner: int) -> None:
        entry = self._entry
        fresh = [each for each in self._heaps[owner] if entry[each & _MAX_BLOCK] is each]
        heapq.heapify(fresh)
        self._heaps[owner] = fresh


def device_victim(order: EvictionOrder, held: Callable[[int], int], share: Callable[[int], float]) -> int | None:
    """The device block to evict (kv-semantics 4.3): of the owner furthest above its share, else the least valuable.

    `held(owner)` counts blocks held and being allocated, `share(owner)` is in blocks. None when nothing is evictable.
    """
    giver = _furthest_above(order, held, share, order.least_valuable)
    return giver if giver is not None else order.least_valuable()


def host_victim(
    order: EvictionOrder,
    held: Callable[[int], int],
    floor: Callable[[int], float],
    newcomer: int,
    newcomer_priority: int,
    at_ceiling: bool = False,
) -> int | None:
    """The host block that makes room for a block of owner `newcomer`, or None: the newcomer is refused.

    Floors come before priorities (5.9): below its floor, `newcomer` may take from owners above theirs whatever the
    priority; otherwise only blocks of lower or equal priority go (5.3). Nothing at or below its floor gives, but to its
    own newcomers. `held` counts what is being allocated, too.
    """
    own = order.least_valuable(newcomer, newcomer_priority)
    if at_ceiling:
        return own
    entitled = held(newcomer) <= floor(newcomer)

    def allowed(owner: int) -> int | None:
        limit = None if entitled and owner != newcomer else newcomer_priority
        return order.least_valuable(owner, limit)

    giver = _furthest_above(order, held, floor, allowed)
    return giver if giver is not None else own


def _furthest_above(
    order: EvictionOrder,
    held: Callable[[int], int],
    share: Callable[[int], float],
    leaf: Callable[[int], int | None],
) -> int | None:
    best: int | None = None
    best_excess = 0.0
    for owner in list(order.owners()):
        excess = held(owner) - share(owner)
        if excess <= 0 or excess < best_excess:
            continue
        block = leaf(owner)
        if block is None:
            continue
        if best is None or excess > best_excess or order.key_of(block) < order.key_of(best):
            best, best_excess = block, excess
    return best

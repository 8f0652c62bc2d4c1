"""Which block leaves a tier next: the one order that the device pool and the host tier share (kv-semantics §4, 5.3, 5.9).

`EvictionOrder` keeps the idle leaves of a tier, by owner, in the order of rule 4.2; who is an idle leaf is decided by
the tier that owns the blocks. `device_victim` and `host_victim` decide between owners and change nothing.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable

_DEPTH_BITS = 32
_BLOCK_BITS = 32
_TICK_BITS = 56
_MAX_DEPTH = (1 << _DEPTH_BITS) - 1
_ABSENT = -1
_SLACK = 64
"""Outdated heap entries that are tolerated beyond as many as there are live ones."""


class EvictionOrder:
    """Idle leaves by owner, then `(priority, tick, deepest first)`.

    Columns indexed by block, and per owner a heap of packed integers. Removal is lazy: an entry counts only while it
    equals the block's column, and a heap is rebuilt when most of it is outdated, so every operation is O(log n)
    amortised.
    """

    def __init__(self, capacity: int) -> None:
        self._owner = array("i", [_ABSENT]) * capacity
        self._priority = array("b", [0]) * capacity
        self._tick = array("Q", [0]) * capacity
        self._depth = array("I", [0]) * capacity
        self._heaps: dict[int, list[int]] = {}
        self._counts: dict[int, int] = {}
        self._length = 0

    def add(self, block: int, owner: int, priority: int, tick: int, depth: int) -> None:
        """Make `block` evictable; a block already in the order moves to its new place."""
        self.discard(block)
        self._owner[block] = owner
        self._priority[block] = priority
        self._tick[block] = tick
        self._depth[block] = depth
        heap = self._heaps.setdefault(owner, [])
        self._counts[owner] = self._counts.get(owner, 0) + 1
        self._length += 1
        heapq.heappush(heap, self._entry(block))
        if len(heap) > 2 * self._counts[owner] + _SLACK:
            self._rebuild(owner)

    def discard(self, block: int) -> None:
        """Take `block` out of the order; nothing happens when it is not in it."""
        owner = self._owner[block]
        if owner == _ABSENT:
            return
        self._owner[block] = _ABSENT
        self._length -= 1
        left = self._counts[owner] - 1
        if left:
            self._counts[owner] = left
        else:
            del self._counts[owner]
            del self._heaps[owner]

    def __contains__(self, block: int) -> bool:
        return self._owner[block] != _ABSENT

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
        return self._priority[block], self._tick[block], -self._depth[block]

    def least_valuable(self, owner: int | None = None, max_priority: int | None = None) -> int | None:
        """The leaf that goes first, of one owner or of all; None when there is none at or below `max_priority`."""
        if owner is None:
            tops = [top for each in list(self._counts) if (top := self._top(each)) is not None]
            block = min(tops, key=self.key_of) if tops else None
        else:
            block = self._top(owner)
        if block is None or (max_priority is not None and self._priority[block] > max_priority):
            return None
        return block

    def check_invariants(self) -> None:
        """Raise AssertionError when columns, counts and heaps disagree; slow."""
        present = [block for block, owner in enumerate(self._owner) if owner != _ABSENT]
        assert len(present) == self._length == sum(self._counts.values())
        for owner, heap in self._heaps.items():
            mine = {self._entry(block) for block in present if self._owner[block] == owner}
            assert len(mine) == self._counts[owner]
            assert mine <= set(heap), f"owner {owner} lacks a live entry"

    def _top(self, owner: int) -> int | None:
        heap = self._heaps.get(owner)
        while heap:
            block = heap[0] & ((1 << _BLOCK_BITS) - 1)
            if self._owner[block] == owner and heap[0] == self._entry(block):
                return block
            heapq.heappop(heap)
        return None

    def _entry(self, block: int) -> int:
        key = self._priority[block] << _TICK_BITS | self._tick[block]
        key = key << _DEPTH_BITS | (_MAX_DEPTH - self._depth[block])
        return key << _BLOCK_BITS | block

    def _rebuild(self, owner: int) -> None:
        mask = (1 << _BLOCK_BITS) - 1
        live = {entry for entry in self._heaps[owner] if self._is_live(entry, entry & mask, owner)}
        fresh = list(live)
        heapq.heapify(fresh)
        self._heaps[owner] = fresh

    def _is_live(self, entry: int, block: int, owner: int) -> bool:
        return self._owner[block] == owner and entry == self._entry(block)


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

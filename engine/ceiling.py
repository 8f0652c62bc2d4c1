"""What a cache that knew the future would serve: the ceiling beside which policies are read.

Prefix-aware Belady: of the blocks that the present request does not use, the one whose next use lies furthest ahead
goes, and of equals the deepest. A block's parent is used whenever the block is, so its next use is never later, and
dependents go first by themselves. No policy can be built like this; nothing here is used to serve.

A trace is kept as block numbers, 4 bytes for each reference and 4 for its next one, and the name of each different block.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence

from cached.keys import BlockHash
from engine.errors import TraceError

MAX_DISTINCT_BLOCKS = 1 << 24
"""Whoever keeps the names of all blocks of a trace needs some 150 bytes for each: with this many 2.5 GB."""
_NEVER = (1 << 32) - 1


def check_distinct(count: int, why: str) -> None:
    """Raises TraceError, with `why` and what to do, where a trace has more different blocks than are kept."""
    if count > MAX_DISTINCT_BLOCKS:
        raise TraceError(f"the trace has more than {MAX_DISTINCT_BLOCKS:,} different blocks, {why}")


class Ceiling:
    """The references of a trace, and what a pool of `capacity` blocks could have served of them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._numbers: dict[BlockHash, int] = {}
        self._blocks = array("I")
        self._ends = array("Q")
        self._servable = array("I")
        self._needed = array("I")

    @property
    def num_distinct(self) -> int:
        """Different blocks in the trace."""
        return len(self._numbers)

    def take(self, hashes: Sequence[BlockHash], servable: int, needed: int) -> None:
        """The next request's full blocks; `servable` of them may come from a cache (kv-semantics 3.1), and `needed` are
        the blocks that the whole prompt takes. Raises TraceError of more different blocks than are kept."""
        self._blocks.extend(self._numbers.setdefault(each, len(self._numbers)) for each in hashes)
        check_distinct(len(self._numbers), "too many for belady, which knows all of them; leave it out of --policy")
        self._ends.append(len(self._blocks))
        self._servable.append(servable)
        self._needed.append(needed)

    def serve(self, trace: Ceiling | None = None) -> tuple[int, int, int]:
        """(blocks served, requests too long for the pool, blocks evicted) over the references that `trace` holds."""
        whole = trace or self
        next_use = whole._next_uses(self.capacity)
        resident: dict[int, int] = {}  # block → the request that uses it next
        heap: list[tuple[int, int, int]] = []
        served = refused = evicted = start = 0
        for end, servable, needed in zip(whole._ends, whole._servable, whole._needed, strict=True):
            blocks = whole._blocks[start:end]
            if needed > self.capacity:
                refused += 1
                start = end
                continue
            found = next((at for at, block in enumerate(blocks) if block not in resident), len(blocks))
            served += min(found, servable)
            using = set(blocks)
            missing = sum(block not in resident for block in using)
            for _ in range(len(resident) + missing - self.capacity):
                evicted += 1
                while True:
                    use, _, block = heapq.heappop(heap)
                    if block not in using and resident.get(block) == -use:
                        break
                del resident[block]
            for depth, block in enumerate(blocks):
                resident[block] = next_use[start + depth]
                heapq.heappush(heap, (-next_use[start + depth], -depth, block))
            start = end
        return served, refused, evicted

    def _next_uses(self, capacity: int) -> array[int]:
        """For each reference, the number of the next request that has the same block and fits the pool."""
        following = array("I", [_NEVER]) * len(self._blocks)
        last = array("I", [_NEVER]) * len(self._numbers)
        end = len(self._blocks)
        for request in range(len(self._ends) - 1, -1, -1):
            start = self._ends[request - 1] if request else 0
            if self._needed[request] > capacity:
                end = start
                continue
            for at in range(start, end):
                following[at] = last[self._blocks[at]]
                last[self._blocks[at]] = request
            end = start
        return following

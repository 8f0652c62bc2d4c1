"""When idle blocks expire: a queue of deadlines (kv-semantics 2.5). What expiry does to a block is the pool's.

An entry counts only while it equals the block's deadline column; it is rebuilt when most of it is outdated, so it holds
at most about twice as many entries as there are deadlines running.
"""

from __future__ import annotations

import heapq
import math
from array import array

NEVER = math.inf
_SLACK = 64


class RetentionClock:
    """One running deadline a block, or none."""

    def __init__(self, num_blocks: int) -> None:
        self._running = array("d", [NEVER]) * num_blocks
        self._heap: list[tuple[float, int]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def start(self, block: int, deadline: float) -> None:
        """Run towards `deadline`; NEVER only stops what ran before."""
        self.stop(block)
        if deadline == NEVER:
            return
        self._running[block] = deadline
        self._length += 1
        heapq.heappush(self._heap, (deadline, block))
        if len(self._heap) > 2 * self._length + _SLACK:
            self._heap = [entry for entry in set(self._heap) if self._running[entry[1]] == entry[0]]
            heapq.heapify(self._heap)

    def stop(self, block: int) -> None:
        """The block is in use again, or gone."""
        if self._running[block] != NEVER:
            self._running[block] = NEVER
            self._length -= 1

    def next_deadline(self) -> float | None:
        """The earliest running deadline."""
        while self._heap:
            deadline, block = self._heap[0]
            if self._running[block] == deadline:
                return deadline
            heapq.heappop(self._heap)
        return None

    def pop_expired(self, now: float) -> int | None:
        """A block whose deadline has come, earliest first; it no longer runs."""
        deadline = self.next_deadline()
        if deadline is None or deadline > now:
            return None
        block = heapq.heappop(self._heap)[1]
        self.stop(block)
        return block

    def is_running(self, block: int) -> bool:
        return self._running[block] != NEVER

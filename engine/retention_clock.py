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
    """One running deadline a block, or none. What begins together and ends together is one entry of the queue."""

    def __init__(self, num_blocks: int) -> None:
        self._running = array("d", [NEVER]) * num_blocks
        self._heap: list[tuple[float, int, list[int]]] = []  # deadline, serial number, blocks
        self._serial = 0
        self._length = 0
        self._num_listed = 0  # blocks in all entries, outdated ones included

    def __len__(self) -> int:
        return self._length

    def start(self, block: int, deadline: float) -> None:
        """Run towards `deadline`; NEVER only stops what ran before."""
        self.start_all([block], deadline)

    def start_all(self, blocks: list[int], deadline: float) -> None:
        """`start` for blocks of one deadline; at expiry the last of them comes first."""
        running = self._running
        for block in blocks:
            if running[block] == NEVER:
                self._length += 1
            running[block] = deadline
        if deadline == NEVER:
            self._length -= len(blocks)
            return
        self._serial += 1
        self._num_listed += len(blocks)
        heapq.heappush(self._heap, (deadline, self._serial, list(blocks)))
        if self._num_listed > 2 * self._length + _SLACK:
            self._rebuild()

    def stop(self, block: int) -> None:
        """The block is in use again, or gone."""
        if self._running[block] != NEVER:
            self._running[block] = NEVER
            self._length -= 1

    def next_deadline(self) -> float | None:
        """The earliest running deadline."""
        while self._heap:
            deadline, _, blocks = self._heap[0]
            while blocks:
                if self._running[blocks[-1]] == deadline:
                    return deadline
                blocks.pop()
                self._num_listed -= 1
            heapq.heappop(self._heap)
        return None

    def pop_expired(self, now: float) -> int | None:
        """A block whose deadline has come, earliest first; it no longer runs."""
        deadline = self.next_deadline()
        if deadline is None or deadline > now:
            return None
        block = self._heap[0][2].pop()
        self._num_listed -= 1
        self.stop(block)
        return block

    def is_running(self, block: int) -> bool:
        return self._running[block] != NEVER

    def _rebuild(self) -> None:
        seen: set[int] = set()  # A block that was stopped and started with the same deadline is listed twice.
        entries: list[tuple[float, int, list[int]]] = []
        for deadline, serial, blocks in self._heap:
            current = [block for block in blocks if self._running[block] == deadline and block not in seen]
            seen.update(current)
            if current:
                entries.append((deadline, serial, current))
        heapq.heapify(entries)
        self._heap = entries
        self._num_listed = sum(len(entry[2]) for entry in entries)

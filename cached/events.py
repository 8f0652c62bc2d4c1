"""The last things that happened to blocks of the tier, numbered, for readers that keep their own cursors (kv-semantics §6).

Remembers a bounded number of them; a reader that fell behind is told so. What is worth an event is the contents' to say,
who reads and when the session's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

STORED = 0
REMOVED = 1
UPDATED = 2


class Happened(NamedTuple):
    """One event: `parent` of zeros for a first block; `old_priority` differs from `priority` in an update only."""

    kind: int
    key: bytes
    parent: bytes
    namespace: int
    owner: bytes
    old_priority: int
    priority: int


EventRow = tuple[int, bytes, bytes, int, bytes, int, int]
"""A `Happened` or a tuple like it: every store makes two, and few are read."""


class Run(NamedTuple):
    """Consecutive events, the first of them numbered `first`; `lost`: some before them were never seen and are gone."""

    first: int
    events: list[Happened]
    lost: bool


class EventRing:
    """The last `capacity` events; numbers begin at 1 and rise by one. A capacity of 0 remembers, and numbers, nothing."""

    def __init__(self, capacity: int) -> None:
        self.last = 0
        self.is_on = capacity > 0
        self._ring: deque[EventRow] = deque(maxlen=capacity)

    def append(self, event: EventRow) -> None:
        """Remember one more; the oldest gives way."""
        if self.is_on:
            self._ring.append(event)
            self.last += 1

    def extend(self, rows: Sequence[EventRow]) -> None:
        """`append` for each."""
        if self.is_on:
            self._ring.extend(rows)
            self.last += len(rows)

    def after(self, cursor: int, limit: int) -> Run:
        """Up to `limit` events numbered above `cursor`. A cursor from the future, as of a former life, has lost all."""
        oldest = self.last - len(self._ring) + 1
        lost = cursor > self.last or cursor < oldest - 1
        first = oldest if lost else cursor + 1
        rows = islice(self._ring, first - oldest, first - oldest + limit)
        return Run(first, list(map(Happened._make, rows)), lost)

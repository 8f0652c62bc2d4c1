"""Small integers for byte strings that many blocks share (owners, namespaces), so that a column holds four bytes each.

Counts references: a number is given to somebody else once nobody refers to it, so the table is no larger than what
is alive.
"""

from __future__ import annotations

from engine.errors import EngineError


class InternTable:
    """Byte string ↔ small integer, reference counted."""

    def __init__(self) -> None:
        self._index_of: dict[bytes, int] = {}
        self._values: list[bytes] = []
        self._references: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._index_of)

    def acquire(self, value: bytes) -> int:
        """The number of `value`, with one more reference to it."""
        index = self._index_of.get(value)
        if index is None:
            index = self._new_index(value)
            self._index_of[value] = index
        self._references[index] += 1
        return index

    def acquire_index(self, index: int, count: int = 1) -> None:
        """More references to a number that already has one."""
        self._references[index] += count

    def release(self, index: int, count: int = 1) -> None:
        """Take back references; the last one frees the number."""
        left = self._references[index] - count
        if left < 0:
            raise EngineError(f"interned value {index} was released more often than acquired; this is a bug")
        self._references[index] = left
        if left == 0:
            del self._index_of[self._values[index]]
            self._values[index] = b""
            self._free.append(index)

    def find(self, value: bytes) -> int | None:
        """The number of `value`, if anybody refers to it."""
        return self._index_of.get(value)

    def value(self, index: int) -> bytes:
        """The byte string behind a number."""
        return self._values[index]

    def references(self, index: int) -> int:
        """How many references there are; for checks."""
        return self._references[index]

    def _new_index(self, value: bytes) -> int:
        if self._free:
            index = self._free.pop()
            self._values[index] = value
            return index
        self._values.append(value)
        self._references.append(0)
        return len(self._values) - 1

"""The children of one node of the prefix tree, sorted by their tokens (kv-semantics 3.4).

The neighbours of the place where a run of tokens would be inserted share the longest prefix with it, so the longest
child is found by bisection. Keys are not stored: a key function reads them from the tree's column.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator

_MAX_BUCKET = 512


class SortedChildren:
    """Blocks in order of their keys, in buckets so that an insertion moves at most `_MAX_BUCKET` entries."""

    __slots__ = ("_buckets", "_key", "_length")

    def __init__(self, key: Callable[[int], bytes]) -> None:
        self._key = key
        self._buckets: list[list[int]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        for bucket in self._buckets:
            yield from bucket

    def add(self, block: int) -> None:
        """Insert a block behind those with a smaller or equal key."""
        self._length += 1
        if not self._buckets:
            self._buckets.append([block])
            return
        key = self._key(block)
        index = max(0, bisect_right(self._buckets, key, key=self._first_key) - 1)
        bucket = self._buckets[index]
        bucket.insert(bisect_right(bucket, key, key=self._key), block)
        if len(bucket) > _MAX_BUCKET:
            half = len(bucket) // 2
            self._buckets[index : index + 1] = [bucket[:half], bucket[half:]]

    def remove(self, block: int) -> None:
        """Take a block out; its key must still be what it was."""
        key = self._key(block)
        # Equal keys (a partial tail and its twin) may straddle buckets, so the search starts one bucket early.
        index = max(0, bisect_left(self._buckets, key, key=self._first_key) - 1)
        while True:
            bucket = self._buckets[index]
            place = bisect_left(bucket, key, key=self._key)
            while place < len(bucket) and bucket[place] != block and self._key(bucket[place]) == key:
                place += 1
            if place < len(bucket) and bucket[place] == block:
                break
            index += 1
        del bucket[place]
        if not bucket:
            del self._buckets[index]
        self._length -= 1

    def around(self, key: bytes) -> tuple[Iterator[int], Iterator[int]]:
        """Blocks before the place of `key`, nearest first, and those from it on."""
        if not self._buckets:
            return iter(()), iter(())
        index = max(0, bisect_right(self._buckets, key, key=self._first_key) - 1)
        place = bisect_left(self._buckets[index], key, key=self._key)
        return self._before(index, place), self._after(index, place)

    def _before(self, index: int, place: int) -> Iterator[int]:
        while index >= 0:
            bucket = self._buckets[index]
            for position in range(min(place, len(bucket)) - 1, -1, -1):
                yield bucket[position]
            index -= 1
            place = _MAX_BUCKET + 1

    def _after(self, index: int, place: int) -> Iterator[int]:
        while index < len(self._buckets):
            bucket = self._buckets[index]
            for position in range(place, len(bucket)):
                yield bucket[position]
            index += 1
            place = 0

    def _first_key(self, bucket: list[int]) -> bytes:
        return self._key(bucket[0])

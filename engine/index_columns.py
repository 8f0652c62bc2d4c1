"""The index at one moment, copied column by column, and made into rows later and elsewhere.

The step thread copies, which takes milliseconds for a pool of any size; whoever reads (`event_feed.py`, in the event loop)
pays for the rows, some at a time. Reads like a sequence of `SnapshotBlock`, parents before children.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cached.keys import BlockHash, OwnerId
from engine.events import SnapshotBlock


class JoinedRows:
    """The rows of several tiers, one tier after the other, as one sequence."""

    def __init__(self, parts: Sequence[IndexColumns]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __getitem__(self, rows: slice) -> tuple[SnapshotBlock, ...]:
        start, end, _ = rows.indices(len(self))
        found: tuple[SnapshotBlock, ...] = ()
        for part in self._parts:
            found += part[max(start, 0) : max(end, 0)]
            start, end = start - len(part), end - len(part)
        return found


@dataclass(slots=True)
class IndexColumns:
    """One row for each block of the pool; those that are not `is_written` and full are not in the snapshot.

    `tokens` None: token ids are not told. The order is found when the first row is asked for.
    """

    tier: str
    tokens_per_block: int
    hashes: list[BlockHash | None]
    parents: array[int]
    depths: array[int]
    filled: array[int]
    is_written: bytes
    priorities: array[int]
    namespaces: array[int]
    owners: array[int]
    fingerprint_of: Mapping[int, str]
    owner_of: Mapping[int, OwnerId]
    tokens: bytes | None = field(repr=False)
    _order: list[int] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self._blocks())

    def __iter__(self) -> Iterator[SnapshotBlock]:
        return map(self._row, self._blocks())

    def __getitem__(self, rows: slice) -> tuple[SnapshotBlock, ...]:
        return tuple(map(self._row, self._blocks()[rows]))

    def _blocks(self) -> list[int]:
        if self._order is None:
            is_full = np.frombuffer(self.filled, np.uint8) == self.tokens_per_block
            found = np.flatnonzero(is_full & (np.frombuffer(self.is_written, np.uint8) != 0))
            depths = np.frombuffer(self.depths, np.intc)[found]
            self._order = found[np.argsort(depths, kind="stable")].tolist()
        return self._order

    def _row(self, block: int) -> SnapshotBlock:
        block_hash, parent = self.hashes[block], self.parents[block]
        assert block_hash is not None, f"block {block} is full and has no hash"
        return SnapshotBlock(
            block_hash=block_hash,
            parent_hash=self.hashes[parent] if parent >= 0 else None,
            tier=self.tier,
            priority=self.priorities[block],
            namespace_fingerprint=self.fingerprint_of[self.namespaces[block]],
            owner=self.owner_of[self.owners[block]],
            token_ids=self._token_ids(block),
        )

    def _token_ids(self, block: int) -> tuple[int, ...] | None:
        if self.tokens is None:
            return None
        start = 4 * self.tokens_per_block * block
        return tuple(np.frombuffer(self.tokens, "<u4", self.tokens_per_block, start).tolist())

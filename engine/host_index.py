"""What the host tier holds of this engine's blocks, kept up from the daemon's own events and lists (kv-semantics 6).

Decides which engine events follow from what the daemon says. Whatever is repeated, missing or out of order, an event that
leaves here fits those before it: parents are stored before their children, and nothing is removed that is not there. When
to ask the daemon is `host_events.py`'s.

Columns, since there may be a million blocks; one row for each that is known.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from cached.keys import OWNER_BYTES, BlockHash, OwnerId
from cached.protocol import ListedBlock, TierEvent
from engine.event_log import MAX_BLOCKS_PER_EVENT, EventLog
from engine.events import Created, Event
from engine.index_columns import IndexColumns
from engine.interning import InternTable

HOST: Final = "host"
DEVICE: Final = "device"
_NO_ROW: Final = -1


class HostList:
    """A list of the tier's blocks that arrives page by page, by columns."""

    def __init__(self) -> None:
        self._names = InternTable()
        self.hashes: list[bytes] = []
        self.parents: list[bytes | None] = []
        self.priorities = bytearray()
        self._whose = array("i")

    def __len__(self) -> int:
        return len(self.hashes)

    def add(self, blocks: Iterable[ListedBlock]) -> None:
        """Take one more page."""
        for block in blocks:
            self.hashes.append(block.block_hash)
            self.parents.append(block.parent)
            self.priorities.append(block.priority)
            self._whose.append(self._names.acquire(_whose_of(block)))

    def whose(self, at: int) -> bytes:
        """Namespace fingerprint and owner of a block, one after the other."""
        return self._names.value(self._whose[at])


class HostIndex:
    """The blocks that consumers believe to be in the host tier. Owned by one thread, or by whoever holds its lock."""

    def __init__(self, num_device_blocks: int) -> None:
        self._num_device_blocks = num_device_blocks
        self.num_blocks: int | None = None
        self._log = EventLog(HOST, 0)
        self._log.take()  # What there is room for is told when the daemon has said it.
        self._row_of: dict[bytes, int] = {}
        self._hashes: list[BlockHash | None] = []
        self._parents = array("i")
        self._depths = array("i")
        self._num_children = array("i")
        self._is_used = array("B")
        self._priorities = array("B")
        self._whose = array("i")
        self._names = InternTable()
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._row_of

    def apply(self, happened: Sequence[TierEvent]) -> list[Event]:
        """Follow what happened in the tier, oldest first. What is known already changes nothing."""
        run = _Run(self._log)
        for event in happened:
            row = self._row_of.get(event.block_hash)
            if event.kind == "removed":
                if row is not None:
                    run.end()
                    self._remove_tree(row)
            elif row is not None:
                run.end()
                self._update(row, event.priority)
            elif event.kind == "stored":
                self._store(run, event.block_hash, event.parent, event.priority, _whose_of(event))
        run.end()
        return self._log.take()

    def resize(self, num_blocks: int) -> Iterator[list[Event]]:
        """The tier has room for so many blocks: one of another size is another one, and is empty at first."""
        if num_blocks == self.num_blocks:
            return iter(())
        return itertools.chain(self.become(HostList()), self._create(num_blocks))

    def become(self, listed: HostList) -> Iterator[list[Event]]:
        """Turn into what was listed, in steps of bounded work, each of which gives its events. Nothing changes before the
        first step; `apply` has to wait for the last one."""
        at_of = {block_hash: at for at, block_hash in enumerate(listed.hashes)}
        return self._steps(listed, self._rows_gone(listed, at_of), _parents_first(listed, at_of))

    def _steps(self, listed: HostList, gone: list[int], order: list[int]) -> Iterator[list[Event]]:
        for rows in _parts(gone):
            for row in rows:
                self._remove(row)
            yield self._log.take()
        for part in _parts(order):
            run = _Run(self._log)
            for at in part:
                known = self._row_of.get(listed.hashes[at])
                if known is None:
                    self._store(run, listed.hashes[at], listed.parents[at], listed.priorities[at], listed.whose(at))
                else:
                    run.end()
                    self._update(known, listed.priorities[at])
            run.end()
            yield self._log.take()

    def _create(self, num_blocks: int) -> Iterator[list[Event]]:
        self.num_blocks = num_blocks
        yield [Created(((DEVICE, self._num_device_blocks), (HOST, num_blocks)))]

    def columns(self) -> IndexColumns:
        """A copy of everything, for a snapshot."""
        numbers = {number: self._names.value(number) for number in set(self._whose) if number >= 0}
        return IndexColumns(
            tier=HOST,
            tokens_per_block=1,  # A block of the tier is full: one of one.
            hashes=self._hashes.copy(),
            parents=self._parents[:],
            depths=self._depths[:],
            filled=self._is_used[:],
            is_written=self._is_used.tobytes(),
            priorities=self._priorities[:],
            namespaces=self._whose[:],
            owners=self._whose[:],
            fingerprint_of={number: _split(name)[0] for number, name in numbers.items()},
            owner_of={number: _split(name)[1] for number, name in numbers.items()},
            tokens=None,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError for a contradiction; slow."""
        used = [row for row, is_used in enumerate(self._is_used) if is_used]
        assert {self._hashes[row]: row for row in used} == self._row_of
        assert sorted([*used, *self._free]) == list(range(len(self._hashes)))
        for row in used:
            parent = self._parents[row]
            assert parent == _NO_ROW or self._is_used[parent]
            assert self._num_children[row] == sum(self._parents[each] == row for each in used)
            assert self._depths[row] == (0 if parent == _NO_ROW else self._depths[parent] + 1)
        assert len(self._names) == len({self._whose[row] for row in used})

    # A list against what is known.

    def _rows_gone(self, listed: HostList, at_of: dict[bytes, int]) -> list[int]:
        """Rows that the list lacks, or has for somebody else, and those below them; children before their parents."""
        rows = sorted(self._row_of.values(), key=self._depths.__getitem__)
        is_gone = bytearray(len(self._hashes))
        gone = []
        for row in rows:
            parent = self._parents[row]
            at = at_of.get(self._hash(row))
            is_same = at is not None and listed.whose(at) == self._names.value(self._whose[row])
            if not is_same or (parent != _NO_ROW and is_gone[parent]):
                is_gone[row] = 1
                gone.append(row)
        return gone[::-1]

    # Single blocks.

    def _store(self, run: _Run, block_hash: bytes, parent: bytes | None, priority: int, whose: bytes) -> None:
        parent_row = _NO_ROW if parent is None else self._row_of.get(parent)
        if parent_row is None:
            return  # It cannot be reached without its parent; both are told again once that is there.
        row = self._new_row()
        self._row_of[block_hash] = row
        self._hashes[row] = BlockHash(block_hash)
        self._parents[row] = parent_row
        self._depths[row] = 0 if parent_row == _NO_ROW else self._depths[parent_row] + 1
        self._num_children[row] = 0
        if parent_row != _NO_ROW:
            self._num_children[parent_row] += 1
        self._is_used[row] = 1
        self._priorities[row] = priority
        self._whose[row] = self._names.acquire(whose)
        run.add(BlockHash(block_hash), None if parent is None else BlockHash(parent), priority, whose)

    def _update(self, row: int, priority: int) -> None:
        old = self._priorities[row]
        if old != priority:
            self._priorities[row] = priority
            self._log.updated(self._hash(row), old, priority, *_split(self._names.value(self._whose[row])))

    def _remove_tree(self, row: int) -> None:
        """The daemon removes children before their parents; children are left here only by what was not seen in order."""
        found = [row]
        if self._num_children[row]:
            parents = np.array(self._parents)
            level = np.array([row])
            while len(level):  # Rows that are free have no parent.
                level = np.flatnonzero(np.isin(parents, level))
                found.extend(level.tolist())
        for each in reversed(found):
            self._remove(each)

    def _remove(self, row: int) -> None:
        block_hash = self._hash(row)
        self._log.removed((block_hash,), *_split(self._names.value(self._whose[row])))
        self._names.release(self._whose[row])
        del self._row_of[block_hash]
        if self._parents[row] != _NO_ROW:
            self._num_children[self._parents[row]] -= 1
        self._hashes[row] = None
        self._parents[row] = self._whose[row] = _NO_ROW
        self._is_used[row] = 0
        self._free.append(row)

    def _new_row(self) -> int:
        if self._free:
            return self._free.pop()
        self._hashes.append(None)
        for column in (self._parents, self._depths, self._num_children, self._is_used, self._priorities, self._whose):
            column.append(0)
        return len(self._hashes) - 1

    def _hash(self, row: int) -> BlockHash:
        block_hash = self._hashes[row]
        assert block_hash is not None, f"row {row} is in use and has no hash"
        return block_hash


class _Run:
    """Blocks stored one below the other, which are one event."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._first_parent: BlockHash | None = None
        self._hashes: list[BlockHash] = []
        self._priorities: list[int] = []
        self._whose = b""

    def add(self, block_hash: BlockHash, parent: BlockHash | None, priority: int, whose: bytes) -> None:
        """One more block, of the same run where it is the child of the last one."""
        if not self._hashes or parent != self._hashes[-1] or whose != self._whose:
            self.end()
            self._first_parent, self._whose = parent, whose
        self._hashes.append(block_hash)
        self._priorities.append(priority)

    def end(self) -> None:
        """Tell what was gathered."""
        if self._hashes:
            fingerprint, owner = _split(self._whose)
            self._log.stored(self._first_parent, self._hashes, self._priorities, fingerprint, owner, None)
            self._hashes, self._priorities = [], []


def _whose_of(told: TierEvent | ListedBlock) -> bytes:
    return bytes.fromhex(told.namespace_fingerprint) + told.owner


def _split(whose: bytes) -> tuple[str, OwnerId]:
    return whose[:-OWNER_BYTES].hex(), OwnerId(whose[-OWNER_BYTES:])


def _parts(rows: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(rows), MAX_BLOCKS_PER_EVENT):
        yield rows[start : start + MAX_BLOCKS_PER_EVENT]


def _parents_first(listed: HostList, at_of: dict[bytes, int]) -> list[int]:
    """Places in the list, chain by chain. Blocks whose parents it lacks are left out: what became of them, or of their
    parents, while the list was read is told by the events after it."""
    children: dict[int, list[int]] = {}
    todo = []
    for at, parent in enumerate(listed.parents):
        if parent is None:
            todo.append(at)
        elif (place := at_of.get(parent)) is not None:
            children.setdefault(place, []).append(at)
    order = []
    while todo:
        at = todo.pop()
        order.append(at)
        todo.extend(children.get(at, ()))
    return order

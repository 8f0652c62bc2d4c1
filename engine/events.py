"""What happens to the index, as values, and the ring from which any number of consumers read (kv-semantics 6).

An event names blocks by hash and namespaces by fingerprint; never the salt, never the namespace. Consumers hold their
own cursor, so none steals from another; one that fell behind is told `Lost` and asks for a snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from cached.keys import HASH_ALGO, BlockHash, OwnerId


@dataclass(frozen=True, slots=True)
class Created:
    """The pool exists; blocks per tier."""

    blocks: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block that became shareable. `token_ids` only if the engine is configured to tell."""

    block_hash: BlockHash
    tier: str
    priority: int
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """A run of blocks, each the child of the one before; `parent_hash` None for a first block.

    Kept by columns, since a long prompt stores thousands; `blocks` gives the rows that rule 6.1 speaks of.
    """

    parent_hash: BlockHash | None
    block_hashes: tuple[BlockHash, ...]
    priorities: tuple[int, ...]
    tier: str
    namespace_fingerprint: str
    owner: OwnerId
    token_ids: tuple[tuple[int, ...], ...] | None = None

    @property
    def blocks(self) -> tuple[StoredBlock, ...]:
        """The blocks one by one."""
        told = self.token_ids if self.token_ids is not None else (None,) * len(self.block_hashes)
        rows = zip(self.block_hashes, self.priorities, told, strict=True)
        return tuple(StoredBlock(block_hash, self.tier, priority, tokens) for block_hash, priority, tokens in rows)


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that left a tier."""

    block_hashes: tuple[BlockHash, ...]
    tier: str
    namespace_fingerprint: str
    owner: OwnerId


@dataclass(frozen=True, slots=True)
class Updated:
    """A block's priority changed."""

    block_hash: BlockHash
    tier: str
    old_priority: int
    new_priority: int
    namespace_fingerprint: str
    owner: OwnerId


Event = Created | Stored | Removed | Updated


def num_blocks_of(event: Event) -> int:
    """How many blocks an event names."""
    match event:
        case Stored() | Removed():
            return len(event.block_hashes)
        case Updated():
            return 1
        case Created():
            return 0


@dataclass(frozen=True, slots=True)
class SnapshotBlock:
    """One block of the index, as a snapshot has it (kv-semantics 6.3); its parent comes before it."""

    block_hash: BlockHash
    parent_hash: BlockHash | None
    tier: str
    priority: int
    namespace_fingerprint: str
    owner: OwnerId
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class NumberedEvent:
    """An event as a consumer sees it: its number rises by one, its incarnation is new at every engine start."""

    event_id: int
    incarnation: str
    hash_algo: str
    event: Event


@dataclass(frozen=True, slots=True)
class Lost:
    """Events before `next_event_id` are gone for this reader; a snapshot puts it right."""

    next_event_id: int


MAX_BLOCKS_PER_EVENT_KEPT = 32
"""On average: a ring that is full of long runs keeps fewer events, so that its memory has a bound that is no surprise."""


class EventRing:
    """The newest `capacity` events, as long as they name few enough blocks; 0 keeps none."""

    def __init__(self, capacity: int, incarnation: str) -> None:
        self._capacity = capacity
        self._incarnation = incarnation
        self._events: deque[NumberedEvent] = deque()
        self._num_blocks = 0
        self._next_id = 0

    @property
    def next_event_id(self) -> int:
        """The cursor of a reader that has seen everything."""
        return self._next_id

    @property
    def oldest_event_id(self) -> int:
        """The oldest event that is still here; with none here, what the next one will be called."""
        return self._next_id - len(self._events)

    def append(self, events: Iterable[Event]) -> None:
        """Number and keep events; the oldest fall out."""
        if self._capacity == 0:
            return
        for event in events:
            self._events.append(NumberedEvent(self._next_id, self._incarnation, HASH_ALGO, event))
            self._num_blocks += num_blocks_of(event)
            self._next_id += 1
            while len(self._events) > 1 and self._is_over():
                self._num_blocks -= num_blocks_of(self._events.popleft().event)

    def read(self, cursor: int, limit: int) -> list[NumberedEvent] | Lost:
        """At most `limit` events from `cursor` on, or what a reader that fell behind has to know."""
        oldest = self.oldest_event_id
        if cursor < oldest or cursor > self._next_id:
            return Lost(oldest)
        first = cursor - oldest
        return [self._events[index] for index in range(first, min(first + limit, len(self._events)))]

    def _is_over(self) -> bool:
        return len(self._events) > self._capacity or self._num_blocks > MAX_BLOCKS_PER_EVENT_KEPT * self._capacity

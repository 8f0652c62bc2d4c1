"""A consumer's copy of an engine's index: a snapshot, and the events after it (kv-semantics 6.3).

Decides what each message does to the copy, and when the copy can no longer follow and has to be asked for anew; connecting,
and handing in messages, is the shell's. Whatever is lost, repeated, late or of another engine life, the copy is either the
engine's index as it was before event `cursor`, or says that it is not current.

    begin() ──▶ [awaits snapshot] ── last page ──▶ [current] ── event `cursor` ──▶ [current]
                      ▲                               │ gap, loss, another incarnation, an event that does not fit
                      └────────── begin() ─────── [stale]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cached.keys import HASH_ALGO, BlockHash, OwnerId
from engine.event_messages import EventBatch, EventsLost, EventsRefused, SnapshotPage, Subscribed, to_blocks, to_events
from engine.events import Created, Event, Removed, SnapshotBlock, Stored, Updated

Message = Subscribed | EventsRefused | SnapshotPage | EventBatch | EventsLost


@dataclass(frozen=True, slots=True)
class IndexedBlock:
    """What is known of one full block in one tier."""

    parent_hash: BlockHash | None
    priority: int
    namespace_fingerprint: str
    owner: OwnerId


@dataclass(frozen=True, slots=True)
class Subscription:
    """What to ask the engine for. Hand in, under this number, what comes after the `Subscribed` that answers it."""

    number: int
    cursor: int | None
    incarnation: str | None


@dataclass(frozen=True, slots=True)
class Taken:
    """The message is in the copy."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """The message says nothing new: it is of an earlier subscription, or repeats what is known."""


@dataclass(frozen=True, slots=True)
class Stale:
    """The copy cannot follow any more: `begin` anew."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unusable:
    """This engine's events are of no use, however often they are asked for."""

    reason: str


Outcome = Taken | Ignored | Stale | Unusable


class EventIndex:
    """Blocks by tier and hash. `is_current` False: what is there is old, or is not there yet."""

    def __init__(self) -> None:
        self._blocks: dict[str, dict[BlockHash, IndexedBlock]] = {}
        self._incarnation: str | None = None
        self._cursor = 0
        self._is_current = False
        self._number = 0
        self._is_over = True  # nothing more is expected of the newest subscription; else, not current awaits a snapshot
        self._pages: _Pages | None = None

    def __repr__(self) -> str:
        count = sum(map(len, self._blocks.values()))
        return f"EventIndex({count} blocks, {'current' if self._is_current else 'not current'}, cursor {self._cursor})"

    @property
    def is_current(self) -> bool:
        """Whether this is the engine's index as it was before event `cursor`."""
        return self._is_current

    @property
    def cursor(self) -> int:
        """The event that comes next."""
        return self._cursor

    @property
    def incarnation(self) -> str | None:
        """Which life of the engine the copy is of."""
        return self._incarnation

    def blocks(self, tier: str = "device") -> Mapping[BlockHash, IndexedBlock]:
        """The blocks of one tier; a view, not a copy."""
        return MappingProxyType(self._blocks.get(tier, {}))

    def begin(self) -> Subscription:
        """What to ask for now, on a new connection or on the old one: the events that are missing, or a snapshot.

        What earlier subscriptions still have to say is ignored from now on, whenever it comes.
        """
        self._number += 1
        self._pages = None
        self._is_over = False
        if self._is_current:
            return Subscription(self._number, self._cursor, self._incarnation)
        return Subscription(self._number, None, None)

    def receive(self, number: int, message: Message) -> Outcome:
        """Take one message of the subscription `number`; raises WireError for one that is malformed."""
        if number != self._number or self._is_over:
            return Ignored()
        match message:
            case EventsRefused():
                return self._end(Unusable(message.message))
            case Subscribed():
                return self._greet(message)
            case SnapshotPage():
                return self._take_page(message)
            case EventBatch():
                return self._take_events(message)
            case EventsLost():
                return self._take_loss(message)

    def check_invariants(self) -> None:
        """Raise AssertionError where a block's parent is missing; slow."""
        for blocks in self._blocks.values():
            for block in blocks.values():
                assert block.parent_hash is None or block.parent_hash in blocks
        assert self._incarnation is not None or not self._is_current

    # Messages.

    def _greet(self, message: Subscribed) -> Outcome:
        if message.hash_algo != HASH_ALGO:
            return self._end(Unusable(f"the engine names blocks by {message.hash_algo}, this consumer by {HASH_ALGO}"))
        if self._is_current and message.incarnation != self._incarnation:
            return self._end(Stale("the engine has started anew"))
        return Taken()

    def _take_page(self, page: SnapshotPage) -> Outcome:
        if self._is_current:
            return Ignored()
        pages = self._pages
        if pages is None or (page.page == 0 and not pages.is_of(page)):
            pages = self._pages = _Pages(page.incarnation, page.event_id)
        if not pages.is_of(page) or page.page > pages.num_pages:
            return self._end(Stale("a part of the snapshot is missing"))
        if page.page < pages.num_pages:
            return Ignored()
        if not pages.add(to_blocks(page)):
            return self._end(Stale("the snapshot contradicts itself"))
        if page.is_last:
            self._blocks, self._pages = pages.blocks, None
            self._incarnation, self._cursor = page.incarnation, page.event_id
            self._is_current = True
        return Taken()

    def _take_events(self, batch: EventBatch) -> Outcome:
        events = to_events(batch)
        if not self._is_current:
            return Ignored()  # They are before the snapshot, or will be missing after it, which is noticed then.
        if batch.incarnation != self._incarnation:
            return self._end(Stale("the engine has started anew"))
        outcome: Outcome = Ignored()
        for numbered in events:
            if numbered.event_id < self._cursor:
                continue
            if numbered.event_id > self._cursor:
                return self._end(Stale(f"events from {self._cursor} to {numbered.event_id - 1} are missing"))
            if not self._apply(numbered.event):
                return self._end(Stale(f"event {numbered.event_id} does not fit what came before it"))
            self._cursor += 1
            outcome = Taken()
        return outcome

    def _take_loss(self, message: EventsLost) -> Outcome:
        if not self._is_current:
            return self._end(Stale("the engine gave the snapshot up"))
        if message.incarnation == self._incarnation and message.next_event_id <= self._cursor:
            return Ignored()
        return self._end(Stale(f"events before {message.next_event_id} are lost"))

    def _end(self, outcome: Outcome) -> Outcome:
        self._is_current = False
        self._is_over = True
        self._pages = None
        return outcome

    # Events. Each is applied whole or not at all.

    def _apply(self, event: Event) -> bool:
        match event:
            case Created(sizes):
                return any(not self._blocks.get(tier) for tier, _ in sizes)  # The one that is new is empty.
            case Stored():
                return self._store(event)
            case Removed(hashes, tier):
                blocks = self._blocks.get(tier, {})
                if len(set(hashes)) < len(hashes) or not all(each in blocks for each in hashes):
                    return False
                for each in hashes:
                    del blocks[each]
                return True
            case Updated():
                return self._update(event)

    def _store(self, event: Stored) -> bool:
        blocks = self._blocks.setdefault(event.tier, {})
        if event.parent_hash is not None and event.parent_hash not in blocks:
            return False
        if len(event.priorities) != len(event.block_hashes) or any(each in blocks for each in event.block_hashes):
            return False
        parent_hash = event.parent_hash
        for block_hash, priority in zip(event.block_hashes, event.priorities, strict=True):
            blocks[block_hash] = IndexedBlock(parent_hash, priority, event.namespace_fingerprint, event.owner)
            parent_hash = block_hash
        return True

    def _update(self, event: Updated) -> bool:
        blocks = self._blocks.get(event.tier, {})
        block = blocks.get(event.block_hash)
        if block is None or block.priority != event.old_priority:
            return False
        blocks[event.block_hash] = IndexedBlock(
            block.parent_hash, event.new_priority, block.namespace_fingerprint, block.owner
        )
        return True


class _Pages:
    """A snapshot that is not complete yet."""

    def __init__(self, incarnation: str, event_id: int) -> None:
        self._of = (incarnation, event_id)
        self.num_pages = 0
        self.blocks: dict[str, dict[BlockHash, IndexedBlock]] = {}

    def is_of(self, page: SnapshotPage) -> bool:
        return self._of == (page.incarnation, page.event_id)

    def add(self, blocks: tuple[SnapshotBlock, ...]) -> bool:
        """Take the next page; False where a block comes twice or before its parent."""
        self.num_pages += 1
        for block in blocks:
            tier = self.blocks.setdefault(block.tier, {})
            if block.block_hash in tier or (block.parent_hash is not None and block.parent_hash not in tier):
                return False
            tier[block.block_hash] = IndexedBlock(
                block.parent_hash, block.priority, block.namespace_fingerprint, block.owner
            )
        return True

"""Who is sent which events: the ring, each consumer's own place in it, and the snapshots being read (kv-semantics 6.2, 6.3).

It decides what a consumer is told next, and leaves to the server when: a consumer that does not read is asked nothing and
costs its cursor. It is never waited for. Memory is bounded whatever consumers do: one ring, and at most `MAX_SNAPSHOTS`
snapshots, of which the oldest is given up for a new one; whoever was reading that one is told that it fell behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from cached.keys import HASH_ALGO
from engine.event_messages import (
    EventBatch,
    EventRow,
    EventsLost,
    EventsRefused,
    SnapshotPage,
    Subscribe,
    Subscribed,
    to_page,
    to_row,
)
from engine.events import Event, EventRing, Lost, SnapshotBlock, num_blocks_of

MAX_SNAPSHOTS: Final = 4
MAX_EVENTS_PER_BATCH: Final = 128
MAX_BLOCKS_PER_BATCH: Final = 512
"""Beyond its first event, which may alone have that many (`event_log.MAX_BLOCKS_PER_EVENT`)."""
BLOCKS_PER_PAGE: Final = 512
EVENTS_OFF: Final = "events_off"
EVENTS_OFF_MESSAGE: Final = (
    "this engine keeps no KV events (event_buffer_max_size is 0); set [engine] event_buffer_max_size and restart it"
)

Told = Subscribed | EventsRefused | EventBatch | EventsLost | SnapshotPage


class Rows(Protocol):
    """What a snapshot must be: its blocks, parents before children, made into rows when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Sequence[SnapshotBlock]: ...


@dataclass(slots=True, eq=False)
class _Snapshot:
    """The index as it was before event `event_id`; without `blocks` once it was given up for newer ones."""

    event_id: int
    blocks: Rows | None


class EventFeed:
    """The events of one engine life, for any number of readers."""

    def __init__(self, capacity: int, incarnation: str) -> None:
        self.incarnation = incarnation
        self.num_lost = 0
        self.num_snapshots = 0
        self._is_on = capacity > 0
        self._ring = EventRing(capacity, incarnation)
        self._snapshots: deque[_Snapshot] = deque()
        self._readers: set[EventReader] = set()
        self._is_latest_fresh = False

    @property
    def is_on(self) -> bool:
        """Whether events are kept at all."""
        return self._is_on

    @property
    def ring(self) -> EventRing:
        """What is kept; readers have cursors into it."""
        return self._ring

    @property
    def readers(self) -> tuple[EventReader, ...]:
        """Everyone who subscribed and has not left."""
        return tuple(self._readers)

    def append(self, events: Iterable[Event]) -> None:
        """Number and keep what happened; the oldest falls out."""
        self._ring.append(events)

    def enter(self) -> EventReader:
        """A place for one consumer; `leave` gives it back."""
        reader = EventReader(self)
        self._readers.add(reader)
        return reader

    def leave(self, reader: EventReader) -> None:
        """A consumer is gone."""
        self._readers.discard(reader)

    def wants_snapshot(self) -> bool:
        """Whether a reader waits for a snapshot, so that one has to be taken of the core."""
        return any(reader.waits_for_snapshot for reader in self._readers)

    def take_snapshot(self, blocks: Rows) -> None:
        """The index as it is after every event appended so far; everyone who waits for one reads it."""
        self.num_snapshots += 1
        snapshot = _Snapshot(self._ring.next_event_id, blocks)
        self._snapshots.append(snapshot)
        self._is_latest_fresh = True
        while len(self._snapshots) > MAX_SNAPSHOTS:
            self._snapshots.popleft().blocks = None
        for reader in self._readers:
            if reader.waits_for_snapshot:
                reader.begin(snapshot)

    def age_snapshot(self) -> None:
        """The newest snapshot is not handed to new readers any more; those who read it go on."""
        self._is_latest_fresh = False
        self.forget_unread()

    def forget_unread(self) -> None:
        """Let go of snapshots that nobody reads."""
        read = {id(reader.snapshot) for reader in self._readers}
        latest = self._snapshots[-1] if self._snapshots and self._is_latest_fresh else None
        self._snapshots = deque(each for each in self._snapshots if id(each) in read or each is latest)

    @property
    def fresh_snapshot(self) -> _Snapshot | None:
        """One that was just taken and from which the ring leads on: a second consumer need not cost a second one."""
        if not self._is_latest_fresh or not self._snapshots:
            return None
        latest = self._snapshots[-1]
        return None if isinstance(self._ring.read(latest.event_id, 1), Lost) else latest


class EventReader:
    """One consumer's place. `next_message` is what it is told next; asked only when it has room for it."""

    def __init__(self, feed: EventFeed) -> None:
        self._feed = feed
        self._answer: Subscribed | EventsRefused | None = None
        self._cursor: int | None = None
        self.snapshot: _Snapshot | None = None
        self._page = 0
        self.waits_for_snapshot = False

    def subscribe(self, message: Subscribe) -> None:
        """Begin anew, from a cursor or with a snapshot; what an earlier subscription still had to say is void."""
        feed = self._feed
        self._cursor, self.snapshot, self._page, self.waits_for_snapshot = None, None, 0, False
        if not feed.is_on:
            self._answer = EventsRefused(message.token, EVENTS_OFF, EVENTS_OFF_MESSAGE)
            return
        ring = feed.ring
        self._answer = Subscribed(message.token, feed.incarnation, HASH_ALGO, ring.oldest_event_id, ring.next_event_id)
        if message.cursor is None:
            fresh = feed.fresh_snapshot
            if fresh is None:
                self.waits_for_snapshot = True
            else:
                self.begin(fresh)
        elif message.incarnation not in (None, feed.incarnation):
            self._cursor = -1  # Numbers of another life mean nothing here: it has lost whatever is before the oldest.
        else:
            self._cursor = message.cursor

    def begin(self, snapshot: _Snapshot) -> None:
        """Read a snapshot from its first page on."""
        self.waits_for_snapshot = False
        self.snapshot = snapshot
        self._page = 0

    def next_message(self) -> Told | None:
        """What this consumer is told next; None when there is nothing to say."""
        if self._answer is not None:
            answer, self._answer = self._answer, None
            return answer
        if self.snapshot is not None:
            return self._next_page(self.snapshot)
        if self._cursor is None:
            return None
        return self._next_batch(self._cursor)

    def _next_page(self, snapshot: _Snapshot) -> SnapshotPage | EventsLost:
        ring = self._feed.ring
        if snapshot.blocks is None:
            self.snapshot = None
            return self._lost(snapshot.event_id, ring.next_event_id)
        start = self._page * BLOCKS_PER_PAGE
        end = start + BLOCKS_PER_PAGE
        is_last = end >= len(snapshot.blocks)
        blocks = snapshot.blocks[start:end]
        page = to_page(self._feed.incarnation, HASH_ALGO, snapshot.event_id, self._page, is_last, blocks)
        self._page += 1
        if is_last:
            self.snapshot, self._cursor = None, snapshot.event_id
            self._feed.forget_unread()
        return page

    def _next_batch(self, cursor: int) -> EventBatch | EventsLost | None:
        found = self._feed.ring.read(cursor, MAX_EVENTS_PER_BATCH)
        if isinstance(found, Lost):
            return self._lost(max(0, min(cursor, found.next_event_id)), found.next_event_id)
        rows: list[EventRow] = []
        num_blocks = 0
        for numbered in found:
            num_blocks += num_blocks_of(numbered.event)
            if rows and num_blocks > MAX_BLOCKS_PER_BATCH:
                break
            rows.append(to_row(numbered))
        if not rows:
            return None
        self._cursor = rows[-1].event_id + 1
        return EventBatch(self._feed.incarnation, HASH_ALGO, tuple(rows))

    def _lost(self, first_event_id: int, next_event_id: int) -> EventsLost:
        self._feed.num_lost += 1
        self._cursor = next_event_id
        return EventsLost(self._feed.incarnation, first_event_id, next_event_id)

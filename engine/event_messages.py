"""The messages of the event stream on the engine's socket, and events in the form in which they travel (kv-semantics 6).

A consumer says `Subscribe` after the Welcome, as often as it likes; the newest one counts, and everything after the
`Subscribed` with its token belongs to it. What an event means is `events.py`'s, who is sent what is `event_feed.py`'s.

    consumer                          engine
    Subscribe(cursor) ──────────────▶
            ◀──────────────────────── EventsRefused (none are kept), or Subscribed, then
            ◀──────────────────────── EventBatch … ; EventsLost where the consumer fell behind, and EventBatch from there
    Subscribe(cursor=None) ─────────▶
            ◀──────────────────────── Subscribed, SnapshotPage … SnapshotPage(is_last), and EventBatch from there
"""

from __future__ import annotations

from dataclasses import dataclass

from cached.errors import WireError
from engine.events import Created, Event, NumberedEvent, Removed, SnapshotBlock, Stored, Updated


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Send me events from `cursor` on; None: a snapshot first. A `cursor` that is of another `incarnation` than the
    engine's, or not in its ring, is answered by `EventsLost`. `token` comes back in the answer."""

    token: int
    cursor: int | None
    incarnation: str | None


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The answer: `next_event_id` is what the next event will be called, `oldest_event_id` the oldest one kept."""

    token: int
    incarnation: str
    hash_algo: str
    oldest_event_id: int
    next_event_id: int


@dataclass(frozen=True, slots=True)
class EventsRefused:
    """There are no events here; `code` for programs, `message` for people."""

    token: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class TierSize:
    """Blocks of one tier."""

    tier: str
    blocks: int


@dataclass(frozen=True, slots=True)
class EventRow:
    """One event: exactly one of the four is there."""

    event_id: int
    created: tuple[TierSize, ...] | None = None
    stored: Stored | None = None
    removed: Removed | None = None
    updated: Updated | None = None


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events in order, each numbered one above the one before."""

    incarnation: str
    hash_algo: str
    events: tuple[EventRow, ...]


@dataclass(frozen=True, slots=True)
class SnapshotPage:
    """A part of the index as it was before event `event_id`, parents before their children; pages count from 0."""

    incarnation: str
    hash_algo: str
    event_id: int
    page: int
    is_last: bool
    blocks: tuple[SnapshotBlock, ...]


@dataclass(frozen=True, slots=True)
class EventsLost:
    """Events from `first_event_id` up to, and without, `next_event_id` will not come: the consumer fell behind, or was
    gone for too long. A snapshot puts its index right."""

    incarnation: str
    first_event_id: int
    next_event_id: int


def to_row(numbered: NumberedEvent) -> EventRow:
    """An event as it travels."""
    match numbered.event:
        case Created(blocks):
            return EventRow(numbered.event_id, created=tuple(TierSize(tier, count) for tier, count in blocks))
        case Stored() as stored:
            return EventRow(numbered.event_id, stored=stored)
        case Removed() as removed:
            return EventRow(numbered.event_id, removed=removed)
        case Updated() as updated:
            return EventRow(numbered.event_id, updated=updated)


def to_events(batch: EventBatch) -> list[NumberedEvent]:
    """The events of a batch; raises WireError for a row that is none."""
    return [NumberedEvent(row.event_id, batch.incarnation, batch.hash_algo, _event_of(row)) for row in batch.events]


def _event_of(row: EventRow) -> Event:
    told: list[Event] = [each for each in (row.stored, row.removed, row.updated) if each is not None]
    if row.created is not None:
        told.append(Created(tuple((size.tier, size.blocks) for size in row.created)))
    if len(told) != 1:
        raise WireError(f"event {row.event_id} says {len(told)} things; an event says one")
    return told[0]

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cached.errors import WireError
from cached.keys import HASH_BYTES, BlockHash, OwnerId
from engine.events import Created, Event, NumberedEvent, Removed, SnapshotBlock, Stored, Updated

_NO_PARENT: Final = bytes(HASH_BYTES)


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
class Whose:
    """What many blocks have in common."""

    tier: str
    namespace_fingerprint: str
    owner: OwnerId


@dataclass(frozen=True, slots=True)
class SnapshotPage:
    """A part of the index as it was before event `event_id`, parents before their children; pages count from 0.

    By columns, since there are many: hashes one after the other, those of parents all zeros for a first block, a byte of
    priority for each block, and the number of its `Whose`.
    """

    incarnation: str
    hash_algo: str
    event_id: int
    page: int
    is_last: bool
    block_hashes: bytes
    parent_hashes: bytes
    priorities: bytes
    whose: tuple[Whose, ...]
    whose_numbers: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...] | None


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


def to_page(
    incarnation: str, hash_algo: str, event_id: int, page: int, is_last: bool, blocks: Sequence[SnapshotBlock]
) -> SnapshotPage:
    """Some blocks of a snapshot as they travel; where some have token ids, no ids stand for those without."""
    numbers: dict[tuple[str, str, OwnerId], int] = {}
    whose = [
        numbers.setdefault((block.tier, block.namespace_fingerprint, block.owner), len(numbers)) for block in blocks
    ]
    told = tuple(block.token_ids or () for block in blocks)
    return SnapshotPage(
        incarnation=incarnation,
        hash_algo=hash_algo,
        event_id=event_id,
        page=page,
        is_last=is_last,
        block_hashes=b"".join([block.block_hash for block in blocks]),
        parent_hashes=b"".join([block.parent_hash or _NO_PARENT for block in blocks]),
        priorities=bytes([block.priority for block in blocks]),
        whose=tuple(Whose(*each) for each in numbers),
        whose_numbers=tuple(whose),
        token_ids=told if any(told) else None,
    )


def to_blocks(page: SnapshotPage) -> tuple[SnapshotBlock, ...]:
    """The blocks of a page; raises WireError for columns that do not fit together."""
    count = len(page.priorities)
    lengths = {
        len(page.block_hashes),
        len(page.parent_hashes),
        count * HASH_BYTES,
        len(page.whose_numbers) * HASH_BYTES,
    }
    told = page.token_ids if page.token_ids is not None else (None,) * count
    if len(lengths) != 1 or len(told) != count:
        raise WireError(f"page {page.page} of a snapshot has columns of different lengths")
    if not all(0 <= number < len(page.whose) for number in page.whose_numbers):
        raise WireError(f"page {page.page} of a snapshot names an owner that it does not have")
    return tuple(
        SnapshotBlock(
            block_hash=BlockHash(page.block_hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]),
            parent_hash=_parent_at(page.parent_hashes, at),
            tier=(whose := page.whose[page.whose_numbers[at]]).tier,
            priority=page.priorities[at],
            namespace_fingerprint=whose.namespace_fingerprint,
            owner=whose.owner,
            token_ids=told[at] or None,
        )
        for at in range(count)
    )


def _parent_at(column: bytes, at: int) -> BlockHash | None:
    found = column[at * HASH_BYTES : (at + 1) * HASH_BYTES]
    return None if found == _NO_PARENT else BlockHash(found)

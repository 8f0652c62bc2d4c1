"""What each message does to a consumer's copy of the index (kv-semantics 6.2, 6.3)."""

from __future__ import annotations

import pytest

from cached.keys import HASH_ALGO, NO_OWNER, BlockHash
from engine.event_index import EventIndex, Ignored, IndexedBlock, Stale, Taken, Unusable
from engine.event_messages import (
    EventBatch,
    EventsLost,
    EventsRefused,
    SnapshotPage,
    Subscribed,
    to_page,
    to_row,
)
from engine.events import Created, Event, NumberedEvent, Removed, SnapshotBlock, Stored, Updated


def named(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 32)


def subscribed(number: int, life: str = "a", hash_algo: str = HASH_ALGO) -> Subscribed:
    return Subscribed(number, life, hash_algo, 0, 100)


def page(*blocks: tuple[int, int | None], at: int = 10, number: int = 0, is_last: bool = True) -> SnapshotPage:
    """A page of `(block, parent)`, all of priority 35."""
    listed = [
        SnapshotBlock(named(block), None if parent is None else named(parent), "device", 35, "f", NO_OWNER)
        for block, parent in blocks
    ]
    return to_page("a", HASH_ALGO, at, number, is_last, listed)


def batch(first: int, *events: Event, life: str = "a") -> EventBatch:
    rows = [to_row(NumberedEvent(first + at, life, HASH_ALGO, event)) for at, event in enumerate(events)]
    return EventBatch(life, HASH_ALGO, tuple(rows))


def stored(parent: int | None, *blocks: int) -> Stored:
    parent_hash = None if parent is None else named(parent)
    return Stored(parent_hash, tuple(map(named, blocks)), (35,) * len(blocks), "device", "f", NO_OWNER)


def removed(*blocks: int) -> Removed:
    return Removed(tuple(map(named, blocks)), "device", "f", NO_OWNER)


def updated(block: int, old: int, new: int) -> Updated:
    return Updated(named(block), "device", old, new, "f", NO_OWNER)


def current() -> EventIndex:
    """Blocks 1 and, below it, 2, as they were before event 10."""
    index = EventIndex()
    asked = index.begin()
    assert (asked.cursor, asked.incarnation) == (None, None)
    assert index.receive(1, subscribed(1)) == Taken()
    assert index.receive(1, page((1, None), (2, 1))) == Taken()
    assert index.is_current
    return index


def block_of(parent: int | None, priority: int = 35) -> IndexedBlock:
    return IndexedBlock(None if parent is None else named(parent), priority, "f", NO_OWNER)


def test_events_after_a_snapshot_are_applied_in_order() -> None:
    index = current()

    outcome = index.receive(1, batch(10, stored(2, 3, 4), removed(4), updated(3, 35, 80)))

    assert outcome == Taken()
    assert dict(index.blocks()) == {named(1): block_of(None), named(2): block_of(1), named(3): block_of(2, 80)}
    assert index.cursor == 13


def test_what_is_known_is_not_applied_again() -> None:
    index = current()
    index.receive(1, batch(10, removed(2)))

    assert index.receive(1, batch(9, stored(None, 9), removed(2))) == Ignored()
    assert index.receive(1, batch(10, removed(2), stored(1, 5))) == Taken()
    assert set(index.blocks()) == {named(1), named(5)}


def test_a_gap_makes_it_stale_and_a_snapshot_is_asked_for() -> None:
    index = current()

    outcome = index.receive(1, batch(11, removed(2)))
    again = index.begin()

    assert outcome == Stale("events from 10 to 10 are missing")
    assert named(2) in index.blocks()
    assert not index.is_current
    assert (again.number, again.cursor) == (2, None)


def test_a_stale_copy_takes_nothing_until_it_is_asked_for_anew() -> None:
    index = current()
    index.receive(1, batch(12, removed(2)))

    assert index.receive(1, batch(10, removed(2))) == Ignored()
    assert index.receive(1, page((1, None))) == Ignored()


def test_a_new_connection_goes_on_where_the_last_one_ended() -> None:
    index = current()
    index.receive(1, batch(10, removed(2)))

    again = index.begin()

    assert (again.cursor, again.incarnation) == (11, "a")
    assert index.receive(2, subscribed(2)) == Taken()
    assert index.receive(2, batch(11, stored(1, 7))) == Taken()


def test_what_an_old_connection_still_delivers_is_ignored() -> None:
    index = current()
    index.begin()

    assert index.receive(1, batch(10, removed(2))) == Ignored()
    assert index.receive(1, EventsLost("a", 5, 50)) == Ignored()
    assert index.is_current
    assert index.cursor == 10


def test_another_life_of_the_engine_is_noticed_at_once() -> None:
    index = current()
    index.begin()

    assert isinstance(index.receive(2, subscribed(2, life="b")), Stale)
    assert index.begin().cursor is None


def test_an_event_of_another_life_is_not_applied_whatever_its_number() -> None:
    index = current()

    assert isinstance(index.receive(1, batch(10, removed(2), life="b")), Stale)
    assert named(2) in index.blocks()


def test_a_loss_of_what_was_not_seen_makes_it_stale_and_of_what_was_seen_does_not() -> None:
    index = current()

    assert index.receive(1, EventsLost("a", 3, 10)) == Ignored()
    assert isinstance(index.receive(1, EventsLost("a", 3, 11)), Stale)


def test_a_snapshot_that_the_engine_gave_up_is_asked_for_again() -> None:
    index = EventIndex()
    index.begin()
    index.receive(1, subscribed(1))

    assert isinstance(index.receive(1, EventsLost("a", 10, 40)), Stale)


def test_pages_come_in_order_and_repeated_ones_are_ignored() -> None:
    index = EventIndex()
    index.begin()
    index.receive(1, page((1, None), is_last=False))

    assert index.receive(1, page((1, None), is_last=False)) == Ignored()
    assert index.receive(1, batch(10, removed(1))) == Ignored()
    assert not index.blocks()
    assert index.receive(1, page((2, 1), number=1)) == Taken()
    assert set(index.blocks()) == {named(1), named(2)}


@pytest.mark.parametrize(
    "second",
    [page((3, 1), number=2), page((2, 1), number=1, at=11), page((1, None), number=1), page((3, 2), number=1)],
    ids=["a page is missing", "of another snapshot", "a block twice", "a parent is missing"],
)
def test_a_snapshot_with_a_fault_is_asked_for_again(second: SnapshotPage) -> None:
    index = EventIndex()
    index.begin()
    index.receive(1, page((1, None), is_last=False))

    assert isinstance(index.receive(1, second), Stale)
    assert not index.is_current


def test_a_newer_snapshot_takes_the_place_of_one_that_was_begun() -> None:
    index = EventIndex()
    index.begin()
    index.receive(1, page((1, None), is_last=False))

    assert index.receive(1, page((5, None), at=20)) == Taken()
    assert (set(index.blocks()), index.cursor) == ({named(5)}, 20)


@pytest.mark.parametrize(
    "event",
    [
        removed(3),
        removed(2, 2),
        stored(3, 4),
        stored(1, 2),
        updated(2, 34, 80),
        updated(3, 35, 80),
        Created((("device", 8),)),
    ],
)
def test_an_event_that_does_not_fit_changes_nothing_and_makes_it_stale(event: Event) -> None:
    index = current()
    before = dict(index.blocks())

    outcome = index.receive(1, batch(10, event))

    assert isinstance(outcome, Stale)
    assert dict(index.blocks()) == before


def test_a_pool_begins_empty() -> None:
    index = EventIndex()
    index.begin()
    index.receive(1, page(at=0))

    assert index.receive(1, batch(0, Created((("device", 8),)), stored(None, 1))) == Taken()


def test_tiers_are_kept_apart() -> None:
    index = current()

    index.receive(1, batch(10, Stored(None, (named(1),), (35,), "host", "f", NO_OWNER), removed(2)))

    assert set(index.blocks("host")) == {named(1)}
    assert set(index.blocks()) == {named(1)}


@pytest.mark.parametrize(
    "answer",
    [EventsRefused(1, "events_off", "this engine keeps no KV events"), subscribed(1, hash_algo="sha1")],
)
def test_an_engine_without_usable_events_is_not_asked_again_and_again(answer: EventsRefused | Subscribed) -> None:
    index = EventIndex()
    index.begin()

    assert isinstance(index.receive(1, answer), Unusable)
    assert index.receive(1, page((1, None))) == Ignored()

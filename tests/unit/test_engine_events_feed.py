"""What a consumer of events is told next, without a socket (kv-semantics 6.2)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cached.errors import WireError
from cached.keys import NO_OWNER, BlockHash, OwnerId
from engine.event_feed import (
    BLOCKS_PER_PAGE,
    EVENTS_OFF,
    MAX_BLOCKS_PER_BATCH,
    MAX_EVENTS_PER_BATCH,
    MAX_SNAPSHOTS,
    EventFeed,
    EventReader,
)
from engine.event_messages import (
    EventBatch,
    EventRow,
    EventsLost,
    EventsRefused,
    SnapshotPage,
    Subscribe,
    Subscribed,
    to_blocks,
    to_events,
    to_page,
    to_row,
)
from engine.events import (
    MAX_BLOCKS_PER_EVENT_KEPT,
    Created,
    Event,
    EventRing,
    NumberedEvent,
    Removed,
    SnapshotBlock,
    Stored,
    Updated,
)
from engine.protocol import MAX_FRAME_BYTES, TO_GATEWAY


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def removed(number: int, count: int = 1) -> Removed:
    return Removed(tuple(name(number + each) for each in range(count)), "device", "01234567", NO_OWNER)


def block(number: int) -> SnapshotBlock:
    return SnapshotBlock(name(number), name(number - 1) if number else None, "device", 35, "01234567", NO_OWNER)


def feed_of(count: int, capacity: int = 1000) -> EventFeed:
    feed = EventFeed(capacity, "aa")
    feed.append([removed(number) for number in range(count)])
    return feed


def reader_of(feed: EventFeed, cursor: int | None, token: int = 1) -> EventReader:
    reader = feed.enter()
    reader.subscribe(Subscribe(token, cursor, None))
    return reader


def all_messages(reader: EventReader) -> list[object]:
    return list(iter(reader.next_message, None))


def test_an_engine_without_events_says_so_by_name_and_how_to_change_it() -> None:
    reader = reader_of(EventFeed(0, "aa"), 0, token=7)

    (answer,) = all_messages(reader)

    assert isinstance(answer, EventsRefused)
    assert (answer.token, answer.code) == (7, EVENTS_OFF)
    assert "event_buffer_max_size is 0" in answer.message


def test_long_histories_come_in_batches_of_bounded_size_and_without_gaps() -> None:
    feed = feed_of(3 * MAX_EVENTS_PER_BATCH)
    feed.append([removed(10_000, MAX_BLOCKS_PER_BATCH), removed(20_000, MAX_BLOCKS_PER_BATCH)])

    answer, *batches = all_messages(reader_of(feed, 5))

    assert isinstance(answer, Subscribed)
    ids: list[int] = []
    for batch in batches:
        assert isinstance(batch, EventBatch)
        rows = [row for row in batch.events if row.removed is not None]
        assert len(rows) <= MAX_EVENTS_PER_BATCH
        assert (
            len(rows) == 1 or sum(len(row.removed.block_hashes) for row in rows if row.removed) <= MAX_BLOCKS_PER_BATCH
        )
        ids.extend(row.event_id for row in rows)
    assert ids == list(range(5, 3 * MAX_EVENTS_PER_BATCH + 2))


def test_the_largest_event_there_can_be_fits_a_frame_many_times() -> None:
    tokens = ((2**32 - 1,) * 128,) * 512
    event = Stored(name(0), (name(1),) * 512, (100,) * 512, "device", "01234567", NO_OWNER, tokens)

    frame = TO_GATEWAY.encode(EventBatch("aa", "x", (to_row(NumberedEvent(2**40, "aa", "x", event)),)))

    assert len(frame) < MAX_FRAME_BYTES / 16


def test_a_snapshot_is_told_in_pages_and_events_follow_from_where_it_was_taken() -> None:
    feed = feed_of(10)
    reader = reader_of(feed, None)
    (answer,) = all_messages(reader)
    assert reader.waits_for_snapshot
    feed.take_snapshot(tuple(block(number) for number in range(BLOCKS_PER_PAGE + 1)))
    feed.append([removed(99)])

    first, second, batch = all_messages(reader)

    assert isinstance(answer, Subscribed)
    assert isinstance(first, SnapshotPage)
    assert isinstance(second, SnapshotPage)
    assert (first.event_id, first.page, first.is_last, len(to_blocks(first))) == (10, 0, False, BLOCKS_PER_PAGE)
    assert (second.event_id, second.page, second.is_last, len(to_blocks(second))) == (10, 1, True, 1)
    assert isinstance(batch, EventBatch)
    assert [row.event_id for row in batch.events] == [10]


def test_an_empty_index_is_one_page_that_is_the_last() -> None:
    feed = feed_of(1)
    reader = reader_of(feed, None)
    feed.take_snapshot(())

    _, page = all_messages(reader)

    assert page == to_page("aa", "sha256-chain/1", 1, 0, True, ())
    assert to_blocks(page) == ()


def test_consumers_that_ask_at_about_the_same_time_share_a_snapshot() -> None:
    feed = feed_of(3)
    waiting = [reader_of(feed, None) for _ in range(2)]
    feed.take_snapshot((block(0),))
    late = reader_of(feed, None)
    after_it_aged = None

    assert not late.waits_for_snapshot
    assert {id(each.snapshot) for each in (*waiting, late)} == {id(late.snapshot)}
    feed.age_snapshot()
    after_it_aged = reader_of(feed, None)
    assert after_it_aged.waits_for_snapshot
    assert feed.num_snapshots == 1


def test_a_fresh_snapshot_from_which_the_ring_no_longer_leads_on_is_not_handed_out() -> None:
    feed = feed_of(3, capacity=5)
    reader_of(feed, None)
    feed.take_snapshot((block(0),))
    feed.append([removed(number) for number in range(6)])

    assert reader_of(feed, None).waits_for_snapshot


def test_snapshots_that_hanging_consumers_hold_are_given_up_for_newer_ones_and_they_are_told() -> None:
    feed = feed_of(1)
    hanging: list[EventReader] = []
    for number in range(MAX_SNAPSHOTS + 2):
        hanging.append(reader_of(feed, None))
        feed.take_snapshot((block(0),))
        feed.append([removed(number)])
        feed.age_snapshot()

    told = [all_messages(reader)[1] for reader in hanging]

    assert [type(each) for each in told] == [EventsLost] * 2 + [SnapshotPage] * MAX_SNAPSHOTS
    assert told[0] == EventsLost("aa", 1, MAX_SNAPSHOTS + 3)
    assert feed.num_lost == 2


def test_a_snapshot_that_nobody_reads_any_more_is_let_go() -> None:
    feed = feed_of(1)
    done, gone = reader_of(feed, None), reader_of(feed, None)
    feed.take_snapshot((block(0),))
    all_messages(done)
    feed.leave(gone)

    feed.age_snapshot()

    assert len(feed._snapshots) == 0


def test_a_new_subscription_replaces_the_old_one_at_once() -> None:
    feed = feed_of(10)
    reader = reader_of(feed, 0, token=1)
    reader.subscribe(Subscribe(2, 8, "aa"))

    answer, batch = all_messages(reader)

    assert isinstance(answer, Subscribed)
    assert answer.token == 2
    assert isinstance(batch, EventBatch)
    assert [row.event_id for row in batch.events] == [8, 9]


def test_a_cursor_from_the_future_has_lost_what_it_cannot_have_seen() -> None:
    reader = reader_of(feed_of(10), 11)

    _, lost, batch = all_messages(reader)

    assert lost == EventsLost("aa", 0, 0)
    assert isinstance(batch, EventBatch)
    assert batch.events[0].event_id == 0


@pytest.mark.parametrize(
    "event",
    [
        Created((("device", 8), ("host", 90))),
        Stored(None, (name(1), name(2)), (35, 80), "device", "01234567", NO_OWNER),
        Stored(name(3), (name(1),), (35,), "device", "01234567", NO_OWNER, ((1, 2),)),
        removed(4, 3),
        Updated(name(1), "device", 35, 80, "01234567", NO_OWNER),
    ],
)
def test_an_event_is_the_same_after_its_journey(event: Event) -> None:
    numbered = NumberedEvent(12, "aa", "x", event)

    frame = TO_GATEWAY.encode(EventBatch("aa", "x", (to_row(numbered),)))

    assert to_events(TO_GATEWAY.decode(frame[4:])) == [numbered]


def test_a_ring_full_of_long_runs_keeps_fewer_events_and_always_the_newest() -> None:
    ring = EventRing(10, "aa")
    ring.append([removed(number, 100) for number in range(10)])
    assert ring.next_event_id - ring.oldest_event_id == 10 * MAX_BLOCKS_PER_EVENT_KEPT // 100

    ring.append([removed(0, 1000)])
    assert (ring.oldest_event_id, ring.next_event_id) == (10, 11)

    ring.append([removed(number) for number in range(20)])
    assert (ring.oldest_event_id, ring.next_event_id) == (21, 31)


def test_a_row_that_says_nothing_or_two_things_is_a_breach() -> None:
    for row in (EventRow(1), EventRow(1, created=(), removed=removed(1))):
        with pytest.raises(WireError, match="an event says one"):
            to_events(EventBatch("aa", "x", (row,)))


@pytest.mark.parametrize("tokens", [None, (1, 2, 3, 4)])
def test_a_page_of_a_snapshot_is_the_same_after_its_journey(tokens: tuple[int, ...] | None) -> None:
    blocks = tuple(
        SnapshotBlock(
            name(number + 1),
            name(number) if number % 3 else None,
            "device",
            number,
            f"0000000{number % 2}",
            OwnerId(bytes([number % 5]) * 16),
            tokens,
        )
        for number in range(101)
    )

    frame = TO_GATEWAY.encode(to_page("aa", "x", 7, 0, True, blocks))

    assert to_blocks(TO_GATEWAY.decode(frame[4:])) == blocks


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_hashes": bytes(33)},
        {"parent_hashes": b""},
        {"priorities": bytes(2)},
        {"whose_numbers": (0, 0)},
        {"whose_numbers": (1,)},
        {"token_ids": ()},
    ],
)
def test_a_page_whose_columns_do_not_fit_is_a_breach(wrong: dict[str, Any]) -> None:
    page = to_page("aa", "x", 7, 0, True, (block(1),))

    with pytest.raises(WireError, match="page 0"):
        to_blocks(dataclasses.replace(page, **wrong))

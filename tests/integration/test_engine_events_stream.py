"""KV events over the real socket: what consumers are told, whatever they do or leave undone (kv-semantics 6)."""

from __future__ import annotations

import asyncio

from engine.client import EngineClient
from engine.event_connection import EventConnection, Heard
from engine.event_feed import BLOCKS_PER_PAGE
from engine.event_messages import EventBatch, EventsLost, SnapshotPage, Subscribed, to_blocks, to_events
from engine.events import Created, NumberedEvent, Stored
from engine.protocol import Sampling
from tests.support.fake_runner import FakeInfo, FakeRunner
from tests.support.shell import WAIT_S, Shell

GREEDY = Sampling(temperature=0.0)


def small(num_blocks: int = 24) -> FakeRunner:
    return FakeRunner(FakeInfo(num_blocks=num_blocks))


async def ask(client: EngineClient, number: int, length: int = 30) -> None:
    prompt = [1 + (number * 131 + at) % 900 for at in range(length)]
    async for _ in client.submit(prompt, 3, GREEDY):
        pass


async def hear(connection: EventConnection) -> Heard:
    return await asyncio.wait_for(anext(connection), WAIT_S)


async def hear_events(connection: EventConnection, up_to: int) -> list[NumberedEvent]:
    """Events until the one before `up_to` has come; anything else on the way is a failure."""
    heard: list[NumberedEvent] = []
    while not heard or heard[-1].event_id < up_to - 1:
        message = await hear(connection)
        assert isinstance(message, EventBatch), message
        heard.extend(to_events(message))
    return heard


async def next_event_id(shell: Shell) -> int:
    figures = await shell.server.statistics()
    return int(figures["server"]["events"])


async def test_events_come_in_order_with_incarnation_algorithm_and_nothing_secret() -> None:
    """kv-semantics 6.1."""
    async with Shell(small(), event_buffer_max_size=100, incarnation="aa") as shell:
        client = await shell.client()
        await ask(client, 1)
        end = await next_event_id(shell)
        consumer = await EventConnection.open(shell.socket, "consumer")
        consumer.subscribe(1, 0)

        answer = await hear(consumer)
        heard = await hear_events(consumer, end)

        assert answer == Subscribed(1, "aa", "sha256-chain/1", 0, end)
        assert [each.event_id for each in heard] == list(range(len(heard)))
        assert {(each.incarnation, each.hash_algo) for each in heard} == {("aa", "sha256-chain/1")}
        assert heard[0].event == Created((("device", 24),))
        stored = [each.event for each in heard if isinstance(each.event, Stored)]
        assert stored[0].parent_hash is None
        assert stored[0].token_ids is None
        assert {len(each.namespace_fingerprint) for each in stored} == {8}
        await consumer.close()


async def test_token_ids_are_told_only_where_the_engine_is_configured_to() -> None:
    """kv-semantics 6.1."""
    async with Shell(small(), event_buffer_max_size=100, settings={"event_token_ids": True}) as shell:
        await ask(await shell.client(), 0, 8)
        consumer = await EventConnection.open(shell.socket, "consumer")
        consumer.subscribe(1, 0)
        await hear(consumer)

        heard = await hear_events(consumer, await next_event_id(shell))

        stored = next(each.event for each in heard if isinstance(each.event, Stored))
        assert stored.token_ids == ((1, 2, 3, 4), (5, 6, 7, 8))
        assert [each.token_ids for each in shell.core.snapshot()][:2] == [(1, 2, 3, 4), (5, 6, 7, 8)]
        await consumer.close()


async def test_every_consumer_has_its_own_cursor_and_none_takes_from_another() -> None:
    async with Shell(small(), event_buffer_max_size=1000) as shell:
        client = await shell.client()
        consumers = [await EventConnection.open(shell.socket, f"consumer-{number}") for number in range(3)]
        for consumer in consumers:
            consumer.subscribe(1, 0)
            assert isinstance(await hear(consumer), Subscribed)
        for number in range(10):
            await ask(client, number)

        end = await next_event_id(shell)
        heard = [await hear_events(consumer, end) for consumer in consumers]

        assert heard[0] == heard[1] == heard[2]
        assert [each.event_id for each in heard[0]] == list(range(end))
        for consumer in consumers:
            await consumer.close()


async def test_a_cursor_inside_the_ring_goes_on_there_and_one_outside_is_told_what_it_lost() -> None:
    async with Shell(small(), event_buffer_max_size=10, incarnation="aa") as shell:
        client = await shell.client()
        for number in range(10):
            await ask(client, number)
        end = await next_event_id(shell)
        consumer = await EventConnection.open(shell.socket, "consumer")

        consumer.subscribe(1, end - 4, "aa")
        assert isinstance(await hear(consumer), Subscribed)
        inside = await hear_events(consumer, end)
        consumer.subscribe(1, 3, "aa")
        assert isinstance(await hear(consumer), Subscribed)
        outside = await hear(consumer)
        after = await hear_events(consumer, end)
        consumer.subscribe(1, end - 4, "another life")
        assert isinstance(await hear(consumer), Subscribed)
        elsewhere = await hear(consumer)

        assert [each.event_id for each in inside] == list(range(end - 4, end))
        assert outside == EventsLost("aa", 3, end - 10)
        assert [each.event_id for each in after] == list(range(end - 10, end))
        assert elsewhere == EventsLost("aa", 0, end - 10)
        await consumer.close()


async def test_a_snapshot_comes_in_pages_parents_first_and_events_go_on_from_it() -> None:
    blocks = 3 * BLOCKS_PER_PAGE
    async with Shell(small(blocks), event_buffer_max_size=10_000) as shell:
        client = await shell.client()
        for number in range(8):
            await ask(client, number, 800)
        consumer = await EventConnection.open(shell.socket, "consumer")
        consumer.subscribe(1, None)
        assert isinstance(await hear(consumer), Subscribed)

        pages: list[SnapshotPage] = []
        while not pages or not pages[-1].is_last:
            page = await hear(consumer)
            assert isinstance(page, SnapshotPage)
            pages.append(page)
        await ask(client, 99)
        after = await hear_events(consumer, await next_event_id(shell))

        told = [block for page in pages for block in to_blocks(page)]
        assert [page.page for page in pages] == list(range(len(pages)))
        assert len(pages) == -(-len(told) // BLOCKS_PER_PAGE) > 1
        assert tuple(told) != shell.core.snapshot()  # One request later.
        seen: set[bytes | None] = {None}
        for block in told:
            assert block.parent_hash in seen
            seen.add(block.block_hash)
        assert after[0].event_id == pages[0].event_id
        await consumer.close()


async def test_a_consumer_that_stops_reading_costs_little_is_told_lost_and_delays_nobody() -> None:
    async with Shell(small(), event_buffer_max_size=50) as shell:
        client = await shell.client()
        lazy = await EventConnection.open(shell.socket, "lazy")
        keen = await EventConnection.open(shell.socket, "keen")
        for consumer in (lazy, keen):
            consumer.subscribe(1, 0)
            assert isinstance(await hear(consumer), Subscribed)
        connection = next(each for each in shell.server.connections if each._name == "lazy")
        transport = connection._transport
        assert transport is not None
        pages = 0
        while not connection._is_full:  # Whatever the kernel takes for a reader that does not read.
            lazy.subscribe(1, 0)
            await ask(client, pages)
            pages += 1
        for number in range(60):
            await ask(client, 1000 + number)
        end = await next_event_id(shell)
        unread = transport.get_write_buffer_size()

        message = await hear(lazy)
        while not isinstance(message, EventsLost) or message.next_event_id < end - 50:
            message = await hear(lazy)
        caught_up = await hear_events(lazy, end)
        while not isinstance(message := await hear(keen), EventBatch) or message.events[-1].event_id < end - 1:
            pass

        assert unread < 512 * 1024
        assert [each.event_id for each in caught_up] == list(range(end - 50, end))
        assert (await shell.server.statistics())["server"]["slow_gateways"] == 0
        await lazy.close()
        await keen.close()
        await shell.until(lambda figures: figures["server"]["event_consumers"] == 0)

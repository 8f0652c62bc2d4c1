"""The host tier's events in the engine's stream, with a real cache daemon that evicts, is killed and comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from cached.client import TierClient
from cached.keys import OwnerId
from cached.protocol import ListedBlock, TierHello
from engine import event_consumer, host_events
from engine.client import EngineClient
from engine.event_connection import EventConnection
from engine.event_consumer import EventConsumer
from engine.event_index import IndexedBlock
from engine.event_messages import EventBatch, EventsLost, SnapshotPage, to_events
from engine.events import Created, Removed, Stored
from engine.protocol import Sampling
from tests.support.cached_daemon import Daemon, daemon_directory
from tests.support.fake_runner import FakeInfo, FakeRunner
from tests.support.shell import WAIT_S, Shell, is_quiet

GREEDY = Sampling(temperature=0.0)
INFO = FakeInfo(num_blocks=16)
SMALL = 24 * 4096
"""Room for few enough blocks that a test fills it."""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with daemon_directory() as directory:
        made = Daemon(directory, host_cache_size=SMALL)
        made.start()
        yield made
        made.close()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_consumer, "SNAPSHOT_PAUSE_S", 0.01)
    monkeypatch.setattr(host_events, "BUSY_PAUSE_S", 0.01)
    monkeypatch.setattr(host_events, "QUIET_PAUSE_S", 0.02)


def tiered(daemon: Daemon, capacity: int = 4096) -> Shell:
    hello = TierHello(INFO.layout_fingerprint, INFO.block_bytes, INFO.tokens_per_block)
    return Shell(
        FakeRunner(INFO),
        make_tier_client=lambda: TierClient(daemon.socket, hello, 2.0),
        event_buffer_max_size=capacity,
    )


@contextlib.asynccontextmanager
async def following(shell: Shell):  # type: ignore[no-untyped-def]
    consumer = EventConsumer(shell.socket, "consumer")
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.close()


async def ask(client: EngineClient, number: int, length: int = 33) -> None:
    prompt = [1 + (number * 131 + at) % 900 for at in range(length)]
    assert [event async for event in client.submit(prompt, 2, GREEDY)][-1].finish == "length"


async def until_tier(client: EngineClient, state: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while client.tier != state:
            await asyncio.sleep(0.01)


def as_indexed(block: ListedBlock) -> IndexedBlock:
    return IndexedBlock(block.parent, block.priority, block.namespace_fingerprint, OwnerId(block.owner))  # type: ignore[arg-type]


async def until_equal(consumer: EventConsumer, daemon: Daemon, at_least: int = 1) -> None:
    """Wait for the copy to be what the daemon lists."""
    observer = daemon.observer()
    for _ in range(int(WAIT_S / 0.02)):
        listed = {each.block_hash: as_indexed(each) for each in observer.blocks()}
        if consumer.is_current and len(listed) >= at_least and dict(consumer.blocks("host")) == listed:
            return
        await asyncio.sleep(0.02)
    assert dict(consumer.blocks("host")) == listed
    raise AssertionError(f"only {len(listed)} blocks in the tier, {consumer!r}")


async def events_until(shell: Shell, holds) -> list:  # type: ignore[no-untyped-def,type-arg]
    """All events from the first on, until they hold something."""
    connection = await EventConnection.open(shell.socket, "test")
    seen: list = []  # type: ignore[type-arg]
    try:
        connection.subscribe(1, 0)
        async with asyncio.timeout(WAIT_S):
            async for message in connection:
                assert not isinstance(message, EventsLost | SnapshotPage)
                if isinstance(message, EventBatch):
                    seen += [numbered.event for numbered in to_events(message)]
                if holds(seen):
                    return seen
    finally:
        await connection.close()
    raise AssertionError("the connection ended")


def of_host(seen: list, kind: type) -> list:  # type: ignore[type-arg]
    return [event for event in seen if isinstance(event, kind) and event.tier == "host"]


async def test_what_is_stored_in_the_tier_and_evicted_from_it_is_told_with_its_tier(daemon: Daemon) -> None:
    async with tiered(daemon) as shell, following(shell) as consumer:
        client = await shell.client()
        await until_tier(client, "ready")
        await ask(client, 1)

        seen = await events_until(shell, lambda seen: of_host(seen, Stored))

        device = [event for event in seen if isinstance(event, Stored) and event.tier == "device"]
        first = of_host(seen, Stored)[0]
        assert first.block_hashes[0] in device[0].block_hashes
        assert (first.namespace_fingerprint, first.owner) == (device[0].namespace_fingerprint, device[0].owner)
        sizes = [dict(event.blocks) for event in seen if isinstance(event, Created)]
        capacity = daemon.stats()["capacity_blocks"] if "capacity_blocks" in daemon.stats() else sizes[-1]["host"]
        assert sizes == [{"device": 16}, {"device": 16, "host": capacity}]

        for number in range(2, 40):
            await ask(client, number)
        await events_until(shell, lambda seen: of_host(seen, Removed))
        await shell.until(is_quiet)
        await until_equal(consumer, daemon)
        async with following(shell) as late:
            await until_equal(late, daemon)
            assert dict(late.blocks()) == dict(consumer.blocks())
            run = [name for name, block in late.blocks("host").items() if block.parent_hash is None][:1]
            assert late.leading_run(run, tier="host") == 1
            assert late.holds(run[0], tier="host")


@pytest.mark.parametrize("keep_arena", [True, False])
async def test_after_a_daemon_was_killed_the_index_is_what_the_next_one_lists(daemon: Daemon, keep_arena: bool) -> None:
    daemon.settings["keep_arena"] = keep_arena
    async with tiered(daemon) as shell, following(shell) as consumer:
        client = await shell.client()
        await until_tier(client, "ready")
        for number in range(4):
            await ask(client, number)
        await shell.until(is_quiet)
        await until_equal(consumer, daemon)

        for life in range(3):
            daemon.kill()
            await until_tier(client, "absent")
            await ask(client, 50 + life)
            daemon.start()
            await until_tier(client, "ready")
            await until_equal(consumer, daemon, at_least=0)
            await ask(client, 60 + life)
            await shell.until(is_quiet)
            await until_equal(consumer, daemon)


async def test_an_engine_that_starts_tells_what_the_tier_holds_already(daemon: Daemon) -> None:
    async with tiered(daemon) as shell:
        client = await shell.client()
        await until_tier(client, "ready")
        await ask(client, 1)
        await shell.until(is_quiet)

    async with tiered(daemon) as shell, following(shell) as consumer:
        await until_equal(consumer, daemon)


async def test_a_tier_that_stays_away_is_forgotten(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_events, "FORGET_AFTER_S", 0.05)
    async with tiered(daemon) as shell, following(shell) as consumer:
        client = await shell.client()
        await until_tier(client, "ready")
        await ask(client, 1)
        await until_equal(consumer, daemon)

        daemon.kill()

        async with asyncio.timeout(WAIT_S):
            while consumer.blocks("host"):
                await asyncio.sleep(0.01)
        assert consumer.is_current
        assert consumer.blocks()


async def test_a_consumer_that_falls_behind_has_both_tiers_right_again(daemon: Daemon) -> None:
    async with tiered(daemon, capacity=3) as shell, following(shell) as consumer:
        client = await shell.client()
        await until_tier(client, "ready")
        for number in range(12):
            await asyncio.gather(*(ask(client, number * 3 + each) for each in range(3)))
        await shell.until(is_quiet)

        await until_equal(consumer, daemon)


def test_a_snapshot_page_keeps_token_ids_apart_of_the_tiers_that_have_them() -> None:
    from cached.keys import NO_OWNER
    from engine.event_messages import to_blocks, to_page
    from engine.events import SnapshotBlock
    from tests.support.cached_daemon import name_of

    blocks = (
        SnapshotBlock(name_of(1), None, "device", 35, "0011aabb", NO_OWNER, (1, 2)),
        SnapshotBlock(name_of(1), None, "host", 35, "0011aabb", NO_OWNER),
    )

    assert to_blocks(to_page("life", "algo", 0, 0, True, blocks)) == blocks

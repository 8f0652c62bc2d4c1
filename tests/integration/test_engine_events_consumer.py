"""A consumer's copy of the index over the real socket: equal to the engine's after whatever happens (kv-semantics 6.3)."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cached.keys import BlockHash, block_hash, namespace
from engine import event_consumer
from engine.client import EngineClient
from engine.event_connection import EventConnection
from engine.event_consumer import EventConsumer
from engine.event_index import IndexedBlock
from engine.protocol import Sampling
from tests.support.fake_runner import FakeInfo, FakeRunner
from tests.support.shell import WAIT_S, Shell, is_quiet

GREEDY = Sampling(temperature=0.0)


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir="/tmp", prefix="halocline-events-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_consumer, "SNAPSHOT_PAUSE_S", 0.01)
    monkeypatch.setattr(event_consumer, "BACKOFF_MAX_S", 0.05)


def engine_at(directory: Path, life: int = 1, capacity: int = 1000, num_blocks: int = 24) -> Shell:
    runner = FakeRunner(FakeInfo(num_blocks=num_blocks))
    return Shell(runner, event_buffer_max_size=capacity, incarnation=f"life {life}", at=directory)


@contextlib.asynccontextmanager
async def consumer_at(directory: Path):  # type: ignore[no-untyped-def]
    consumer = EventConsumer(directory / "engine.sock", "consumer")
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.close()


def prompt_of(number: int, length: int = 30) -> list[int]:
    return [1 + (number * 131 + at) % 900 for at in range(length)]


async def ask(client: EngineClient, *numbers: int) -> None:
    for number in numbers:
        async for _ in client.submit(prompt_of(number), 3, GREEDY):
            pass


async def assert_equal(consumer: EventConsumer, shell: Shell) -> None:
    figures = await shell.until(is_quiet)
    assert await consumer.wait_current(WAIT_S, figures["server"]["events"]), consumer
    assert dict(consumer.blocks()) == {
        each.block_hash: IndexedBlock(each.parent_hash, each.priority, each.namespace_fingerprint, each.owner)
        for each in shell.core.snapshot()
    }
    assert consumer.incarnation == shell.incarnation


async def test_a_copy_follows_the_engine_and_answers_for_chains(directory: Path) -> None:
    async with engine_at(directory) as shell, consumer_at(directory) as consumer:
        client = await shell.client()
        await ask(client, 1)
        assert await consumer.wait_current(WAIT_S)
        await ask(client, 2)

        await assert_equal(consumer, shell)

        chain: list[BlockHash] = []
        parent: BlockHash = namespace(shell.runner.info.layout_fingerprint, None)  # type: ignore[assignment]
        for at in range(0, 28, 4):
            parent = block_hash(parent, prompt_of(2)[at : at + 4])
            chain.append(parent)
        assert consumer.leading_run(chain) == len(chain) == 7
        assert consumer.holds(chain[0])
        assert consumer.leading_run([chain[0], BlockHash(bytes(32)), chain[1]]) == 1
        assert not consumer.holds(BlockHash(bytes(32)))


async def test_a_consumer_that_was_cut_off_goes_on_from_its_cursor_without_a_snapshot(directory: Path) -> None:
    async with engine_at(directory) as shell, consumer_at(directory) as consumer:
        client = await shell.client()
        await ask(client, 1, 2)
        await assert_equal(consumer, shell)
        for number in range(3, 8):
            cut(shell)
            await ask(client, number)

        await assert_equal(consumer, shell)

        assert shell.server.feed.num_snapshots == 1
        assert shell.server.feed.num_lost == 0


async def test_a_consumer_that_was_away_for_longer_than_the_ring_takes_a_snapshot(directory: Path) -> None:
    async with engine_at(directory, capacity=5) as shell:
        client = await shell.client()
        async with consumer_at(directory) as consumer:
            await ask(client, 1, 2)
            await assert_equal(consumer, shell)
            before = shell.server.feed.num_snapshots
            shell.server.may_connect = lambda uid: False  # type: ignore[method-assign]
            cut(shell)
            await ask(client, *range(3, 12))
            assert not consumer.is_current
            del shell.server.may_connect

            await assert_equal(consumer, shell)

            assert shell.server.feed.num_lost >= 1
            assert shell.server.feed.num_snapshots == before + 1


async def test_an_engine_that_starts_anew_is_followed_from_a_snapshot_of_its_new_life(directory: Path) -> None:
    async with consumer_at(directory) as consumer:
        for life, numbers in enumerate([(1, 2, 3), (4,), (), (1, 9, 9)]):
            async with engine_at(directory, life) as shell:
                await ask(await shell.client(), *numbers)
                await assert_equal(consumer, shell)
            assert not consumer.is_current or not await consumer.wait_current(0.01)


async def test_a_consumer_that_stops_reading_is_told_and_is_right_again_when_it_reads(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read = asyncio.Event()
    may_read.set()
    read = EventConnection._next

    async def read_when_allowed(connection: EventConnection) -> object:
        await may_read.wait()
        return await read(connection)

    monkeypatch.setattr(EventConnection, "_next", read_when_allowed)
    async with engine_at(directory, capacity=20) as shell, consumer_at(directory) as consumer:
        client = await shell.client()
        await ask(client, 1)
        await assert_equal(consumer, shell)
        narrow(shell)
        may_read.clear()
        number = 2
        while not link_of(shell)._is_full:
            await ask(client, number)
            number += 1
        await ask(client, *range(number, number + 30))  # Far more than the ring keeps.
        assert shell.server.feed.num_lost == 0  # It has no room for being told, and nothing waits for it.

        may_read.set()

        await assert_equal(consumer, shell)
        assert shell.server.feed.num_lost >= 1
        assert shell.server.counters["slow_gateways"] == 0


async def test_an_engine_without_events_is_named_and_one_that_takes_its_place_is_followed(directory: Path) -> None:
    async with consumer_at(directory) as consumer:
        async with engine_at(directory, capacity=0):
            async with asyncio.timeout(WAIT_S):
                while "event_buffer_max_size is 0" not in (consumer.last_error or ""):
                    await asyncio.sleep(0.01)
            assert not consumer.is_current
        async with engine_at(directory, life=2) as shell:
            await ask(await shell.client(), 1)
            await assert_equal(consumer, shell)


async def test_a_consumer_before_its_engine_waits_and_says_why(directory: Path) -> None:
    async with consumer_at(directory) as consumer:
        assert not await consumer.wait_current(0.1)
        assert "no engine answers" in str(consumer.last_error)

        async with engine_at(directory) as shell:
            await assert_equal(consumer, shell)


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_in_whatever_order_the_copies_are_the_index_in_the_end(
    directory: Path, seed: int
) -> None:
    rng = random.Random(seed)
    async with contextlib.AsyncExitStack() as stack:
        steady = await stack.enter_async_context(consumer_at(directory))
        for life in range(3):
            capacity = rng.choice([3, 20, 1000])
            async with engine_at(directory, life, capacity) as shell, consumer_at(directory) as late:
                client = await shell.client()
                for _ in range(12):
                    if rng.random() < 0.3:
                        cut(shell)
                    requests = [ask(client, rng.randrange(12)) for _ in range(rng.randrange(1, 4))]
                    await asyncio.gather(*requests)
                    shell.core.check_invariants()
                await assert_equal(steady, shell)
                await assert_equal(late, shell)


def link_of(shell: Shell):  # type: ignore[no-untyped-def]
    return next(each for each in shell.server.connections if each._events is not None)


def cut(shell: Shell) -> None:
    """End the connections of all consumers."""
    for connection in list(shell.server.connections):
        if connection._events is not None:
            connection.abort()


def narrow(shell: Shell) -> None:
    """Let little fit between engine and consumer, so that a test need not write much to fill it."""
    transport = link_of(shell)._transport
    transport.set_write_buffer_limits(high=2048)
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

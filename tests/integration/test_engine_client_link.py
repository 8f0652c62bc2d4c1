"""The gateway's end of the link against an engine that says what a test wants."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cached.keys import NO_OWNER
from cached.wire import FrameReader
from engine.client import EngineClient
from engine.errors import EngineUnavailable, RequestRejected
from engine.protocol import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    TO_ENGINE,
    TO_GATEWAY,
    Cancel,
    Confirm,
    Hello,
    OwnerShare,
    OwnerTable,
    Rejected,
    Stats,
    StatsRequest,
    Step,
    Stop,
    Submit,
    TierChanged,
    TokenEvent,
    Welcome,
)

WAIT_S = 20.0

WELCOME = Welcome(
    version=PROTOCOL_VERSION,
    incarnation="00",
    model_id="scripted",
    model_dir="",
    vocab_size=1000,
    max_context_tokens=100,
    max_prompt_tokens=99,
    eos_token_ids=(0,),
    tokens_per_block=16,
    num_blocks=10,
    layout_fingerprint=bytes(32),
    credits=8,
    tier="none",
)

Script = Callable[["Link", Any], Awaitable[None] | None]


class Link:
    """One connection to the scripted engine."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer

    def send(self, message: Any) -> None:
        self.writer.write(TO_GATEWAY.encode(message))

    def drop(self) -> None:
        self.writer.transport.abort()


class ScriptedEngine:
    """Answers each message with what `script` does, and remembers what it heard."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "engine.sock"
        self.heard: list[Any] = []
        self.links: list[Link] = []
        self.script: Script = self.polite
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for link in self.links:
            link.drop()
        self.path.unlink(missing_ok=True)

    def polite(self, link: Link, message: Any) -> None:
        if isinstance(message, Hello):
            link.send(WELCOME)

    async def until_heard(self, kind: type) -> Any:
        async with asyncio.timeout(WAIT_S):
            while True:
                for message in self.heard:
                    if isinstance(message, kind):
                        return message
                await asyncio.sleep(0.002)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link, frames = Link(writer), FrameReader(MAX_FRAME_BYTES)
        self.links.append(link)
        try:
            while data := await reader.read(65536):
                for frame in frames.receive(data):
                    message = TO_ENGINE.decode(frame)
                    self.heard.append(message)
                    done = self.script(link, message)
                    if done is not None:
                        await done
        except ConnectionError:
            pass
        finally:
            writer.close()


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    directory = Path(tempfile.mkdtemp(dir="/tmp", prefix="halocline-link-"))
    scripted = ScriptedEngine(directory)
    await scripted.start()
    yield scripted
    await scripted.stop()
    shutil.rmtree(directory)


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[EngineClient]:
    made = EngineClient(str(engine.path), "test")
    await made.start()
    assert await made.wait_connected(WAIT_S)
    yield made
    await made.close()


async def test_events_end_with_the_finish(engine: ScriptedEngine, client: EngineClient) -> None:
    stream = client.submit([1, 2], 5)
    submit = await engine.until_heard(Submit)
    engine.links[0].send(Step((TokenEvent(submit.request_id, (7,)), TokenEvent(999, (8,)))))
    engine.links[0].send(Step((TokenEvent(submit.request_id, (9,), finish="stop"),)))

    events = [event async for event in stream]

    assert [event.tokens for event in events] == [(7,), (9,)]
    assert stream.finished
    assert client.num_inflight == 0


async def test_leaving_a_stream_that_has_not_finished_cancels_it(engine: ScriptedEngine, client: EngineClient) -> None:
    async with client.submit([1], 5) as stream:
        pass

    assert await engine.until_heard(Cancel) == Cancel(stream.request_id)
    engine.links[0].send(Step((TokenEvent(stream.request_id, (7,)),)))
    assert [event async for event in stream] == []


async def test_after_a_stop_the_stream_is_over_and_is_not_cancelled(
    engine: ScriptedEngine, client: EngineClient
) -> None:
    async with client.submit([1], 5, hold_generated=True) as stream:
        stream.confirm(1)
        stream.stop(2)
        assert [event async for event in stream] == []

    assert await engine.until_heard(Confirm) == Confirm(stream.request_id, 1)
    assert await engine.until_heard(Stop) == Stop(stream.request_id, 2)
    await engine.until_heard(Submit)
    assert not any(isinstance(message, Cancel) for message in engine.heard)


async def test_a_rejection_is_raised_by_the_stream(engine: ScriptedEngine, client: EngineClient) -> None:
    stream = client.submit([1], 5)
    submit = await engine.until_heard(Submit)
    engine.links[0].send(Rejected(submit.request_id, "engine_overloaded", "busy", None, True))

    with pytest.raises(RequestRejected) as rejected:
        await anext(stream)

    assert (rejected.value.code, rejected.value.retryable) == ("engine_overloaded", True)


async def test_a_waiting_reader_learns_that_the_engine_died_and_the_client_reconnects(
    engine: ScriptedEngine, client: EngineClient
) -> None:
    stream = client.submit([1], 5)
    reading = asyncio.ensure_future(anext(stream))
    await engine.until_heard(Submit)

    engine.links[0].drop()

    with pytest.raises(EngineUnavailable):
        await reading
    assert await client.wait_connected(WAIT_S)
    assert client.num_inflight == 0


async def test_tokens_that_came_before_the_death_are_read_before_it(
    engine: ScriptedEngine, client: EngineClient
) -> None:
    stream = client.submit([1], 5)
    submit = await engine.until_heard(Submit)
    engine.links[0].send(Step((TokenEvent(submit.request_id, (7,)),)))
    await engine.links[0].writer.drain()
    engine.links[0].writer.close()

    assert (await anext(stream)).tokens == (7,)
    with pytest.raises(EngineUnavailable):
        await anext(stream)


async def test_what_cannot_be_read_ends_the_connection_and_its_streams(
    engine: ScriptedEngine, client: EngineClient
) -> None:
    stream = client.submit([1], 5)
    await engine.until_heard(Submit)

    engine.links[0].writer.write(b"\x00\x00\x00\x01\xc1")

    with pytest.raises(EngineUnavailable):
        await anext(stream)
    assert "cannot be read" in (client.last_error or "") or await client.wait_connected(WAIT_S)


async def test_an_engine_of_another_version_is_not_connected_to_and_the_reason_is_told(engine: ScriptedEngine) -> None:
    engine.script = lambda link, message: link.send(dataclasses.replace(WELCOME, version=PROTOCOL_VERSION + 1))
    client = EngineClient(str(engine.path), "test")
    await client.start()
    await engine.until_heard(Hello)

    async with asyncio.timeout(WAIT_S):
        while "version" not in (client.last_error or ""):
            await asyncio.sleep(0.005)

    assert not client.connected
    await client.close()


async def test_an_engine_that_comes_later_is_found(engine: ScriptedEngine) -> None:
    await engine.stop()
    client = EngineClient(str(engine.path), "test")
    await client.start()
    assert not await client.wait_connected(0.1)

    await engine.start()

    assert await client.wait_connected(WAIT_S)
    await client.close()


async def test_the_owner_table_is_told_to_every_engine_that_is_connected(
    engine: ScriptedEngine, client: EngineClient
) -> None:
    table = OwnerTable(3, (OwnerShare(NO_OWNER, 2.0, 0, None),))
    client.set_owner_table(table)
    await engine.until_heard(OwnerTable)
    engine.heard.clear()

    engine.links[0].drop()

    assert await engine.until_heard(OwnerTable) == table


async def test_tier_changes_and_statistics_are_heard(engine: ScriptedEngine, client: EngineClient) -> None:
    def answer(link: Link, message: Any) -> None:
        if isinstance(message, StatsRequest):
            link.send(TierChanged("ready"))
            link.send(Stats(message.token, "ready", '{"core": {"blocks_total": 3}, "tier": {"loads": 1}}'))

    engine.script = answer

    figures = await client.stats()

    assert figures["core"]["blocks_total"] == 3
    assert client.tier == "ready"


async def test_statistics_that_do_not_come_are_an_unavailable_engine(
    engine: ScriptedEngine, client: EngineClient
) -> None:
    with pytest.raises(EngineUnavailable):
        await client.stats(timeout_s=0.05)


async def test_closing_ends_open_streams(engine: ScriptedEngine, client: EngineClient) -> None:
    stream = client.submit([1], 5)

    await client.close()

    with pytest.raises(EngineUnavailable):
        await anext(stream)
    assert not client.connected

"""Requests through a real socket and the real core: what is answered, what is released, what is refused."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import stat
import threading
from pathlib import Path

import pytest

from cached.keys import NO_OWNER, OwnerId
from cached.wire import HEADER_BYTES
from engine.client import EngineClient, EngineStream
from engine.errors import EngineConfigError, EngineUnavailable, RequestRejected
from engine.protocol import (
    PROTOCOL_VERSION,
    TO_ENGINE,
    TO_GATEWAY,
    Cancel,
    Hello,
    OwnerShare,
    OwnerTable,
    Rejected,
    Sampling,
    Step,
    Submit,
    TokenEvent,
    Welcome,
)
from engine.server import EngineServer, bind_socket
from tests.support.fake_runner import FakeInfo, FakeRunner, expected_tokens
from tests.support.shell import WAIT_S, Shell, is_quiet

GREEDY = Sampling(temperature=0.0)


async def read_all(stream: EngineStream) -> list[TokenEvent]:
    return [event async for event in stream]


async def generate(client: EngineClient, prompt: list[int], max_tokens: int, **more: object) -> list[int]:
    events = await read_all(client.submit(prompt, max_tokens, GREEDY, **more))  # type: ignore[arg-type]
    assert events[-1].finish == "length"
    assert sum(event.finish is not None for event in events) == 1
    return [token for event in events for token in event.tokens]


def prompt_of(seed: int, length: int) -> list[int]:
    return [random.Random(seed * 1000 + at).randrange(1, 1000) for at in range(length)]


class RawGateway:
    """A connection that says whatever a test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, path: Path, hello: Hello | None = Hello(PROTOCOL_VERSION, "raw")) -> RawGateway:  # noqa: B008
        raw = cls(*await asyncio.open_unix_connection(str(path)))
        if hello is not None:
            raw.send(hello)
            assert isinstance(await raw.receive(), Welcome)
        return raw

    def send(self, message: object) -> None:
        self.writer.write(TO_ENGINE.encode(message))

    async def receive(self) -> object:
        header = await asyncio.wait_for(self.reader.readexactly(HEADER_BYTES), WAIT_S)
        return TO_GATEWAY.decode(await self.reader.readexactly(int.from_bytes(header, "big")))

    async def is_closed(self) -> bool:
        try:
            while await asyncio.wait_for(self.reader.read(65536), WAIT_S):
                pass
        except ConnectionResetError:
            pass
        return True


async def test_a_request_gets_its_tokens_in_order_and_one_finish() -> None:
    prompt = prompt_of(1, 30)
    async with Shell() as shell:
        client = await shell.client()

        tokens = await generate(client, prompt, 10)

        assert tokens == expected_tokens(prompt, 10)
        await shell.until(is_quiet)


async def test_the_second_run_of_a_prompt_is_served_from_the_device_and_gives_the_same() -> None:
    prompt = prompt_of(2, 33)
    async with Shell() as shell:
        client = await shell.client()
        first = await read_all(client.submit(prompt, 4, GREEDY))
        second = await read_all(client.submit(prompt, 4, GREEDY))

        assert [event.tokens for event in first] == [event.tokens for event in second]
        cold, warm = first[0].first, second[0].first
        assert cold is not None
        assert warm is not None
        assert (cold.device_tokens, cold.computed_tokens) == (0, 33)
        assert (warm.device_tokens, warm.computed_tokens) == (32, 1)
        assert cold.blocks_missed == warm.blocks_full + warm.blocks_missed == 9
        assert warm.ttft_ms >= warm.queue_ms >= 0


async def test_many_gateways_and_requests_at_once_each_get_their_own_answer() -> None:
    async with Shell(FakeRunner(FakeInfo(num_blocks=96))) as shell:
        clients = [await shell.client(f"gateway-{number}") for number in range(3)]
        prompts = [prompt_of(number % 7, 10 + number % 50) for number in range(60)]

        answers = await asyncio.gather(
            *(generate(clients[at % 3], prompt, 5 + at % 9) for at, prompt in enumerate(prompts))
        )

        for at, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            assert answer == expected_tokens(prompt, 5 + at % 9)
        await shell.until(is_quiet)


async def test_a_seed_is_chosen_when_none_is_given_and_kept_when_one_is() -> None:
    prompt = prompt_of(3, 9)
    async with Shell() as shell:
        client = await shell.client()

        async def run(seed: int | None) -> list[int]:
            events = await read_all(client.submit(prompt, 5, Sampling(temperature=1.0, seed=seed)))
            return [token for event in events for token in event.tokens]

        assert await run(7) == await run(7) == expected_tokens(prompt, 5, seed=7, temperature=1.0)
        assert await run(None) != await run(None)


async def test_a_cancelled_request_gives_its_step_up_and_releases_all_it_held() -> None:
    async with Shell(FakeRunner(gate=threading.Event())) as shell:
        client = await shell.client()
        stream = client.submit(prompt_of(4, 40), 100, GREEDY)
        await asyncio.to_thread(shell.runner.executing.wait, WAIT_S)

        stream.cancel()  # The step itself would last for ever.

        await shell.until(is_quiet)
        assert shell.runner.aborted == 1
        assert client.num_inflight == 0


async def test_a_step_that_others_wait_for_is_not_given_up() -> None:
    gate = threading.Event()
    gate.set()
    async with Shell(FakeRunner(gate=gate)) as shell:
        client = await shell.client()
        kept_prompt = prompt_of(5, 8)
        kept, left = client.submit(kept_prompt, 50, GREEDY), client.submit(prompt_of(6, 8), 500, GREEDY)
        await anext(left)

        gate.clear()
        left.cancel()
        gate.set()

        tokens = [token for event in await read_all(kept) for token in event.tokens]
        assert tokens == expected_tokens(kept_prompt, 50)
        assert shell.runner.aborted == 0
        await shell.until(is_quiet)


async def test_a_lost_connection_cancels_all_its_requests_and_no_others() -> None:
    async with Shell(FakeRunner(step_s=0.005)) as shell:
        leaving, staying = await shell.client("leaving"), await shell.client("staying")
        for number in range(10):
            leaving.submit(prompt_of(number, 12), 900, GREEDY)
        prompt = prompt_of(20, 12)
        answer = asyncio.create_task(generate(staying, prompt, 20))

        await leaving.close()

        assert await answer == expected_tokens(prompt, 20)
        await shell.until(is_quiet)


async def test_half_of_five_hundred_requests_cancelled_at_random_leave_nothing_behind() -> None:
    async with Shell(FakeRunner(FakeInfo(num_blocks=64))) as shell:
        client = await shell.client()
        await generate(client, prompt_of(0, 20), 3)
        fds_before = len(os.listdir("/proc/self/fd"))
        dice = random.Random(500)

        async def one(number: int) -> None:
            prompt = prompt_of(number % 20, dice.randrange(1, 60))
            events_wanted = dice.choice([None, 0, 1, 2, 5])
            async with client.submit(prompt, 8, GREEDY) as stream:
                if events_wanted is None:
                    tokens = [token for event in await read_all(stream) for token in event.tokens]
                    assert tokens == expected_tokens(prompt, 8)
                for _ in range(events_wanted or 0):
                    await anext(stream)

        await asyncio.gather(*(one(number) for number in range(500)))

        figures = await shell.until(is_quiet)
        assert figures["core"]["blocks_total"] == figures["core"]["blocks_idle"] + figures["core"]["blocks_free"]
        assert client.num_inflight == 0
        assert len(os.listdir("/proc/self/fd")) == fds_before
        assert not shell.inbox.cancelled
        shell.core.check_invariants()


async def test_a_stop_string_ends_the_request_and_its_tokens_are_reusable_as_far_as_they_are_kept() -> None:
    prompt = prompt_of(7, 8)
    async with Shell() as shell:
        client = await shell.client()
        stream = client.submit(prompt, 500, GREEDY, hold_generated=True)
        tokens: list[int] = []
        async for event in stream:
            tokens += event.tokens
            if len(tokens) >= 9:
                stream.confirm(8)
                stream.stop(8)
        await shell.until(is_quiet)

        again = client.submit([*prompt, *tokens[:8], 5, 6], 1, GREEDY)
        first = (await read_all(again))[0].first

        assert first is not None
        assert first.device_tokens >= 12


async def test_the_engine_says_one_finish_after_a_stop() -> None:
    async with Shell() as shell:
        raw = await RawGateway.connect(shell.socket)
        raw.send(Submit(1, (1).to_bytes(4, "little") * 9, 5, GREEDY))
        finishes = []
        while not finishes:
            step = await raw.receive()
            assert isinstance(step, Step)
            finishes += [event.finish for event in step.events if event.finish]
        raw.send(Submit(2, b"", 5, GREEDY))

        assert isinstance(await raw.receive(), Rejected)
        assert finishes == ["length"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": b"\x01"}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"owner": b"short"}, "owner"),
        ({"sampling": Sampling(temperature=float("nan"))}, "temperature"),
        ({"sampling": Sampling(logprobs=1000)}, "logprobs"),
    ],
)
async def test_a_request_that_would_spoil_a_step_is_rejected_and_the_connection_stays(
    change: dict[str, object], param: str
) -> None:
    async with Shell() as shell:
        raw = await RawGateway.connect(shell.socket)
        fields: dict[str, object] = {"request_id": 1, "prompt": bytes(16), "max_tokens": 1, "sampling": GREEDY}

        raw.send(Submit(**{**fields, **change}))  # type: ignore[arg-type]

        rejected = await raw.receive()
        assert isinstance(rejected, Rejected)
        assert (rejected.param, rejected.retryable) == (param, False)
        raw.send(Submit(2, bytes(16), 1, GREEDY))
        assert isinstance(await raw.receive(), Step)


async def test_a_prompt_longer_than_the_pool_and_a_token_outside_the_vocabulary_are_rejected() -> None:
    async with Shell(FakeRunner(FakeInfo(num_blocks=8))) as shell:
        client = await shell.client()

        with pytest.raises(RequestRejected) as too_long:
            await read_all(client.submit([1] * 4000, 1, GREEDY))
        with pytest.raises(RequestRejected) as outside:
            await read_all(client.submit([1, 1_000_000], 1, GREEDY))
        with pytest.raises(RequestRejected):
            client.submit([-1], 1, GREEDY)

        assert too_long.value.code == "context_length_exceeded"
        assert not too_long.value.retryable
        assert not outside.value.retryable
        assert client.num_inflight == 0


async def test_an_owner_that_floods_a_connection_within_one_step_leaves_places_to_others() -> None:
    greedy, other = OwnerId(b"1" * 16), OwnerId(b"2" * 16)
    async with Shell(FakeRunner(gate=threading.Event()), credits=20) as shell:
        client = await shell.client()
        busy = client.submit([1, 2, 3], 1, GREEDY, owner=greedy)
        await asyncio.to_thread(shell.runner.executing.wait)
        # The step that runs never ends here, so the core cannot judge; the connection has to.
        flood = [client.submit([4, 5, each], 1, GREEDY, owner=greedy) for each in range(30)]
        with pytest.raises(RequestRejected, match="your share") as refused:
            await anext(flood[-1])
        theirs = client.submit([6, 7, 8], 1, GREEDY, owner=other)
        async with asyncio.timeout(WAIT_S):
            while shell.server.num_live < 11:  # Ten of the greedy one, and this.
                await asyncio.sleep(0.005)

        assert refused.value.retryable
        assert shell.runner.gate is not None
        shell.runner.gate.set()
        assert [event async for event in theirs][-1].finish == "length"
        assert [event async for event in busy][-1].finish == "length"
        for stream in flood[:-1]:
            stream.cancel()
        await shell.until(is_quiet)


async def test_more_than_the_credits_is_rejected_as_busy() -> None:
    async with Shell(FakeRunner(gate=threading.Event()), credits=2) as shell:
        client = await shell.client()
        streams = [client.submit([1, 2, 3], 5, GREEDY) for _ in range(3)]

        with pytest.raises(RequestRejected) as busy:
            await anext(streams[2])

        assert client.info is not None
        assert client.info.credits == 2
        assert busy.value.retryable


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x01\xc1",
        b"\x00\x00\x00\x00",
        b"\x00\x00\x00\x03\x92\x63\x01",
        TO_ENGINE.encode(Cancel(1))[:-1] + b"\xc3",
        TO_ENGINE.encode(Hello(PROTOCOL_VERSION, "again")),
    ],
)
async def test_a_malformed_frame_closes_its_connection_only(garbage: bytes) -> None:
    prompt = prompt_of(8, 10)
    async with Shell() as shell:
        client = await shell.client()
        raw = await RawGateway.connect(shell.socket)
        raw.send(Submit(1, bytes(16), 900, GREEDY))

        raw.writer.write(garbage)

        assert await raw.is_closed()
        assert await generate(client, prompt, 3) == expected_tokens(prompt, 3)
        await shell.until(is_quiet)


async def test_a_request_id_in_use_is_a_breach_of_protocol() -> None:
    async with Shell(FakeRunner(gate=threading.Event())) as shell:
        raw = await RawGateway.connect(shell.socket)
        raw.send(Submit(1, bytes(16), 5, GREEDY))
        raw.send(Submit(1, bytes(16), 5, GREEDY))

        assert await raw.is_closed()


async def test_a_gateway_of_another_version_learns_the_engines_and_is_let_go() -> None:
    async with Shell() as shell:
        raw = await RawGateway.connect(shell.socket, Hello(PROTOCOL_VERSION + 1, "newer"))

        assert await raw.is_closed()


async def test_a_gateway_that_does_not_read_is_disconnected_and_others_are_served() -> None:
    prompt = prompt_of(9, 10)
    async with Shell(max_unread_bytes=4096) as shell:
        client = await shell.client()
        raw = await RawGateway.connect(shell.socket)
        raw.writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        raw.reader._limit = 1  # type: ignore[attr-defined]  # asyncio stops reading at twice this.
        for number in range(200):
            raw.send(Submit(number, bytes(16), 1900, Sampling(temperature=0.0, logprobs=1)))

        figures = await shell.until(lambda figures: figures["server"]["slow_gateways"] == 1)

        assert figures["server"]["gateways"] == 1
        assert await generate(client, prompt, 3) == expected_tokens(prompt, 3)
        await shell.until(is_quiet)


async def test_a_failed_step_fails_its_requests_as_retryable_and_the_next_one_works() -> None:
    prompt = prompt_of(10, 10)
    async with Shell(FakeRunner(failures=1)) as shell:
        client = await shell.client()

        events = await read_all(client.submit(prompt, 3, GREEDY))

        assert [event.finish for event in events] == ["error"]
        assert events[0].error
        assert await generate(client, prompt, 3) == expected_tokens(prompt, 3)
        assert shell.ended == []
        await shell.until(is_quiet)


async def test_an_engine_whose_steps_keep_failing_ends_so_that_another_can_start() -> None:
    async with Shell(FakeRunner(failures=1000)) as shell:
        client = await shell.client()

        for _ in range(3):
            events = await read_all(client.submit([1, 2, 3], 3, GREEDY))
            assert [event.finish for event in events] == ["error"]

        while not shell.ended:
            await asyncio.sleep(0.01)
        assert shell.ended[0] is not None


async def test_an_engine_that_stops_ends_open_streams_with_a_retryable_error_never_a_normal_finish() -> None:
    async with Shell(FakeRunner(gate=threading.Event())) as shell:
        client = await shell.client()
        stream = client.submit([1, 2, 3], 50, GREEDY)
        await asyncio.to_thread(shell.runner.executing.wait, WAIT_S)

        shell.inbox.stop()
        await shell.server.close("The engine is stopping; the request may be retried.")

        events = await read_all(stream)
        assert [event.finish for event in events] == ["error"]
        assert not shell.socket.exists()


async def test_a_stream_whose_engine_dies_raises_and_the_client_finds_the_next_engine() -> None:
    directory: Path
    async with Shell(FakeRunner(gate=threading.Event())) as shell:
        directory = shell.directory
        client = await shell.client()
        stream = client.submit([1, 2, 3], 50, GREEDY)
        for connection in list(shell.server.connections):
            connection.abort()

        with pytest.raises(EngineUnavailable):
            await read_all(stream)

        assert await client.wait_connected(WAIT_S)
        assert directory.exists()


async def test_submitting_without_an_engine_raises_at_once() -> None:
    client = EngineClient("/nonexistent/engine.sock", "test")
    await client.start()

    with pytest.raises(EngineUnavailable):
        client.submit([1], 1)

    await client.close()


async def test_statistics_reach_the_gateway() -> None:
    async with Shell() as shell:
        client = await shell.client()
        await generate(client, prompt_of(11, 10), 3)

        figures = await client.stats()

        assert figures["tier"]["state"] == "none"
        assert figures["core"]["tokens_generated"] == 3
        assert figures["server"]["requests"] == 1


async def test_the_socket_is_for_its_group_and_a_dead_engines_is_replaced_a_live_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    dead = bind_socket(path)
    dead.close()

    live = bind_socket(path)
    live.listen()

    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    with pytest.raises(EngineConfigError, match="runs"):
        bind_socket(path)
    live.close()
    ordinary = tmp_path / "file"
    ordinary.touch()
    with pytest.raises(EngineConfigError, match="in the way"):
        bind_socket(ordinary)


async def test_only_this_user_root_and_users_that_are_named_may_connect() -> None:
    async with Shell() as shell:
        facts, inbox = shell.server.facts, shell.inbox
        server = EngineServer(facts, inbox, tier="none", allowed_uids=frozenset({4711}))

        assert all(server.may_connect(uid) for uid in (os.geteuid(), 0, 4711))
        assert not server.may_connect(4712)


async def test_a_peer_that_may_not_connect_is_closed_without_a_word() -> None:
    async with Shell() as shell:
        shell.server.may_connect = lambda uid: False  # type: ignore[method-assign]
        raw = await RawGateway.connect(shell.socket, None)

        assert await asyncio.wait_for(raw.reader.read(), WAIT_S) == b""
        assert shell.server.counters["refused_peers"] == 1


async def test_the_newest_owner_table_is_taken_and_an_impossible_one_is_a_breach() -> None:
    async with Shell() as shell:
        client = await shell.client()
        told: list[dict[bytes, float]] = []
        shell.core.set_weights = told.append  # type: ignore[method-assign, assignment]
        for version, weight in ((2, 3.0), (1, 9.0)):
            client.set_owner_table(OwnerTable(version, (OwnerShare(NO_OWNER, weight, 0, None),)))
        await client.stats()
        raw = await RawGateway.connect(shell.socket)
        raw.send(OwnerTable(3, (OwnerShare(NO_OWNER, float("nan"), 0, None),)))

        assert await raw.is_closed()
        assert told == [{NO_OWNER: 3.0}]

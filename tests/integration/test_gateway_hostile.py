"""What hostile clients found: each test tells what was possible before, and holds that it is not any more."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.support.engine_stub import WELCOME, Script
from tests.support.gateway_stand import Stand, chat_body, standing

FOREVER = Script(tokens=(504, 282), repeat=True, step_s=0.005)
SILENT = Script(hang_after=0)
GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
async def stand(demo_model_dir: Path) -> AsyncIterator[Stand]:
    async with standing(demo_model_dir) as made:
        yield made


async def wait_for(condition: Any, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def ask(stand: Stand, data: bytes, timeout_s: float = 10.0) -> bytes:
    """Everything that is answered until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
    try:
        writer.write(data)
        async with asyncio.timeout(timeout_s):
            return await reader.read()
    finally:
        writer.close()


def envelope_of(raw: bytes, status: int) -> dict[str, Any]:
    """The last answer's error; every answer is JSON with an id."""
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.split(b" ")[:2] in ([b"HTTP/1.1", b"%d" % status], [b"HTTP/1.0", b"%d" % status]), raw
    assert b"content-type: application/json" in head.lower()
    assert b"x-request-id: req_" in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def post(stand: Stand, path: str, body: bytes, *extra: str, length: int | None = None) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {stand.key}",
        f"Content-Length: {len(body) if length is None else length}",
        *extra,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class TestAdmission:
    """One tenant with many requests held all 256 places, or all 1024 sequences, and everybody else was answered 503."""

    async def test_a_greedy_tenant_is_told_429_and_the_other_one_is_served(self, demo_model_dir: Path) -> None:
        async with standing(demo_model_dir, SILENT, max_inflight=8) as stand:
            held = [asyncio.create_task(stand.chat()) for _ in range(4)]
            await wait_for(lambda: stand.stub.num_running == 4)

            async with stand.http.post(
                stand.url + "/v1/chat/completions", json=chat_body(), headers=stand.headers()
            ) as response:
                refused, retry_after = await response.json(), response.headers["Retry-After"]
                assert response.status == 429
            other = asyncio.create_task(stand.chat(stand.other_key))
            await wait_for(lambda: stand.stub.num_running == 5)

            assert refused["error"]["type"] == "rate_limit_error"
            assert refused["error"]["code"] == "rate_limit_exceeded"
            assert retry_after == "1"
            for task in [*held, other]:
                task.cancel()
            await wait_for(lambda: len(stand.server.inflight) == 0)

    async def test_sequences_are_counted_too_and_come_back(self, demo_model_dir: Path) -> None:
        async with standing(demo_model_dir, SILENT, with_engine=False) as stand:
            stand.stub.welcome = replace(WELCOME, credits=32)
            await stand.stub.start()
            assert await stand.server.wait_engine(5.0)
            first = asyncio.create_task(stand.chat(n=16))
            await wait_for(lambda: stand.stub.num_running == 16)

            status, body = await stand.chat(n=2)
            assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
            other = asyncio.create_task(stand.chat(stand.other_key, n=2))
            await wait_for(lambda: stand.stub.num_running == 18)
            status, body = await stand.chat(stand.other_key, n=16)
            assert (status, body["error"]["code"]) == (503, "overloaded")

            first.cancel()
            await wait_for(lambda: stand.stub.num_running == 2)
            again = asyncio.create_task(stand.chat(n=4))
            await wait_for(lambda: stand.stub.num_running == 6)
            for task in (other, again):
                task.cancel()
            await wait_for(lambda: len(stand.server.inflight) == 0)

    async def test_a_refusal_holds_nothing(self, stand: Stand) -> None:
        """Nor does a body that is refused after its place was taken."""
        for _ in range(3):
            assert (await stand.chat(n=99))[0] == 400
            assert (await stand.chat(messages=[]))[0] == 400

        assert len(stand.server.inflight) == 0
        assert repr(stand.server.inflight._requests) == "Places(0 taken by 0)"
        assert repr(stand.server.inflight._sequences) == "Places(0 taken by 0)"


class TestDeparture:
    """aiohttp stops reading when much is pipelined, and then sees no end: a generation ran on for 20 s for nobody."""

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("behind", ["nothing", "few", "many", "body", "half header", "junk"])
    @pytest.mark.parametrize("leave", ["fin", "reset"])
    async def test_a_client_that_leaves_is_noticed_whatever_it_has_pipelined(
        self, demo_model_dir: Path, stream: bool, behind: str, leave: str
    ) -> None:
        async with standing(demo_model_dir, FOREVER) as stand:
            tail = {
                "nothing": b"",
                "few": GET * 20,
                "many": GET * 3000,
                "body": post(stand, "/v1/completions", b"x" * 2_000_000, length=30_000_000),
                "half header": b"GET / HT",
                "junk": b"junk\r\n\r\n",
            }[behind]
            _, writer = await asyncio.open_connection("127.0.0.1", stand.port)
            writer.write(post(stand, "/v1/chat/completions", json.dumps(chat_body(stream=stream)).encode()))
            await wait_for(lambda: stand.stub.num_running == 1)
            writer.write(tail)
            await asyncio.sleep(0.02)

            writer.transport.abort() if leave == "reset" else writer.close()

            # The engine would go on for 40 s.
            await wait_for(lambda: stand.stub.num_running == 0)
            await wait_for(lambda: len(stand.server.inflight) == 0)

    async def test_a_client_that_stays_is_ended_when_it_pipelines_more_than_can_be_read(self, stand: Stand) -> None:
        """Whether it would leave could not be seen, since the end would lie behind what nobody reads."""
        stand.stub.script = FOREVER
        _, writer = await asyncio.open_connection("127.0.0.1", stand.port)
        writer.write(post(stand, "/v1/chat/completions", json.dumps(chat_body(stream=True)).encode()))
        await wait_for(lambda: stand.stub.num_running == 1)
        writer.write(GET * 3000)

        await wait_for(lambda: stand.stub.num_running == 0)
        writer.close()

    async def test_many_quick_requests_behind_each_other_are_all_answered(self, stand: Stand) -> None:
        short = post(stand, "/v1/chat/completions", json.dumps(chat_body()).encode())
        last = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

        raw = await ask(stand, (short + GET) * 100 + last)

        assert raw.count(b"HTTP/1.1 200 OK") == 201

    async def test_a_large_body_of_the_request_itself_is_no_pipelining(self, stand: Stand) -> None:
        body = json.dumps(chat_body(padding=" " * 4_000_000)).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
        data = post(stand, "/v1/chat/completions", body, "Connection: close")
        for start in range(0, len(data), 1_000_000):
            writer.write(data[start : start + 1_000_000])
            await asyncio.sleep(0.1)  # Longer than an unread connection may be behind an answer.

        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
        writer.close()


class TestHeaderDeadline:
    @pytest.mark.parametrize(
        "data",
        [
            pytest.param(b"GET /h", id="alone"),
            pytest.param(GET + b"GET /hea", id="behind a request"),  # Had the 75 s of an idle connection.
            pytest.param(GET * 40 + b"GET /hea", id="behind many"),
            pytest.param(b"\r\n\r\n" + GET + b"\r\nGET /hea", id="with empty lines"),
        ],
    )
    async def test_half_a_header_is_answered_408_wherever_it_begins(self, demo_model_dir: Path, data: bytes) -> None:
        async with standing(demo_model_dir, header_timeout_s=0.3) as stand:
            raw = await ask(stand, data)

        assert raw.count(b"HTTP/1.1 200 OK") == data.count(b"Host: x")
        envelope_of(raw[raw.rindex(b"HTTP/1.1 ") :], 408)

    def test_half_a_header_that_arrives_with_the_connection_is_answered_too(self, demo_model_dir: Path) -> None:
        """Under uvloop it is read before aiohttp waits for a request, and was closed without a word."""

        async def answer() -> bytes:
            async with standing(demo_model_dir, header_timeout_s=0.3) as stand:
                # The kernel takes both before the server's loop turns.
                with socket.create_connection(("127.0.0.1", stand.port)) as link:
                    link.sendall(b"GET /h")
                    reader, writer = await asyncio.open_connection(sock=link.dup())
                    raw = await asyncio.wait_for(reader.read(), 10)
                    writer.close()
                    return raw

        envelope_of(uvloop.run(answer()), 408)

    @pytest.mark.parametrize("coding", ["length", "chunked"])
    async def test_half_a_header_behind_a_body_is_too_and_its_time_begins_with_the_end_of_the_answer(
        self, demo_model_dir: Path, coding: str
    ) -> None:
        async with standing(demo_model_dir, Script(first_s=0.5), header_timeout_s=0.2) as stand:
            body = json.dumps(chat_body()).encode()
            data = post(stand, "/v1/chat/completions", body)
            if coding == "chunked":
                data = data.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
                data = data.replace(body, b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
            raw = await ask(stand, data + b"GET /hea")

        assert raw.startswith(b"HTTP/1.1 200 OK")
        envelope_of(raw[raw.rindex(b"HTTP/1.1 ") :], 408)

    @pytest.mark.parametrize("coding", ["length", "chunked", "none"])
    @pytest.mark.parametrize("step", [1, 7, 10_000])
    async def test_a_kept_connection_without_a_rest_is_left_alone(
        self, demo_model_dir: Path, coding: str, step: int
    ) -> None:
        """However a request is cut, nothing of it is taken for the beginning of the next."""
        async with standing(demo_model_dir, header_timeout_s=0.5, keepalive_timeout_s=30) as stand:
            body = json.dumps(chat_body()).encode()
            data = post(stand, "/v1/chat/completions", body) if coding != "none" else GET
            if coding == "chunked":
                data = data.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
                data = data.replace(body, b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
            reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
            for start in range(0, len(data), step):
                writer.write(data[start : start + step])
                await asyncio.sleep(0)
            await asyncio.sleep(1.0)
            writer.write(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            raw = await reader.read()
            writer.close()

        assert raw.count(b"HTTP/1.1 200 OK") == 2, raw


class TestExpect:
    """aiohttp answers before any handler: 417 in plain text, or 100 Continue for a path that does not exist."""

    @pytest.mark.parametrize("expectation", ["100-continue", "odd", ""])
    async def test_what_does_not_exist_or_has_no_key_is_refused_and_not_invited(
        self, stand: Stand, expectation: str
    ) -> None:
        for line, status in (("POST /nope", 404), ("PUT /v1/models", 405), ("POST /v1/completions", 401)):
            raw = await ask(
                stand,
                f"{line} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: {expectation}\r\n"
                "Connection: close\r\n\r\n{}".encode(),
            )
            envelope_of(raw, status)

    @pytest.mark.parametrize("path", ["/healthz", "/readyz"])
    async def test_an_unknown_expectation_is_ignored(self, stand: Stand, path: str) -> None:
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nExpect: odd\r\nConnection: close\r\n\r\n".encode()

        assert (await ask(stand, head)).startswith(b"HTTP/1.1 200 OK")
        reader, writer = await asyncio.open_unix_connection(str(stand.directory / "admin.sock"))
        writer.write(head.replace(b"/readyz", b"/healthz"))
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
        writer.close()

    async def test_a_refused_client_cannot_smuggle_its_body_into_a_next_request(self, stand: Stand) -> None:
        raw = await ask(stand, post(stand, "/nope", GET, "Expect: 100-continue") + GET)

        assert raw.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in raw.lower()

    async def test_a_good_request_is_invited_once_its_key_is_known(self, stand: Stand) -> None:
        body = json.dumps(chat_body()).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
        head = post(stand, "/v1/chat/completions", body, "Expect: 100-Continue", "Connection: close")
        writer.write(head.removesuffix(body))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)

        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
        writer.close()


class TestEncodings:
    @pytest.mark.parametrize(
        ("version", "lines"),
        [
            ("1.1", "Transfer-Encoding: gzip, chunked"),
            ("1.0", "Transfer-Encoding: chunked"),
            ("1.1", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked"),
            ("1.1", "Transfer-Encoding: identity"),
        ],
    )
    async def test_a_body_whose_end_is_doubtful_is_refused_and_the_connection_ended(
        self, stand: Stand, version: str, lines: str
    ) -> None:
        head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nAuthorization: Bearer {stand.key}\r\n{lines}\r\n\r\n"
        raw = await ask(stand, head.encode() + b"2\r\n{}\r\n0\r\n\r\n")

        # Some are refused by aiohttp's parser already.
        assert envelope_of(raw, 400)["code"] in ("unsupported_transfer_encoding", "invalid_http")

    async def test_a_second_content_encoding_counts_too(self, stand: Stand) -> None:
        """The first was asked, which said identity; the second said gzip."""
        for lines in (
            ["Content-Encoding: identity", "Content-Encoding: gzip"],
            ["Content-Encoding: identity, gzip"],
            ["Content-Encoding: gzip", "Content-Encoding: identity"],
        ):
            raw = await ask(stand, post(stand, "/v1/completions", b"{}", *lines, "Connection: close"))
            envelope_of(raw, 415)

    async def test_a_chunk_that_is_broken_in_a_later_packet_is_a_400_at_once(self, stand: Stand) -> None:
        """The reader of the body was left waiting for its 30 s, since the parser spoke to nobody but the next request."""
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
        head = post(stand, "/v1/completions", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        writer.write(head + b"2\r\n{}\r\n")
        await asyncio.sleep(0.05)
        writer.write(b"zz\r\n")

        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 400 ")
        writer.close()


async def readiness(stand: Stand) -> tuple[int, dict[str, Any]]:
    async with stand.http.get(stand.url + "/readyz") as response:
        return response.status, await response.json()


async def wait_ready(stand: Stand, **expected: Any) -> int:
    async with asyncio.timeout(5):
        while True:
            status, body = await readiness(stand)
            if expected.items() <= body.items():
                return status
            await asyncio.sleep(0.01)


class TestHeartbeat:
    """A stopped engine keeps its socket: the gateway said it was ready, and requests waited 600 s for a first token."""

    async def test_an_engine_that_does_not_answer_is_unresponsive_until_it_does(self, demo_model_dir: Path) -> None:
        async with standing(demo_model_dir, engine_heartbeat_s=0.2) as stand:
            stand.stub.freeze()
            assert await wait_ready(stand, engine="unresponsive", status="unavailable") == 503
            async with stand.http.post(
                stand.url + "/v1/chat/completions", json=chat_body(), headers=stand.headers()
            ) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "1")
                assert (await response.json())["error"]["code"] == "engine_unavailable"

            stand.stub.thaw()
            assert await wait_ready(stand, engine="connected", status="ready") == 200
            assert (await stand.chat())[0] == 200

    async def test_an_idle_engine_that_answers_stays_ready(self, demo_model_dir: Path) -> None:
        async with standing(demo_model_dir, engine_heartbeat_s=0.3) as stand:
            for _ in range(40):
                assert (await readiness(stand))[1]["engine"] == "connected"
                await asyncio.sleep(0.02)

    async def test_an_engine_that_ends_while_it_is_unresponsive_is_found_again(self, demo_model_dir: Path) -> None:
        async with standing(demo_model_dir, engine_heartbeat_s=0.1) as stand:
            stand.stub.freeze()
            await wait_ready(stand, engine="unresponsive")
            stand.stub.crash()
            await wait_ready(stand, engine="absent")
            stand.stub.thaw()
            await stand.stub.start()
            await wait_ready(stand, engine="connected")
            assert (await stand.chat())[0] == 200


async def test_old_tenants_are_told_by_readiness_and_served_all_the_same(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that could not be read for minutes left no trace on the tenants' listener."""
    monkeypatch.setattr(type(stand.watcher), "age_s", 5.5)

    status, body = await readiness(stand)

    assert (status, body["status"], body["tenants"]) == (200, "ready", "stale")
    assert (await stand.chat())[0] == 200

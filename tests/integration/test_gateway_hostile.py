"""What hostile clients found: each test tells what was possible before, and holds that it is not any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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
    assert head.startswith(b"HTTP/1.1 %d " % status), raw
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

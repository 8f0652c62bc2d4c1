"""The readiness probe of `up`: a real request, which says that it is no traffic."""

from __future__ import annotations

import asyncio

import pytest

from command.ready import Address, Answered, NotYet, Wrong, probe


async def probed(status: str) -> tuple[Answered | NotYet | Wrong, bytes]:
    """The probe's verdict on an answer, and the head of what it sent."""
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        verdict = await probe(Address("127.0.0.1", server.sockets[0].getsockname()[1]), "key", "demo")
    return verdict, heads[0]


async def test_the_probe_says_that_it_is_a_warm_up() -> None:
    verdict, head = await probed("200 OK")

    assert verdict == Answered()
    assert b"\r\nx-halocline-warm-up: 1\r\n" in head


@pytest.mark.parametrize(("status", "kind"), [("503 Service Unavailable", NotYet), ("401 Unauthorized", Wrong)])
async def test_other_answers_are_told_apart_by_whether_waiting_helps(status: str, kind: type) -> None:
    assert isinstance((await probed(status))[0], kind)

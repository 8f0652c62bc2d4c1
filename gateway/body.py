"""Reads a request's body within its limits of size, time and memory, and decodes it as a JSON object.

A body gets `timeout_s`, and more only as long as it keeps coming at `MIN_BYTES_PER_S`: slow lines may send large bodies,
a trickle may not hold a connection (field report 56). All bodies together may hold `BodyMemory` of memory; they are
counted by what has arrived, since what a header announces costs its sender nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.errors import (
    bad_request,
    invalid_json,
    overloaded,
    slow_body,
    too_large,
    too_many_values,
    unsupported_media,
)
from gateway.json_size import ValueCounter
from gateway.responses import EXPECTS_CONTINUE

MIN_BYTES_PER_S: Final = 16 * 1024
MAX_VALUES: Final = 2**20
"""Parsing as many takes about 0.1 s, in which nothing else is answered; a prompt of token ids has one value a token."""


class BodyMemory:
    """How many bytes of bodies are held at once, on all connections together. Owned by the event loop."""

    def __init__(self, max_bytes: int) -> None:
        self.bytes_held = 0
        self._max_bytes = max_bytes

    @contextmanager
    def holding(self) -> Iterator[Share]:
        """One body's share of the memory, given back at the end of the block if not before."""
        share = Share(self)
        try:
            yield share
        finally:
            share.release()

    def _take(self, num_bytes: int) -> None:
        # Who asks for the byte too many is refused, and gives back what it had: so some body always gets to its end.
        if self.bytes_held + num_bytes > self._max_bytes:
            raise overloaded("The server is reading too many large bodies at once. The request may be retried.")
        self.bytes_held += num_bytes

    def _give_back(self, num_bytes: int) -> None:
        self.bytes_held -= num_bytes


class Share:
    """What one body holds of the memory, from its first byte until only tokens are left of it."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._bytes_held = 0

    def take(self, num_bytes: int) -> None:
        """Hold so many more; raises ApiError (503) when there is no room for them."""
        self._memory._take(num_bytes)
        self._bytes_held += num_bytes

    def release(self) -> None:
        """The body is not needed any more; twice is as good as once."""
        self._memory._give_back(self._bytes_held)
        self._bytes_held = 0


async def read_json_object(request: web.Request, share: Share, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """The body as an object; raises ApiError for one that is too large, too slow, encoded, or not a JSON object."""
    check_headers(request, max_bytes)
    await _invite(request)
    return _decoded(await _read(request, share, max_bytes, timeout_s))


def _decoded(raw: bytearray) -> dict[str, Any]:
    if not raw or raw.isspace():
        raise invalid_json("it is empty")
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise invalid_json(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    if not isinstance(body, dict):
        raise invalid_json("its outermost value is not an object")
    return body


def check_headers(request: web.Request, max_bytes: int) -> None:
    """Refuse by what the headers say, before a byte of the body is read."""
    length = request.content_length
    if length is not None and length > max_bytes:
        raise too_large(max_bytes)
    # All of them: which of two headers counts is not for the sender's luck to decide.
    encodings = ",".join(request.headers.getall("Content-Encoding", [])).split(",")
    if any(encoding.strip().lower() not in ("identity", "") for encoding in encodings):
        raise unsupported_media("The body must be sent without Content-Encoding.")
    charset = request.charset
    if charset is not None and charset.lower() not in ("utf-8", "utf8", "us-ascii"):
        raise unsupported_media("The body must be UTF-8.")


async def _invite(request: web.Request) -> None:
    """Ask for the body of a client that waits to be asked."""
    if request.get(EXPECTS_CONTINUE):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # What follows is the first output of the answer as far as aiohttp's writer is concerned.
        request.writer.output_size = 0
        del request[EXPECTS_CONTINUE]


async def _read(request: web.Request, share: Share, max_bytes: int, timeout_s: float) -> bytearray:
    started = asyncio.get_running_loop().time()
    received = bytearray()
    counter = ValueCounter()
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            while chunk := await request.content.readany():
                if len(received) + len(chunk) > max_bytes:
                    raise too_large(max_bytes)
                share.take(len(chunk))
                received += chunk
                if counter.feed(chunk) > MAX_VALUES:
                    raise too_many_values(MAX_VALUES)
                deadline.reschedule(started + timeout_s + len(received) / MIN_BYTES_PER_S)
    except TimeoutError:
        raise slow_body() from None
    except (web.RequestPayloadError, HttpProcessingError):
        raise bad_request("The body's transfer encoding is broken.", None, "invalid_body") from None
    return received

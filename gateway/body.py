"""Reads a request's body within its limits of size and time, and decodes it as a JSON object.

A body gets `timeout_s`, and more only as long as it keeps coming at `MIN_BYTES_PER_S`: slow lines may send large bodies,
a trickle may not hold a connection (field report 56).
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.errors import bad_request, invalid_json, slow_body, too_large, unsupported_media

MIN_BYTES_PER_S: Final = 16 * 1024


async def read_json_object(request: web.Request, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """The body as an object; raises ApiError for one that is too large, too slow, encoded, or not a JSON object."""
    check_headers(request, max_bytes)
    raw = await _read(request, max_bytes, timeout_s)
    if not raw.strip():
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
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise unsupported_media("The body must be sent without Content-Encoding.")
    charset = request.charset
    if charset is not None and charset.lower() not in ("utf-8", "utf8", "us-ascii"):
        raise unsupported_media("The body must be UTF-8.")


async def _read(request: web.Request, max_bytes: int, timeout_s: float) -> bytes:
    started = asyncio.get_running_loop().time()
    received = bytearray()
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            while chunk := await request.content.readany():
                received += chunk
                if len(received) > max_bytes:
                    raise too_large(max_bytes)
                deadline.reschedule(started + timeout_s + len(received) / MIN_BYTES_PER_S)
    except TimeoutError:
        raise slow_body() from None
    except (web.RequestPayloadError, HttpProcessingError):
        raise bad_request("The body's transfer encoding is broken.", None, "invalid_body") from None
    return bytes(received)

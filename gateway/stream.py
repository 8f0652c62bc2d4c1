"""One answer as server-sent events: opens late, so that an early failure can still be a plain error; pings when quiet.

Headers go out with the first event, or with the first ping when the engine takes long. Every write is a whole frame, so
a ping can never fall into one. Never compressed: a compressor would hold events back.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Final

from aiohttp import web

from gateway import sse

PING_INTERVAL_S: Final = 10.0
"""Load balancers close what is quiet for a minute; the contract asks for a sign every 15 s at least."""

WRITE_STALL_S: Final = 60.0
"""A client that takes nothing for this long is treated as gone; otherwise it would hold its generation for ever."""

_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventStream:
    """Use within `async with`; `is_open` says whether the client has been sent anything."""

    def __init__(self, request: web.Request, ping_interval_s: float = PING_INTERVAL_S) -> None:
        self.response = web.StreamResponse(headers=_HEADERS)
        self._request = request
        self._ping_interval_s = ping_interval_s
        self._last_write = 0.0
        self._opening = asyncio.Lock()
        self._pinger: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self.response.prepared

    async def __aenter__(self) -> EventStream:
        loop = asyncio.get_running_loop()
        self._last_write = loop.time()
        self._pinger = loop.create_task(self._ping())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pinger is not None:
            self._pinger.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await self._pinger

    async def write(self, frames: bytes) -> None:
        """Send whole frames; raises ConnectionError when the client is gone or takes nothing any more."""
        if not frames:
            return
        self._last_write = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(WRITE_STALL_S):
                if not self.response.prepared:
                    async with self._opening:
                        if not self.response.prepared:
                            await self.response.prepare(self._request)
                await self.response.write(frames)
        except TimeoutError:
            # A close would wait for what is still unsent, which is what this client does not take.
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionAbortedError("the client takes nothing") from None

    async def end(self, *, keep_connection: bool = True) -> web.StreamResponse:
        """Say that the body is complete."""
        if not keep_connection:
            self.response.force_close()
        await self.response.write_eof()
        return self.response

    async def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            quiet_s = loop.time() - self._last_write
            if quiet_s < self._ping_interval_s:
                await asyncio.sleep(self._ping_interval_s - quiet_s)
                continue
            await self.write(sse.PING)

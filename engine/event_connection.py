"""One connection of a consumer of KV events: the greeting, subscriptions, and the engine's messages one by one.

It decides nothing about events: `event_consumer.py` keeps an index from them, `events_cli.py` prints them. Nothing is
read ahead of whoever iterates: a consumer that is slow lets the engine's end fill, where it costs its cursor.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from pathlib import Path
from typing import Final

from cached.errors import WireError
from cached.wire import FrameReader
from engine.errors import EngineUnavailable
from engine.event_messages import (
    EventBatch,
    EventsLost,
    EventsRefused,
    SnapshotPage,
    Subscribe,
    Subscribed,
)
from engine.protocol import MAX_FRAME_BYTES, PROTOCOL_VERSION, TO_ENGINE, TO_GATEWAY, Hello, Welcome

GREETING_TIMEOUT_S: Final = 5.0
READ_BYTES: Final = 1 << 16

Heard = Subscribed | EventsRefused | EventBatch | EventsLost | SnapshotPage


class EventConnection:
    """`await EventConnection.open(…)`, `subscribe`, `async for message in connection`, `await close()`.

    Iterating raises EngineUnavailable when the connection ends, whatever ended it.
    """

    def __init__(self, socket_path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._socket_path = socket_path
        self._reader = reader
        self._writer = writer
        self._frames = FrameReader(MAX_FRAME_BYTES)
        self._unread: deque[object] = deque()
        self.welcome: Welcome | None = None

    @classmethod
    async def open(cls, socket_path: str | Path, client_name: str) -> EventConnection:
        """Connect and greet; raises EngineUnavailable when no engine of this release answers."""
        path = str(socket_path)
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=READ_BYTES)
        except OSError as error:
            raise EngineUnavailable(
                f"no engine answers at {path}: {error.strerror or error}; `halocline up` or `halocline engine` starts one"
            ) from None
        connection = cls(path, reader, writer)
        try:
            await asyncio.wait_for(connection._greet(client_name), GREETING_TIMEOUT_S)
        except TimeoutError:
            await connection.close()
            raise EngineUnavailable(f"the engine at {path} gave no Welcome within {GREETING_TIMEOUT_S} s") from None
        except BaseException:
            await connection.close()
            raise
        return connection

    def subscribe(self, token: int, cursor: int | None, incarnation: str | None = None) -> None:
        """Ask for events from `cursor` on (of that incarnation), or for a snapshot first (None). What comes after the
        `Subscribed` with this token is the answer; the newest subscription counts."""
        self._writer.write(TO_ENGINE.encode(Subscribe(token, cursor, incarnation)))

    def __aiter__(self) -> EventConnection:
        return self

    async def __anext__(self) -> Heard:
        while True:
            message = await self._next()
            if isinstance(message, Subscribed | EventsRefused | EventBatch | EventsLost | SnapshotPage):
                return message

    async def close(self) -> None:
        """Disconnect; does nothing the second time."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _greet(self, client_name: str) -> None:
        self._writer.write(TO_ENGINE.encode(Hello(PROTOCOL_VERSION, client_name)))
        welcome = await self._next()
        if not isinstance(welcome, Welcome):
            raise EngineUnavailable(f"the engine at {self._socket_path} did not answer with a Welcome")
        if welcome.version != PROTOCOL_VERSION:
            raise EngineUnavailable(
                f"the engine at {self._socket_path} speaks version {welcome.version} of the protocol, this consumer "
                f"{PROTOCOL_VERSION}; run both from one release"
            )
        self.welcome = welcome

    async def _next(self) -> object:
        while not self._unread:
            try:
                data = await self._reader.read(READ_BYTES)
            except OSError as error:
                raise EngineUnavailable(f"the engine at {self._socket_path} went away: {error}") from None
            if not data:
                raise EngineUnavailable(f"the engine at {self._socket_path} closed the connection")
            try:
                self._unread.extend(TO_GATEWAY.decode(frame) for frame in self._frames.receive(data))
            except WireError as error:
                raise EngineUnavailable(
                    f"the engine at {self._socket_path} sent what cannot be read: {error}"
                ) from None
        return self._unread.popleft()

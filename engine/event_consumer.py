"""Keeps a copy of an engine's index over the engine's socket, whatever happens to either end (kv-semantics 6.3).

It decides when to connect and to ask again; what a message does to the copy is `event_index.py`'s. One event loop owns a
consumer. While the engine is away the copy is what it last was, and `is_current` says so; the events that were missed are
asked for first, and a snapshot where they are gone or the engine has started anew.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from cached.errors import WireError
from cached.keys import BlockHash
from engine.errors import EngineUnavailable
from engine.event_connection import EventConnection
from engine.event_index import EventIndex, IndexedBlock, Stale, Unusable
from engine.event_messages import EventsRefused, Subscribed

BACKOFF_MIN_S: Final = 0.05
BACKOFF_MAX_S: Final = 1.0
SNAPSHOT_PAUSE_S: Final = 1.0
"""A snapshot costs the engine a walk of its index: a consumer too slow for the events does not ask for more than one in
this time."""
DEVICE: Final = "device"


class EventConsumer:
    """`start`, then ask `holds` and `leading_run` at any time; `close` ends it."""

    def __init__(self, socket_path: str | Path, client_name: str) -> None:
        self._socket_path = str(socket_path)
        self._client_name = client_name
        self._index = EventIndex()
        self._connection: EventConnection | None = None
        self._following: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._target = 0
        self._snapshot_asked_at = -SNAPSHOT_PAUSE_S
        self._last_error: str | None = None
        self.num_snapshots = 0

    def __repr__(self) -> str:
        return f"EventConsumer({self._socket_path}, {self._index!r}, {self._last_error or 'no error'})"

    @property
    def is_current(self) -> bool:
        """Whether the copy follows the engine: connected, and up to where the engine was when it answered."""
        return self._connection is not None and self._index.is_current and self._index.cursor >= self._target

    @property
    def cursor(self) -> int:
        """The event that comes next."""
        return self._index.cursor

    @property
    def incarnation(self) -> str | None:
        """Which life of the engine the copy is of."""
        return self._index.incarnation

    @property
    def last_error(self) -> str | None:
        """Why there is no connection, or the last one ended."""
        return self._last_error

    def blocks(self, tier: str = DEVICE) -> Mapping[BlockHash, IndexedBlock]:
        """All blocks of one tier; a view that changes with what happens."""
        return self._index.blocks(tier)

    def holds(self, block_hash: BlockHash, tier: str = DEVICE) -> bool:
        """Whether the engine has this block, as far as is known here."""
        return block_hash in self._index.blocks(tier)

    def leading_run(self, block_hashes: Sequence[BlockHash], tier: str = DEVICE) -> int:
        """How many of the first blocks of a chain the engine has, up to the first that it lacks."""
        blocks = self._index.blocks(tier)
        return next((at for at, each in enumerate(block_hashes) if each not in blocks), len(block_hashes))

    async def start(self) -> None:
        """Begin following in the background; does not wait for the engine."""
        if self._following is None:
            self._following = asyncio.get_running_loop().create_task(self._keep_following())

    async def close(self) -> None:
        """Disconnect for good."""
        if self._following is not None:
            self._following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._following
            self._following = None

    async def wait_current(self, timeout_s: float, event_id: int = 0) -> bool:
        """Wait until the copy is current and has everything before `event_id`; False when it has not in time."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.is_current and self._index.cursor >= event_id)
        except TimeoutError:
            return False
        return True

    async def _keep_following(self) -> None:
        backoff_s = BACKOFF_MIN_S
        while True:
            try:
                connection = await EventConnection.open(self._socket_path, self._client_name)
                self._connection, backoff_s = connection, BACKOFF_MIN_S
                try:
                    self._last_error = await self._follow(connection)
                finally:
                    self._connection = None
                    await connection.close()
                backoff_s = BACKOFF_MAX_S  # Its events are of no use; another engine may come in its place.
            except EngineUnavailable as error:
                self._last_error = str(error)
            except WireError as error:
                self._last_error = f"the engine at {self._socket_path} sent what cannot be read: {error}"
                backoff_s = BACKOFF_MAX_S
            await self._tell_change()
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)

    async def _follow(self, connection: EventConnection) -> str:
        """Take messages until the connection ends (which raises), or a sentence why this engine is of no use."""
        number = 0
        await self._ask(connection)
        async for message in connection:
            if isinstance(message, Subscribed | EventsRefused):
                number = message.token
            if isinstance(message, Subscribed):
                self._target = message.next_event_id
            outcome = self._index.receive(number, message)
            match outcome:
                case Stale():
                    await self._ask(connection)
                case Unusable(reason):
                    return reason
            await self._tell_change()
        raise AssertionError("a connection ends by raising")

    async def _ask(self, connection: EventConnection) -> None:
        if not self._index.is_current:
            await self._pause_before_snapshot()
        subscription = self._index.begin()
        connection.subscribe(subscription.number, subscription.cursor, subscription.incarnation)

    async def _pause_before_snapshot(self) -> None:
        now = asyncio.get_running_loop().time()
        wait_s = self._snapshot_asked_at + SNAPSHOT_PAUSE_S - now
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        self._snapshot_asked_at = max(now, now + wait_s)
        self.num_snapshots += 1

    async def _tell_change(self) -> None:
        async with self._changed:
            self._changed.notify_all()

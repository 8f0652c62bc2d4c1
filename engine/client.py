"""The gateway's end of the link to one engine: connects, reconnects, and gives each request its own stream of events.

Decides when to connect again and which stream a message belongs to; what a request may ask and what its tokens mean is
the gateway's and the engine's business. One event loop owns a client and everything it hands out.

A connection's life:

    absent ──connect──▶ greeting ──Welcome──▶ connected ──lost──▶ absent (its streams raise EngineUnavailable)
       ▲                   │
       └──── backoff ◀─────┘ refused, wrong version, no answer
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, cast

from cached.errors import WireError
from cached.keys import NO_OWNER, OwnerId, token_bytes
from cached.retention import DEFAULT_RETENTION, RetentionConfig
from cached.wire import FrameReader
from engine.errors import EngineUnavailable, RequestRejected
from engine.protocol import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    TO_ENGINE,
    TO_GATEWAY,
    Cancel,
    Confirm,
    Hello,
    OwnerTable,
    Rejected,
    Sampling,
    Stats,
    StatsRequest,
    Step,
    Stop,
    Submit,
    TierChanged,
    TierState,
    TokenEvent,
    Welcome,
)

BACKOFF_MIN_S: Final = 0.05
BACKOFF_MAX_S: Final = 1.0
GREETING_TIMEOUT_S: Final = 5.0
STATS_TIMEOUT_S: Final = 5.0
MAX_UNSENT_BYTES: Final = 4 * MAX_FRAME_BYTES
"""More than this unread by the engine means that it hangs; new requests are refused rather than piled up."""

_DEFAULT_SAMPLING: Final = Sampling()


class EngineClient:
    """One engine as the gateway sees it. `start` returns at once; `connected` says whether `submit` can succeed."""

    def __init__(self, socket_path: str, client_name: str) -> None:
        self.socket_path = socket_path
        self.client_name = client_name
        self._link: _Link | None = None
        self._last_tier: TierState = "none"
        self._last_error: str | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._owner_table: OwnerTable | None = None

    def __repr__(self) -> str:
        state = "connected" if self.connected else f"absent ({self._last_error})"
        streams = len(self._link.streams) if self._link else 0
        return f"EngineClient({self.socket_path}, {state}, {streams} streams)"

    @property
    def connected(self) -> bool:
        """Whether the engine has welcomed us and the connection stands."""
        return self._link is not None

    @property
    def info(self) -> Welcome | None:
        """What the engine said of itself; None while there is no connection."""
        return self._link.welcome if self._link else None

    @property
    def tier(self) -> TierState:
        """The engine's host tier as last heard."""
        return self._last_tier

    @property
    def last_error(self) -> str | None:
        """Why the last attempt to connect failed, or the last connection ended."""
        return self._last_error

    @property
    def heard_at(self) -> float:
        """When the engine last said anything on this connection, in the event loop's time; 0 without one."""
        return self._link.heard_at if self._link else 0.0

    @property
    def num_inflight(self) -> int:
        """Streams that have neither finished nor been cancelled."""
        return len(self._link.streams) if self._link else 0

    async def start(self) -> None:
        """Begin connecting in the background; does not wait for the engine."""
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._keep_connected())

    async def wait_connected(self, timeout_s: float) -> bool:
        """Wait until there is a connection; False when there is none after `timeout_s`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not self.connected:
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0:
                return False
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), remaining)
        return True

    async def close(self) -> None:
        """Disconnect for good; the engine cancels what was running, and open streams raise EngineUnavailable."""
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._connecting
            self._connecting = None
        if self._link is not None:
            self._link.shut("the client was closed")

    def submit(
        self,
        prompt: Sequence[int] | bytes,
        max_tokens: int,
        sampling: Sampling = _DEFAULT_SAMPLING,
        cache_salt: str | None = None,
        owner: OwnerId = NO_OWNER,
        retention: RetentionConfig = DEFAULT_RETENTION,
        hold_generated: bool = False,
    ) -> EngineStream:
        """Send one sequence to be generated; `prompt` is token ids, or little-endian u32 bytes of them.

        Raises EngineUnavailable without a connection, RequestRejected for a prompt that cannot be sent at all. Whatever
        the engine refuses comes from the stream.
        """
        link = self._link
        if link is None:
            raise EngineUnavailable(f"the engine at {self.socket_path} is not there: {self._last_error or 'starting'}")
        if link.num_unsent_bytes > MAX_UNSENT_BYTES:
            raise RequestRejected("engine_overloaded", "The engine does not take requests at the moment.", None, True)
        packed = _packed(prompt)
        request_id = link.next_request_id()
        message = Submit(request_id, packed, max_tokens, sampling, cache_salt, owner, retention, hold_generated)
        try:
            link.send(message)
        except WireError:
            limit = link.welcome.max_prompt_tokens if link.welcome else 0
            raise RequestRejected(
                "context_length_exceeded",
                f"The prompt has {len(packed) // 4} tokens; at most {limit} are possible.",
                "messages",
                False,
            ) from None
        stream = EngineStream(link, request_id)
        link.streams[request_id] = stream
        return stream

    def set_owner_table(self, table: OwnerTable) -> None:
        """Tell the engine the shares of owners, now and after every reconnect; it ignores those that are not newer."""
        self._owner_table = table
        if self._link is not None:
            self._link.send(table)

    async def stats(self, timeout_s: float = STATS_TIMEOUT_S) -> dict[str, Any]:
        """The engine's gauges and counters; raises EngineUnavailable when there is no answer."""
        link = self._link
        if link is None:
            raise EngineUnavailable(f"the engine at {self.socket_path} is not there: {self._last_error or 'starting'}")
        try:
            return await asyncio.wait_for(link.ask_stats(), timeout_s)
        except TimeoutError:
            raise EngineUnavailable(
                f"the engine at {self.socket_path} gave no statistics within {timeout_s} s"
            ) from None

    async def _keep_connected(self) -> None:
        backoff_s = BACKOFF_MIN_S
        while True:
            link = await self._connect()
            if link is None:
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)
                continue
            backoff_s = BACKOFF_MIN_S
            self._link = link
            if self._owner_table is not None:
                link.send(self._owner_table)
            self._changed.set()
            try:
                self._last_error = await link.wait_lost()
            finally:
                self._link = None
                link.shut("the client was closed")
            await asyncio.sleep(backoff_s)

    async def _connect(self) -> _Link | None:
        loop = asyncio.get_running_loop()
        link = _Link(self._heard_tier)
        try:
            await loop.create_unix_connection(lambda: link, self.socket_path)
            link.send(Hello(PROTOCOL_VERSION, self.client_name))
            welcome = await asyncio.wait_for(link.wait_welcome(), GREETING_TIMEOUT_S)
        except TimeoutError:
            self._last_error = f"no Welcome within {GREETING_TIMEOUT_S} s"
        except (OSError, EngineUnavailable) as error:
            self._last_error = str(error)
        except asyncio.CancelledError:
            link.shut("the client was closed")
            raise
        else:
            if welcome.version == PROTOCOL_VERSION:
                return link
            self._last_error = (
                f"the engine speaks version {welcome.version} of the protocol, this gateway {PROTOCOL_VERSION}; "
                "run both from one release"
            )
        link.shut(self._last_error)
        return None

    def _heard_tier(self, tier: TierState) -> None:
        self._last_tier = tier


class EngineStream:
    """The events of one request, in order; ends after the event that has a `finish`.

    `async with` cancels on exit what has not finished. `confirm`, `stop` and `cancel` send and return; after `stop` and
    `cancel` the stream is over.
    """

    def __init__(self, link: _Link, request_id: int) -> None:
        self.request_id = request_id
        self._link = link
        self._events: deque[TokenEvent | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._over = False

    def __repr__(self) -> str:
        return f"EngineStream({self.request_id}, {'over' if self._over else 'open'}, {len(self._events)} unread)"

    @property
    def finished(self) -> bool:
        """Whether nothing more will come from the engine (what is unread can still be iterated)."""
        return self._over

    def __aiter__(self) -> EngineStream:
        return self

    async def __anext__(self) -> TokenEvent:
        while not self._events:
            if self._over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        event = self._events.popleft()
        if isinstance(event, Exception):
            raise event
        return event

    async def __aenter__(self) -> EngineStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """The client is gone: the engine drops the request and all it holds. Does nothing when the stream is over."""
        if not self._over:
            self._link.send(Cancel(self.request_id))
            self._leave()

    def confirm(self, tokens_kept: int) -> None:
        """The first `tokens_kept` generated tokens are kept whatever comes (kv-semantics 3.6)."""
        if not self._over:
            self._link.send(Confirm(self.request_id, tokens_kept))

    def stop(self, tokens_kept: int) -> None:
        """A stop string was found: end the request, of whose tokens only the first `tokens_kept` count.

        When the engine had finished by itself this still says how far its tokens count.
        """
        self._link.send(Stop(self.request_id, tokens_kept))
        self._leave()

    def _leave(self) -> None:
        self._events.clear()
        self._end()
        self._link.streams.pop(self.request_id, None)

    def _put(self, event: TokenEvent | Exception) -> None:
        self._events.append(event)
        if isinstance(event, Exception) or event.finish is not None:
            self._end()
        self._wake()

    def _end(self) -> None:
        self._over = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Link(asyncio.Protocol):
    """One connection: bytes to messages, messages to streams. Lost once, and never used again after that."""

    def __init__(self, heard_tier: Any) -> None:
        self.streams: dict[int, EngineStream] = {}
        self.welcome: Welcome | None = None
        self.heard_at = 0.0
        self._heard_tier = heard_tier
        self._reader = FrameReader(MAX_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        loop = asyncio.get_running_loop()
        self._welcomed: asyncio.Future[Welcome] = loop.create_future()
        self._lost: asyncio.Future[str] = loop.create_future()
        self._stats: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last_id = 0

    def next_request_id(self) -> int:
        """Ids rise and are never used twice on a connection."""
        self._last_id += 1
        return self._last_id

    @property
    def num_unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport else 0

    def send(self, message: Any) -> None:
        """Queue one message; dropped silently once the connection is lost (its streams learn that by themselves)."""
        frame = TO_ENGINE.encode(message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    async def wait_welcome(self) -> Welcome:
        return await asyncio.shield(self._welcomed)

    async def wait_lost(self) -> str:
        return await asyncio.shield(self._lost)

    async def ask_stats(self) -> dict[str, Any]:
        token = self.next_request_id()
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._stats[token] = future
        try:
            self.send(StatsRequest(token))
            return await future
        finally:
            self._stats.pop(token, None)

    def shut(self, reason: str) -> None:
        """End the connection; every stream still open raises EngineUnavailable."""
        if self._transport is not None:
            self._transport.abort()
        self._end(reason)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance.

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the engine closed the connection{f': {exc}' if exc else ''}")

    def data_received(self, data: bytes) -> None:
        self.heard_at = asyncio.get_running_loop().time()
        try:
            for frame in self._reader.receive(data):
                self._handle(TO_GATEWAY.decode(frame))
        except (WireError, ValueError) as error:
            self.shut(f"the engine sent what cannot be read: {error}")

    def _handle(self, message: Any) -> None:
        match message:
            case Step(events):
                for event in events:
                    self._deliver(event.request_id, event, event.finish is not None)
            case Rejected(request_id, code, text, param, retryable):
                self._deliver(request_id, RequestRejected(code, text, param, retryable), True)
            case Welcome(tier=tier):
                self.welcome = message
                self._heard_tier(tier)
                if not self._welcomed.done():
                    self._welcomed.set_result(message)
            case TierChanged(tier):
                self._heard_tier(tier)
            case Stats(token, tier, body):
                future = self._stats.get(token)
                if future is not None and not future.done():
                    future.set_result({"tier": tier, **json.loads(body)})

    def _deliver(self, request_id: int, event: TokenEvent | Exception, last: bool) -> None:
        """An id that is unknown was cancelled or stopped here while its last events were on the way."""
        stream = self.streams.pop(request_id, None) if last else self.streams.get(request_id)
        if stream is not None:
            stream._put(event)

    def _end(self, reason: str) -> None:
        if self._lost.done():
            return
        self._lost.set_result(reason)
        error = f"the engine went away: {reason}; the request may be retried"
        if not self._welcomed.done():
            self._welcomed.set_exception(EngineUnavailable(reason))
            self._welcomed.exception()  # Retrieved here, since nobody may be waiting for it any more.
        for stream in list(self.streams.values()):
            stream._put(EngineUnavailable(error))
        self.streams.clear()
        for future in self._stats.values():
            if not future.done():
                future.set_exception(EngineUnavailable(error))


def _packed(prompt: Sequence[int] | bytes) -> bytes:
    if isinstance(prompt, bytes):
        return prompt
    try:
        return token_bytes(prompt)
    except (OverflowError, ValueError, TypeError):
        raise RequestRejected(
            "invalid_token_id", "The prompt has a token id outside the vocabulary.", "prompt", False
        ) from None

"""The engine's Unix socket: who may connect, what a connection may have inside, and whom an event belongs to.

It decides about connections and credits; a request's fate is the step loop's. One event loop owns everything here;
the step thread reaches it only through `deliver`. A gateway that breaks the protocol, or does not read, loses its
connection and with it its requests, and nobody else notices.

    connected ──Hello──▶ welcomed ──Submit──▶ sequence in the loop ──Outputs──▶ Step … finish
        │ 5 s, bad peer      │ lost, malformed, does not read
        ▼                    ▼
      closed             closed; all its sequences dropped
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import struct
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import structlog

from cached.errors import WireError
from cached.keys import OWNER_BYTES, OwnerId
from cached.protocol import OwnerShare as HostShare
from cached.wire import FrameReader
from engine.admission import chosen_seed, fault_of, unpacked
from engine.errors import EngineConfigError
from engine.event_feed import EventFeed, EventReader
from engine.event_messages import Subscribe
from engine.fair_places import FairPlaces, Verdict
from engine.host_events import HostEvents
from engine.index_columns import IndexColumns, JoinedRows
from engine.loop import (
    Admit,
    AskSnapshot,
    AskStatistics,
    Drop,
    Ended,
    Halt,
    Happened,
    Inbox,
    Keep,
    Outbound,
    Outputs,
    Refusal,
    SnapshotTaken,
    TierNow,
    Weigh,
    now_s,
)
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
from engine.roster import MAX_UNCONFIRMED
from engine.values import NewRequest, Refused, SequenceOutput

GREETING_TIMEOUT_S: Final = 5.0
MAX_CONNECTIONS: Final = 64
MAX_HOST_BYTES: Final = 2**62
"""No floor is higher: more than any host tier has."""
MAX_UNREAD_BYTES: Final = 8 * 2**20
"""What a gateway may leave unread before it is disconnected; thousands of steps' worth."""
MAX_INBOX: Final = 16384
"""While more than this waits for the step thread, nothing more is read from any gateway that sends."""
RESUME_AFTER_S: Final = 0.02
SNAPSHOT_FRESH_S: Final = 1.0
"""A snapshot costs the step thread a walk of the whole index: consumers that ask within this time share one."""
LISTEN_BACKLOG: Final = 128
SOCKET_CHECK_S: Final = 2.0
"""How often the engine looks whether its socket's path still leads to it."""

log = structlog.get_logger("engine.server")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What every gateway is told, and how much each may ask."""

    incarnation: str
    model_id: str
    model_dir: str
    vocab_size: int
    max_context_tokens: int
    max_prompt_tokens: int
    eos_token_ids: tuple[int, ...]
    tokens_per_block: int
    num_blocks: int
    layout_fingerprint: bytes
    credits: int


class EngineServer:
    """Serves gateways from `listen` to `close`."""

    def __init__(
        self,
        facts: ServerFacts,
        inbox: Inbox,
        *,
        tier: TierState,
        allowed_uids: frozenset[int] = frozenset(),
        max_unread_bytes: int = MAX_UNREAD_BYTES,
        event_buffer_max_size: int = 0,
        on_ended: Callable[[str | None], None] = lambda failure: None,
    ) -> None:
        self.facts = facts
        self.inbox = inbox
        self.tier = tier
        self.max_unread_bytes = max_unread_bytes
        self.feed = EventFeed(event_buffer_max_size, facts.incarnation)
        self.host_events = HostEvents(facts.num_blocks, self.tell_host_events)
        self.is_stopping = False
        self.connections: set[_Connection] = set()
        self.counters = dict.fromkeys(
            (
                "connections",
                "refused_peers",
                "bad_frames",
                "slow_gateways",
                "requests",
                "rejected",
                "cancelled",
                "sockets_remade",
            ),
            0,
        )
        self._allowed_uids = allowed_uids | {0, os.geteuid()}
        self._on_ended = on_ended
        self._live: dict[int, _Live] = {}
        self._is_snapshot_asked = False
        self._last_sequence_id = 0
        self._table_version = -1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: asyncio.AbstractServer | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def num_live(self) -> int:
        """Requests inside that have not ended."""
        return len(self._live)

    async def listen(self, path: Path) -> None:
        """Bind and accept; raises EngineConfigError when another engine has the socket."""
        self._loop = asyncio.get_running_loop()
        self._path = path
        await self._bind()
        self._directory_mode = path.parent.stat().st_mode & 0o7777
        self._watch = self._loop.create_task(self._keep_reachable())

    async def _bind(self) -> None:
        bound = bind_socket(self._path)
        self._socket_id = _file_id(self._path)
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _Connection(self), sock=bound, backlog=LISTEN_BACKLOG
        )

    async def _keep_reachable(self) -> None:
        """Whoever cleans up directories of sockets may remove one that is in use: nobody new would reach this engine,
        and nothing would say so."""
        last_error = ""
        while True:
            await asyncio.sleep(SOCKET_CHECK_S)
            if _file_id(self._path) == self._socket_id:
                continue
            try:
                await self._bind_again()
                last_error = ""
            except (OSError, EngineConfigError) as error:
                if str(error) != last_error:
                    log.error("the socket is gone and cannot be made again", socket=str(self._path), error=str(error))
                last_error = str(error)

    async def _bind_again(self) -> None:
        if not self._path.parent.exists():
            self._path.parent.mkdir(mode=self._directory_mode, parents=True)
        former = self._server
        await self._bind()
        if former is not None:
            former.close()  # Stops listening; those who are connected stay.
        self.counters["sockets_remade"] += 1
        log.warning("the socket was gone and was made again", socket=str(self._path))

    async def close(self, reason: str) -> None:
        """Stop accepting, end every request with a retryable error, let that reach the gateways, disconnect."""
        self.is_stopping = True
        if self._watch is not None:
            self._watch.cancel()
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(OSError):
            if _file_id(self._path) == self._socket_id:
                self._path.unlink()
        self.fail_all(reason)
        for connection in list(self.connections):
            connection.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wait_disconnected(), 1.0)
        for connection in list(self.connections):
            connection.abort()

    async def _wait_disconnected(self) -> None:
        while self.connections:
            await asyncio.sleep(0.005)

    def fail_all(self, reason: str) -> None:
        """End every request with a retryable error."""
        outputs = [SequenceOutput(sequence_id, (), finish="error", error=reason) for sequence_id in self._live]
        self._take_outputs(outputs)

    def deliver(self, item: Outbound) -> None:
        """Hand over something from the step thread; never blocks."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # The event loop is closed: nobody is left to tell.
            self._loop.call_soon_threadsafe(self._take, item)

    def tell_host_events(self) -> None:
        """Something happened in the host tier: have it taken. For any thread; never blocks."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._take_host_events)

    def _take_host_events(self) -> None:
        self.feed.append(self.host_events.take())
        self._tell_consumers()

    async def statistics(self) -> dict[str, Any]:
        """Figures of the whole engine, asked of the step thread."""
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.ask_statistics(lambda body: None if future.done() else future.set_result(body))
        return await future

    def ask_statistics(self, reply: Callable[[dict[str, Any]], None]) -> None:
        """Have `reply` called, in the event loop, with figures of core, steps, tier and server."""

        def pass_on(body: dict[str, Any]) -> None:
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(lambda: reply({**body, "server": self._own_figures()}))

        self.inbox.put(AskStatistics(pass_on))

    def _own_figures(self) -> dict[str, int]:
        return {
            **self.counters,
            "gateways": len(self.connections) - len(self.feed.readers),
            "live": len(self._live),
            "event_consumers": len(self.feed.readers),
            "events": self.feed.ring.next_event_id,
            "events_lost": self.feed.num_lost,
            "event_snapshots": self.feed.num_snapshots,
        }

    # From the step thread. ------------------------------------------------------------------------------------------

    def _take(self, item: Outbound) -> None:
        match item:
            case Outputs(outputs):
                self._take_outputs(outputs)
            case Refusal(sequence_id, refused):
                self._take_refusal(sequence_id, refused)
            case TierNow(state):
                self.tier = state
                for connection in list(self.connections):
                    connection.tell_tier(state)
            case Happened(events):
                self.feed.append(events)
                self._tell_consumers()
            case SnapshotTaken(blocks):
                self._take_snapshot(blocks)
            case Ended(failure):
                self.fail_all("The engine stopped; the request may be retried.")
                self._on_ended(failure)

    def _take_outputs(self, outputs: list[SequenceOutput] | tuple[SequenceOutput, ...]) -> None:
        """One frame per connection; what belongs to a request that has ended here is dropped."""
        frames: defaultdict[_Connection, list[TokenEvent]] = defaultdict(list)
        for output in outputs:
            found = self._live.get(output.sequence_id)
            if found is None:
                continue
            connection, request_id = found.connection, found.request_id
            if output.finish is not None:
                is_held = request_id in connection.held
                self.forget(output.sequence_id)
                if is_held and output.finish != "error":
                    connection.await_confirmation(request_id, output.sequence_id)
            frames[connection].append(
                TokenEvent(request_id, output.tokens, output.logprobs, output.first, output.finish, output.error)
            )
        for connection, events in frames.items():
            connection.send(Step(tuple(events)))

    def _take_refusal(self, sequence_id: int, refused: Refused) -> None:
        found = self._live.get(sequence_id)
        if found is not None:
            self.forget(sequence_id)
            found.connection.reject(found.request_id, refused)

    def _take_snapshot(self, blocks: IndexColumns) -> None:
        self._is_snapshot_asked = False
        happened, host_blocks = self.host_events.take_with_columns()
        self.feed.append(happened)
        self.feed.take_snapshot(JoinedRows((blocks, host_blocks)))
        asyncio.get_running_loop().call_later(SNAPSHOT_FRESH_S, self.feed.age_snapshot)
        self._tell_consumers()

    def _tell_consumers(self) -> None:
        for connection in list(self.connections):
            connection.tell_events()

    # From connections. ----------------------------------------------------------------------------------------------

    def may_connect(self, uid: int) -> bool:
        """Whether a process of this user is served."""
        return uid in self._allowed_uids

    def admit(self, connection: _Connection, submit: Submit) -> Refused | None:
        """Give a request to the step loop, or say why not."""
        if self.is_stopping:
            return Refused("engine_overloaded", "The engine is stopping.", None, True)
        fault = fault_of(submit, self.facts.vocab_size) or self._no_credit(connection, submit.owner)
        if fault is not None:
            return fault
        self._last_sequence_id += 1
        sequence_id = self._last_sequence_id
        self._live[sequence_id] = _Live(connection, submit.request_id, submit.owner)
        connection.sequences[submit.request_id] = sequence_id
        connection.places.take(submit.owner)
        if submit.hold_generated:
            connection.held.add(submit.request_id)
        self.inbox.put(Admit(_request(sequence_id, submit), now_s()))
        return None

    def _no_credit(self, connection: _Connection, owner: OwnerId) -> Refused | None:
        """The core judges the queue, between two steps; until then nobody may fill a connection either."""
        match connection.places.judge(owner, self.facts.credits):
            case Verdict.MAY_TAKE:
                return None
            case Verdict.OWN_SHARE_TAKEN:
                own = connection.places.count_of(owner)
                message = f"{own} of your own requests are inside, which is your share of this engine's places."
            case Verdict.ALL_TAKEN:
                message = f"All {self.facts.credits} places of this engine are taken."
        return Refused("engine_overloaded", message, None, True)

    def weigh(self, table: OwnerTable) -> None:
        """Take a table of shares unless a newer one is known; raises WireError for an impossible one. Floors and ceilings
        are passed on to the host tier."""
        for share in table.shares:
            if not 0 < share.weight < math.inf or len(share.owner) != OWNER_BYTES:
                raise WireError("OwnerTable has a weight that is not positive and finite, or an owner id that is none")
            ceiling = MAX_HOST_BYTES if share.host_ceiling_bytes is None else share.host_ceiling_bytes
            if not 0 <= share.host_floor_bytes <= ceiling <= MAX_HOST_BYTES:
                raise WireError("OwnerTable has a host floor that is negative, or above its ceiling")
        if table.version > self._table_version:
            self._table_version = table.version
            host = tuple(HostShare(s.owner, s.weight, s.host_floor_bytes, s.host_ceiling_bytes) for s in table.shares)
            self.inbox.put(Weigh(tuple((share.owner, share.weight) for share in table.shares), table.version, host))

    def ask_snapshot(self) -> None:
        """Have the step thread take a snapshot if a consumer waits for one and none is under way."""
        if self.feed.wants_snapshot() and not self._is_snapshot_asked:
            self._is_snapshot_asked = True
            self.inbox.put(AskSnapshot())

    def drop(self, sequence_id: int) -> None:
        """The client of a sequence is gone; a step that works only for such is given up."""
        self.forget(sequence_id)
        self.counters["cancelled"] += 1
        self.inbox.put(Drop(sequence_id))

    def forget(self, sequence_id: int) -> None:
        """From now on nothing is said about a sequence."""
        live = self._live.pop(sequence_id)
        del live.connection.sequences[live.request_id]
        live.connection.held.discard(live.request_id)
        live.connection.places.give_back(live.owner)


@dataclass(frozen=True, slots=True)
class _Live:
    """A request inside: whose it is, by the id that its gateway gave it, and who is charged for it."""

    connection: _Connection
    request_id: int
    owner: OwnerId


class _Connection(asyncio.Protocol):
    """One gateway. `sequences` is what it has inside, by its own request ids; `held` those of them whose generated blocks
    wait for its word. Of such as have finished by themselves, the word may still come."""

    def __init__(self, server: EngineServer) -> None:
        self.sequences: dict[int, int] = {}
        self.held: set[int] = set()
        self.places = FairPlaces()
        self._unconfirmed: dict[int, int] = {}
        self._server = server
        self._reader = FrameReader(MAX_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        self._is_welcomed = False
        self._name = "?"
        self._greeting: asyncio.TimerHandle | None = None
        self._events: EventReader | None = None
        self._is_full = False
        self._is_telling = False

    # Called by asyncio. ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance.
        server = self._server
        uid = _peer_uid(transport)
        if not server.may_connect(uid) or len(server.connections) >= MAX_CONNECTIONS or server.is_stopping:
            server.counters["refused_peers"] += 1
            log.warning("connection refused", peer_uid=uid, connections=len(server.connections))
            self._transport.abort()
            return
        server.counters["connections"] += 1
        server.connections.add(self)
        self._greeting = asyncio.get_running_loop().call_later(GREETING_TIMEOUT_S, self._greeting_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._greeting is not None:
            self._greeting.cancel()
        self._server.connections.discard(self)
        if self._events is not None:
            self._server.feed.leave(self._events)
        if self._is_welcomed:
            log.info("gateway gone", client=self._name, requests_dropped=len(self.sequences))
        for sequence_id in list(self.sequences.values()):
            self._server.drop(sequence_id)
        self._server.inbox.put_all([Drop(sequence_id) for sequence_id in self._unconfirmed.values()])

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.receive(data):
                self._handle(TO_ENGINE.decode(frame))
        except WireError as error:
            self._server.counters["bad_frames"] += 1
            log.warning("gateway broke the protocol; its connection is closed", client=self._name, error=str(error))
            self.abort()
        if len(self._server.inbox) > MAX_INBOX:
            self._pause()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self.tell_events()

    # Messages. ------------------------------------------------------------------------------------------------------

    def _handle(self, message: Any) -> None:
        if not self._is_welcomed:
            self._greet(message)
            return
        match message:
            case Submit():
                self._submit(message)
            case Cancel(request_id):
                sequence_id = self.sequences.get(request_id)
                if sequence_id is not None:
                    self._server.drop(sequence_id)
            case Confirm(request_id, tokens_kept):
                sequence_id = self.sequences.get(request_id, self._unconfirmed.get(request_id))
                if sequence_id is not None:
                    self._server.inbox.put(Keep(sequence_id, _count(tokens_kept)))
            case Stop(request_id, tokens_kept):
                self._stop(request_id, _count(tokens_kept))
            case StatsRequest(token):
                self._server.ask_statistics(lambda body: self._send_stats(token, body))
            case OwnerTable():
                self._server.weigh(message)
            case Subscribe():
                self._subscribe(message)
            case Hello():
                raise WireError("Hello came a second time")

    def _greet(self, message: Any) -> None:
        if not isinstance(message, Hello):
            raise WireError(f"the first message is {type(message).__name__}, not Hello")
        if self._greeting is not None:
            self._greeting.cancel()
        self._name = message.client[:64]
        facts = self._server.facts
        self.send(
            Welcome(
                version=PROTOCOL_VERSION,
                incarnation=facts.incarnation,
                model_id=facts.model_id,
                model_dir=facts.model_dir,
                vocab_size=facts.vocab_size,
                max_context_tokens=facts.max_context_tokens,
                max_prompt_tokens=facts.max_prompt_tokens,
                eos_token_ids=facts.eos_token_ids,
                tokens_per_block=facts.tokens_per_block,
                num_blocks=facts.num_blocks,
                layout_fingerprint=facts.layout_fingerprint,
                credits=facts.credits,
                tier=self._server.tier,
            )
        )
        if message.version != PROTOCOL_VERSION:
            log.warning("gateway speaks another version", client=self._name, version=message.version)
            self.close()  # After the Welcome, from which it learns what this engine speaks.
            return
        self._is_welcomed = True
        log.info("gateway connected", client=self._name)

    def _submit(self, submit: Submit) -> None:
        if submit.request_id in self.sequences:
            raise WireError(f"request id {submit.request_id} is in use")
        self._unconfirmed.pop(submit.request_id, None)
        self._server.counters["requests"] += 1
        refused = self._server.admit(self, submit)
        if refused is not None:
            self.reject(submit.request_id, refused)

    def _stop(self, request_id: int, tokens_kept: int) -> None:
        """The core says nothing after a stop, so the last word of the request is said here; of one that has finished by
        itself it has been said."""
        finished = self._unconfirmed.pop(request_id, None)
        if finished is not None:
            self._server.inbox.put(Halt(finished, tokens_kept))
            return
        sequence_id = self.sequences.get(request_id)
        if sequence_id is None:
            return
        self._server.forget(sequence_id)
        self._server.inbox.put(Halt(sequence_id, tokens_kept))
        self.send(Step((TokenEvent(request_id, (), finish="stop"),)))

    def await_confirmation(self, request_id: int, sequence_id: int) -> None:
        """A request has finished by itself while the gateway has yet to say how far its tokens count; the core waits for
        no more of them, and no longer, than it likes."""
        self._unconfirmed[request_id] = sequence_id
        if len(self._unconfirmed) > MAX_UNCONFIRMED:
            del self._unconfirmed[next(iter(self._unconfirmed))]

    def _subscribe(self, message: Subscribe) -> None:
        if self._events is None:
            self._events = self._server.feed.enter()
        self._events.subscribe(message)
        self._server.ask_snapshot()
        self.tell_events()

    # Sending. -------------------------------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        """Queue one message; a gateway that leaves too much unread is disconnected instead."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(TO_GATEWAY.encode(message))
        if transport.get_write_buffer_size() > self._server.max_unread_bytes:
            self._server.counters["slow_gateways"] += 1
            log.warning("gateway does not read; its connection is closed", client=self._name)
            self.abort()

    def reject(self, request_id: int, refused: Refused) -> None:
        """Say that a request never started."""
        self._server.counters["rejected"] += 1
        self.send(Rejected(request_id, refused.code, refused.message, refused.param, refused.retryable))

    def tell_tier(self, state: TierState) -> None:
        """Say that the host tier came or went."""
        if self._is_welcomed:
            self.send(TierChanged(state))

    def tell_events(self) -> None:
        """Send a consumer what it has room for, a message per turn of the event loop, so that nobody else waits long.

        What does not fit waits in the feed, which costs nothing more: a consumer that does not read is left alone.
        """
        if self._events is None or self._is_full or self._is_telling:
            return
        message = self._events.next_message()
        if message is not None:
            self.send(message)
            self._is_telling = True
            asyncio.get_running_loop().call_soon(self._tell_more)

    def _tell_more(self) -> None:
        self._is_telling = False
        if self._transport is not None and not self._transport.is_closing():
            self.tell_events()

    def _send_stats(self, token: int, body: dict[str, Any]) -> None:
        self.send(Stats(token, self._server.tier, json.dumps(body)))

    def close(self) -> None:
        """Disconnect when what was sent has been read."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Disconnect now."""
        if self._transport is not None:
            self._transport.abort()

    def _greeting_is_late(self) -> None:
        log.warning("no Hello in time; the connection is closed", timeout_s=GREETING_TIMEOUT_S)
        self.abort()

    def _pause(self) -> None:
        """Too much waits for the step thread; the kernel's buffer and then the gateway wait with it."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.pause_reading()
            asyncio.get_running_loop().call_later(RESUME_AFTER_S, self._resume)

    def _resume(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if len(self._server.inbox) > MAX_INBOX // 2:
            asyncio.get_running_loop().call_later(RESUME_AFTER_S, self._resume)
        else:
            transport.resume_reading()


def bind_socket(path: Path) -> socket.socket:
    """A bound socket at `path`, 0660. What a dead engine left is replaced; a live one's is refused."""
    clear_socket(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o117)
    try:
        bound.bind(str(path))
    except OSError as error:
        bound.close()
        raise EngineConfigError(f"socket {path} cannot be made: {error.strerror}; its directory must exist") from None
    finally:
        os.umask(before)
    bound.setblocking(False)
    return bound


def clear_socket(path: Path) -> None:
    """Remove what a dead engine left at `path`; raises EngineConfigError for anything that is still in use."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except (ConnectionRefusedError, FileNotFoundError):
                path.unlink(missing_ok=True)
            except OSError as error:
                raise EngineConfigError(f"socket {path}: {error}; remove it if no engine uses it") from None
            else:
                raise EngineConfigError(f"socket {path} belongs to an engine that runs; stop it or choose another path")
    elif path.exists():
        raise EngineConfigError(f"socket {path} is in the way and is no socket; choose another path")


def _file_id(path: Path) -> tuple[int, int] | None:
    """What a path leads to; None where it leads to nothing that can be seen."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _request(sequence_id: int, submit: Submit) -> NewRequest:
    return NewRequest(
        sequence_id=sequence_id,
        prompt=unpacked(submit.prompt),
        max_tokens=submit.max_tokens,
        sampling=submit.sampling,
        seed=chosen_seed(submit.sampling.seed, os.urandom(8)),
        cache_salt=submit.cache_salt,
        owner=submit.owner,
        retention=submit.retention,
        hold_generated=submit.hold_generated,
    )


def _count(tokens_kept: int) -> int:
    if tokens_kept < 0:
        raise WireError(f"tokens_kept is {tokens_kept}; it must not be negative")
    return tokens_kept


def _peer_uid(transport: asyncio.BaseTransport) -> int:
    peer = transport.get_extra_info("socket")
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)

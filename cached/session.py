"""One peer's conversation, without I/O: bytes in, frames out, and the table of what may be said when.

Decides which messages are legal in which state and answers each through the tier. The server owns the socket, attaches
the descriptors where a frame asks for them, and closes the connection when a PeerError comes out of here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, NamedTuple

from cached import inspection
from cached.errors import PeerError
from cached.events import Run
from cached.part import Part, TierSettings
from cached.protocol import (
    COMMIT_OUTCOMES,
    MAX_FRAME_BYTES,
    MAX_ROWS,
    NAMESPACE_FINGERPRINT_BYTES,
    PROTOCOL_VERSION,
    TABLE,
    Abort,
    Bye,
    Commit,
    CommitReply,
    ConfigReply,
    ConfigRequest,
    Done,
    Drop,
    DropReply,
    EventsReply,
    EventsRequest,
    Hello,
    HelloRefused,
    Lease,
    LeaseReply,
    ListReply,
    ListRequest,
    Lookup,
    LookupReply,
    OwnersReply,
    OwnersRequest,
    OwnersSet,
    Release,
    ReleaseReply,
    Reserve,
    ReserveReply,
    SetOwners,
    Setting,
    Settled,
    Stats,
    StatsRequest,
    Suspect,
    Touch,
    Verify,
    VerifyReply,
    Welcome,
    f64s,
    read_u32s,
    read_u64s,
    u32s,
    u64s,
)
from cached.records import Holder
from cached.shares import NO_TABLE
from cached.store import BlockStore
from cached.tier import Admitted, NotAdmitted, Tier
from cached.wire import FrameReader

MAX_FRAMES_AT_ONCE = 16
"""A peer waits for the reply before it asks again; `Settled` alone may come together with what follows it. Thousands of
requests fit into one read, and nobody else would be served until all of them were."""

_CODE_OF = {outcome: code for code, outcome in enumerate(COMMIT_OUTCOMES)}


class State(Enum):
    """Where a conversation stands."""

    NEW = "new"
    ENGINE = "engine"
    OBSERVER = "observer"
    CLOSED = "closed"


_FOR_ALL = frozenset({Drop, Verify, StatsRequest, OwnersRequest, ListRequest, EventsRequest, ConfigRequest, Bye})

LEGAL: dict[State, frozenset[type]] = {
    State.NEW: frozenset({Hello}),
    State.ENGINE: frozenset({Lookup, Lease, Release, Reserve, Commit, Abort, Touch, Suspect, SetOwners, Settled})
    | _FOR_ALL,
    State.OBSERVER: _FOR_ALL,
    State.CLOSED: frozenset(),
}


class Outgoing(NamedTuple):
    """A frame to send; `with_payload`: together with the descriptors of its part's payload and of its client's lock."""

    frame: bytes
    with_payload: bool = False


class Peer(NamedTuple):
    """The process at the other end, as the kernel tells it."""

    pid: int
    started: int


class Session:
    """One peer from its first byte to its last; `end` must be called when its connection is gone."""

    def __init__(
        self, tier: Tier, settings: TierSettings, peer: Peer, shown: Callable[[], Iterable[tuple[str, str]]] = tuple
    ) -> None:
        self.state = State.NEW
        self.number = 0
        self.part: Part | None = None
        """Where an engine's blocks are."""
        self._tier = tier
        self._settings = settings
        self._peer = peer
        self._shown = shown
        self.holder = Holder(peer.pid, peer.started, b"")
        self._reader = FrameReader(MAX_FRAME_BYTES)

    def receive(self, data: bytes, now: float) -> list[Outgoing]:
        """Act on what `data` completes; raises PeerError when the peer broke the protocol."""
        outgoing: list[Outgoing] = []
        frames = self._reader.receive(data)
        if len(frames) > MAX_FRAMES_AT_ONCE:
            raise PeerError(f"{len(frames)} requests came at once; a peer waits for the reply before it asks again")
        for frame in frames:
            message = TABLE.decode(frame)
            if type(message) not in LEGAL[self.state]:
                raise PeerError(f"{type(message).__name__} is not legal in state {self.state.value}")
            reply = _VERBS[type(message)](self, message, now)
            if reply is not None:
                with_payload = type(reply) is Welcome and reply.payload_bytes > 0
                outgoing.append(Outgoing(TABLE.encode(reply), with_payload))
        return outgoing

    def end(self, now: float) -> bool:
        """The connection is gone. True when the peer's process must be watched until it is gone, too: it ended
        without a `Bye` and held something."""
        was_engine = self.state is State.ENGINE
        was_open = was_engine or self.state is State.OBSERVER
        self.state = State.CLOSED
        return was_open and self._tier.end_session(self.number, clean=False, now=now)

    def _hello(self, message: Hello, now: float) -> Welcome | HelloRefused:
        match self._tier.admit(message, self._peer.pid, self._peer.started, now):
            case NotAdmitted(reason, text):
                self.state = State.CLOSED
                return HelloRefused(message.request_id, reason, text)
            case Admitted(session, part):
                self.number, self.part = session, part
                self.state = State.OBSERVER if part is None else State.ENGINE
                self.holder = Holder(self._peer.pid, self._peer.started, message.client_id)
                sizes = (0, 0, 0, 0)
                if part is not None:
                    files = part.files
                    sizes = files.slot_bytes, files.num_slots, files.payload_bytes, files.registration_bytes
                ttls = self._settings.lease_ttl_s, self._settings.reservation_ttl_s
                return Welcome(message.request_id, PROTOCOL_VERSION, session, *sizes, *ttls)

    def _lookup(self, message: Lookup, now: float) -> LookupReply:
        return LookupReply(message.request_id, self._mine.lookup(message.hashes, now))

    def _lease(self, message: Lease, now: float) -> LeaseReply:
        run = self._mine.lease(self.number, message.hashes, now)
        if run is None:
            return LeaseReply(message.request_id, 0, b"", b"", b"", b"", b"", b"")
        columns = self._store.blocks
        return LeaseReply(
            message.request_id,
            run.lease_id,
            u32s(run.slots),
            u64s([columns.generation[slot] for slot in run.slots]),
            u64s([columns.checksum[slot] for slot in run.slots]),
            bytes([columns.priority[slot] for slot in run.slots]),
            f64s([columns.deadline[slot] for slot in run.slots]),
            bytes([columns.drops[slot] for slot in run.slots]),
        )

    def _release(self, message: Release, now: float) -> ReleaseReply:
        return ReleaseReply(message.request_id, self._store.release(self.number, message.lease_id, now))

    def _reserve(self, message: Reserve, now: float) -> ReserveReply:
        decided = self._mine.reserve(self.number, message, now)
        first, slots = decided.first_reservation, decided.slots
        return ReserveReply(message.request_id, decided.outcomes, u64s(range(first, first + len(slots))), u32s(slots))

    def _commit(self, message: Commit, now: float) -> CommitReply:
        reservations, checksums = _u64_column(message.reservations), _u64_column(message.checksums)
        if len(reservations) != len(checksums):
            raise PeerError(f"{len(reservations)} reservations come with {len(checksums)} checksums")
        outcomes = self._store.commit(self.number, zip(reservations, checksums, strict=True), now)
        return CommitReply(message.request_id, bytes(map(_CODE_OF.__getitem__, outcomes)))

    def _abort(self, message: Abort, now: float) -> Done:
        self._store.abort(self.number, _u64_column(message.reservations), now)
        return Done(message.request_id)

    def _touch(self, message: Touch, now: float) -> Done:
        self._mine.touch(message, now)
        return Done(message.request_id)

    def _suspect(self, message: Suspect, now: float) -> Done:
        self._mine.suspect(message.hashes)
        return Done(message.request_id)

    def _drop(self, message: Drop, now: float) -> DropReply:
        return DropReply(message.request_id, self._tier.drop_owner(message.owner, now))

    def _stats(self, message: StatsRequest, now: float) -> Stats:
        self._tier.expire(now)
        return Stats(message.request_id, self._tier.statistics())

    def _set_owners(self, message: SetOwners, now: float) -> OwnersSet:
        outcome, version = self._mine.set_owners(message, now)
        return OwnersSet(message.request_id, outcome, version)

    def _owners(self, message: OwnersRequest, now: float) -> OwnersReply:
        part = self._asked_about(message.part)
        store = None if part is None else part.store
        if store is None:
            return inspection.list_owners(message.request_id, None, NO_TABLE)
        return inspection.list_owners(message.request_id, store.contents, store.shares)

    def _list(self, message: ListRequest, now: float) -> ListReply:
        if len(message.namespace) not in (0, NAMESPACE_FINGERPRINT_BYTES):
            raise PeerError(f"a namespace's fingerprint has {NAMESPACE_FINGERPRINT_BYTES} bytes, or none for all")
        wanted = read_u32s(message.namespace)[0] if message.namespace else None
        self._tier.expire(now)
        part = self._asked_about(message.part)
        contents = None if part is None or part.store is None else part.store.contents
        return inspection.list_blocks(message.request_id, contents, wanted, message.after)

    def _events(self, message: EventsRequest, now: float) -> EventsReply:
        self._tier.expire(now)
        part = self._asked_about(message.part)
        run = Run(1, [], message.after != 0) if part is None else part.happened(message.after)
        return inspection.show_events(message.request_id, self._tier.incarnation(), run)

    def _config(self, message: ConfigRequest, now: float) -> ConfigReply:
        return ConfigReply(message.request_id, tuple(Setting(name, value) for name, value in self._shown()))

    def _verify(self, message: Verify, now: float) -> VerifyReply:
        return VerifyReply(message.request_id, self._tier.verify_all())

    def _settled(self, message: Settled, now: float) -> None:
        self._tier.settled(self.number, self.holder)

    def _bye(self, message: Bye, now: float) -> None:
        self.state = State.CLOSED
        self._tier.end_session(self.number, clean=True, now=now)

    def _asked_about(self, number: int) -> Part | None:
        """An engine is told of its own layout, whatever it asks; an observer of the one it names."""
        return self.part if self.part is not None else self._tier.part_at(number)

    @property
    def _mine(self) -> Part:
        assert self.part is not None, "an engine's session exists only with a part"
        return self.part

    @property
    def _store(self) -> BlockStore:
        return self._mine.require_store()


_VERBS: dict[type, Callable[[Session, Any, float], Any]] = {
    Hello: Session._hello,
    Lookup: Session._lookup,
    Lease: Session._lease,
    Release: Session._release,
    Reserve: Session._reserve,
    Commit: Session._commit,
    Abort: Session._abort,
    Touch: Session._touch,
    Suspect: Session._suspect,
    Drop: Session._drop,
    StatsRequest: Session._stats,
    SetOwners: Session._set_owners,
    OwnersRequest: Session._owners,
    ListRequest: Session._list,
    EventsRequest: Session._events,
    ConfigRequest: Session._config,
    Verify: Session._verify,
    Settled: Session._settled,
    Bye: Session._bye,
}
"""By message, and not bound to the session: a session that held its own methods would wait for the collector of cycles."""


def _u64_column(column: bytes) -> list[int]:
    if len(column) % 8 or len(column) > 8 * MAX_ROWS:
        raise PeerError(f"{len(column)} bytes are no column of at most {MAX_ROWS} numbers")
    return read_u64s(column).tolist()

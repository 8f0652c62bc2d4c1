"""An engine's end of the cache daemon's link: verbs with a deadline that answer a miss when the daemon does not.

Owned by one thread. The engine does the copies itself, through `payload`; what is stored or evicted is the daemon's
to decide. No verb raises for what the world does: a daemon that is stopped, killed, restarted or was never started is
`state == "absent"`, and every question has an answer that means "not in the tier".

A reply that did not come in time closes the connection, so no late reply is ever taken for another's; the breaker then
keeps the client away for a while, and the next connection is opened without waiting for it. What an ended session had
handed out is remembered until the engine gives it back: only then does `Settled` tell the daemon that nothing is being
copied into those slots any more.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from cached.errors import PeerError, TierUnavailable, WireError
from cached.keys import HASH_BYTES, OWNER_BYTES, OwnerId, self_test_vector
from cached.protocol import (
    CLIENT_ID_BYTES,
    COMMIT_OUTCOMES,
    EVENT_KINDS,
    FIRST_REFUSAL,
    MAX_FRAME_BYTES,
    MAX_HASHES,
    MAX_ROWS,
    NAMESPACE_FINGERPRINT_BYTES,
    NEVER,
    NO_CEILING,
    NO_PARENT,
    PRESENT,
    PROTOCOL_VERSION,
    REFUSAL_REASONS,
    RESERVED,
    TABLE,
    Abort,
    Bye,
    Commit,
    CommitOutcome,
    CommitReply,
    Done,
    Drop,
    DropReply,
    EventsReply,
    EventsRequest,
    Hello,
    HelloRefused,
    Layout,
    LeasedBlock,
    LeaseReply,
    ListedBlock,
    ListReply,
    ListRequest,
    Lookup,
    LookupReply,
    OfferedBlock,
    OwnerShare,
    OwnersOutcome,
    OwnersSet,
    Pending,
    Present,
    Refused,
    Release,
    ReleaseReply,
    Reserve,
    Reserved,
    ReserveOutcome,
    ReserveReply,
    SetOwners,
    Settled,
    Stats,
    StatsRequest,
    Suspect,
    TierEvent,
    TierEvents,
    TierHello,
    Touch,
    Welcome,
    cut,
    f64s,
    read_f64s,
    read_u32s,
    read_u64s,
    u64s,
)
from cached.protocol import Lease as LeaseRequest
from cached.shares import ShareTable, fault_of
from cached.wire import FrameReader

if TYPE_CHECKING:
    from cached.guarded_mapping import GuardedMapping

FIRST_BACKOFF_S = 0.05
ABSENT_BACKOFF_S = 0.2
"""Between attempts where nobody listens, which costs next to nothing, so that hits resume soon after a restart."""
LAST_BACKOFF_S = 1.0
"""After a breach of the deadline, which costs whoever waits."""
REFUSED_BACKOFF_S = 2.0
RECEIVE_BYTES = 64 * 1024
"""Below the size from which the allocator maps and unmaps memory for every call."""

_Reply = TypeVar("_Reply")
_PRESENT = Present()
_PENDING = Pending()


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to read `blocks` until `release`; bound to the session it was given in."""

    lease_id: int
    session: int
    blocks: tuple[LeasedBlock, ...]


@dataclass(frozen=True, slots=True)
class ListedPage:
    """Some stored blocks; ask for the next ones with `next_after`, None: these were the last."""

    blocks: tuple[ListedBlock, ...]
    next_after: int | None


class TierClient:
    """A blocking client of one daemon. `hello` None: an observer, which may only ask for `stats` and `drop_owner`.

    Verbs take at most `timeout_s`. `refusal` says why the daemon did not take the session, when it said so.
    """

    def __init__(self, socket_path: str | Path, hello: TierHello | None, timeout_s: float) -> None:
        self.state: Literal["ready", "absent"] = "absent"
        self.refusal: HelloRefused | None = None
        self._path = str(socket_path)
        self._hello = hello
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._client_id = os.urandom(CLIENT_ID_BYTES)
        self._sock: socket.socket | None = None
        self._reader = FrameReader(MAX_FRAME_BYTES)
        self._welcome: Welcome | None = None
        self._fds: list[int] = []
        self._next_request = 1
        self._hello_by: float | None = None
        self._not_before = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self._is_patient = True
        self._mapping: GuardedMapping | None = None
        self._mapped: tuple[int, int, int] | None = None
        self._payload_fd = -1
        self._held: set[int] = set()
        self._stale: set[int] = set()
        self._must_settle = False

    @property
    def payload(self) -> memoryview | None:
        """The arena's bytes, mapped and writable, while there is a session; a former mapping lives as long as it is
        referenced. None in a child forked since, until that has a session of its own. For handing to a device's driver:
        copies go through `read` and `write`, which notice when a peer has cut the payload short.
        """
        mapping = self._map() if self.state == "ready" and os.getpid() == self._pid else None
        return None if mapping is None else mapping.array.data

    @property
    def num_slots(self) -> int:
        """How many blocks of this layout the tier can hold; 0 without a session."""
        return self._welcome.num_slots if self._welcome is not None and self.state == "ready" else 0

    def poll(self) -> Literal["ready", "absent"]:
        """Bring a reconnect forward without asking anything; call it now and then while idle."""
        with contextlib.suppress(TierUnavailable):
            self._ensure_ready(time.monotonic() + self._timeout_s)
            self._notice_the_end()
        return self.state

    # --- Reading --------------------------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, the tier holds; 0 when it is absent."""
        if not hashes:
            return 0
        reply = self._ask(Lookup(self._request_id(), _join(hashes)), LookupReply)
        return 0 if reply is None else min(reply.num_blocks, len(hashes))

    def lease(self, hashes: Sequence[bytes]) -> Lease | None:
        """Lease a leading run of these blocks, maybe shorter than asked; None when there is none."""
        if not hashes:
            return None
        reply = self._ask(LeaseRequest(self._request_id(), _join(hashes)), LeaseReply)
        if reply is None or reply.lease_id == 0:
            return None
        assert self._welcome is not None
        blocks = self._leased_blocks(reply, self._welcome)
        if blocks is None:
            return None
        self._held.add(reply.lease_id)
        return Lease(reply.lease_id, self._welcome.session, blocks)

    def release(self, lease: Lease) -> bool:
        """End a lease; True only if it held to its end. Without a True every copy made under it is a miss."""
        if self._give_back([lease.lease_id]) == []:
            return False
        reply = self._ask(Release(self._request_id(), lease.lease_id), ReleaseReply)
        return reply is not None and reply.held

    def read(self, lease: Lease, block: LeasedBlock, out: memoryview) -> bool:
        """`read_many` of one block."""
        return self.read_many(lease, [block], [out])

    def read_many(self, lease: Lease, blocks: Sequence[LeasedBlock], outs: Sequence[memoryview]) -> bool:
        """Copy leased blocks out, each into its own of `outs`, in one call. False, and `outs` worth nothing, when the
        session is over or a peer has cut the payload short. The copies count only if `release` answers True afterwards."""
        if not self.may_copy([lease.lease_id]):
            return False
        mapping = self._map()
        return mapping is not None and mapping.copy_out([block.slot_offset for block in blocks], outs)

    def may_copy(self, numbers: Sequence[int]) -> bool:
        """Whether these leases and reservations are of the session that is open, so that their slots may be copied from
        and to. For copies made elsewhere than in `read` and `write`: ask before and after."""
        return self._held.issuperset(numbers) and os.getpid() == self._pid

    # --- Writing --------------------------------------------------------------------------------------------

    def reserve(self, chain: Sequence[OfferedBlock]) -> list[ReserveOutcome]:
        """Offer a chain, root first; one outcome per block."""
        outcomes: list[ReserveOutcome] = []
        for start in range(0, len(chain), MAX_ROWS):
            rows = chain[start : start + MAX_ROWS]
            reply = self._ask(_reserve_message(self._request_id(), rows), ReserveReply)
            granted = None if reply is None else self._reserve_outcomes(reply, len(rows))
            outcomes += [Refused("absent")] * len(rows) if granted is None else granted
        return outcomes

    def write(self, reserved: Reserved, data: memoryview) -> bool:
        """`write_many` of one block."""
        return self.write_many([reserved], [data])

    def write_many(self, reserved: Sequence[Reserved], data: Sequence[memoryview]) -> bool:
        """Copy blocks into the slots that were reserved for them, in one call. False when the session is over, so that the
        slots may be another's by now, or when there is no memory for them: abort these reservations then."""
        if not self.may_copy([each.reservation for each in reserved]):
            return False
        mapping = self._map()
        return mapping is not None and mapping.copy_in([each.slot_offset for each in reserved], data)

    def commit(self, items: Sequence[tuple[int, int]]) -> list[CommitOutcome]:
        """`(reservation, xxh3_64 of the payload)` of blocks that are in place; one outcome each."""
        live = set(self._give_back([reservation for reservation, _ in items]))
        outcomes: dict[int, CommitOutcome] = {}
        asked = [item for item in items if item[0] in live]
        for start in range(0, len(asked), MAX_ROWS):
            rows = asked[start : start + MAX_ROWS]
            numbers = [reservation for reservation, _ in rows]
            message = Commit(self._request_id(), u64s(numbers), u64s([checksum for _, checksum in rows]))
            reply = self._ask(message, CommitReply)
            if reply is not None and len(reply.outcomes) == len(rows) and max(reply.outcomes) < len(COMMIT_OUTCOMES):
                outcomes.update(zip(numbers, (COMMIT_OUTCOMES[code] for code in reply.outcomes), strict=True))
        return [outcomes.get(reservation, "expired") for reservation, _ in items]

    def abort(self, reservations: Sequence[int]) -> None:
        """Give reservations up; nothing may be written into their slots afterwards."""
        live = self._give_back(reservations)
        for start in range(0, len(live), MAX_ROWS):
            self._ask(Abort(self._request_id(), u64s(live[start : start + MAX_ROWS])), Done)

    # --- Shares and events ----------------------------------------------------------------------------------

    def set_owners(self, version: int, shares: Sequence[OwnerShare]) -> OwnersOutcome | Literal["absent", "invalid"]:
        """Forward the gateway's table of shares; the daemon keeps the newest. One that it would end the session for is
        not sent."""
        if fault_of(ShareTable(version, tuple(shares))) is not None:
            return "invalid"
        message = SetOwners(
            self._request_id(),
            version,
            b"".join([share.owner for share in shares]),
            f64s([share.weight for share in shares]),
            u64s([share.floor for share in shares]),
            u64s([NO_CEILING if share.ceiling is None else share.ceiling for share in shares]),
        )
        reply = self._ask(message, OwnersSet)
        return "absent" if reply is None else reply.outcome

    def events(self, after: int) -> TierEvents | None:
        """What happened in the tier after the cursor `after`, as far as one reply holds it: ask again with `last` until
        no events come. None when the daemon is absent."""
        reply = self._ask(EventsRequest(self._request_id(), after), EventsReply)
        if reply is None:
            return None
        try:
            return TierEvents(reply.incarnation, reply.last, reply.lost, _read_events(reply))
        except (ValueError, IndexError):
            self._lose(is_breach=True)
            return None

    def list_blocks(self, after: int = -1, namespace_fingerprint: str | None = None) -> ListedPage | None:
        """Stored blocks in slots above `after`, of one namespace or of all, as far as one reply holds them. Blocks that
        come or go between pages may be in one or not. None when the daemon is absent."""
        namespace = bytes.fromhex(namespace_fingerprint) if namespace_fingerprint else b""
        reply = self._ask(ListRequest(self._request_id(), namespace, after), ListReply)
        if reply is None:
            return None
        try:
            return ListedPage(tuple(_read_list(reply)), reply.next_after if reply.next_after > after else None)
        except (ValueError, IndexError):
            self._lose(is_breach=True)
            return None

    # --- Retention ------------------------------------------------------------------------------------------

    def touch(self, items: Sequence[tuple[bytes, int, float | None, str]]) -> None:
        """`(block_hash, priority, deadline, on_expiry)` of blocks a sequence released."""
        for start in range(0, len(items), MAX_ROWS):
            rows = items[start : start + MAX_ROWS]
            message = Touch(
                self._request_id(),
                b"".join([block_hash for block_hash, _, _, _ in rows]),
                bytes([priority for _, priority, _, _ in rows]),
                f64s([NEVER if deadline is None else deadline for _, _, deadline, _ in rows]),
                bytes([on_expiry == "drop" for _, _, _, on_expiry in rows]),
            )
            self._ask(message, Done)

    def suspect(self, hashes: Sequence[bytes]) -> None:
        """Tell the daemon that these blocks' bytes did not match their checksums: it verifies them before it serves
        them again. A leading run; to report single blocks, call once for each."""
        if hashes:
            self._ask(Suspect(self._request_id(), _join(hashes)), Done)

    def drop_owner(self, owner: OwnerId) -> int | None:
        """Remove every block of an owner; how many went, or None when the daemon is absent."""
        reply = self._ask(Drop(self._request_id(), owner), DropReply)
        return None if reply is None else reply.num_blocks

    def stats(self) -> dict[str, object] | None:
        """The daemon's statistics (`protocol.TierStatistics` as a dict, labelled counts as dicts), or None when it
        is absent."""
        reply = self._ask(StatsRequest(self._request_id()), Stats)
        if reply is None:
            return None
        fields: dict[str, object] = asdict(reply.statistics)
        for name, value in fields.items():
            if isinstance(value, tuple):
                fields[name] = {count["label"]: count["value"] for count in value}
        return fields

    def close(self) -> None:
        """End the session orderly: no copy may be under way."""
        if self._sock is not None and self.state == "ready" and os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._sock.setblocking(False)
                self._sock.sendall(TABLE.encode(Bye()))
        self._disconnect()
        self._stale.clear()
        self._not_before = NEVER
        self._forget_payload()

    # --- One question ---------------------------------------------------------------------------------------

    def _ask(self, message: Any, kind: type[_Reply]) -> _Reply | None:
        """The reply to one request, or None: the daemon is absent, and stays so for this verb."""
        deadline = time.monotonic() + self._timeout_s
        try:
            self._ensure_ready(deadline)
            assert self._sock is not None
            self._transmit(TABLE.encode(message), deadline)
            reply = self._receive(deadline)
            if type(reply) is not kind or reply.request_id != message.request_id:  # type: ignore[attr-defined]
                self._lose(is_breach=True)
                return None
        except TierUnavailable:
            return None
        return reply

    def _transmit(self, data: bytes, deadline: float) -> None:
        assert self._sock is not None
        try:
            self._sock.settimeout(max(deadline - time.monotonic(), 0.001))
            self._sock.sendall(data)
        except TimeoutError:
            self._lose(is_breach=True)
            raise TierUnavailable from None
        except OSError:
            self._lose(is_breach=False)
            raise TierUnavailable from None

    def _receive(self, deadline: float) -> Any:
        """The next message; raises TierUnavailable when the deadline passes or the daemon goes."""
        assert self._sock is not None
        while True:
            try:
                self._sock.settimeout(max(deadline - time.monotonic(), 0.001))
                data = self._recv()
                frames = self._reader.receive(data)
                if len(frames) > 1:
                    raise WireError("more than one reply to one request")
                if frames:
                    return TABLE.decode(frames[0])
            except (TimeoutError, PeerError):
                self._lose(is_breach=True)
                raise TierUnavailable from None
            except OSError:
                self._lose(is_breach=False)
                raise TierUnavailable from None
            if time.monotonic() >= deadline:
                self._lose(is_breach=True)
                raise TierUnavailable

    def _recv(self) -> bytes:
        assert self._sock is not None
        if self._welcome is None:
            data, fds, _, _ = socket.recv_fds(self._sock, RECEIVE_BYTES, 4)
            self._fds += fds
        else:
            data = self._sock.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError
        return data

    def _request_id(self) -> int:
        self._next_request += 1
        return self._next_request - 1

    # --- The session ----------------------------------------------------------------------------------------

    def _ensure_ready(self, deadline: float) -> None:
        if os.getpid() != self._pid:
            self._become_a_child()
        if self.state == "ready":
            return
        now = time.monotonic()
        if self._sock is None:
            if now < self._not_before:
                raise TierUnavailable
            self._connect(now)
        # After a breach the daemon may be alive and not answering: nobody waits for it twice.
        self._await_welcome(deadline if self._is_patient else now)

    def _connect(self, now: float) -> None:
        layout = None
        if self._hello is not None:
            layout = Layout(self._hello.layout_fingerprint, self._hello.block_bytes, self._hello.tokens_per_block)
        hello = Hello(self._request_id(), PROTOCOL_VERSION, self._client_id, self_test_vector(), layout)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            sock.connect(self._path)
            sock.sendall(TABLE.encode(hello))
        except OSError:
            sock.close()
            self._back_off()
            raise TierUnavailable from None
        self._sock = sock
        self._reader = FrameReader(MAX_FRAME_BYTES)
        self._hello_by = now + max(self._timeout_s, LAST_BACKOFF_S)

    def _await_welcome(self, deadline: float) -> None:
        assert self._sock is not None
        assert self._hello_by is not None
        while self._welcome is None:
            try:
                self._sock.settimeout(max(deadline - time.monotonic(), 0.0))
                frames = self._reader.receive(self._recv())
                for frame in frames:
                    self._greeted(TABLE.decode(frame))
            except (TimeoutError, BlockingIOError):
                # Stopped or busy. The hello stays on its way; a daemon that never reads it is given up after a while.
                self._is_patient = False
                if time.monotonic() >= self._hello_by:
                    self._lose(is_breach=True)
                raise TierUnavailable from None
            except (OSError, PeerError):
                self._lose(is_breach=False)
                raise TierUnavailable from None

    def _greeted(self, message: Any) -> None:
        if isinstance(message, HelloRefused):
            self.refusal = message
            self._disconnect()
            self._not_before = time.monotonic() + REFUSED_BACKOFF_S
            raise TierUnavailable
        if not isinstance(message, Welcome):
            raise WireError(f"{type(message).__name__} is no answer to a hello")
        self._map_payload(message)
        self._welcome = message
        self.refusal = None
        self.state = "ready"
        self._is_patient = True
        self._backoff_s = FIRST_BACKOFF_S
        self._settle()

    def _map_payload(self, welcome: Welcome) -> None:
        """Map what came with the welcome; the same payload as before keeps its mapping, and whatever was registered
        with it."""
        fds, self._fds = self._fds, []
        try:
            if not welcome.payload_bytes:
                return
            if len(fds) != 1:
                raise WireError(f"{len(fds)} descriptors came with the welcome, not one")
            found = os.fstat(fds[0])
            identity = (found.st_dev, found.st_ino, welcome.payload_bytes)
            if found.st_size < welcome.payload_bytes or welcome.slot_bytes * welcome.num_slots > welcome.payload_bytes:
                raise WireError("the payload is shorter than the welcome says")
            if identity != self._mapped:
                self._forget_payload()
                self._payload_fd = fds.pop()
                self._mapped = identity
        finally:
            for fd in fds:
                os.close(fd)

    def _map(self) -> GuardedMapping | None:
        """The mapping to copy through; a new one when the last was spoiled. None while the payload is cut short."""
        if self._mapping is not None and self._mapping.is_spoiled:
            self._mapping = None
        if self._mapping is None and self._mapped is not None:
            from cached.guarded_mapping import GuardedMapping  # numpy and numba, which an observer does without.

            with contextlib.suppress(OSError, ValueError):
                self._mapping = GuardedMapping(self._payload_fd, self._mapped[2])
                threading.Thread(target=_populate, args=(self._mapping,), name="tier-populate", daemon=True).start()
        return self._mapping

    def _forget_payload(self) -> None:
        """A mapping that somebody still refers to lives on, its descriptor does not."""
        self._mapping = self._mapped = None
        if self._payload_fd >= 0:
            os.close(self._payload_fd)
            self._payload_fd = -1

    def _notice_the_end(self) -> None:
        """See whether the daemon has closed the connection while nothing was asked."""
        if self._sock is None or self.state != "ready":
            return
        try:
            self._sock.setblocking(False)
            if self._sock.recv(1, socket.MSG_PEEK) == b"":
                self._lose(is_breach=False)
        except BlockingIOError:
            return
        except OSError:
            self._lose(is_breach=False)

    def _lose(self, is_breach: bool) -> None:
        """The session is over; after a breach of the deadline the breaker is open for the longest backoff."""
        self._disconnect()
        if is_breach:
            self._is_patient = False
            self._not_before = time.monotonic() + LAST_BACKOFF_S
        else:
            self._back_off()

    def _back_off(self) -> None:
        self._not_before = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, ABSENT_BACKOFF_S)

    def _disconnect(self) -> None:
        if self._sock is not None:
            self._sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        self._sock = self._welcome = self._hello_by = None
        if self.state == "ready":
            self._must_settle = True
        self.state = "absent"
        self._stale |= self._held
        self._held.clear()

    def _become_a_child(self) -> None:
        """A forked child has nothing of its parent's: not the connection, nor what was handed out over it. It only
        closes its copy of the socket, so the parent's session goes on."""
        self._disconnect()
        self._pid = os.getpid()
        self._client_id = os.urandom(CLIENT_ID_BYTES)
        self._stale.clear()
        self._must_settle = False
        self._is_patient = True
        self._not_before = 0.0

    # --- What was handed out --------------------------------------------------------------------------------

    def _give_back(self, numbers: Sequence[int]) -> list[int]:
        """The engine says that the copies behind these reservations or leases are over; says which of them belong to
        the session that is open."""
        live = [number for number in numbers if number in self._held]
        self._held.difference_update(live)
        self._stale.difference_update(numbers)
        self._settle()
        return live

    def _settle(self) -> None:
        if not self._must_settle or self._stale or self.state != "ready":
            return
        self._must_settle = False
        with contextlib.suppress(TierUnavailable):
            self._transmit(TABLE.encode(Settled()), time.monotonic() + self._timeout_s)

    # --- Replies, checked -----------------------------------------------------------------------------------

    def _leased_blocks(self, reply: LeaseReply, welcome: Welcome) -> tuple[LeasedBlock, ...] | None:
        try:
            slots = read_u32s(reply.slots)
            rows = zip(
                slots,
                read_u64s(reply.generations),
                read_u64s(reply.checksums),
                reply.priorities,
                read_f64s(reply.deadlines),
                reply.on_expiry,
                strict=True,
            )
            if max(slots) >= welcome.num_slots:
                raise ValueError
            return tuple(
                LeasedBlock(
                    slot * welcome.slot_bytes,
                    generation,
                    checksum,
                    priority,
                    None if deadline == NEVER else deadline,
                    "drop" if drops else "demote",
                )
                for slot, generation, checksum, priority, deadline, drops in rows
            )
        except ValueError:
            self._lose(is_breach=True)
            return None

    def _reserve_outcomes(self, reply: ReserveReply, asked: int) -> list[ReserveOutcome] | None:
        welcome = self._welcome
        try:
            numbers, slots = list(read_u64s(reply.reservations)), list(read_u32s(reply.slots))
            granted = reply.outcomes.count(RESERVED)
            if welcome is None or len(reply.outcomes) != asked or not granted == len(numbers) == len(slots):
                raise ValueError
            if slots and max(slots) >= welcome.num_slots:
                raise ValueError
            places = zip(numbers, slots, strict=True)
            slot_bytes = welcome.slot_bytes
            outcomes: list[ReserveOutcome] = []
            for code in reply.outcomes:
                if code == RESERVED:
                    number, slot = next(places)
                    outcomes.append(Reserved(number, slot * slot_bytes))
                elif code < FIRST_REFUSAL:
                    outcomes.append(_PRESENT if code == PRESENT else _PENDING)
                else:
                    outcomes.append(Refused(REFUSAL_REASONS[code - FIRST_REFUSAL]))
        except (ValueError, IndexError):
            self._lose(is_breach=True)
            return None
        self._held.update(numbers)
        return outcomes


def _populate(mapping: GuardedMapping) -> None:
    """Decision 5: engines populate their own mapping in the background."""
    while mapping.populate_next():
        pass


def _read_events(reply: EventsReply) -> tuple[TierEvent, ...]:
    rows = zip(
        reply.kinds,
        cut(reply.hashes, HASH_BYTES),
        cut(reply.parents, HASH_BYTES),
        cut(reply.namespaces, NAMESPACE_FINGERPRINT_BYTES),
        cut(reply.owners, OWNER_BYTES),
        reply.old_priorities,
        reply.priorities,
        strict=True,
    )
    return tuple(
        TierEvent(
            reply.first + at,
            EVENT_KINDS[kind],
            key,
            None if parent == NO_PARENT else parent,
            namespace.hex(),
            owner,
            old,
            new,
        )
        for at, (kind, key, parent, namespace, owner, old, new) in enumerate(rows)
    )


def _read_list(reply: ListReply) -> Iterator[ListedBlock]:
    rows = zip(
        read_u32s(reply.slots),
        cut(reply.hashes, HASH_BYTES),
        cut(reply.parents, HASH_BYTES),
        cut(reply.namespaces, NAMESPACE_FINGERPRINT_BYTES),
        reply.priorities,
        read_f64s(reply.deadlines),
        cut(reply.owners, OWNER_BYTES),
        reply.states,
        strict=True,
    )
    for slot, key, parent, namespace, priority, deadline, owner, state in rows:
        yield ListedBlock(
            slot,
            key,
            None if parent == NO_PARENT else parent,
            namespace.hex(),
            priority,
            None if deadline == NEVER else deadline,
            owner,
            "unverified" if state else "stored",
        )


def prepare_copies() -> None:
    """Compile what copies need (half a second) now, and not in the middle of the first one. Does nothing on a machine
    where payloads cannot be mapped: there the client says so itself."""
    from cached.guarded_mapping import prepare  # numpy and numba, which an observer does without.

    with contextlib.suppress(OSError):
        prepare()


def _join(hashes: Sequence[bytes]) -> bytes:
    return b"".join(hashes[:MAX_HASHES])


def _reserve_message(request_id: int, chain: Sequence[OfferedBlock]) -> Reserve:
    return Reserve(
        request_id,
        b"".join([block.block_hash for block in chain]),
        b"".join([block.parent or NO_PARENT for block in chain]),
        b"".join([bytes.fromhex(block.namespace_fingerprint) for block in chain]),
        bytes([block.priority for block in chain]),
        f64s([NEVER if block.deadline is None else block.deadline for block in chain]),
        bytes([block.on_expiry == "drop" for block in chain]),
        b"".join([block.owner for block in chain]),
    )

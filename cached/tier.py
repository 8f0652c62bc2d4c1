"""The host tier as its peers see it: which layout the arena is cut for, who is connected, what each verb answers.

Composes the store with the arena and turns columns of the wire into the store's values. Frames and order of messages
are the session's, sockets and processes the server's; `Arena` is what it asks of the files.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cached.errors import ArenaError, PeerError
from cached.events import Run
from cached.keys import HASH_BYTES, OWNER_BYTES, fingerprint, self_test_vector
from cached.offers import Decided, LeasedRun, OfferRow, Retouch, Unverified
from cached.protocol import (
    CLIENT_ID_BYTES,
    FIRST_REFUSAL,
    MAX_HASHES,
    MAX_OWNERS,
    MAX_ROWS,
    NAMESPACE_FINGERPRINT_BYTES,
    NO_CEILING,
    NO_PARENT,
    PROTOCOL_VERSION,
    REFUSAL_REASONS,
    Hello,
    Layout,
    OwnerShare,
    OwnersOutcome,
    Reserve,
    SetOwners,
    TierStatistics,
    Touch,
    cut,
    read_f64s,
    read_u32s,
    read_u64s,
)
from cached.records import MAX_FINGERPRINT_BYTES, Holder, StoredRecord
from cached.retention import MAX_PRIORITY
from cached.shares import NO_TABLE, ShareTable, fault_of, pack, unpack
from cached.store import BlockStore, Records

MAX_BLOCK_BYTES = 2**32
MAX_TOKENS_PER_BLOCK = 2**16
_NO_LAYOUT = FIRST_REFUSAL + REFUSAL_REASONS.index("no_layout")


class Arena(Records, Protocol):
    """What the tier needs of the files on tmpfs."""

    layout: Layout | None
    payload_bytes: int
    allocated_bytes: int
    slot_bytes: int
    num_slots: int

    @property
    def allocated_slots(self) -> int:
        """Slots, from the first on, whose memory is there."""

    def format(self, layout: Layout) -> None:
        """Cut the payload for `layout`; no record is left."""

    def slots_for(self, layout: Layout) -> int:
        """How many blocks of `layout` fit."""

    def scan(self) -> Iterator[tuple[int, StoredRecord | Holder | None]]:
        """Every slot that is not free; None for a record that cannot be read."""

    def write_shares(self, data: bytes) -> None:
        """Keep the owners' shares for the next daemon."""

    def read_shares(self) -> bytes:
        """What was kept; empty when nothing was."""

    def verify(self, wanted: Sequence[tuple[int, int]], budget_s: float) -> list[bool]:
        """Check `(slot, checksum)` for about as long as the budget; answers for the first so many."""


@dataclass(frozen=True, slots=True)
class TierSettings:
    """The times in force."""

    lease_ttl_s: float
    reservation_ttl_s: float
    layout_linger_s: float
    verify_budget_s: float = 0.005
    event_buffer: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    """A session is open; for an engine `layout` is what the arena is cut for."""

    session: int
    layout: Layout | None


@dataclass(frozen=True, slots=True)
class NotAdmitted:
    """A session is not opened; `reason` is one word, `message` says what to do."""

    reason: str
    message: str


class Tier:
    """One arena, one layout at a time. `first_id` is new at every start, so that ids of a former life mean nothing."""

    def __init__(self, arena: Arena, settings: TierSettings, first_id: int, now: float) -> None:
        self.arena = arena
        self.store: BlockStore | None = None
        self._settings = settings
        self._first_id = first_id
        self._next_session = 1
        self._engines: dict[int, Holder] = {}
        self._settled_by: dict[Holder, int] = {}
        self._observers: set[int] = set()
        self._last_seen = now
        self._published = 0
        self._kept_shares = unpack(arena.read_shares()) or NO_TABLE
        if arena.layout is not None:
            self._take_over(now)

    # --- Sessions -------------------------------------------------------------------------------------------

    def admit(self, hello: Hello, pid: int, started: int, now: float) -> Admitted | NotAdmitted:
        """Open a session for a peer, whose process is `pid`, started at `started`; or say why not."""
        if len(hello.client_id) != CLIENT_ID_BYTES:
            raise PeerError(f"client_id has {len(hello.client_id)} bytes, not {CLIENT_ID_BYTES}")
        if hello.version != PROTOCOL_VERSION:
            return NotAdmitted(
                "version", f"this daemon speaks protocol {PROTOCOL_VERSION}, the peer {hello.version}; run one version"
            )
        if hello.self_test != self_test_vector():
            return NotAdmitted("hash", "peer and daemon do not hash alike; run one version of both")
        if hello.layout is None:
            session = self._new_session()
            self._observers.add(session)
            return Admitted(session, None)
        refusal = self._fit(hello.layout, now)
        if refusal is not None:
            return refusal
        assert self.store is not None
        session = self._new_session()
        holder = Holder(pid, started, hello.client_id)
        self.store.open_session(session, holder)
        self._engines[session] = holder
        return Admitted(session, hello.layout)

    def end_session(self, session: int, clean: bool, now: float) -> bool:
        """Undo what a session held; True when its process must be gone, or settle, before all of it is free."""
        self._observers.discard(session)
        holder = self._engines.pop(session, None)
        if holder is None:
            return False
        # Its client may have said in a later session that nothing of this one is under way, and be heard first.
        settled_by = self._settled_by.get(holder, 0)
        clean = clean or settled_by > session
        if settled_by == session:
            del self._settled_by[holder]
        self._last_seen = now
        assert self.store is not None
        return self.store.end_session(session, clean, now)

    def process_gone(self, session: int) -> None:
        """The process behind an ended session is gone."""
        if self.store is not None:
            self.store.settle(session)

    def settled(self, session: int, holder: Holder) -> list[int]:
        """This client, in this session, has no copy of an earlier one under way; says which sessions are settled by that.
        Those whose end has not been seen yet will be, when it is."""
        self._settled_by[holder] = session
        mine = [session for session, other in self.quarantined().items() if other == holder]
        for session in mine:
            self.process_gone(session)
        return mine

    def quarantined(self) -> dict[int, Holder]:
        """Ended sessions whose processes must be watched."""
        return self.store.quarantined_sessions() if self.store is not None else {}

    def allocated(self) -> None:
        """More of the arena's memory is there."""
        if self.store is not None:
            end = self.arena.allocated_slots
            self.store.publish(self._published, end)
            self._published = end

    # --- Verbs ----------------------------------------------------------------------------------------------

    def lookup(self, hashes: bytes, now: float) -> int:
        """The leading run of blocks that can be leased; verifies what a restart left unverified, within a budget."""
        store = self._checked(hashes)
        self._verify_run(store, hashes)
        found = store.lookup(hashes, now)
        store.count_lookup(len(hashes) // HASH_BYTES, found)
        return found

    def lease(self, session: int, hashes: bytes, now: float) -> LeasedRun | None:
        """Lease the leading run."""
        store = self._checked(hashes)
        self._verify_run(store, hashes)
        return store.lease(session, hashes, now)

    def reserve(self, session: int, message: Reserve, now: float) -> Decided:
        """Decide an offered chain."""
        store = self._engine_store()
        offers = _read_offers(message)
        if store.blocks.num_slots == 0:
            return Decided(bytes([_NO_LAYOUT]) * len(message.priorities), 0, [])
        return store.decide(session, offers, now)

    def touch(self, message: Touch, now: float) -> None:
        """New retention for blocks that were released elsewhere."""
        self._engine_store().touch(list(_read_touches(message)), now)

    def suspect(self, hashes: bytes) -> None:
        """A peer saw wrong bytes; they are verified before they are served again."""
        self._checked(hashes).suspect(hashes)

    def set_owners(self, message: SetOwners, now: float) -> tuple[OwnersOutcome, int]:
        """A table of owners' shares: what became of it, and which version is in force. One that is taken is kept for the
        next daemon before it is answered."""
        store = self._engine_store()
        table = _read_shares(message)
        outcome = store.set_shares(table.in_blocks(self.arena.payload_bytes, self.arena.num_slots), now)
        if outcome == "taken":
            self._kept_shares = table
            self.arena.write_shares(pack(table))
        return outcome, store.shares.version

    def happened(self, after: int) -> Run:
        """Events after a reader's cursor."""
        return self.store.events.after(after, MAX_ROWS) if self.store is not None else Run(1, [], after != 0)

    def incarnation(self) -> int:
        """What distinguishes this life of the daemon from others, for readers of events."""
        return self._first_id

    def verify_all(self) -> int:
        """Have every block verified again in the background; how many."""
        return self.store.suspect_all() if self.store is not None else 0

    def mended(self) -> None:
        """The payload was damaged and is whole again: no byte of it is believed before it is verified."""
        if self.store is not None:
            self.store.count_mending()
            self.store.suspect_all()

    def drop_owner(self, owner: bytes, now: float) -> int:
        """Remove an owner's blocks; how many went."""
        if len(owner) != OWNER_BYTES:
            raise PeerError(f"an owner has {OWNER_BYTES} bytes, not {len(owner)}")
        return self.store.drop_owner(owner, now) if self.store is not None else 0

    def expire(self, now: float) -> None:
        """Let happen what is due."""
        if self.store is not None:
            self.store.expire(now)

    def next_deadline(self) -> float | None:
        """When `expire` may next have something to do."""
        return self.store.next_deadline() if self.store is not None else None

    def next_unverified(self, count: int) -> list[Unverified]:
        """Blocks to verify in the background."""
        return self.store.next_unverified(count) if self.store is not None else []

    def statistics(self) -> TierStatistics:
        """A frozen snapshot."""
        layout = self.arena.layout
        found = self.store.statistics() if self.store is not None else TierStatistics()
        return replace(
            found,
            layout_fingerprint=fingerprint(layout.fingerprint) if layout is not None else "",
            capacity_bytes=self.arena.payload_bytes,
            allocated_bytes=self.arena.allocated_bytes,
            slot_bytes=self.arena.slot_bytes,
            sessions=len(self._engines),
        )

    # --- Layout ---------------------------------------------------------------------------------------------

    def _fit(self, layout: Layout, now: float) -> NotAdmitted | None:
        """Make the arena fit `layout`, or say why it does not."""
        if not 0 < len(layout.fingerprint) <= MAX_FINGERPRINT_BYTES or not 0 < layout.block_bytes <= MAX_BLOCK_BYTES:
            raise PeerError("a layout needs a fingerprint of 1 to 64 bytes and a block of 1 byte to 4 GiB")
        if not 0 < layout.tokens_per_block <= MAX_TOKENS_PER_BLOCK:
            raise PeerError(f"a layout of {layout.tokens_per_block} tokens a block is none")
        if self.arena.layout == layout:
            return None
        if self.arena.slots_for(layout) == 0:
            return NotAdmitted(
                "block_too_large",
                f"one block has {layout.block_bytes} bytes and the arena {self.arena.payload_bytes}; raise host_cache_size",
            )
        if self.arena.layout is not None and self.arena.layout.fingerprint == layout.fingerprint:
            return NotAdmitted(
                "layout_contradicts",
                f"blocks of layout {fingerprint(layout.fingerprint)} have {self.arena.layout.block_bytes} bytes here, "
                f"{layout.block_bytes} there; run one version of the engine",
            )
        held = self._still_held(now)
        if held is not None:
            return held
        self.store = None  # Its records go now, whatever comes.
        try:
            self.arena.format(layout)
        except ArenaError as error:
            return NotAdmitted("no_room", str(error))
        self.store = self._new_store()
        self.allocated()
        return None

    def _still_held(self, now: float) -> NotAdmitted | None:
        if self.store is None or self.arena.layout is None:
            return None
        name = fingerprint(self.arena.layout.fingerprint)
        if self.store.has_holdings():
            return NotAdmitted(
                "layout_in_use",
                f"the arena is cut for layout {name}, which an engine is using; "
                "stop that engine, or run a second daemon with its own arena_dir and socket",
            )
        left = self._last_seen + self._settings.layout_linger_s - now
        if self.store.is_vacant() or left <= 0:
            return None
        return NotAdmitted(
            "layout_lingers",
            f"the arena holds blocks of layout {name}; if no engine comes back for them, "
            f"they give way in {left:.0f} s (layout_linger_s)",
        )

    def _take_over(self, now: float) -> None:
        self.store = self._new_store()
        stored: list[tuple[int, StoredRecord]] = []
        held: dict[Holder, list[int]] = {}
        torn: list[int] = []
        for slot, record in self.arena.scan():
            match record:
                case StoredRecord():
                    stored.append((slot, record))
                case Holder():
                    held.setdefault(record, []).append(slot)
                case None:
                    torn.append(slot)
        for slot in torn:
            self.arena.clear(slot)
        self.store.counters.lost_at_restart += len(torn)
        self.store.restore(iter(stored), now)
        for holder, slots in held.items():
            self.store.restore_quarantine(self._new_session(), holder, slots)
        self.allocated()

    def _new_store(self) -> BlockStore:
        layout = self.arena.layout
        assert layout is not None
        self._published = 0
        store = BlockStore(
            self.arena.num_slots,
            layout.block_bytes,
            self.arena,
            self._settings.lease_ttl_s,
            self._settings.reservation_ttl_s,
            self._first_id,
            self._settings.event_buffer,
        )
        # In a tier too small for its floors a kept table is not in force; the gateway's next one is judged afresh.
        kept = self._kept_shares.in_blocks(self.arena.payload_bytes, self.arena.num_slots)
        store.set_shares(kept, self._last_seen)
        return store

    def _new_session(self) -> int:
        self._next_session += 1
        return self._next_session - 1

    # --- Checks ---------------------------------------------------------------------------------------------

    def _engine_store(self) -> BlockStore:
        assert self.store is not None, "an engine's session exists only with a layout"
        return self.store

    def _checked(self, hashes: bytes) -> BlockStore:
        if len(hashes) % HASH_BYTES or len(hashes) > MAX_HASHES * HASH_BYTES:
            raise PeerError(f"{len(hashes)} bytes are no column of at most {MAX_HASHES} hashes")
        return self._engine_store()

    def _verify_run(self, store: BlockStore, hashes: bytes) -> None:
        unverified = store.unverified_run(hashes)
        if not unverified:
            return
        wanted = [(item.slot, item.checksum) for item in unverified]
        answers = self.arena.verify(wanted, self._settings.verify_budget_s)
        for item, is_sound in zip(unverified, answers, strict=False):
            store.verified(item, is_sound)


def _read_offers(message: Reserve) -> Iterator[OfferRow]:
    count = len(message.priorities)
    _check_columns(
        count,
        {
            "hashes": (message.hashes, HASH_BYTES),
            "parents": (message.parents, HASH_BYTES),
            "namespaces": (message.namespaces, NAMESPACE_FINGERPRINT_BYTES),
            "owners": (message.owners, OWNER_BYTES),
        },
    )
    deadlines = _read_retention(count, message.priorities, message.deadlines, message.on_expiry)
    namespaces = read_u32s(message.namespaces)
    keys, parents = cut(message.hashes, HASH_BYTES), cut(message.parents, HASH_BYTES)
    if NO_PARENT in keys or any(map(operator.eq, keys, parents)):
        raise PeerError("a block is offered under no name or as its own parent")
    return zip(
        keys,
        [None if parent == NO_PARENT else parent for parent in parents],
        namespaces,
        message.priorities,
        deadlines,
        map(bool, message.on_expiry),
        cut(message.owners, OWNER_BYTES),
        strict=True,
    )


def _read_shares(message: SetOwners) -> ShareTable:
    count = len(message.owners) // OWNER_BYTES
    if count > MAX_OWNERS:
        raise PeerError(f"a table of {count} owners; at most {MAX_OWNERS} are allowed")
    columns = {
        "owners": (message.owners, OWNER_BYTES),
        "weights": (message.weights, 8),
        "floors": (message.floors, 8),
        "ceilings": (message.ceilings, 8),
    }
    _check_widths(count, columns)
    rows = zip(
        range(0, len(message.owners), OWNER_BYTES),
        read_f64s(message.weights),
        read_u64s(message.floors),
        read_u64s(message.ceilings),
        strict=True,
    )
    table = ShareTable(
        message.version,
        tuple(
            OwnerShare(message.owners[at : at + OWNER_BYTES], weight, floor, None if ceiling == NO_CEILING else ceiling)
            for at, weight, floor, ceiling in rows
        ),
    )
    fault = fault_of(table)
    if fault is not None:
        raise PeerError(fault)
    return table


def _read_touches(message: Touch) -> Iterator[Retouch]:
    count = len(message.priorities)
    _check_columns(count, {"hashes": (message.hashes, HASH_BYTES)})
    deadlines = _read_retention(count, message.priorities, message.deadlines, message.on_expiry)
    for row in range(count):
        key = message.hashes[row * HASH_BYTES : (row + 1) * HASH_BYTES]
        yield Retouch(key, message.priorities[row], deadlines[row], bool(message.on_expiry[row]))


def _read_retention(count: int, priorities: bytes, deadlines: bytes, on_expiry: bytes) -> Sequence[float]:
    _check_columns(count, {"deadlines": (deadlines, 8), "on_expiry": (on_expiry, 1)})
    values = read_f64s(deadlines)
    if any(map(operator.ne, values, values)):
        raise PeerError("a deadline is not a number")
    if count and max(priorities) > MAX_PRIORITY:
        raise PeerError(f"a priority is {max(priorities)}; the highest is {MAX_PRIORITY}")
    return values


def _check_columns(count: int, columns: dict[str, tuple[bytes, int]]) -> None:
    if count > MAX_ROWS:
        raise PeerError(f"{count} rows are over the maximum of {MAX_ROWS}")
    _check_widths(count, columns)


def _check_widths(count: int, columns: dict[str, tuple[bytes, int]]) -> None:
    for name, (column, width) in columns.items():
        if len(column) != count * width:
            raise PeerError(f"{name} has {len(column)} bytes for {count} rows of {width}")

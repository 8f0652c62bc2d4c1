"""Messages between the cache daemon and its peers; one request, one reply, matched by `request_id`.

A peer opens with `Hello`; an engine names its layout and gets `Welcome` together with two descriptors (SCM_RIGHTS): the
payload of that layout, and its lock, to be kept open while a copy is under way. An observer names none and may neither store
nor load. Everything a peer reserves or leases
belongs to its session and is undone when that ends.

    peer                                  cached
    Hello ──────────────────────────────▶ Welcome (+ descriptors of payload and lock) | HelloRefused
    Lookup(hashes) ─────────────────────▶ LookupReply(num_blocks)
    Lease(hashes) ──────────────────────▶ LeaseReply(lease_id, slots, …)   then the peer copies, then
    Release(lease_id) ──────────────────▶ ReleaseReply(held)
    Reserve(chain) ─────────────────────▶ ReserveReply(outcomes, …)        then the peer copies, then
    Commit(reservations, checksums) ────▶ CommitReply(outcomes), or
    Abort(reservations) ────────────────▶ Done
    Touch · Suspect ────────────────────▶ Done
    SetOwners(table) ───────────────────▶ OwnersSet(outcome)
    EventsRequest(after) ───────────────▶ EventsReply(events)
    Settled · Bye                         no reply

What operators ask, and engines may: StatsRequest ▶ Stats, OwnersRequest ▶ OwnersReply, ListRequest ▶ ListReply,
ConfigRequest ▶ ConfigReply, Drop ▶ DropReply, Verify ▶ VerifyReply.

What there are many of travels as columns: one `bytes` per field, native byte order (both ends share a machine), so
that a message of 4,096 blocks is decoded without an object per block.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cached.keys import BlockHash, OwnerId
from cached.retention import OnExpiry
from cached.wire import MessageTable

PROTOCOL_VERSION = 3
MAX_FRAME_BYTES = 2**20
MAX_HASHES = 16384
"""Most hashes in one lookup, lease or suspect."""
MAX_ROWS = 4096
"""Most blocks in one reserve, commit, abort or touch, and in one answer to a list or events request."""
MAX_OWNERS = 16384
"""Most owners in a table of shares."""
MAX_OWNERS_SHOWN = 4096
"""Most owners in one `OwnersReply`: those that hold most."""
NO_CEILING = 2**64 - 1
"""In a column of ceilings: none."""

NO_PARENT = bytes(32)
"""Stands for "no parent" in a column of hashes: a first block's. No block hashes to zero."""
NAMESPACE_FINGERPRINT_BYTES = 4
CLIENT_ID_BYTES = 16
NEVER = float("inf")
"""The deadline of a block without one."""

RefusalReason = Literal["orphan", "full", "outranked", "no_layout", "absent", "floors", "ceiling"]
REFUSAL_REASONS: tuple[RefusalReason, ...] = (
    "orphan",  # its parent is neither in the tier nor taken with it
    "full",  # nothing is evictable: all is in use, being stored, or has dependents
    "outranked",  # what is evictable has a higher priority
    "no_layout",  # the arena is cut for no layout
    "absent",  # said by the client: no daemon answers
    "floors",  # what is evictable belongs to owners at or below their floors
    "ceiling",  # its owner holds all it may, and nothing of its own can go
)
OwnersOutcome = Literal["taken", "known", "older", "floors_exceed_capacity"]
OWNERS_OUTCOMES: tuple[OwnersOutcome, ...] = ("taken", "known", "older", "floors_exceed_capacity")
EventKind = Literal["stored", "removed", "updated"]
EVENT_KINDS: tuple[EventKind, ...] = ("stored", "removed", "updated")
CommitOutcome = Literal["stored", "orphan", "expired"]
COMMIT_OUTCOMES: tuple[CommitOutcome, ...] = ("stored", "orphan", "expired")

RESERVED = 0
PRESENT = 1
PENDING = 2
FIRST_REFUSAL = 3
"""In `ReserveReply.outcomes`: from here on `REFUSAL_REASONS[code − FIRST_REFUSAL]`."""


# --- What an engine offers and gets -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TierHello:
    """The layout of an engine's blocks; only engines with equal layouts share blocks (kv-semantics 1.1). `label`: what
    operators call it, such as the model's name."""

    layout_fingerprint: bytes
    block_bytes: int
    tokens_per_block: int
    label: str = ""


@dataclass(frozen=True, slots=True)
class OfferedBlock:
    """One block of a chain offered to the tier. `parent` None: a first block. `deadline` in CLOCK_BOOTTIME seconds,
    None: never. `namespace_fingerprint` is what `keys.fingerprint` gives."""

    block_hash: BlockHash
    parent: BlockHash | None
    namespace_fingerprint: str
    priority: int
    deadline: float | None
    on_expiry: OnExpiry
    owner: OwnerId


class Reserved(NamedTuple):
    """A slot to copy the block into: at `slot_offset` of the payload, then `commit` or `abort` the reservation."""

    reservation: int
    slot_offset: int


@dataclass(frozen=True, slots=True)
class Present:
    """The tier has the block."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Somebody is storing the block now."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The tier does not take the block; the same offer may be taken later."""

    reason: RefusalReason


ReserveOutcome = Reserved | Present | Pending | Refused


@dataclass(frozen=True, slots=True)
class LeasedBlock:
    """Where one leased block lies and what its bytes must hash to (xxh3-64)."""

    slot_offset: int
    generation: int
    checksum: int
    priority: int
    deadline: float | None
    on_expiry: OnExpiry


@dataclass(frozen=True, slots=True)
class OwnerShare:
    """What one owner may count on in the tier (kv-semantics 5.9), in bytes on its way, in blocks where a store has it in
    force. `ceiling` None: no limit but the tier's size. `weight` is for the device; the tier keeps it so that the table is
    whole."""

    owner: bytes
    weight: float
    floor: int
    ceiling: int | None


@dataclass(frozen=True, slots=True)
class TierEvent:
    """Something that happened to one block of the tier. `parent` None: a first block; `old_priority` differs from
    `priority` only in an update."""

    event_id: int
    kind: EventKind
    block_hash: bytes
    parent: bytes | None
    namespace_fingerprint: str
    owner: bytes
    old_priority: int
    priority: int


@dataclass(frozen=True, slots=True)
class TierEvents:
    """Events after a cursor, oldest first. `incarnation` is new per start of the daemon. `lost`: some are gone that the
    reader had not seen, so it needs a list of what is there; `last` is the cursor for the next question."""

    incarnation: int
    last: int
    lost: bool
    events: tuple[TierEvent, ...]


@dataclass(frozen=True, slots=True)
class ListedBlock:
    """One block of the tier as an operator sees it."""

    slot: int
    block_hash: bytes
    parent: bytes | None
    namespace_fingerprint: str
    priority: int
    deadline: float | None
    owner: bytes
    state: str


# --- Messages ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout on the wire: 1–64 bytes of fingerprint, bytes and tokens of one block."""

    fingerprint: bytes
    block_bytes: int
    tokens_per_block: int


@dataclass(frozen=True, slots=True)
class Hello:
    """A peer's first message. `client_id` is random per client and survives its reconnects; `self_test` is
    `keys.self_test_vector()`; `layout` None makes the peer an observer; `label` is what operators call the layout."""

    request_id: int
    version: int
    client_id: bytes
    self_test: bytes
    layout: Layout | None
    label: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """The session is open. An observer gets zeros for the sizes and no descriptor. Slot n begins at byte
    (n ÷ k) × registration_bytes + (n mod k) × slot_bytes, where k = registration_bytes ÷ slot_bytes, both rounded down: no
    slot crosses a multiple of `registration_bytes`, in pieces of which the payload may be registered with a device."""

    request_id: int
    version: int
    session: int
    slot_bytes: int
    num_slots: int
    payload_bytes: int
    registration_bytes: int
    lease_ttl_s: float
    reservation_ttl_s: float


@dataclass(frozen=True, slots=True)
class HelloRefused:
    """The session is not opened; `reason` is one word, `message` says what to do."""

    request_id: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Lookup:
    """How long a leading run of these blocks does the tier hold? `hashes`: 32 bytes each."""

    request_id: int
    hashes: bytes


@dataclass(frozen=True, slots=True)
class LookupReply:
    """`num_blocks` of the asked are there, from the first on."""

    request_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Lease:
    """Keep the leading run of these blocks in place until released, at most `lease_ttl_s`."""

    request_id: int
    hashes: bytes


@dataclass(frozen=True, slots=True)
class LeaseReply:
    """`lease_id` 0: nothing to lease. Columns: u32 slots, u64 generations and checksums, u8 priorities, f64
    deadlines, u8 on_expiry (1: drop)."""

    request_id: int
    lease_id: int
    slots: bytes
    generations: bytes
    checksums: bytes
    priorities: bytes
    deadlines: bytes
    on_expiry: bytes


@dataclass(frozen=True, slots=True)
class Release:
    """The copies under a lease are done."""

    request_id: int
    lease_id: int


@dataclass(frozen=True, slots=True)
class ReleaseReply:
    """`held`: the lease was good until now; otherwise every copy made under it is a miss."""

    request_id: int
    held: bool


@dataclass(frozen=True, slots=True)
class Reserve:
    """A chain of blocks, root first. Columns: hashes and parents of 32 bytes (zeros: a first block), namespace
    fingerprints of 4, u8 priorities, f64 deadlines (infinity: never), u8 on_expiry (1: drop), owners of 16."""

    request_id: int
    hashes: bytes
    parents: bytes
    namespaces: bytes
    priorities: bytes
    deadlines: bytes
    on_expiry: bytes
    owners: bytes


@dataclass(frozen=True, slots=True)
class ReserveReply:
    """One u8 outcome per block; for each RESERVED one, in order, a u64 reservation and a u32 slot."""

    request_id: int
    outcomes: bytes
    reservations: bytes
    slots: bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """The blocks of these reservations are in place. Columns: u64 reservations, u64 checksums."""

    request_id: int
    reservations: bytes
    checksums: bytes


@dataclass(frozen=True, slots=True)
class CommitReply:
    """One u8 index into COMMIT_OUTCOMES per reservation."""

    request_id: int
    outcomes: bytes


@dataclass(frozen=True, slots=True)
class Abort:
    """Give up these reservations (u64 each); nothing will be written into their slots any more."""

    request_id: int
    reservations: bytes


@dataclass(frozen=True, slots=True)
class Touch:
    """A sequence released these blocks: new retention, and a release for recency (kv-semantics 2.6)."""

    request_id: int
    hashes: bytes
    priorities: bytes
    deadlines: bytes
    on_expiry: bytes


@dataclass(frozen=True, slots=True)
class Suspect:
    """The peer found bytes that do not match these blocks' checksums; they are verified before they are served again."""

    request_id: int
    hashes: bytes


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove all blocks of one owner (16 bytes) and what descends from them."""

    request_id: int
    owner: bytes


@dataclass(frozen=True, slots=True)
class DropReply:
    """So many blocks are gone."""

    request_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Done:
    """The request has been carried out and has nothing to say."""

    request_id: int


@dataclass(frozen=True, slots=True)
class StatsRequest:
    """Ask for `Stats`."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Count:
    """One counter of a labelled family."""

    label: str
    value: int


@dataclass(frozen=True, slots=True)
class LayoutLine:
    """One part of the arena and the layout in it (`fingerprint` empty: none yet). `name`: for which layout the part is kept;
    empty: for any. Counts are blocks."""

    name: str
    fingerprint: str
    label: str
    tokens_per_block: int
    capacity_bytes: int
    allocated_bytes: int
    slot_bytes: int
    capacity_slots: int
    allocated_slots: int
    sessions: int
    used: int
    leased: int
    unverified: int
    quarantined: int
    looked_up: int
    found: int
    stored: int
    loaded: int
    evicted: int
    refused: int
    verified: int
    corrupt: int


@dataclass(slots=True)
class Counted:
    """What has been done since the daemon started: blocks, unless the name says something else; numbers only rise. The store
    counts in one, and a snapshot is one."""

    looked_up: int = 0
    found: int = 0
    stored: int = 0
    loaded: int = 0
    aborted: int = 0
    expired: int = 0
    dropped: int = 0
    dropped_unused: int = 0
    verified: int = 0
    corrupt: int = 0
    restored: int = 0
    lost_at_restart: int = 0
    leases_broken: int = 0
    reservations_expired: int = 0
    payload_mended: int = 0


@dataclass(slots=True)
class TierStatistics(Counted):
    """What the tier holds (blocks, unless the name says bytes) and has done since the daemon started (kv-semantics 7.2).
    Sums over all layouts; `layout_fingerprint` and `slot_bytes` are the only one's, and empty when there are several.

    `used` = idle + leased blocks; reserved and quarantined slots come on top; `allocated_slots` grows to
    `capacity_slots` while the arena is being allocated. A snapshot is replaced and never changed, which cannot be enforced
    beside a base that counts.
    """

    layout_fingerprint: str = ""
    capacity_bytes: int = 0
    allocated_bytes: int = 0
    slot_bytes: int = 0
    capacity_slots: int = 0
    allocated_slots: int = 0
    sessions: int = 0
    used: int = 0
    idle: int = 0
    leased: int = 0
    reserved: int = 0
    waiting: int = 0
    quarantined: int = 0
    unverified: int = 0
    owners: int = 0
    used_by_priority: tuple[Count, ...] = ()
    shares_version: int = 0
    floors_total: int = 0
    sockets_remade: int = 0
    evicted_by_priority: tuple[Count, ...] = ()
    refused_by_reason: tuple[Count, ...] = ()
    layouts: tuple[LayoutLine, ...] = ()


@dataclass(frozen=True, slots=True)
class Stats:
    """The answer to `StatsRequest`."""

    request_id: int
    statistics: TierStatistics


@dataclass(frozen=True, slots=True)
class SetOwners:
    """The gateway's table of shares, forwarded. Columns: owners of 16 bytes, f64 weights, u64 floors and ceilings in
    bytes of the tier (2⁶⁴−1: no ceiling). The newest version counts."""

    request_id: int
    version: int
    owners: bytes
    weights: bytes
    floors: bytes
    ceilings: bytes


@dataclass(frozen=True, slots=True)
class OwnersSet:
    """What became of a table (`OWNERS_OUTCOMES`), and which version is in force now."""

    request_id: int
    outcome: OwnersOutcome
    version: int


@dataclass(frozen=True, slots=True)
class OwnersRequest:
    """Ask for `OwnersReply`. `part`: which of the statistics' `layouts`; engines are told of their own."""

    request_id: int
    part: int


@dataclass(frozen=True, slots=True)
class OwnerLine:
    """One owner: its share, what it holds or is being given, what of it could be evicted now, what it was refused and
    what it lost to others and to itself since the daemon started."""

    owner: bytes
    weight: float
    floor: int
    ceiling: int | None
    held: int
    evictable: int
    evicted: int
    refused: tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class OwnersReply:
    """Owners that hold something or have a share, those that hold most first; `left_off` did not fit."""

    request_id: int
    version: int
    capacity_slots: int
    left_off: int
    owners: tuple[OwnerLine, ...]


@dataclass(frozen=True, slots=True)
class ListRequest:
    """Ask for stored blocks in slots above `after` (−1: from the first on), of one namespace if `namespace` has the 4
    bytes of its fingerprint, of all if it is empty. `part`: which of the statistics' `layouts`; engines see their own."""

    request_id: int
    namespace: bytes
    after: int
    part: int


@dataclass(frozen=True, slots=True)
class ListReply:
    """Up to `MAX_ROWS` blocks; ask again with `next_after` until that is −1. Columns: u32 slots, hashes and parents of
    32 bytes (zeros: a first block), namespace fingerprints of 4, u8 priorities, f64 deadlines (infinity: never), owners
    of 16, u8 states (0: verified, 1: not yet)."""

    request_id: int
    next_after: int
    slots: bytes
    hashes: bytes
    parents: bytes
    namespaces: bytes
    priorities: bytes
    deadlines: bytes
    owners: bytes
    states: bytes


@dataclass(frozen=True, slots=True)
class EventsRequest:
    """Ask for events with ids above `after`; every reader keeps its own cursor, and none takes from another. `part`: which
    of the statistics' `layouts`; engines are told of their own."""

    request_id: int
    after: int
    part: int


@dataclass(frozen=True, slots=True)
class EventsReply:
    """Up to `MAX_ROWS` events with consecutive ids, the first of them `first`; `last` is the cursor for the next
    question, `lost` says that ids between the asked one and `first` are gone. Columns: u8 kinds (`EVENT_KINDS`), hashes
    and parents of 32 bytes, namespace fingerprints of 4, owners of 16, u8 old and new priorities."""

    request_id: int
    incarnation: int
    first: int
    last: int
    lost: bool
    kinds: bytes
    hashes: bytes
    parents: bytes
    namespaces: bytes
    owners: bytes
    old_priorities: bytes
    priorities: bytes


@dataclass(frozen=True, slots=True)
class ConfigRequest:
    """Ask for `ConfigReply`."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting in force, as text."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class ConfigReply:
    """The settings in force and what was found of the machine at the start."""

    request_id: int
    settings: tuple[Setting, ...]


@dataclass(frozen=True, slots=True)
class Verify:
    """Read every stored block again and compare it with its checksum; none is served before that."""

    request_id: int


@dataclass(frozen=True, slots=True)
class VerifyReply:
    """So many blocks are to be verified; `Stats` tells how it goes (`unverified`, `verified`, `corrupt`)."""

    request_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Settled:
    """No copy of this client's earlier sessions is under way any more: what was quarantined for them is free."""


@dataclass(frozen=True, slots=True)
class Bye:
    """The peer ends the session and neither reads nor writes the payload any more."""


MESSAGES: dict[int, type] = {
    1: Hello,
    2: Welcome,
    3: HelloRefused,
    4: Lookup,
    5: LookupReply,
    6: Lease,
    7: LeaseReply,
    8: Release,
    9: ReleaseReply,
    10: Reserve,
    11: ReserveReply,
    12: Commit,
    13: CommitReply,
    14: Abort,
    15: Touch,
    16: Suspect,
    17: Drop,
    18: DropReply,
    19: Done,
    20: StatsRequest,
    21: Stats,
    22: Settled,
    23: Bye,
    24: SetOwners,
    25: OwnersSet,
    26: OwnersRequest,
    27: OwnersReply,
    28: ListRequest,
    29: ListReply,
    30: EventsRequest,
    31: EventsReply,
    32: ConfigRequest,
    33: ConfigReply,
    34: Verify,
    35: VerifyReply,
}
TABLE = MessageTable(MESSAGES, MAX_FRAME_BYTES)


# --- Columns ----------------------------------------------------------------------------------------------------

_RUN = 64


def u32s(values: Sequence[int]) -> bytes:
    """A column of u32."""
    return array("I", values).tobytes()


def u64s(values: Sequence[int]) -> bytes:
    """A column of u64."""
    return array("Q", values).tobytes()


def f64s(values: Sequence[float]) -> bytes:
    """A column of f64."""
    return array("d", values).tobytes()


def read_u32s(column: bytes) -> array[int]:
    """A column of u32, read; raises ValueError when bytes are left over."""
    return array("I", column)


def read_u64s(column: bytes) -> array[int]:
    """A column of u64, read; raises ValueError when bytes are left over."""
    return array("Q", column)


def read_f64s(column: bytes) -> array[float]:
    """A column of f64, read; raises ValueError when bytes are left over."""
    return array("d", column)


def cut(column: bytes, width: int) -> list[bytes]:
    """A column of values of one width; raises ValueError when bytes are left over."""
    if len(column) % width:
        raise ValueError(f"{len(column)} bytes are no column of width {width}")
    # A slice each takes four times as long. Formats are compiled for whole runs and for what is left of one, no others.
    whole = len(column) // (width * _RUN) * _RUN
    found: list[bytes] = []
    for at in range(0, whole, _RUN):
        found += struct.unpack_from(f"{width}s" * _RUN, column, at * width)
    found += struct.unpack_from(f"{width}s" * (len(column) // width - whole), column, whole * width)
    return found

"""Requests made of what an engine says in values, and values made of the daemon's replies in columns.

Pure: what a reply means for the session is the client's business. A reply that contradicts itself, the question or the
sizes of the welcome raises ValueError.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from cached.keys import HASH_BYTES, OWNER_BYTES
from cached.places import SlotPlaces
from cached.protocol import (
    COMMIT_OUTCOMES,
    EVENT_KINDS,
    FIRST_REFUSAL,
    MAX_HASHES,
    NAMESPACE_FINGERPRINT_BYTES,
    NEVER,
    NO_CEILING,
    NO_PARENT,
    PRESENT,
    REFUSAL_REASONS,
    RESERVED,
    CommitOutcome,
    CommitReply,
    EventsReply,
    LeasedBlock,
    LeaseReply,
    ListedBlock,
    ListReply,
    OfferedBlock,
    OwnerShare,
    Pending,
    Present,
    Refused,
    Reserve,
    Reserved,
    ReserveOutcome,
    ReserveReply,
    SetOwners,
    TierEvent,
    TierStatistics,
    Touch,
    Welcome,
    cut,
    f64s,
    read_f64s,
    read_u32s,
    read_u64s,
    u64s,
)

TouchedRow = tuple[bytes, int, float | None, str]
"""`block_hash, priority, deadline, on_expiry`."""

_PRESENT = Present()
_PENDING = Pending()


# --- Requests -----------------------------------------------------------------------------------------------------


def joined(hashes: Sequence[bytes]) -> bytes:
    """A column of hashes, as many as one message may have."""
    return b"".join(hashes[:MAX_HASHES])


def reserve_request(request_id: int, chain: Sequence[OfferedBlock]) -> Reserve:
    """An offered chain as columns."""
    namespaces = [block.namespace_fingerprint for block in chain]
    bytes_of = {text: bytes.fromhex(text) for text in set(namespaces)}  # One, mostly.
    return Reserve(
        request_id,
        b"".join([block.block_hash for block in chain]),
        b"".join([block.parent or NO_PARENT for block in chain]),
        b"".join([bytes_of[text] for text in namespaces]),
        bytes([block.priority for block in chain]),
        f64s([NEVER if block.deadline is None else block.deadline for block in chain]),
        bytes([block.on_expiry == "drop" for block in chain]),
        b"".join([block.owner for block in chain]),
    )


def touch_request(request_id: int, items: Sequence[TouchedRow]) -> Touch:
    """New retention as columns."""
    return Touch(
        request_id,
        b"".join([block_hash for block_hash, _, _, _ in items]),
        bytes([priority for _, priority, _, _ in items]),
        f64s([NEVER if deadline is None else deadline for _, _, deadline, _ in items]),
        bytes([on_expiry == "drop" for _, _, _, on_expiry in items]),
    )


def owners_request(request_id: int, version: int, shares: Sequence[OwnerShare]) -> SetOwners:
    """A table of shares as columns."""
    return SetOwners(
        request_id,
        version,
        b"".join([share.owner for share in shares]),
        f64s([share.weight for share in shares]),
        u64s([share.floor for share in shares]),
        u64s([NO_CEILING if share.ceiling is None else share.ceiling for share in shares]),
    )


# --- Replies ------------------------------------------------------------------------------------------------------


def leased_blocks(reply: LeaseReply, welcome: Welcome) -> tuple[LeasedBlock, ...]:
    """Where the blocks of a lease lie."""
    slots = read_u32s(reply.slots)
    rows = zip(
        _places(welcome).offsets(slots),
        read_u64s(reply.generations),
        read_u64s(reply.checksums),
        reply.priorities,
        read_f64s(reply.deadlines),
        reply.on_expiry,
        strict=True,
    )
    if max(slots) >= welcome.num_slots:
        raise ValueError("a leased block lies beyond the payload")
    return tuple(
        LeasedBlock(
            offset,
            generation,
            checksum,
            priority,
            None if deadline == NEVER else deadline,
            "drop" if drops else "demote",
        )
        for offset, generation, checksum, priority, deadline, drops in rows
    )


def _places(welcome: Welcome) -> SlotPlaces:
    return SlotPlaces(welcome.slot_bytes, welcome.registration_bytes)


def reserve_outcomes(reply: ReserveReply, num_asked: int, welcome: Welcome) -> list[ReserveOutcome]:
    """What became of each offered block."""
    numbers, slots = read_u64s(reply.reservations), read_u32s(reply.slots)
    num_granted = reply.outcomes.count(RESERVED)
    if len(reply.outcomes) != num_asked or not num_granted == len(numbers) == len(slots):
        raise ValueError("the columns of a reply to a reserve do not fit together")
    if slots and max(slots) >= welcome.num_slots:
        raise ValueError("a reserved slot lies beyond the payload")
    granted = map(Reserved, numbers, _places(welcome).offsets(slots))
    if num_granted == num_asked:
        return list(granted)
    return [next(granted) if code == RESERVED else _not_reserved(code) for code in reply.outcomes]


def _not_reserved(code: int) -> ReserveOutcome:
    if code < FIRST_REFUSAL:
        return _PRESENT if code == PRESENT else _PENDING
    if code - FIRST_REFUSAL >= len(REFUSAL_REASONS):
        raise ValueError(f"{code} is no outcome of a reserve")
    return Refused(REFUSAL_REASONS[code - FIRST_REFUSAL])


def commit_outcomes(reply: CommitReply, num_asked: int) -> list[CommitOutcome]:
    """What became of each committed reservation."""
    if len(reply.outcomes) != num_asked or max(reply.outcomes) >= len(COMMIT_OUTCOMES):
        raise ValueError("a reply to a commit does not fit what was asked")
    return [COMMIT_OUTCOMES[code] for code in reply.outcomes]


def events_of(reply: EventsReply) -> tuple[TierEvent, ...]:
    """The events of a reply, numbered."""
    if not all(kind < len(EVENT_KINDS) for kind in reply.kinds):
        raise ValueError("an event is of no kind")
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


def listed_blocks(reply: ListReply) -> Iterator[ListedBlock]:
    """The blocks of one page of a list."""
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


def statistics_fields(statistics: TierStatistics) -> dict[str, object]:
    """Statistics by name, labelled counts and layouts as dicts."""
    fields: dict[str, object] = asdict(statistics)
    for name, value in fields.items():
        if isinstance(value, tuple) and name != "layouts":
            fields[name] = {count["label"]: count["value"] for count in value}
    return fields

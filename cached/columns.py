"""Columns of the wire as what the store takes: offers, touches and tables of shares, checked on the way.

Decides nothing; whatever does not fit together is the peer's fault.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from cached.errors import PeerError
from cached.keys import HASH_BYTES, OWNER_BYTES
from cached.offers import OfferRow, Retouch
from cached.protocol import (
    MAX_HASHES,
    MAX_OWNERS,
    MAX_ROWS,
    NAMESPACE_FINGERPRINT_BYTES,
    NO_CEILING,
    NO_PARENT,
    OwnerShare,
    Reserve,
    SetOwners,
    Touch,
    cut,
    read_f64s,
    read_u32s,
    read_u64s,
)
from cached.retention import MAX_PRIORITY
from cached.shares import ShareTable, fault_of


def check_hashes(hashes: bytes) -> None:
    """Raise PeerError unless this is a column of hashes of legal length."""
    if len(hashes) % HASH_BYTES or len(hashes) > MAX_HASHES * HASH_BYTES:
        raise PeerError(f"{len(hashes)} bytes are no column of at most {MAX_HASHES} hashes")


def check_owner(owner: bytes) -> None:
    """Raise PeerError unless these bytes name an owner."""
    if len(owner) != OWNER_BYTES:
        raise PeerError(f"an owner has {OWNER_BYTES} bytes, not {len(owner)}")


def read_offers(message: Reserve) -> Iterator[OfferRow]:
    """The chain that a session offers."""
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
    keys = cut(message.hashes, HASH_BYTES)
    parents = _read_parents(message.parents, keys)
    if NO_PARENT in keys or any(map(operator.eq, keys, parents)):
        raise PeerError("a block is offered under no name or as its own parent")
    owner = message.owners[:OWNER_BYTES]
    owners = [owner] * count if message.owners == owner * count else cut(message.owners, OWNER_BYTES)
    return zip(
        keys, parents, namespaces, message.priorities, deadlines, map(bool, message.on_expiry), owners, strict=True
    )


def _read_parents(column: bytes, keys: list[bytes]) -> list[bytes | None]:
    """The parents of a chain, mostly the very objects before them, whose hashes as keys of a dict are known then."""
    parents: list[bytes | None] = [column[:HASH_BYTES], *keys[:-1]] if keys else []
    if column[HASH_BYTES:] != b"".join(keys[:-1]):
        parents = list(cut(column, HASH_BYTES))
    return [None if parent == NO_PARENT else parent for parent in parents]


def read_share_table(message: SetOwners) -> ShareTable:
    """A table of owners' shares that has no fault."""
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


def read_touches(message: Touch) -> Iterator[Retouch]:
    """New retention for blocks that were released elsewhere."""
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

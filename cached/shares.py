"""What each owner may count on in the host tier: whether a table of floors and ceilings may be in force, and how it is kept.

A table comes from the gateway through any engine; the newest version counts (kv-semantics 5.9). It is refused whole when
its floors together exceed what the tier can hold: a promise that cannot be kept is not made in part. It travels and is kept
in bytes, since those who make it do not know how large a block is; in force it is in blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import msgpack
from xxhash import xxh3_64_intdigest

from cached.keys import OWNER_BYTES
from cached.protocol import MAX_OWNERS, OwnerShare, OwnersOutcome

_MAGIC = b"HALSHARE"
_SUM_BYTES = 8
MAX_SHARE = 2**62
"""More than any tier has, in bytes and so in blocks; bounds what is added up and sent."""


@dataclass(frozen=True, slots=True)
class ShareTable:
    """One version of the table, in bytes or in blocks; owners that are not in it have no floor and no ceiling."""

    version: int = 0
    shares: tuple[OwnerShare, ...] = ()

    @property
    def floors_total(self) -> int:
        """What is promised."""
        return sum(share.floor for share in self.shares)

    def in_blocks(self, tier_bytes: int, num_slots: int) -> ShareTable:
        """A table in bytes as one in blocks, for `num_slots` slots that a tier of `tier_bytes` was cut into. What is left
        over at the edges of slots counts as theirs: floors that fit into the bytes fit into the slots."""

        def blocks(size: int) -> int:
            return min(size * num_slots // tier_bytes, MAX_SHARE)

        shares = (
            replace(share, floor=blocks(share.floor), ceiling=None if share.ceiling is None else blocks(share.ceiling))
            for share in self.shares
        )
        return replace(self, shares=tuple(shares))


NO_TABLE = ShareTable()


def fault_of(table: ShareTable) -> str | None:
    """What is wrong with a table, whatever the tier's size; None when nothing is."""
    if table.version < 1:
        return f"version {table.version} of a table of owners; versions begin at 1"
    if len(table.shares) > MAX_OWNERS:
        return f"a table of {len(table.shares)} owners; at most {MAX_OWNERS} are allowed"
    if len({share.owner for share in table.shares}) != len(table.shares):
        return "a table of owners names one owner twice"
    for share in table.shares:
        if len(share.owner) != OWNER_BYTES:
            return f"an owner has {OWNER_BYTES} bytes, not {len(share.owner)}"
        if not (math.isfinite(share.weight) and share.weight > 0):
            return f"a weight of {share.weight}; weights are finite and above 0"
        if not 0 <= share.floor <= (MAX_SHARE if share.ceiling is None else min(share.ceiling, MAX_SHARE)):
            return (
                f"a floor of {share.floor} and a ceiling of {share.ceiling}; a floor is 0 or more, at most the ceiling"
            )
        if share.ceiling is not None and share.ceiling > MAX_SHARE:
            return f"a ceiling of {share.ceiling}; at most {MAX_SHARE}"
    return None


def judge(table: ShareTable, in_force: ShareTable, capacity: int) -> OwnersOutcome:
    """Whether `table`, in blocks and without a fault, takes the place of the one in force in a tier of `capacity` blocks."""
    if table.version == in_force.version:
        return "known"
    if table.version < in_force.version:
        return "older"
    return "floors_exceed_capacity" if table.floors_total > capacity else "taken"


def trouble_of(set_version: int, floors_bytes: int, in_force_version: int, tier_bytes: int) -> str | None:
    """Why the shares that were set, of which these are the version and the sum of floors, are not those in force, and what to
    do; None when they are, or nobody has set any."""
    if set_version in (0, in_force_version):
        return None
    if floors_bytes > tier_bytes:
        return (
            f"the floors of all tenants are {floors_bytes} bytes together and the host tier has {tier_bytes}, so it refuses all "
            "shares and keeps the former ones; lower a floor with `halocline tenant share`, or raise cached.host_cache_size "
            "and restart cached"
        )
    if in_force_version > set_version:
        return (
            f"the host tier keeps shares of version {in_force_version}, newer than the tenant store's {set_version}; if the "
            "store was restored from a backup, set any share again with `halocline tenant share`"
        )
    return (
        f"the tenant store has shares of version {set_version} and the host tier has {in_force_version or 'none'}; a gateway and "
        "an engine that run bring them within seconds"
    )


def pack(table: ShareTable) -> bytes:
    """A table as it is kept for the next daemon, with a checksum."""
    rows = [[share.owner, share.weight, share.floor, share.ceiling] for share in table.shares]
    body = _MAGIC + bytes(msgpack.packb([table.version, rows], use_bin_type=True))
    return body + xxh3_64_intdigest(body).to_bytes(_SUM_BYTES, "big")


def unpack(data: bytes) -> ShareTable | None:
    """The table in `data`, or None when it is torn, flipped, or none."""
    body, found = data[:-_SUM_BYTES], data[-_SUM_BYTES:]
    if not body.startswith(_MAGIC) or xxh3_64_intdigest(body).to_bytes(_SUM_BYTES, "big") != found:
        return None
    try:
        version, rows = msgpack.unpackb(body[len(_MAGIC) :], raw=False)
        table = ShareTable(version, tuple(OwnerShare(bytes(o), float(w), int(f), c) for o, w, f, c in rows))
    except (ValueError, TypeError):
        return None
    return table if fault_of(table) is None else None

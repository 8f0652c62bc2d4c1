"""Which records that a former daemon left make whole chains; what to do with them is the store's business."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cached.protocol import NO_PARENT
from cached.records import StoredRecord


class Rebuilt(NamedTuple):
    """`kept`: slots and records, every parent before its children; `lost`: slots whose records mean nothing."""

    kept: list[tuple[int, StoredRecord]]
    lost: list[int]


def rebuild(found: Iterable[tuple[int, StoredRecord]]) -> Rebuilt:
    """Keep what a chain without a gap leads to. Of two records of one name the younger generation counts; records
    whose parents form a ring are never reached."""
    by_key: dict[bytes, tuple[int, StoredRecord]] = {}
    lost: list[int] = []
    for slot, record in found:
        other = by_key.get(record.key)
        if other is None or other[1].generation < record.generation:
            by_key[record.key] = (slot, record)
        if other is not None:
            lost.append(slot if other[1].generation >= record.generation else other[0])
    children: dict[bytes, list[tuple[int, StoredRecord]]] = {}
    for slot, record in by_key.values():
        children.setdefault(record.parent, []).append((slot, record))
    kept = children.pop(NO_PARENT, [])
    for _, record in kept:  # Grows while it is walked.
        kept += children.pop(record.key, [])
    lost += [slot for stranded in children.values() for slot, _ in stranded]
    return Rebuilt(kept, lost)

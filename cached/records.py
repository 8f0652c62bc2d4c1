"""Slot records and the table's header as bytes: each with its own checksum, so that a torn or flipped one is no record.

A record's checksum is seeded with its slot, so that a record in the wrong place is none either. Where the bytes live
and in which order they are written is the arena's business.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from cached.protocol import Layout
from cached.retention import MAX_PRIORITY

TABLE_VERSION = 2
HEADER_BYTES = 4096
MAX_FINGERPRINT_BYTES = 64
MAX_LABEL_BYTES = 1024
"""Of a label in UTF-8: as long as a model's name may be."""

_FREE = 0
_STORED = 1
_RESERVED = 2

_MAGIC = b"HALOCLIN"
_BODY = struct.Struct("<BBBxIQ32s32s16sdQQQ")
_SUM = struct.Struct("<Q")
RECORD_BYTES = _BODY.size + _SUM.size
_SLOT = struct.Struct("<Q")
REWRITE_BYTES = _SLOT.size + RECORD_BYTES
REWRITE_AT = HEADER_BYTES - REWRITE_BYTES
"""Where in the header's page the record that is being rewritten stands meanwhile."""
_HEADER = struct.Struct("<8sIIII16sQQQQQQ64s1024s")


class StoredRecord(NamedTuple):
    """A committed block, in the order of its bytes. `parent` of zeros: a first block. `drops`: on_expiry is drop."""

    drops: int
    priority: int
    namespace: int
    length: int
    key: bytes
    parent: bytes
    owner: bytes
    deadline: float
    checksum: int
    generation: int
    tick: int


StoredRow = tuple[int, int, int, int, bytes, bytes, bytes, float, int, int, int]
"""A `StoredRecord` or a tuple like it: thousands of them are written a second, and nobody reads their names."""


class Holder(NamedTuple):
    """The client that may be writing into a slot: its process, when that started, and which of its clients."""

    pid: int
    started: int
    client_id: bytes


def pack_stored(slot: int, record: StoredRow) -> bytes:
    """The bytes of a stored block's record."""
    body = _BODY.pack(_STORED, *record)
    return body + _SUM.pack(xxh3_64_intdigest(body, slot))


def pack_reserved(slot: int, holder: Holder) -> bytes:
    """The bytes of a slot that `holder` may be writing into."""
    return with_sum(slot, reserved_body(holder))


def reserved_body(holder: Holder) -> bytes:
    """The same without its checksum: what the records of all slots of one holder have in common."""
    return _BODY.pack(_RESERVED, 0, 0, 0, holder.pid, b"", b"", holder.client_id, 0.0, holder.started, 0, 0)


def with_sum(slot: int, body: bytes) -> bytes:
    """A record's body with the checksum it has in `slot`."""
    return body + _SUM.pack(xxh3_64_intdigest(body, slot))


def pack_rewrite(slot: int, data: bytes) -> bytes:
    """A record and the slot where it is about to be written over another one of the same block, or the same holder."""
    return _SLOT.pack(slot) + data


def unpack_rewrite(data: bytes) -> tuple[int, bytes] | None:
    """The slot and the record that were about to be written; None where there are none, or their own write was torn."""
    slot, record = _SLOT.unpack_from(data)[0], data[_SLOT.size :]
    return (slot, record) if unpack(slot, record) is not None else None


def is_stored(first_byte: int) -> bool:
    """Whether a record that begins with this byte is a stored block's."""
    return first_byte == _STORED


def is_free(data: bytes) -> bool:
    """Whether a slot's record says that it is free; one byte decides, so that clearing a record cannot be torn."""
    return data[0] == _FREE


def unpack(slot: int, data: bytes) -> StoredRecord | Holder | None:
    """The record in `data`, or None when it is free, torn, flipped or another slot's."""
    if data[0] == _FREE or xxh3_64_intdigest(data[: _BODY.size], slot) != _SUM.unpack_from(data, _BODY.size)[0]:
        return None
    state, *fields = _BODY.unpack_from(data)
    record = StoredRecord(*fields)
    if state == _STORED and record.priority <= MAX_PRIORITY:
        return record
    # What a holder is stands where a block's length, owner and checksum would.
    return Holder(record.length, record.checksum, record.owner) if state == _RESERVED else None


@dataclass(frozen=True, slots=True)
class Header:
    """What the table says of itself. `layout` None: not formatted, so there is no record to read. `process_space` names the
    namespace of processes in which the pids of its holders mean something, `label` what an engine calls the layout."""

    boot_id: bytes
    process_space: int
    registration_bytes: int
    num_slots: int = 0
    slot_bytes: int = 0
    layout: Layout | None = None
    label: str = ""


def pack_header(header: Header) -> bytes:
    """The table's first bytes."""
    layout, label = header.layout or Layout(b"", 0, 0), header.label.encode()
    body = _HEADER.pack(
        _MAGIC,
        TABLE_VERSION,
        len(layout.fingerprint),
        len(label),
        0,
        header.boot_id,
        header.process_space,
        header.registration_bytes,
        header.num_slots,
        header.slot_bytes,
        layout.block_bytes,
        layout.tokens_per_block,
        layout.fingerprint,
        label,
    )
    return body + _SUM.pack(xxh3_64_intdigest(body))


def unpack_header(data: bytes) -> Header | None:
    """The header in `data`, or None when it is another version's, torn or no header at all."""
    if len(data) < _HEADER.size + _SUM.size:
        return None
    if xxh3_64_intdigest(data[: _HEADER.size]) != _SUM.unpack_from(data, _HEADER.size)[0]:
        return None
    magic, version, length, label_length, _, boot_id, space, registration, num_slots, slot_bytes, *rest = (
        _HEADER.unpack_from(data)
    )
    block_bytes, tokens, name, label = rest
    if magic != _MAGIC or version != TABLE_VERSION or length > MAX_FINGERPRINT_BYTES or label_length > MAX_LABEL_BYTES:
        return None
    layout = Layout(name[:length], block_bytes, tokens) if length else None
    text = label[:label_length].decode(errors="replace")
    return Header(boot_id, space, registration, num_slots, slot_bytes, layout, text)

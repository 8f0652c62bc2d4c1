"""One part of the arena: its table of slot records and its payload, both on tmpfs, for blocks of one layout at a time.

`table` holds a header and one record per slot, mapped by the daemon alone and never passed on. `payload` holds the
blocks' bytes; its descriptor is what engines of this layout get, and the daemon reads it with pread only, since a peer
could truncate a file that is mapped. Which block is in which slot is the store's to decide, whose part it is the arena's.

Write order, so that SIGKILL between any two writes leaves the old record, the new one, or a free slot:
a record is cleared by one byte; it is written in one piece with its checksum, and a torn one is no record; one that is
written over a record of the same block, which must not be lost, stands in the header's page meanwhile; a header says "not formatted" before records of an old layout go and names the new layout only after they are gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from xxhash import xxh3_64_intdigest

from cached.errors import ArenaError
from cached.places import SlotPlaces
from cached.protocol import Layout
from cached.records import (
    HEADER_BYTES,
    RECORD_BYTES,
    REWRITE_AT,
    REWRITE_BYTES,
    Header,
    Holder,
    StoredRecord,
    StoredRow,
    is_free,
    is_stored,
    pack_header,
    pack_reserved,
    pack_rewrite,
    pack_stored,
    reserved_body,
    unpack,
    unpack_header,
    unpack_rewrite,
    with_sum,
)

SLOT_ALIGNMENT = 4096
PIECE_BYTES = 64 * 2**20
"""The payload is allocated, and published, in pieces of this size: about 30 ms each."""
FILE_KINDS = ("table", "payload", "owners", "owners.new")

_FREE_BYTE = b"\x00"
NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class Life:
    """What tells one life of the machine and of its processes from another: deadlines hold for one boot, pids mean
    something in one namespace of processes."""

    boot_id: bytes
    process_space: int


class ArenaPart:
    """Everything but `allocate_next` is for one thread. `suffix` tells its files from other parts'."""

    def __init__(
        self, directory: Path, suffix: str, name: str, payload_bytes: int, registration_bytes: int, life: Life
    ) -> None:
        self.name = name
        self.label = ""
        self.payload_bytes = payload_bytes // SLOT_ALIGNMENT * SLOT_ALIGNMENT
        self.registration_bytes = registration_bytes
        self.allocated_bytes = 0
        self.layout: Layout | None = None
        self.places = SlotPlaces(SLOT_ALIGNMENT, registration_bytes)
        self.num_slots = 0
        self._life = life
        self._is_of_this_space = True
        self._directory = directory
        self._suffix = suffix
        self._table: mmap.mmap | None = None
        self._rewritten = NO_SLOT
        self._buffer = bytearray()
        self._locked_map: mmap.mmap | None = None
        self._table_fd = open_private(self._path("table"))
        try:
            self.payload_fd = open_private(self._path("payload"))
        except ArenaError:
            os.close(self._table_fd)
            raise

    # --- Layout ---------------------------------------------------------------------------------------------

    def format(self, layout: Layout, label: str = "") -> None:
        """Cut the payload into slots for `layout`; every record is gone afterwards. Raises ArenaError, and is cut for nothing,
        when there is no room for the table."""
        self._write_header(self._blank())
        self._cut_for(layout, label)
        try:
            self._map_table(fresh=True)
        except ArenaError:
            self._cut_for(None, "")
            self._map_table(fresh=True)
            self._write_header(self._blank())
            raise
        self._write_header(self._header())

    def relabel(self, label: str) -> None:
        """Its engines call the layout something else now."""
        self.label = label
        self._write_header(self._header())

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot; 0 while it is cut for nothing."""
        return self.places.slot_bytes if self.layout is not None else 0

    @property
    def allocated_slots(self) -> int:
        """Slots, from the first on, whose memory is there."""
        return min(self.places.slots_within(self.allocated_bytes), self.num_slots)

    def slots_for(self, layout: Layout) -> int:
        """How many blocks of a layout the payload can hold."""
        return self._places_for(layout).slots_within(self.payload_bytes)

    # --- Records --------------------------------------------------------------------------------------------

    def write_stored(self, slots: Sequence[int], rows: Iterable[StoredRow]) -> None:
        """Make `rows` the slots' records, one after the other. A stored block's record is only ever written over by one of
        the same block."""
        table = self._table
        assert table is not None
        for slot, row in zip(slots, rows, strict=True):
            at = HEADER_BYTES + slot * RECORD_BYTES
            data = pack_stored(slot, row)
            if is_stored(table[at]):
                table[REWRITE_AT : REWRITE_AT + REWRITE_BYTES] = pack_rewrite(slot, data)
                self._rewritten = slot
            table[at : at + RECORD_BYTES] = data

    def write_reserved(self, slots: Sequence[int], holder: Holder) -> None:
        """Note that `holder` may be writing into the slots, one after the other."""
        table, body = self._table, reserved_body(holder)
        assert table is not None
        for slot in slots:
            if slot == self._rewritten:
                self._forget_rewrite()
            at = HEADER_BYTES + slot * RECORD_BYTES
            table[at : at + RECORD_BYTES] = with_sum(slot, body)

    def clear(self, slot: int) -> None:
        """Free the slot for good: one byte, which cannot be torn."""
        assert self._table is not None
        if slot == self._rewritten:
            self._forget_rewrite()
        at = HEADER_BYTES + slot * RECORD_BYTES
        self._table[at : at + 1] = _FREE_BYTE

    def scan(self) -> Iterator[tuple[int, StoredRecord | Holder | None]]:
        """Every slot that is not free, and its record; None: torn or flipped. A record that was torn when it was written over
        one of the same block is whole again. A holder from another namespace of processes
        has no pid here, since the same number is another process there."""
        assert self._table is not None
        self._finish_rewrite()
        for slot in range(self.num_slots):
            at = HEADER_BYTES + slot * RECORD_BYTES
            data = self._table[at : at + RECORD_BYTES]
            if is_free(data):
                continue
            record = unpack(slot, data)
            if isinstance(record, Holder) and not self._is_of_this_space:
                record = Holder(0, 0, record.client_id)
            yield slot, record

    def _finish_rewrite(self) -> None:
        assert self._table is not None
        found = unpack_rewrite(self._table[REWRITE_AT : REWRITE_AT + REWRITE_BYTES])
        if found is None or found[0] >= self.num_slots:
            return
        slot, record = found
        at = HEADER_BYTES + slot * RECORD_BYTES
        there = self._table[at : at + RECORD_BYTES]
        if there[0] == record[0] and unpack(slot, there) is None:
            self._table[at : at + RECORD_BYTES] = record
        self._forget_rewrite()

    def _forget_rewrite(self) -> None:
        """What it speaks of leaves its slot: it must not come back in place of what comes there next."""
        assert self._table is not None
        self._table[REWRITE_AT : REWRITE_AT + REWRITE_BYTES] = bytes(REWRITE_BYTES)
        self._rewritten = NO_SLOT

    # --- The table of owners' shares ------------------------------------------------------------------------

    def write_shares(self, data: bytes) -> None:
        """Keep the owners' shares for the next daemon: the old ones or the new ones are there, whenever this one dies."""
        newborn = self._path("owners.new")
        fd = open_private(newborn)
        try:
            os.ftruncate(fd, 0)
            if os.write(fd, data) < len(data):  # So a full file system answers a write that it has some room for.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            newborn.rename(self._path("owners"))
        except OSError as error:
            raise ArenaError(f"cannot keep the owners' shares in {self._directory}: {error.strerror}") from error
        finally:
            os.close(fd)

    def read_shares(self) -> bytes:
        """What was kept; empty when nothing was."""
        try:
            return self._path("owners").read_bytes()
        except OSError:
            return b""

    # --- Payload --------------------------------------------------------------------------------------------

    def is_sound(self, slot: int, checksum: int, buffer: bytearray | None = None) -> bool:
        """Whether the block in `slot` hashes to `checksum`; a payload that a peer has cut short does not."""
        layout = self.layout
        if layout is None:
            return False
        into = self._buffer if buffer is None else buffer
        if len(into) != layout.block_bytes:
            into[:] = bytes(layout.block_bytes)
        try:
            read = os.preadv(self.payload_fd, [into], self.places.offset(slot))
        except OSError:
            return False
        return read == len(into) and xxh3_64_intdigest(into) == checksum

    def verify(self, wanted: Sequence[tuple[int, int]], budget_s: float) -> list[bool]:
        """Check `(slot, checksum)` in order for about `budget_s`: one answer each for as many as that allowed, and
        for one at least."""
        end = time.monotonic() + budget_s
        answers: list[bool] = []
        for slot, checksum in wanted:
            answers.append(self.is_sound(slot, checksum))
            if time.monotonic() >= end:
                break
        return answers

    @property
    def missing_bytes(self) -> int:
        """What the payload still needs of the file system."""
        return max(0, self.payload_bytes - os.fstat(self.payload_fd).st_blocks * 512)

    def allocate_next(self) -> bool:
        """Allocate the payload's next piece, and lock it in memory if that was asked for; False when all of it is there.
        May run in a thread of its own. Raises ArenaError with what is missing where."""
        start = self.allocated_bytes
        piece = min(self.payload_bytes - start, PIECE_BYTES)
        if piece <= 0:
            return False
        try:
            os.posix_fallocate(self.payload_fd, start, piece)
        except OSError as error:
            raise self._no_room(error) from error
        self._lock(start, piece)
        self.allocated_bytes += piece
        return True

    def count_what_is_there(self) -> None:
        """A payload that a former daemon allocated in full need not be gone through again. Until it was counted its blocks
        would seem to fill all there is, and newcomers would evict them."""
        if not self.missing_bytes:
            self.allocated_bytes = self.payload_bytes

    def lock_in_memory(self) -> None:
        """From now on what is allocated is locked, too."""
        self._locked_map = mmap.mmap(self.payload_fd, self.payload_bytes)

    def mend(self) -> bool:
        """Make the payload whole again if a peer cut it short, lengthened it, or punched holes in it. True when it did:
        any block's bytes may be gone then. Raises ArenaError when there is no room to do it."""
        allocated = self.allocated_bytes  # Before the look: the other thread only adds.
        found = os.fstat(self.payload_fd)
        if found.st_size == self.payload_bytes and found.st_blocks * 512 >= allocated:
            return False
        try:
            os.ftruncate(self.payload_fd, self.payload_bytes)
            os.posix_fallocate(self.payload_fd, 0, allocated)
        except OSError as error:
            raise self._no_room(error) from error
        self._lock(0, allocated)
        return True

    # --- Its files ------------------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Take over what the table describes, as far as it is of this boot, cut to the capacity now in force. Where slots
        would lie elsewhere now, the payload is another file: whoever still writes into the old one harms nobody."""
        header = unpack_header(os.pread(self._table_fd, HEADER_BYTES, 0))
        if header is None or header.boot_id != self._life.boot_id or not self._lies_as_before(header):
            os.ftruncate(self._table_fd, 0)
            if os.fstat(self.payload_fd).st_size:
                self._replace_payload()
            self._resize_payload()
            self._map_table(fresh=True)
            self._write_header(self._blank())
            return
        self._is_of_this_space = header.process_space == self._life.process_space
        self._cut_for(header.layout, header.label)
        if self.num_slots < header.num_slots:  # Records go before the bytes they speak of.
            os.ftruncate(self._table_fd, HEADER_BYTES + self.num_slots * RECORD_BYTES)
        self._resize_payload()
        self._map_table(fresh=header.layout is None)
        # Holders of another namespace stay that: the header is for the next daemon, which finds none of their pids either.
        self._forget_foreign_pids()
        self._write_header(self._header())

    def close(self) -> None:
        """Let go of the files."""
        for mapping in (self._table, self._locked_map):
            if mapping is not None:
                mapping.close()
        self._table = self._locked_map = None
        for fd in (self._table_fd, self.payload_fd):
            with contextlib.suppress(OSError):
                os.close(fd)

    def unlink(self) -> None:
        """Leave nothing behind."""
        for kind in FILE_KINDS:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(kind))

    def _path(self, kind: str) -> Path:
        return self._directory / f"{kind}{self._suffix}"

    def _lies_as_before(self, header: Header) -> bool:
        if header.layout is None or header.registration_bytes == self.registration_bytes:
            return True
        before = SlotPlaces(header.slot_bytes, header.registration_bytes)
        now = SlotPlaces(header.slot_bytes, self.registration_bytes)
        return header.num_slots <= min(before.slots_per_chunk, now.slots_per_chunk)

    def _forget_foreign_pids(self) -> None:
        if self._is_of_this_space or self._table is None:
            return
        for slot, record in list(self.scan()):
            if isinstance(record, Holder):
                # A torn one would be a free slot, into which somebody may be writing.
                data = pack_reserved(slot, record)
                self._table[REWRITE_AT : REWRITE_AT + REWRITE_BYTES] = pack_rewrite(slot, data)
                at = HEADER_BYTES + slot * RECORD_BYTES
                self._table[at : at + RECORD_BYTES] = data
        self._forget_rewrite()
        self._is_of_this_space = True

    def _replace_payload(self) -> None:
        os.close(self.payload_fd)
        self._path("payload").unlink(missing_ok=True)
        self.payload_fd = open_private(self._path("payload"))

    def _resize_payload(self) -> None:
        if os.fstat(self.payload_fd).st_size != self.payload_bytes:
            os.ftruncate(self.payload_fd, self.payload_bytes)

    def _map_table(self, fresh: bool) -> None:
        if self._table is not None:
            self._table.close()
            self._table = None
        if fresh and os.fstat(self._table_fd).st_size > HEADER_BYTES:
            os.ftruncate(self._table_fd, HEADER_BYTES)
        size = HEADER_BYTES + self.num_slots * RECORD_BYTES
        try:
            os.posix_fallocate(self._table_fd, 0, size)
        except OSError as error:
            raise self._no_room(error) from error
        self._table = mmap.mmap(self._table_fd, size)
        if fresh:
            self._forget_rewrite()

    def _cut_for(self, layout: Layout | None, label: str) -> None:
        self.layout, self.label = layout, label
        if layout is None:
            self.places, self.num_slots = SlotPlaces(SLOT_ALIGNMENT, self.registration_bytes), 0
        else:
            self.places, self.num_slots = self._places_for(layout), self.slots_for(layout)

    def _places_for(self, layout: Layout) -> SlotPlaces:
        return SlotPlaces(_round_up(layout.block_bytes, SLOT_ALIGNMENT), self.registration_bytes)

    def _blank(self) -> Header:
        return Header(self._life.boot_id, self._life.process_space, self.registration_bytes)

    def _header(self) -> Header:
        return replace(
            self._blank(), num_slots=self.num_slots, slot_bytes=self.slot_bytes, layout=self.layout, label=self.label
        )

    def _write_header(self, header: Header) -> None:
        assert self._table is not None
        data = pack_header(header)
        self._table[: len(data)] = data

    # --- Room -----------------------------------------------------------------------------------------------

    def _no_room(self, error: OSError) -> ArenaError:
        if error.errno != errno.ENOSPC:
            return ArenaError(f"cannot allocate the arena in {self._directory}: {error.strerror}")
        return shortfall(self._directory, self.payload_bytes, self.missing_bytes, free_bytes(self._directory))

    def _lock(self, start: int, size: int) -> None:
        if self._locked_map is None:
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._locked_map)) + start
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)) != 0:
            raise ArenaError(
                f"cannot lock bytes {start} to {start + size} of a payload of {self.payload_bytes} bytes in memory "
                f"({os.strerror(ctypes.get_errno())}); raise RLIMIT_MEMLOCK (LimitMEMLOCK=infinity, ulimit -l), free memory, "
                "or set mlock = false"
            )


def shortfall(directory: Path, size: int, wanted: int, free: int) -> ArenaError:
    """There is no room: what is wanted, what is free, and where."""
    return ArenaError(
        f"the arena of {size} bytes needs {wanted} more bytes in {directory}, where {free} are free; "
        "lower host_cache_size, free some, or enlarge the file system (mount -o remount,size=…)"
    )


def free_bytes(directory: Path) -> int:
    """What the file system of a directory still has for this user."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def open_private(path: Path) -> int:
    """A file of ours alone; a link in its place is not followed."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.fchmod(fd, 0o600)
    except OSError as error:
        raise ArenaError(f"cannot open {path}: {error.strerror}") from error
    return fd


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to

"""The arena: two files on tmpfs that outlive the daemon, and the lock that says whose they are (architecture decision 5).

`table` holds a header and one record per slot, mapped by the daemon alone and never passed on. `payload` holds the
blocks' bytes; its descriptor is what engines get, and the daemon reads it with pread only, since a peer could truncate
a file that is mapped. Which block is in which slot is the store's to decide.

Write order, so that SIGKILL between any two writes leaves the old record, the new one, or a free slot:
a record is cleared by one byte; it is written in one piece with its checksum, and a torn one is no record; a header
says "not formatted" before records of an old layout go and names the new layout only after they are gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from xxhash import xxh3_64_intdigest

from cached.errors import ArenaError
from cached.protocol import Layout
from cached.records import (
    HEADER_BYTES,
    RECORD_BYTES,
    Header,
    Holder,
    StoredRecord,
    StoredRow,
    is_free,
    pack_header,
    pack_stored,
    reserved_body,
    unpack,
    unpack_header,
    with_sum,
)

SLOT_ALIGNMENT = 4096
PIECE_BYTES = 64 * 2**20
"""The payload is allocated, and published, in pieces of this size: about 30 ms each."""

_FREE_BYTE = b"\x00"


class Arena:
    """An arena this process owns. Made by `Arena.open`; everything but `allocate_next` is for one thread."""

    def __init__(self, directory: Path, payload_bytes: int, lock_fd: int) -> None:
        self.directory = directory
        self.payload_bytes = payload_bytes // SLOT_ALIGNMENT * SLOT_ALIGNMENT
        self.allocated_bytes = 0
        self.layout: Layout | None = None
        self.slot_bytes = 0
        self.num_slots = 0
        self._boot_id = _boot_id()
        self._lock_fd = lock_fd
        self._table_fd = _open_private(directory / "table")
        self.payload_fd = _open_private(directory / "payload")
        self._table: mmap.mmap | None = None
        self._buffer = bytearray()
        self._locked_map: mmap.mmap | None = None

    @classmethod
    def open(cls, directory: Path, payload_bytes: int, mlock: bool = False) -> Arena:
        """Take the arena in `directory`, which is made if need be: what a dead owner left is reused where it fits and
        reclaimed where not. Raises ArenaError when a live one holds it, or when there is no room for it."""
        _make_private_directory(directory)
        arena = cls(directory, payload_bytes, _take_lock(directory))
        try:
            arena._adopt()
            arena._check_room()
            arena.allocate_next()
            if mlock:
                arena._lock_in_memory()
        except BaseException:
            arena.close(keep=True)
            raise
        return arena

    # --- Layout ---------------------------------------------------------------------------------------------

    def format(self, layout: Layout) -> None:
        """Cut the payload into slots for `layout`; every record is gone afterwards. Raises ArenaError, and is cut for nothing,
        when there is no room for the table."""
        self._write_header(Header(self._boot_id, 0, 0, None))
        self.layout = layout
        self.slot_bytes = _round_up(layout.block_bytes, SLOT_ALIGNMENT)
        self.num_slots = self.payload_bytes // self.slot_bytes
        try:
            self._map_table(fresh=True)
        except ArenaError:
            self.layout, self.slot_bytes, self.num_slots = None, 0, 0
            self._map_table(fresh=True)
            self._write_header(Header(self._boot_id, 0, 0, None))
            raise
        self._write_header(Header(self._boot_id, self.num_slots, self.slot_bytes, layout))

    @property
    def allocated_slots(self) -> int:
        """Slots, from the first on, whose memory is there."""
        return min(self.allocated_bytes // self.slot_bytes, self.num_slots) if self.slot_bytes else 0

    def slots_for(self, layout: Layout) -> int:
        """How many blocks of a layout the payload can hold."""
        return self.payload_bytes // _round_up(layout.block_bytes, SLOT_ALIGNMENT)

    # --- Records --------------------------------------------------------------------------------------------

    def write_stored(self, slots: Sequence[int], rows: Iterable[StoredRow]) -> None:
        """Make `rows` the slots' records, one after the other."""
        table = self._table
        assert table is not None
        for slot, row in zip(slots, rows, strict=True):
            at = HEADER_BYTES + slot * RECORD_BYTES
            table[at : at + RECORD_BYTES] = pack_stored(slot, row)

    def write_reserved(self, slots: Sequence[int], holder: Holder) -> None:
        """Note that `holder` may be writing into the slots, one after the other."""
        table, body = self._table, reserved_body(holder)
        assert table is not None
        for slot in slots:
            at = HEADER_BYTES + slot * RECORD_BYTES
            table[at : at + RECORD_BYTES] = with_sum(slot, body)

    def clear(self, slot: int) -> None:
        """Free the slot for good: one byte, which cannot be torn."""
        assert self._table is not None
        at = HEADER_BYTES + slot * RECORD_BYTES
        self._table[at : at + 1] = _FREE_BYTE

    def scan(self) -> Iterator[tuple[int, StoredRecord | Holder | None]]:
        """Every slot that is not free, and its record; None: torn or flipped."""
        assert self._table is not None
        for slot in range(self.num_slots):
            at = HEADER_BYTES + slot * RECORD_BYTES
            data = self._table[at : at + RECORD_BYTES]
            if not is_free(data):
                yield slot, unpack(slot, data)

    # --- The table of owners' shares ------------------------------------------------------------------------

    def write_shares(self, data: bytes) -> None:
        """Keep the owners' shares for the next daemon: the old ones or the new ones are there, whenever this one dies."""
        newborn = self.directory / "owners.new"
        fd = _open_private(newborn)
        try:
            os.ftruncate(fd, 0)
            os.write(fd, data)
            newborn.rename(self.directory / "owners")
        except OSError as error:
            raise ArenaError(f"cannot keep the owners' shares in {self.directory}: {error.strerror}") from error
        finally:
            os.close(fd)

    def read_shares(self) -> bytes:
        """What was kept; empty when nothing was."""
        try:
            return (self.directory / "owners").read_bytes()
        except OSError:
            return b""

    # --- Payload --------------------------------------------------------------------------------------------

    def is_sound(self, slot: int, checksum: int, buffer: bytearray | None = None) -> bool:
        """Whether the block in `slot` hashes to `checksum`; a payload that a peer has cut short does not."""
        assert self.layout is not None
        into = self._buffer if buffer is None else buffer
        if len(into) != self.layout.block_bytes:
            into[:] = bytes(self.layout.block_bytes)
        try:
            read = os.preadv(self.payload_fd, [into], slot * self.slot_bytes)
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

    def allocate_next(self) -> bool:
        """Allocate the payload's next piece; False when all of it is there. May run in a thread of its own."""
        left = self.payload_bytes - self.allocated_bytes
        if left <= 0:
            return False
        piece = min(left, PIECE_BYTES)
        try:
            os.posix_fallocate(self.payload_fd, self.allocated_bytes, piece)
        except OSError as error:
            raise self._no_room(error) from error
        self.allocated_bytes += piece
        return True

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
        return True

    def close(self, keep: bool) -> None:
        """Let go of the arena; with `keep` false nothing of it is left."""
        if not keep:
            for name in ("table", "payload", "owners", "owners.new", "lock"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.directory / name)
            with contextlib.suppress(OSError):
                self.directory.rmdir()
        for mapping in (self._table, self._locked_map):
            if mapping is not None:
                mapping.close()
        self._table = self._locked_map = None
        for fd in (self._table_fd, self.payload_fd, self._lock_fd):
            with contextlib.suppress(OSError):
                os.close(fd)

    # --- Taking over ----------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Take over what the table describes, as far as it is of this boot, cut to the capacity now in force."""
        header = unpack_header(os.pread(self._table_fd, HEADER_BYTES, 0))
        if header is None or header.boot_id != self._boot_id or header.layout is None:
            os.ftruncate(self._table_fd, 0)
            self._resize_payload()
            self._map_table(fresh=True)
            self._write_header(Header(self._boot_id, 0, 0, None))
            return
        self.layout, self.slot_bytes = header.layout, header.slot_bytes
        self.num_slots = self.payload_bytes // self.slot_bytes
        if self.num_slots < header.num_slots:  # Records go before the bytes they speak of.
            os.ftruncate(self._table_fd, HEADER_BYTES + self.num_slots * RECORD_BYTES)
        self._resize_payload()
        self._map_table(fresh=False)
        self._write_header(Header(self._boot_id, self.num_slots, self.slot_bytes, self.layout))

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

    def _write_header(self, header: Header) -> None:
        assert self._table is not None
        data = pack_header(header)
        self._table[: len(data)] = data

    # --- Room -----------------------------------------------------------------------------------------------

    def _check_room(self) -> None:
        wanted = self.payload_bytes - os.fstat(self.payload_fd).st_blocks * 512
        free = _free_bytes(self.directory)
        if wanted > free:
            raise ArenaError(self._shortfall(wanted, free))

    def _no_room(self, error: OSError) -> ArenaError:
        if error.errno != errno.ENOSPC:
            return ArenaError(f"cannot allocate the arena in {self.directory}: {error.strerror}")
        wanted = self.payload_bytes - os.fstat(self.payload_fd).st_blocks * 512
        return ArenaError(self._shortfall(wanted, _free_bytes(self.directory)))

    def _shortfall(self, wanted: int, free: int) -> str:
        return (
            f"the arena of {self.payload_bytes} bytes needs {wanted} more bytes in {self.directory}, where {free} are free; "
            "lower host_cache_size, free some, or enlarge the file system (mount -o remount,size=…)"
        )

    def _lock_in_memory(self) -> None:
        while self.allocate_next():
            pass
        mapping = mmap.mmap(self.payload_fd, self.payload_bytes)
        self._locked_map = mapping
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(self.payload_bytes)) != 0:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
            raise ArenaError(
                f"cannot lock the arena in memory ({os.strerror(ctypes.get_errno())}): it needs {self.payload_bytes} bytes "
                f"and RLIMIT_MEMLOCK is {shown}; raise it (LimitMEMLOCK=infinity, ulimit -l) or set mlock = false"
            )


def _take_lock(directory: Path) -> int:
    path = directory / "lock"
    while True:
        fd = _open_private(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise ArenaError(
                f"the arena in {directory} is held by a running cache daemon (process {owner}); "
                "stop it, or give this one another arena_dir"
            ) from None
        # A daemon that leaves without keeping its arena unlinks the lock it holds: locked, but not there any more.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
        os.close(fd)


def _make_private_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise ArenaError(f"cannot make the arena's directory {directory}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ArenaError(f"{directory} is not a directory (a link is not followed); give another arena_dir")
    if found.st_uid != os.geteuid():
        denied = PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        message = f"{directory} belongs to user {found.st_uid}, not to {os.geteuid()}; give another arena_dir"
        raise ArenaError(message) from denied
    if stat.S_IMODE(found.st_mode) != 0o700:
        directory.chmod(0o700)


def _open_private(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.fchmod(fd, 0o600)
    except OSError as error:
        raise ArenaError(f"cannot open {path}: {error.strerror}") from error
    return fd


def _free_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _boot_id() -> bytes:
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to

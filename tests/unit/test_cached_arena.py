"""The arena's files: records torn anywhere are free slots, and what a former owner left is reused or refused."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest

from cached.arena import Arena
from cached.errors import ArenaError
from cached.protocol import Layout
from cached.records import (
    HEADER_BYTES,
    RECORD_BYTES,
    Header,
    Holder,
    StoredRecord,
    pack_header,
    pack_reserved,
    pack_stored,
    unpack,
    unpack_header,
)

LAYOUT = Layout(b"layout", 5000, 16)
OLD = StoredRecord(1, 35, 7, 5000, b"o" * 32, b"p" * 32, b"w" * 16, 12.5, 99, 3, 4)
NEW = OLD._replace(key=b"n" * 32, priority=80, generation=9)
HOLDER = Holder(123, 456, b"c" * 16)


def open_arena(directory: Path, size: int = 2**20) -> Arena:
    return Arena.open(directory / "arena", size)


def test_records_come_back_as_they_were_written() -> None:
    assert unpack(5, pack_stored(5, OLD)) == OLD
    assert unpack(5, pack_reserved(5, HOLDER)) == HOLDER


def test_a_record_in_another_slot_is_none() -> None:
    assert unpack(6, pack_stored(5, OLD)) is None


def test_every_flipped_bit_of_a_record_is_noticed() -> None:
    pristine = pack_stored(5, OLD)

    for bit in range(8 * RECORD_BYTES):
        data = bytearray(pristine)
        data[bit // 8] ^= 1 << bit % 8
        assert unpack(5, bytes(data)) is None, f"bit {bit}"


@pytest.mark.parametrize("before", [bytes(RECORD_BYTES), pack_stored(5, OLD), pack_reserved(5, HOLDER)])
@pytest.mark.parametrize("after", [pack_stored(5, NEW), pack_reserved(5, HOLDER._replace(pid=9))])
def test_a_write_torn_anywhere_leaves_old_or_new_or_nothing(before: bytes, after: bytes) -> None:
    legal = {unpack(5, before), unpack(5, after), None}

    for cut in range(RECORD_BYTES + 1):
        assert unpack(5, after[:cut] + before[cut:]) in legal
        assert unpack(5, before[:cut] + after[cut:]) in legal


def test_a_torn_header_is_no_header() -> None:
    data = pack_header(Header(b"b" * 16, 7, 8192, LAYOUT))
    other = pack_header(Header(b"b" * 16, 9, 4096, Layout(b"another", 1, 2)))
    assert unpack_header(data) == Header(b"b" * 16, 7, 8192, LAYOUT)

    for cut in range(len(data)):
        assert unpack_header(data[:cut] + other[cut:]) in (unpack_header(data), unpack_header(other), None)


def test_records_survive_their_daemon(tmp_path: Path) -> None:
    arena = open_arena(tmp_path)
    arena.format(LAYOUT)
    arena.write_stored([3], [OLD])
    arena.write_reserved([4], HOLDER)
    arena.write_stored([5], [OLD])
    arena.clear(5)
    arena.close(keep=True)

    arena = open_arena(tmp_path)

    assert arena.layout == LAYOUT
    assert dict(arena.scan()) == {3: OLD, 4: HOLDER}
    arena.close(keep=True)


def test_a_new_layout_leaves_no_record_of_the_old(tmp_path: Path) -> None:
    arena = open_arena(tmp_path)
    arena.format(LAYOUT)
    arena.write_stored([3], [OLD])

    arena.format(Layout(b"other", 9000, 16))

    assert dict(arena.scan()) == {}
    arena.close(keep=True)


def test_an_arena_of_another_boot_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kv-semantics 2.7: its deadlines are on a clock that has begun anew."""
    arena = open_arena(tmp_path)
    arena.format(LAYOUT)
    arena.write_stored([3], [OLD])
    arena.close(keep=True)
    monkeypatch.setattr("cached.arena._boot_id", lambda: b"another boot ..."[:16])

    arena = open_arena(tmp_path)

    assert arena.layout is None
    arena.close(keep=True)


def test_a_held_arena_is_refused_and_a_released_one_is_not(tmp_path: Path) -> None:
    arena = open_arena(tmp_path)

    with pytest.raises(ArenaError, match=f"process {os.getpid()}"):
        open_arena(tmp_path)
    arena.close(keep=False)

    open_arena(tmp_path).close(keep=True)


def test_a_link_in_the_arenas_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "arena").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(ArenaError, match="not a directory"):
        open_arena(tmp_path)


def test_a_payload_cut_short_by_a_peer_is_not_sound(tmp_path: Path) -> None:
    arena = open_arena(tmp_path)
    arena.format(LAYOUT)
    from xxhash import xxh3_64_intdigest

    checksum = xxh3_64_intdigest(bytes(5000))
    assert arena.is_sound(3, checksum)

    os.truncate(arena.payload_fd, 4096)

    assert not arena.is_sound(3, checksum)
    arena.close(keep=True)


def test_the_payload_is_allocated_in_full(tmp_path: Path) -> None:
    arena = open_arena(tmp_path, 3 * 2**20)

    while arena.allocate_next():
        pass

    assert os.fstat(arena.payload_fd).st_blocks * 512 >= 3 * 2**20
    assert arena.allocated_bytes == arena.payload_bytes
    arena.close(keep=True)


def test_no_room_names_the_numbers_and_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cached.arena._free_bytes", lambda _directory: 1000)

    with pytest.raises(ArenaError, match=r"needs 1048576 more bytes in .*arena, where 1000 are free"):
        open_arena(tmp_path)


def test_a_table_of_garbage_is_replaced(tmp_path: Path) -> None:
    open_arena(tmp_path).close(keep=True)
    (tmp_path / "arena" / "table").write_bytes(os.urandom(HEADER_BYTES * 2))

    arena = open_arena(tmp_path)

    assert arena.layout is None
    arena.close(keep=True)


def test_locking_more_than_the_limit_names_limit_and_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root locks what it likes, so the kernel's refusal is played."""

    class Libc:
        def mlock(self, *_: object) -> int:
            ctypes.set_errno(errno.ENOMEM)
            return -1

    monkeypatch.setattr("cached.arena.ctypes.CDLL", lambda *_, **__: Libc())
    monkeypatch.setattr("cached.arena.resource.getrlimit", lambda _: (65536, 65536))

    with pytest.raises(ArenaError, match=r"needs 1048576 bytes and RLIMIT_MEMLOCK is 65536 bytes"):
        Arena.open(tmp_path / "arena", 2**20, mlock=True)

"""The arena's files: records torn anywhere are free slots, and what a former owner left is reused or refused."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cached.arena import Arena
from cached.arena_part import ArenaPart
from cached.errors import ArenaError
from cached.parts import PartPlan
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
    pack_header,
    pack_reserved,
    pack_rewrite,
    pack_stored,
    unpack,
    unpack_header,
)

LAYOUT = Layout(b"layout", 5000, 16)
OLD = StoredRecord(1, 35, 7, 5000, b"o" * 32, b"p" * 32, b"w" * 16, 12.5, 99, 3, 4)
NEW = OLD._replace(key=b"n" * 32, priority=80, generation=9)
HEADER = Header(b"b" * 16, 3, 2**36, 7, 8192, LAYOUT, "a model")
HOLDER = Holder(123, 456, b"c" * 16)


def open_arena(directory: Path, size: int = 2**20, **more: Any) -> Arena:
    return Arena.open(directory / "arena", size, **more)


def part_of(arena: Arena) -> ArenaPart:
    """The only part there is."""
    [part] = arena.parts
    return part


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
    data = pack_header(HEADER)
    other = pack_header(Header(b"c" * 16, 9, 2**30, 7, 4096, Layout(b"another", 1, 2), "other"))
    assert unpack_header(data) == HEADER

    for cut in range(len(data)):
        assert unpack_header(data[:cut] + other[cut:]) in (unpack_header(data), unpack_header(other), None)


def test_records_survive_their_daemon(tmp_path: Path) -> None:
    arena = open_arena(tmp_path)
    part_of(arena).format(LAYOUT)
    part_of(arena).write_stored([3], [OLD])
    part_of(arena).write_reserved([4], HOLDER)
    part_of(arena).write_stored([5], [OLD])
    part_of(arena).clear(5)
    arena.close(keep=True)

    arena = open_arena(tmp_path)

    assert part_of(arena).layout == LAYOUT
    assert dict(part_of(arena).scan()) == {3: OLD, 4: HOLDER}
    arena.close(keep=True)


def test_a_stored_blocks_record_that_is_torn_by_new_retention_is_not_lost(tmp_path: Path) -> None:
    """A record is longer than what a processor writes at once. A daemon killed in the middle of a touch lost a block that
    it had acknowledged long before, and with it all that descended from it."""
    table, retouched = tmp_path / "arena" / "table", OLD._replace(priority=90, deadline=99.0, tick=8)
    at, there = HEADER_BYTES + 3 * RECORD_BYTES, slice(HEADER_BYTES + 3 * RECORD_BYTES, HEADER_BYTES + 4 * RECORD_BYTES)
    arena = open_arena(tmp_path)
    part_of(arena).format(LAYOUT)
    part_of(arena).write_stored([3], [OLD])
    before = table.read_bytes()
    part_of(arena).write_stored([3], [retouched])
    after = table.read_bytes()
    arena.close(keep=True)

    for cut in range(REWRITE_BYTES + 1):
        killed = bytearray(before)
        killed[REWRITE_AT : REWRITE_AT + cut] = after[REWRITE_AT : REWRITE_AT + cut]
        assert records_of(tmp_path, killed) == {3: OLD}
    for cut in range(RECORD_BYTES + 1):
        killed = bytearray(after)
        killed[there] = after[at : at + cut] + before[at + cut : at + RECORD_BYTES]
        # Before the first byte and after the last changed one, the record is a whole one.
        assert records_of(tmp_path, killed) in ({3: retouched}, {3: OLD})


@pytest.mark.parametrize("leaves", ["cleared", "given out"])
def test_a_block_that_left_does_not_come_back_for_its_last_retention(tmp_path: Path, leaves: str) -> None:
    arena = open_arena(tmp_path)
    part_of(arena).format(LAYOUT)
    part_of(arena).write_stored([3], [OLD])
    part_of(arena).write_stored([3], [OLD._replace(priority=90)])
    if leaves == "cleared":
        part_of(arena).clear(3)
    part_of(arena).write_reserved([3], HOLDER)
    arena.close(keep=True)
    table = bytearray((tmp_path / "arena" / "table").read_bytes())
    table[HEADER_BYTES + 3 * RECORD_BYTES] = 1
    table[HEADER_BYTES + 3 * RECORD_BYTES + 20] ^= 1

    assert records_of(tmp_path, table) == {3: None}


def records_of(directory: Path, table: bytes) -> dict[int, object]:
    """What a daemon finds that starts with this table."""
    (directory / "arena" / "table").write_bytes(table)
    arena = open_arena(directory)
    found = dict(part_of(arena).scan())
    arena.close(keep=True)
    return found


def test_a_new_layout_leaves_no_record_of_the_old(tmp_path: Path) -> None:
    arena = open_arena(tmp_path)
    part_of(arena).format(LAYOUT)
    part_of(arena).write_stored([3], [OLD])

    part_of(arena).format(Layout(b"other", 9000, 16))

    assert dict(part_of(arena).scan()) == {}
    arena.close(keep=True)


def test_an_arena_of_another_boot_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kv-semantics 2.7: its deadlines are on a clock that has begun anew."""
    arena = open_arena(tmp_path)
    part_of(arena).format(LAYOUT)
    part_of(arena).write_stored([3], [OLD])
    arena.close(keep=True)
    monkeypatch.setattr("cached.arena._boot_id", lambda: b"another boot ..."[:16])

    arena = open_arena(tmp_path)

    assert part_of(arena).layout is None
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
    part_of(arena).format(LAYOUT)
    from xxhash import xxh3_64_intdigest

    checksum = xxh3_64_intdigest(bytes(5000))
    assert part_of(arena).is_sound(3, checksum)

    os.truncate(part_of(arena).payload_fd, 4096)

    assert not part_of(arena).is_sound(3, checksum)
    arena.close(keep=True)


def test_the_payload_is_allocated_in_full(tmp_path: Path) -> None:
    arena = open_arena(tmp_path, 3 * 2**20)

    while arena.allocate_next():
        pass

    assert os.fstat(part_of(arena).payload_fd).st_blocks * 512 >= 3 * 2**20
    assert arena.allocated_bytes == arena.payload_bytes
    arena.close(keep=True)


def test_no_room_names_the_numbers_and_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cached.arena.free_bytes", lambda _directory: 1000)

    with pytest.raises(ArenaError, match=r"needs 1048576 more bytes in .*arena, where 1000 are free"):
        open_arena(tmp_path)


def test_a_table_of_garbage_is_replaced(tmp_path: Path) -> None:
    open_arena(tmp_path).close(keep=True)
    (tmp_path / "arena" / "table").write_bytes(os.urandom(HEADER_BYTES * 2))

    arena = open_arena(tmp_path)

    assert part_of(arena).layout is None
    arena.close(keep=True)


def test_locking_more_than_the_limit_names_limit_and_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a byte of it is allocated: an arena of hundreds of gigabytes is not filled first and refused then."""
    monkeypatch.setattr("cached.machine.lock_limit", lambda: 65536)

    with pytest.raises(ArenaError, match=r"needs 1048576 bytes and RLIMIT_MEMLOCK is 65536 bytes"):
        open_arena(tmp_path, mlock=True)

    assert (tmp_path / "arena" / "payload").stat().st_blocks == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not lock")
def test_the_kernels_limit_counts_for_whoever_has_no_right_to_lock(tmp_path: Path) -> None:
    """Root locks what it likes, so somebody else tries, with the kernel's own limit."""
    home = tmp_path / "nobody"
    home.mkdir()
    os.chown(home, 65534, 65534)
    program = f"""
import os, resource, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from cached.arena import Arena
from cached.errors import ArenaError
home = os.open({str(home)!r}, os.O_RDONLY)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (2**17, 2**17))
os.setuid(65534)
os.fchdir(home)  # Its ancestors are closed to nobody.
arena = Arena.open(Path("fits"), 2**17, mlock=True)
while arena.allocate_next(): pass
locked = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmLck")]
arena.close(keep=False)
try:
    Arena.open(Path("does-not"), 2**18, mlock=True)
except ArenaError as error:
    print(*locked, error)
"""

    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert said.startswith("128 ")
    assert "needs 262144 bytes and RLIMIT_MEMLOCK is 131072 bytes" in said


def test_a_piece_that_cannot_be_locked_is_an_error_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may refuse whatever the limit says, such as when there is no memory to lock."""

    class Libc:
        def mlock(self, *_: object) -> int:
            ctypes.set_errno(errno.ENOMEM)
            return -1

    monkeypatch.setattr("cached.machine.lock_limit", lambda: None)
    monkeypatch.setattr("cached.arena_part.ctypes.CDLL", lambda *_, **__: Libc())

    with pytest.raises(ArenaError, match=r"bytes 0 to 1048576 of a payload of 1048576 bytes .*RLIMIT_MEMLOCK"):
        open_arena(tmp_path, mlock=True)


def test_an_arena_is_locked_piece_by_piece_as_it_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[tuple[int, int]] = []
    monkeypatch.setattr("cached.machine.lock_limit", lambda: None)
    monkeypatch.setattr("cached.arena_part.PIECE_BYTES", 2**18)
    monkeypatch.setattr(ArenaPart, "_lock", lambda _part, start, size: locked.append((start, size)))

    arena = open_arena(tmp_path, mlock=True)
    assert arena.allocated_bytes == 2**18
    while arena.allocate_next():
        pass

    assert locked == [(start, 2**18) for start in range(0, 2**20, 2**18)]
    arena.close(keep=True)


# --- Parts ---

TWO = (PartPlan("first", 2**19), PartPlan("", 2**18))


def test_parts_have_files_of_their_own_and_are_allocated_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cached.arena_part.PIECE_BYTES", 2**17)

    arena = open_arena(tmp_path, plans=TWO)

    first, common = arena.parts
    assert (first.allocated_bytes, common.allocated_bytes) == (2**17, 2**17)
    assert os.fstat(first.payload_fd).st_ino != os.fstat(common.payload_fd).st_ino
    arena.allocate_next()
    arena.allocate_next()
    assert (first.allocated_bytes, common.allocated_bytes) == (2**18, 2**18)
    while arena.allocate_next():
        pass
    assert (first.allocated_bytes, common.allocated_bytes) == (2**19, 2**18)
    arena.close(keep=False)
    assert not (tmp_path / "arena").exists()


def test_each_part_keeps_its_records_whatever_comes_beside_it(tmp_path: Path) -> None:
    arena = open_arena(tmp_path, plans=TWO)
    for number, part in enumerate(arena.parts):
        part.format(Layout(b"layout %d" % number, 5000, 16), f"model {number}")
        part.write_stored([number], [OLD])
    arena.close(keep=True)

    arena = open_arena(tmp_path, plans=(PartPlan("another", 2**17), *TWO))

    assert [(part.name, part.label, dict(part.scan()) if part.layout else None) for part in arena.parts] == [
        ("another", "", None),
        ("first", "model 0", {0: OLD}),
        ("", "model 1", {1: OLD}),
    ]
    arena.close(keep=True)


def test_a_part_that_is_not_configured_any_more_is_reclaimed(tmp_path: Path) -> None:
    open_arena(tmp_path, plans=TWO).close(keep=True)
    (tmp_path / "arena" / "mine.txt").write_text("not the daemon's")

    arena = open_arena(tmp_path, 2**18)

    names = {path.name for path in (tmp_path / "arena").iterdir()}
    assert names == {"lock", "peers", "table", "payload", "mine.txt"}
    arena.close(keep=True)


def test_the_room_for_all_parts_is_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cached.arena.free_bytes", lambda _directory: 1000)

    with pytest.raises(
        ArenaError, match=r"arena of 786432 bytes needs 786432 more bytes in .*arena, where 1000 are free"
    ):
        open_arena(tmp_path, plans=TWO)


# --- Chunks ---


@pytest.mark.parametrize("chunk", [8192, 12288, 20480, 2**20, 2**36])
def test_no_slot_crosses_the_end_of_a_registration(chunk: int) -> None:
    places = SlotPlaces(8192, chunk)
    payload = 10 * 12288

    offsets = [places.offset(slot) for slot in range(places.slots_within(payload))]

    assert offsets == places.offsets(range(len(offsets)))
    assert all(offset // chunk == (offset + 8191) // chunk for offset in offsets)
    assert all(after - before >= 8192 for before, after in itertools.pairwise(offsets))
    assert offsets[-1] + 8192 <= payload
    assert len(offsets) == payload // chunk * (chunk // 8192) + payload % chunk // 8192


def test_slots_are_published_as_their_memory_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cached.arena_part.PIECE_BYTES", 2**17)
    arena = open_arena(tmp_path, registration_bytes=20480)
    part = part_of(arena)
    part.format(LAYOUT)
    seen = [part.allocated_slots]

    while arena.allocate_next():
        seen.append(part.allocated_slots)

    assert seen == [part.places.slots_within(size) for size in range(2**17, 2**20 + 1, 2**17)]
    assert seen[-1] == part.num_slots == 102
    arena.close(keep=True)


def test_other_chunks_keep_what_lies_where_it_lay(tmp_path: Path) -> None:
    arena = open_arena(tmp_path, registration_bytes=2**30)
    part_of(arena).format(LAYOUT)
    part_of(arena).write_stored([3], [OLD])
    arena.close(keep=True)

    arena = open_arena(tmp_path, registration_bytes=2**20)

    assert dict(part_of(arena).scan()) == {3: OLD}
    arena.close(keep=True)


def test_other_chunks_that_move_slots_begin_with_another_payload(tmp_path: Path) -> None:
    """A writer of the old daemon's may still be at work in the old one."""
    arena = open_arena(tmp_path, registration_bytes=2**30)
    part_of(arena).format(LAYOUT)
    part_of(arena).write_reserved([3], HOLDER)
    old = os.dup(part_of(arena).payload_fd)
    arena.close(keep=True)

    arena = open_arena(tmp_path, registration_bytes=12288)

    assert part_of(arena).layout is None
    assert os.fstat(old).st_ino != os.fstat(part_of(arena).payload_fd).st_ino
    os.close(old)
    arena.close(keep=True)


# --- Whose processes ---


def test_pids_of_another_namespace_of_processes_mean_nothing_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container started anew has its own processes: number 123 of the former one is nobody, or somebody else."""
    arena = open_arena(tmp_path)
    part_of(arena).format(LAYOUT)
    part_of(arena).write_reserved([3], HOLDER)
    arena.close(keep=True)

    monkeypatch.setattr("cached.machine.process_space", lambda: 77)
    arena = open_arena(tmp_path)
    assert dict(part_of(arena).scan()) == {3: HOLDER._replace(pid=0, started=0)}
    arena.close(keep=True)

    monkeypatch.undo()
    arena = open_arena(tmp_path)
    assert dict(part_of(arena).scan()) == {3: HOLDER._replace(pid=0, started=0)}
    arena.close(keep=True)


def test_a_payload_that_was_allocated_in_full_is_there_at_once_for_the_next_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to be published piece by piece again: with more blocks than one piece holds there was no free slot for a
    moment after each restart, and newcomers evicted blocks from a tier that was a third full."""
    monkeypatch.setattr("cached.arena_part.PIECE_BYTES", 2**16)
    arena = open_arena(tmp_path)
    part_of(arena).format(LAYOUT)
    while arena.allocate_next():
        pass
    arena.close(keep=True)

    again = open_arena(tmp_path)

    assert part_of(again).allocated_slots == part_of(again).num_slots == 2**20 // 8192
    assert not again.allocate_next()
    again.close(keep=True)


def test_a_payload_with_a_hole_is_allocated_piece_by_piece_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cached.arena_part.PIECE_BYTES", 2**16)
    arena = open_arena(tmp_path)
    while arena.allocate_next():
        pass
    arena.close(keep=True)
    payload = tmp_path / "arena" / "payload"
    os.truncate(payload, 2**19)

    again = open_arena(tmp_path)

    assert again.allocated_bytes == 2**16
    while again.allocate_next():
        pass
    assert payload.stat().st_blocks * 512 >= 2**20
    again.close(keep=True)


def test_shares_that_do_not_fit_leave_the_former_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system with a little room takes a part of what is written and says so only in the count."""
    arena = open_arena(tmp_path)
    part = part_of(arena)
    part.write_shares(b"former")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))

    with pytest.raises(ArenaError, match="No space left"):
        part.write_shares(b"newer ones")

    assert part.read_shares() == b"former"
    arena.close(keep=False)


def test_a_daemon_killed_while_it_forgets_foreign_pids_frees_no_slot_that_somebody_may_write_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, forgotten = tmp_path / "arena" / "table", Holder(0, 0, HOLDER.client_id)
    arena = open_arena(tmp_path)
    part_of(arena).format(LAYOUT)
    part_of(arena).write_reserved([3], HOLDER)
    arena.close(keep=True)
    monkeypatch.setattr("cached.machine.process_space", lambda: 77)
    before, new, at = table.read_bytes(), pack_reserved(3, forgotten), HEADER_BYTES + 3 * RECORD_BYTES

    for cut in range(0, RECORD_BYTES + 1, 4):
        killed = bytearray(before)
        killed[REWRITE_AT:HEADER_BYTES] = pack_rewrite(3, new)
        killed[at : at + cut] = new[:cut]
        assert records_of(tmp_path, killed) == {3: forgotten}

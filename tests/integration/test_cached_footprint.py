"""What a daemon takes of the machine and leaves behind: names in /dev/shm, memory of a tmpfs made to measure, pages of a peer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cached.arena import Arena
from cached.errors import ArenaError
from cached.mapped_payload import POPULATE_PAUSE_S, MappedPayload
from cached.protocol import PROTOCOL_VERSION, Welcome
from tests.support.cached_daemon import Daemon, chain, daemon_directory, load, store, wait_until

MIB = 2**20


def footprint(folder: Path) -> tuple[list[str], int]:
    """Names below a folder, and the bytes that they occupy."""
    found = sorted(folder.rglob("*"))
    return [str(path.relative_to(folder)) for path in found], sum(path.lstat().st_blocks * 512 for path in found)


def daemon_ends(count: int) -> None:
    """Starts that end by every signal in turn; after the first end each leaves as much as the one before."""
    with daemon_directory() as directory:
        daemon = Daemon(directory, host_cache_size=MIB, layouts=("demo=0.5",))
        seen = []
        for number in range(count):
            daemon.start()
            store(daemon.client(), chain(number, 4))
            assert daemon.process is not None
            assert all(path.startswith(str(directory)) for path in shared_files(daemon.process.pid))
            daemon.process.send_signal((signal.SIGKILL, signal.SIGTERM, signal.SIGINT)[number % 3])
            daemon.process.wait()
            names, size = footprint(directory)
            # A killed daemon leaves its socket, and the lock of a client that may still be copying.
            seen.append(([name for name in names if not name.startswith(("c.sock", "arena/peers/"))], size))
            for client in daemon.clients:
                client.close()
            daemon.clients.clear()
        assert seen == [seen[0]] * count
        assert seen[0][1] <= 2 * MIB
        daemon.settings["keep_arena"] = False
        daemon.start()
        assert daemon.stop() == 0
        assert list(directory.iterdir()) == []


def shared_files(pid: int) -> set[str]:
    """The files in shared memory, with a name or without, that a process has open or mapped."""
    folder = Path(f"/proc/{pid}/fd")
    found = {os.readlink(folder / name) for name in os.listdir(folder)}
    found |= {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/" in line}
    return {path for path in found if path.startswith(("/dev/shm", "/memfd", "/SYSV"))}


@pytest.mark.long
def test_twenty_ends_leave_nothing_more_than_one() -> None:
    """LMCache left a pool behind at every SIGTERM on one of its entry points (field reports, A1)."""
    daemon_ends(20)


@contextmanager
def tmpfs(directory: Path, size: int) -> Iterator[tuple[str, ...]]:
    """A tmpfs of `size` bytes over `directory` in a namespace of mounts; yields the command that runs others in it."""
    script = f"mount -t tmpfs -o size={size} tmpfs {directory} && echo mounted && exec sleep 600"
    holder = subprocess.Popen(["unshare", "--mount", "sh", "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        if holder.stdout.readline() != "mounted\n":
            pytest.skip("may not mount a tmpfs")
        yield "nsenter", "-t", str(holder.pid), "-m"
    finally:
        holder.kill()
        holder.communicate()


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("nsenter") is None, reason="needs root and nsenter")
def test_a_tmpfs_made_for_one_arena_serves_after_every_kill() -> None:
    """In a container the tmpfs outlives the daemon: what a dead one left must not stand in the next one's way (A2)."""
    with daemon_directory() as directory:
        (directory / "arena").mkdir(mode=0o700)
        room = 128 * 1024  # For the table of 512 records, and the lock.
        with tmpfs(directory / "arena", 4 * MIB + room) as enter:
            daemon = Daemon(directory, host_cache_size=4 * MIB)
            daemon.wrapper = enter
            for _ in range(4):
                daemon.start()
                wait_until(lambda: daemon.stats()["allocated_bytes"] == 4 * MIB)
                client = daemon.client()
                names = chain("exact", 20)
                assert set(store(client, names)) <= {"stored", "present"}
                assert len(load(client, names)) == 20
                client.close()
                daemon.kill()
            daemon.settings["host_cache_size"] = 8 * MIB
            refused = daemon.spawn(stderr=subprocess.PIPE)
            _, said = refused.communicate(timeout=20)
            assert refused.returncode == 1
            assert f"arena of {8 * MIB} bytes needs {4 * MIB} more bytes in {directory}/arena, where " in said.decode()


def test_what_runs_out_while_the_arena_grows_is_said_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else fills the tmpfs after the start: what is there goes on being served."""
    monkeypatch.setattr("cached.arena_part.PIECE_BYTES", MIB)
    arena = Arena.open(tmp_path / "arena", 3 * MIB)

    def full(_fd: int, _offset: int, _length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        ArenaError, match=rf"arena of {3 * MIB} bytes needs {2 * MIB} more bytes in .*, where \d+ are free"
    ):
        arena.allocate_next()

    assert arena.allocated_bytes == MIB
    arena.close(keep=False)


def test_an_engine_populates_its_own_mapping_in_the_background() -> None:
    """Decision 5: no copy pays for the first touch of a page."""
    with daemon_directory() as directory:
        daemon = Daemon(directory, host_cache_size=8 * MIB)
        daemon.start()
        client = daemon.client()
        assert client.poll() == "ready"

        view = client.payload

        assert view is not None
        inode = (daemon.arena_dir / "payload").stat().st_ino
        wait_until(lambda: resident_bytes(inode) == 8 * MIB)
        del view
        daemon.close()


def test_an_engine_makes_no_page_that_the_daemon_has_not_allocated() -> None:
    """It would count as memory of the engine's control group, and be made where there may be no room for it."""
    fd = os.memfd_create("payload")
    os.truncate(fd, 4 * MIB)
    os.posix_fallocate(fd, 0, MIB)
    inode = os.fstat(fd).st_ino
    payload = MappedPayload()
    payload.adopt(Welcome(1, PROTOCOL_VERSION, 1, 4096, 1024, 4 * MIB, 2**30, 10.0, 30.0), [os.dup(fd)])

    view = payload.view()
    wait_until(lambda: resident_bytes(inode) == MIB)
    time.sleep(3 * POPULATE_PAUSE_S)
    assert os.fstat(fd).st_blocks * 512 == MIB
    os.posix_fallocate(fd, MIB, 3 * MIB)

    wait_until(lambda: resident_bytes(inode) == 4 * MIB)
    del view
    payload.forget()
    os.close(fd)


def resident_bytes(inode: int) -> int:
    """How much of a file this process has mapped and present."""
    found, is_it = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_it = words[4] == str(inode)
        elif is_it and words[0] == "Rss:":
            found += 1024 * int(words[1])
    return found

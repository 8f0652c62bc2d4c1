"""A file system that is full, descriptors that are used up, a peer that falls silent: each has a named outcome, those who
are served go on being served, and all is well again once the trouble is over.

A tmpfs of a few megabytes is mounted in a private namespace of mounts, so it is really full.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cached.protocol import TABLE, Lookup
from cached.server import HELLO_TIMEOUT_S, TICK_S
from tests.support.cached_daemon import Daemon, chain, content_of, daemon_directory, load, offers, store, wait_until

REPOSITORY = Path(__file__).parents[2]

_PREAMBLE = """
    import os, signal, subprocess, sys, time
    from pathlib import Path
    sys.path.insert(0, {repository!r})
    from tests.support.cached_daemon import *
    directory = Path({directory!r})

    def contents(names):
        return [content_of(name) for name in names]

    def free():
        found = os.statvfs(directory)
        return found.f_bavail * found.f_frsize

    def fill(leaving=0):
        with open(directory / "filler", "wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, free() - leaving)
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    with daemon_directory() as path:
        yield path


def missing_for_mounts() -> str | None:
    """Why no file system can be mounted here, or None."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "needs root and unshare"
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    )
    return None if tried.returncode == 0 else f"needs mounts: {tried.stderr.decode(errors='replace').strip()}"


def on_tmpfs(directory: Path, size: int, program: str) -> None:
    """Run a program whose `directory` is a tmpfs of `size` bytes that nobody else sees; it fails by an exception."""
    if (missing := missing_for_mounts()) is not None:
        pytest.skip(missing)
    preamble = textwrap.dedent(_PREAMBLE).format(repository=str(REPOSITORY), directory=str(directory))
    mount = f'mount -t tmpfs -o size={size} none "$1" && exec "$2" -c "$3"'
    words = ["sh", "-c", mount, "sh", str(directory), sys.executable, preamble + textwrap.dedent(program)]
    # Whatever is started in a namespace of processes ends with its first one.
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run([*unshare, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


# --- The file system is full ---


def test_a_tmpfs_of_exactly_one_arena_takes_the_next_daemon_after_each_kill(directory: Path) -> None:
    """Elsewhere a file that outlived its owner filled the tmpfs, and every start after that failed for want of room."""
    on_tmpfs(
        directory,
        4 * 2**20,
        """
        daemon = Daemon(directory, host_cache_size=4 * 2**20 - 256 * 1024)
        daemon.start()
        names = chain("kept", 20)
        assert store(daemon.client(), names) == ["stored"] * 20
        fill()
        assert free() == 0
        for attempt in range(3):
            daemon.kill()
            daemon.start()
            client = daemon.client()
            wait_until(lambda: load(client, names) == contents(names))
            more = chain(("more", attempt), 5)
            assert store(client, more) == ["stored"] * 5
            names_left = {path.name for path in daemon.arena_dir.iterdir()}
            assert len([name for name in names_left if name.startswith("payload")]) == 1
            client.close()
        daemon.close()
        """,
    )


@pytest.mark.long
def test_a_start_without_room_says_how_much_is_wanted_and_free_and_succeeds_once_there_is(directory: Path) -> None:
    on_tmpfs(
        directory,
        8 * 2**20,
        """
        daemon = Daemon(directory, host_cache_size=4 * 2**20)
        fill(leaving=2**20)
        refused = daemon.spawn(stderr=subprocess.PIPE)
        _, said = refused.communicate(timeout=60)
        assert refused.returncode == 1
        said = said.decode()
        assert "the arena of 4194304 bytes needs 4194304 more bytes in" in said, said
        assert "are free" in said and str(directory) in said, said
        (directory / "filler").unlink()
        daemon.start()
        names = chain("room", 3)
        assert store(daemon.client(), names) == ["stored"] * 3
        daemon.close()
        """,
    )


@pytest.mark.long
def test_a_file_system_that_fills_up_while_the_arena_is_allocated_leaves_a_smaller_one_that_serves(
    directory: Path,
) -> None:
    on_tmpfs(
        directory,
        256 * 2**20,
        """
        daemon = Daemon(directory, host_cache_size=240 * 2**20)
        daemon.process = daemon.spawn(stderr=subprocess.PIPE)
        payload = daemon.arena_dir / "payload"
        while not (payload.exists() and payload.stat().st_blocks):
            time.sleep(0.0005)
        daemon.process.send_signal(signal.SIGSTOP)
        while "State:\\tT" not in Path(f"/proc/{daemon.process.pid}/status").read_text():
            time.sleep(0.0005)
        fill(leaving=8 * 2**20)  # For the table, which is made when the first engine says what its blocks are.
        daemon.process.send_signal(signal.SIGCONT)

        for line in daemon.process.stderr:
            if b"the arena stays smaller than asked" in line:
                assert b"more bytes in" in line, line
                break
        else:
            raise AssertionError("the shortfall was not told")
        client = daemon.client()
        names = chain("smaller", 20)
        wait_until(lambda: client.poll() == "ready")
        assert store(client, names) == ["stored"] * 20
        assert load(client, names) == contents(names)
        found = daemon.stats()
        assert 0 < found["allocated_bytes"] < found["capacity_bytes"] == 240 * 2**20, found
        assert found["allocated_slots"] < found["capacity_slots"]
        (directory / "filler").unlink()
        daemon.kill()
        daemon.start()
        wait_until(lambda: daemon.stats()["allocated_bytes"] == 240 * 2**20)
        daemon.close()
        """,
    )


def test_a_full_file_system_costs_neither_blocks_nor_sessions_and_a_cut_payload_is_mended_when_there_is_room(
    directory: Path,
) -> None:
    """Copying into a hole that no memory can be found for raises SIGBUS; it must cost the copy, not the process."""
    on_tmpfs(
        directory,
        8 * 2**20,
        """
        from cached.protocol import OwnerShare
        daemon = Daemon(directory, host_cache_size=4 * 2**20, log_level="error")
        daemon.start()
        client, peer = daemon.client(), daemon.client()
        names = chain("full", 20)
        assert store(client, names) == ["stored"] * 20
        assert peer.poll() == "ready"
        fill()
        assert load(client, names) == contents(names)
        client.set_owners(1, [OwnerShare(b"a" * 16, 1.0, 0, None)])
        wait_until(lambda: client.poll() == "ready")
        assert daemon.process.poll() is None

        payload_fd = os.open(daemon.arena_dir / "payload", os.O_RDWR)
        os.ftruncate(payload_fd, 0)
        fill()
        wait_until(lambda: daemon.stats()["unverified"] == 0)
        copies = load(client, names)
        assert copies == contents(names)[:len(copies)]
        assert set(store(client, chain("in a hole", 3))) <= {"aborted", "refused", "stored"}
        assert daemon.process.poll() is None

        (directory / "filler").unlink()
        wait_until(lambda: os.fstat(payload_fd).st_blocks * 512 >= 4 * 2**20)
        wait_until(lambda: daemon.stats()["unverified"] == 0)
        again = chain("again", 3)
        wait_until(lambda: store(client, again) == ["stored"] * 3 or load(client, again) == contents(again))
        assert load(client, again) == contents(again)
        daemon.close()
        """,
    )


# --- Descriptors are used up ---


def test_without_descriptors_new_peers_are_told_so_old_ones_are_served_and_all_is_well_with_more(
    directory: Path,
) -> None:
    daemon = Daemon(directory, log_level="error")
    daemon.start()
    try:
        client, names = daemon.client(), chain("descriptors", 2)
        store(client, names)
        assert daemon.process is not None
        pid = daemon.process.pid
        wait_until(lambda: daemon.stats()["sessions"] == 1)
        former = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest_descriptor(pid) + 1, former[1]))

        late = [daemon.client(timeout_s=5.0) for _ in range(3)]
        assert [each.poll() for each in late] == ["absent"] * 3
        assert [each.refusal.reason for each in late if each.refusal is not None] == ["no_descriptors"] * 3
        assert load(client, names) == [content_of(name) for name in names]
        assert store(client, chain("meanwhile", 2)) == ["stored"] * 2
        time.sleep(1.2 * TICK_S)  # What the daemon looks at once a second used to end it here.
        assert daemon.process.poll() is None
        assert load(client, names) == [content_of(name) for name in names]

        resource.prlimit(pid, resource.RLIMIT_NOFILE, former)
        for each in late:
            wait_until(lambda each=each: each.poll() == "ready")
            assert load(each, names) == [content_of(name) for name in names]
    finally:
        daemon.close()


def highest_descriptor(pid: int) -> int:
    """The kernel gives the lowest free number, and a limit is on the number."""
    return max(map(int, os.listdir(f"/proc/{pid}/fd")))


# --- A peer falls silent in the middle of a frame ---


def test_half_a_frame_of_an_engine_that_then_sleeps_holds_nobody_else_up_and_its_reservations_end(
    directory: Path,
) -> None:
    daemon = Daemon(directory, lease_ttl_s=0.5, reservation_ttl_s=0.5)
    daemon.start()
    try:
        silent, client, names = daemon.client(), daemon.client(), chain("half", 3)
        store(client, names)
        silent.reserve(offers(chain("never written", 4)))
        lease = silent.lease(names)
        assert lease is not None
        frame = TABLE.encode(Lookup(99, b"".join(names)))
        assert silent._link._sock is not None
        silent._link._sock.sendall(frame[: len(frame) // 2])

        assert load(client, names) == [content_of(name) for name in names]
        wait_until(lambda: (daemon.stats()["leased"], daemon.stats()["reserved"]) == (0, 0))
        assert store(client, chain("never written", 4)) == ["stored"] * 4
        assert client.state == "ready"
    finally:
        daemon.close()


@pytest.mark.long
def test_half_a_hello_is_not_waited_for_longer_than_a_hello(directory: Path) -> None:
    daemon = Daemon(directory, max_sessions=2)
    daemon.start()
    try:
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        silent.connect(str(daemon.socket))
        silent.sendall(b"\x00\x00")
        silent.settimeout(10 * HELLO_TIMEOUT_S)

        assert silent.recv(1) == b""
        assert daemon.client().poll() == "ready"
    finally:
        daemon.close()

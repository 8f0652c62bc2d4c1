"""Peers in another namespace of processes: their slots stay in quarantine while they live, and are free when they are dead.

Real namespaces, made with unshare: the daemon sees pid 0 where its peers are, as it does between containers that share
nothing but the socket's directory.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cached.peer_locks import PeerLocks
from cached.protocol import Reserved
from tests.support.cached_daemon import Daemon, chain, daemon_directory, load, offers, store, wait_until

REPOSITORY = Path(__file__).parents[2]
UNSHARE = ("unshare", "--fork", "--pid", "--mount-proc", "--kill-child")
MORE_THAN_A_TICK_S = 1.3


def missing() -> str | None:
    """Why no namespace can be made here, or None."""
    if shutil.which("unshare") is None:
        return "needs unshare"
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "may not make namespaces of processes"


pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


class HiddenDaemon(Daemon):
    """A daemon that is the first process of a namespace of its own, a new one at every start."""

    wrapper = UNSHARE

    def kill(self) -> None:
        assert self.process is not None
        os.kill(inner_pid(self.process), signal.SIGKILL)
        self.process.wait()


def inner_pid(unshare: subprocess.Popen[bytes] | subprocess.Popen[str]) -> int:
    """The process that an unshare waits for, as it is seen from here."""
    children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children")
    wait_until(lambda: children.read_text().split())
    return int(children.read_text().split()[0])


@pytest.fixture
def daemon() -> Iterator[HiddenDaemon]:
    with daemon_directory() as directory:
        daemon = HiddenDaemon(directory)
        daemon.start()
        yield daemon
        daemon.close()


@contextmanager
def hidden_peer(daemon: Daemon, program: str) -> Iterator[subprocess.Popen[str]]:
    """An engine in a third namespace, which says a line when its program has come to the end and lives on."""
    preamble = f"""
        import os, sys, time
        sys.path.insert(0, {str(REPOSITORY)!r})
        from tests.support.cached_daemon import *
        client = TierClient({str(daemon.socket)!r}, HELLO, 5.0)
    """
    text = textwrap.dedent(preamble) + textwrap.dedent(program) + "\nprint('done', flush=True)\nsys.stdin.read()\n"
    peer = subprocess.Popen(
        [*UNSHARE, sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert peer.stdout is not None
        assert peer.stdout.readline() == "done\n"
        yield peer
    finally:
        die(peer)
        for pipe in (peer.stdin, peer.stdout):
            assert pipe is not None
            pipe.close()


def die(peer: subprocess.Popen[str]) -> None:
    if peer.poll() is None:
        os.kill(inner_pid(peer), signal.SIGKILL)
        peer.wait()


def locks(daemon: Daemon) -> list[str]:
    return os.listdir(daemon.arena_dir / "peers")


def test_what_a_hidden_peer_held_is_free_when_it_is_dead_and_not_before(daemon: HiddenDaemon) -> None:
    """It used to stay in quarantine for good: SO_PEERCRED says pid 0, and nothing can be watched."""
    with hidden_peer(daemon, "client.reserve(offers(chain('hidden', 3))); client._link._sock.close()") as peer:
        wait_until(lambda: daemon.stats()["sessions"] == 0)
        time.sleep(MORE_THAN_A_TICK_S)
        assert daemon.stats()["quarantined"] == 3
        # Its keys are storable meanwhile, in other slots.
        assert store(daemon.client(), chain("hidden", 3)) == ["stored"] * 3

        # A container of the daemon's that is started anew, while its engines live on in theirs.
        daemon.kill()
        daemon.start()
        time.sleep(MORE_THAN_A_TICK_S)
        assert daemon.stats()["quarantined"] == 3
        assert len(locks(daemon)) == 1

        die(peer)

        wait_until(lambda: daemon.stats()["quarantined"] == 0)
        wait_until(lambda: locks(daemon) == [])


@pytest.mark.long
def test_a_pid_of_the_daemons_former_namespace_is_not_taken_for_anybody(directory_daemon: Daemon) -> None:
    """The first daemon sees its peer's pid; the second, in a namespace of its own, sees nobody of that number, which
    says nothing of the peer, who may still be writing."""
    daemon = directory_daemon
    client = daemon.client()
    outcomes = client.reserve(offers(chain("seen", 3)))
    assert all(isinstance(each, Reserved) for each in outcomes)
    daemon.kill()
    hidden = HiddenDaemon(daemon.directory)

    hidden.start()

    time.sleep(MORE_THAN_A_TICK_S)
    assert hidden.stats()["quarantined"] == 3
    client.commit([(each.reservation, 1) for each in outcomes if isinstance(each, Reserved)])
    wait_until(lambda: client.poll() == "ready" and hidden.stats()["quarantined"] == 0)
    hidden.close()


@pytest.fixture
def directory_daemon() -> Iterator[Daemon]:
    with daemon_directory() as directory:
        daemon = Daemon(directory)
        daemon.start()
        yield daemon
        daemon.close()


@pytest.mark.long
def test_hidden_peers_share_blocks_and_cost_no_descriptors(daemon: HiddenDaemon) -> None:
    client = daemon.client()
    names = chain("shared", 4)
    with hidden_peer(daemon, "print(store(client, chain('shared', 4)).count('stored'), end='', file=sys.stderr)"):
        assert len(load(client, names)) == 4
    assert daemon.process is not None
    folder = f"/proc/{inner_pid(daemon.process)}/fd"
    mine = len(os.listdir("/proc/self/fd"))
    wait_until(lambda: daemon.stats()["sessions"] == 1)
    before = len(os.listdir(folder))

    for number in range(5):
        outcomes = client.reserve(offers(chain(number, 1)))
        client._link.lose(is_breach=False)
        wait_until(lambda: client.poll() == "ready")
        client.commit([(each.reservation, 1) for each in outcomes if isinstance(each, Reserved)])

    wait_until(lambda: daemon.stats()["quarantined"] == 0)
    wait_until(lambda: len(os.listdir(folder)) == before)
    assert len(os.listdir("/proc/self/fd")) == mine
    wait_until(lambda: len(locks(daemon)) == 1)


# --- The locks alone ---


def test_a_lock_lasts_as_long_as_anybody_has_it_open(tmp_path: Path) -> None:
    locks, client = PeerLocks(tmp_path), b"c" * 16
    assert not locks.is_released(client)  # Nothing was given: that says nothing.
    first, second = locks.give(client), locks.give(client)
    copy = os.dup(first)

    os.close(first)
    os.close(second)
    assert not locks.is_released(client)
    os.close(copy)

    assert locks.is_released(client)


def test_locks_of_those_who_hold_nothing_are_removed(tmp_path: Path) -> None:
    locks = PeerLocks(tmp_path / "peers")
    (tmp_path / "peers").mkdir()
    for client in (b"a" * 16, b"b" * 16):
        os.close(locks.give(client))
    (tmp_path / "peers" / "not a lock").touch()

    locks.keep_only({b"a" * 16})

    assert sorted(os.listdir(tmp_path / "peers")) == [(b"a" * 16).hex(), "not a lock"]

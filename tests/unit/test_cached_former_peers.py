"""What a former daemon's peers held is free once their processes are known to be gone, and not before."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cached.former_peers import FormerPeers, start_time_of
from cached.peer_locks import PeerLocks
from cached.records import Holder

CLIENT = b"c" * 16


class Loop:
    """What former peers need of the loop, and whom they said to be gone."""

    def __init__(self, directory: Path) -> None:
        self.watched: set[int] = set()
        self.gone: list[int] = []
        self.locks = PeerLocks(directory)
        self.peers = FormerPeers(lambda fd, _: self.watched.add(fd), self.watched.discard, self.locks, self.gone.append)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path)
    yield made
    made.peers.close()


def test_a_process_that_is_not_visible_is_not_taken_for_gone(loop: Loop) -> None:
    loop.peers.find(7, 0, 0)  # What SO_PEERCRED says of a peer in another namespace of processes.

    assert loop.gone == []


def test_a_process_that_cannot_be_watched_is_not_taken_for_gone(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", full)
    loop.peers.find(7, os.getpid(), start_time_of(os.getpid()))

    assert loop.gone == []


def test_a_process_whose_number_is_anothers_now_is_gone(loop: Loop) -> None:
    loop.peers.find(7, os.getpid(), start_time_of(os.getpid()) + 1)

    assert loop.gone == [7]


def test_a_process_that_is_there_is_watched_until_its_sessions_are_settled(loop: Loop) -> None:
    loop.peers.find(7, os.getpid(), start_time_of(os.getpid()))
    loop.peers.find(8, os.getpid(), start_time_of(os.getpid()))

    loop.peers.keep_only({8})
    assert (loop.gone, len(loop.watched)) == ([], 1)

    loop.peers.keep_only(())
    assert not loop.watched


def test_a_process_costs_one_descriptor_however_many_sessions_it_leaves_and_all_end_with_it() -> None:
    """A peer that reserved a block, hung up and came again, over and over, used up the daemon's descriptors."""
    told: list[int] = []
    handlers: dict[int, Callable[[int], None]] = {}
    peers = FormerPeers(handlers.__setitem__, handlers.__delitem__, PeerLocks(Path("/nowhere")), told.append)
    child = subprocess.Popen(["sleep", "60"])
    try:
        for session in range(20):
            peers.take(session, os.pidfd_open(child.pid), (child.pid, start_time_of(child.pid)))
        [handler] = handlers.values()
    finally:
        child.kill()
        child.wait()

    handler(0)

    assert sorted(told) == list(range(20))
    assert not peers.are_watched
    assert not handlers


def test_who_was_given_no_lock_is_not_taken_for_gone_and_who_let_go_of_it_is(loop: Loop) -> None:
    waiting = {7: Holder(0, 0, CLIENT)}
    loop.peers.look_at_locks(waiting)
    lock = loop.locks.give(CLIENT)
    loop.peers.look_at_locks(waiting)
    assert loop.gone == []

    os.close(lock)
    loop.peers.look_at_locks(waiting)

    assert loop.gone == [7]

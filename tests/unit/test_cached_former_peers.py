"""What a former daemon's peers held is free once their processes are known to be gone, and not before."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
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


def test_a_process_that_is_there_is_watched_until_its_session_is_settled(loop: Loop) -> None:
    loop.peers.find(7, os.getpid(), start_time_of(os.getpid()))
    loop.peers.find(8, os.getpid(), start_time_of(os.getpid()))
    assert (loop.gone, len(loop.watched)) == ([], 2)

    loop.peers.keep_only({8})

    assert len(loop.watched) == 1


def test_who_was_given_no_lock_is_not_taken_for_gone_and_who_let_go_of_it_is(loop: Loop) -> None:
    waiting = {7: Holder(0, 0, CLIENT)}
    loop.peers.look_at_locks(waiting)
    lock = loop.locks.give(CLIENT)
    loop.peers.look_at_locks(waiting)
    assert loop.gone == []

    os.close(lock)
    loop.peers.look_at_locks(waiting)

    assert loop.gone == [7]

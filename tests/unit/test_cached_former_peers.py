"""What a former daemon's peers held is free once their processes are known to be gone, and not before."""

from __future__ import annotations

import errno
import os

import pytest

from cached.server import Server, start_time_of


class Settled:
    def __init__(self) -> None:
        self.sessions: list[int] = []

    def process_gone(self, session: int) -> None:
        self.sessions.append(session)


def server() -> tuple[Server, Settled]:
    made = Server.__new__(Server)
    settled = Settled()
    made.tier = settled  # type: ignore[assignment]
    made._watched = {}
    made._watch = lambda fd, handler: None  # type: ignore[method-assign]
    return made, settled


def test_a_process_that_is_not_visible_is_not_taken_for_gone() -> None:
    made, settled = server()
    made._watch_former(7, 0, 0)  # What SO_PEERCRED says of a peer in another namespace of processes.
    assert settled.sessions == []


def test_a_process_that_cannot_be_watched_is_not_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    made, settled = server()
    monkeypatch.setattr(os, "pidfd_open", full)
    made._watch_former(7, os.getpid(), start_time_of(os.getpid()))
    assert settled.sessions == []


def test_a_process_whose_number_is_anothers_now_is_gone() -> None:
    made, settled = server()
    made._watch_former(7, os.getpid(), start_time_of(os.getpid()) + 1)
    assert settled.sessions == [7]

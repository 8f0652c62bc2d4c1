"""A tmpfs that is full while the daemon runs costs what could not be written, not the daemon."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cached.arena import Arena
from cached.keys import self_test_vector
from cached.protocol import CLIENT_ID_BYTES, PROTOCOL_VERSION, Hello, Layout, OwnerShare
from cached.tier import Admitted, NotAdmitted, Tier, TierSettings
from tests.support.cached_daemon import Daemon, daemon_directory

SHARES = [OwnerShare(b"a" * 16, 1.0, 0, None)]


def test_a_table_of_owners_that_cannot_be_kept_does_not_end_the_daemon() -> None:
    with daemon_directory() as directory:
        daemon = Daemon(directory)
        daemon.start()
        try:
            client = daemon.client()
            assert client.poll() == "ready"
            (daemon.arena_dir / "owners.new").mkdir()  # In the way, as a full tmpfs would be.

            client.set_owners(1, SHARES)

            assert daemon.stats() is not None
            assert daemon.process is not None
            assert daemon.process.poll() is None
        finally:
            daemon.close()


def test_a_layout_whose_table_finds_no_room_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arena = Arena.open(tmp_path / "arena", 2**20)
    tier = Tier(arena.parts, TierSettings(1.0, 1.0, 0.0), 1, 0.0)
    allocate = os.posix_fallocate

    def full(fd: int, offset: int, length: int) -> None:
        if length > 4096:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, offset, length)

    hello = Hello(
        1, PROTOCOL_VERSION, bytes(CLIENT_ID_BYTES), self_test_vector(), Layout(b"a layout", 4096, 16), "a label"
    )
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert isinstance(tier.admit(hello, 1, 1, 0.0), NotAdmitted)
    assert tier.statistics().capacity_slots == 0
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    assert isinstance(tier.admit(hello, 1, 1, 1.0), Admitted)
    arena.close(keep=False)

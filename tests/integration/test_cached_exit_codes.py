"""Why a daemon did not start, as its supervisor is told."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import cached.main
from cached.arena import Arena
from cached.config import CachedConfig
from cached.errors import ArenaError
from command.errors import Exit
from command.restarts import FINAL_CODES
from tests.support.cached_daemon import Daemon, daemon_directory


@pytest.fixture
def directory() -> Iterator[Path]:
    with daemon_directory() as path:
        yield path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory another user's")
def test_an_arena_of_another_user_is_a_fault_of_permission(directory: Path) -> None:
    daemon = Daemon(directory)
    daemon.arena_dir.mkdir(mode=0o700)
    os.chown(daemon.arena_dir, 4321, 4321)

    ended = daemon.spawn(stderr=subprocess.PIPE)
    _, said = ended.communicate(timeout=30)

    assert ended.returncode == Exit.PERMISSION
    assert "belongs to user 4321" in said.decode()


@pytest.mark.parametrize(
    ("cause", "code", "is_final"),
    [
        (PermissionError(13, "Permission denied"), Exit.PERMISSION, True),
        (OSError(28, "No space left on device"), Exit.FAILED, False),
        (None, Exit.FAILED, False),
    ],
)
def test_only_what_no_second_try_changes_is_final(
    directory: Path, monkeypatch: pytest.MonkeyPatch, cause: OSError | None, code: Exit, is_final: bool
) -> None:
    def refuse(*_: object, **__: object) -> Arena:
        raise ArenaError("cannot open the arena") from cause

    monkeypatch.setattr(cached.main.Arena, "open", refuse)
    config = CachedConfig(socket=directory / "c.sock", arena_dir=directory / "arena", host_cache_size=2**20)

    ended = cached.main.run(config)

    assert ended == code
    assert (ended in FINAL_CODES) is is_final

"""A socket whose file is removed under a running daemon."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cached_daemon import Daemon, chain, content_of, daemon_directory, load, store, wait_until


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with daemon_directory() as directory:
        started = Daemon(directory, socket=str(directory / "run" / "c.sock"))
        started.socket = Path(started.settings["socket"])  # type: ignore[arg-type]
        started.start()
        yield started
        started.close()


def test_a_removed_socket_is_made_again_and_who_is_connected_notices_nothing(daemon: Daemon) -> None:
    client, names = daemon.client(), chain("kept", 3)
    store(client, names)
    daemon.socket.unlink()
    wait_until(daemon.socket.exists)

    assert load(client, names) == [content_of(name) for name in names]
    assert load(daemon.client(), names) == [content_of(name) for name in names]
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o660
    assert daemon.stop() == 0
    assert not daemon.socket.exists()


def test_a_removed_directory_is_made_again(daemon: Daemon) -> None:
    names = chain("kept", 2)
    store(daemon.client(), names)
    shutil.rmtree(daemon.socket.parent)
    wait_until(daemon.socket.exists)

    assert load(daemon.client(), names) == [content_of(name) for name in names]

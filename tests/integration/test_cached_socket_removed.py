"""A socket or an arena whose files are removed under a running daemon."""

from __future__ import annotations

import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cached.server import TICK_S
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
    assert daemon.stats()["sockets_remade"] == 1
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o660
    assert daemon.stop() == 0
    assert not daemon.socket.exists()


def test_a_removed_directory_is_made_again(daemon: Daemon) -> None:
    names = chain("kept", 2)
    store(daemon.client(), names)
    shutil.rmtree(daemon.socket.parent)
    wait_until(daemon.socket.exists)

    assert load(daemon.client(), names) == [content_of(name) for name in names]


def test_an_arena_whose_directory_is_removed_goes_on_in_what_is_open_of_it(daemon: Daemon) -> None:
    """The daemon's look once a second for the locks of peers that are gone used to end it."""
    client, names = daemon.client(), chain("kept", 2)
    store(client, names)
    shutil.rmtree(daemon.arena_dir)
    time.sleep(1.5 * TICK_S)

    assert load(client, names) == [content_of(name) for name in names]
    assert load(daemon.client(), names) == [content_of(name) for name in names]

"""Connections that send anything at all to a real daemon, while an engine goes on storing and loading what it stored."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cached.keys import OwnerId
from cached.protocol import MAX_FRAME_BYTES, TABLE, Layout
from cached.wire import FrameReader
from tests.support.cached_daemon import HELLO, Daemon, chain, content_of, daemon_directory, load, store, wait_until
from tests.support.cached_frames import FrameMaker

LAYOUT = Layout(HELLO.layout_fingerprint, HELLO.block_bytes, HELLO.tokens_per_block)
NUM_CONNECTIONS = 4
CHECK_EVERY = 25


class Stranger:
    """One connection after the other to the daemon's socket."""

    def __init__(self, path: Path, dice: random.Random) -> None:
        self._path = str(path)
        self._dice = dice
        self._connect()

    def send(self, kinds: list[type]) -> None:
        """A frame, and whatever has been answered so far."""
        try:
            self._sock.sendall(self._maker.frame(self._dice.choice(kinds)))
            for frame in self._reader.receive(self._answers()):
                self._maker.learn(TABLE.decode(frame))
        except OSError:
            self._connect()
        if self._dice.random() < 0.05:  # Most lengths never come to an end.
            self._connect()

    def close(self) -> None:
        self._sock.close()

    def _connect(self) -> None:
        with contextlib.suppress(AttributeError):
            self._sock.close()
        self._maker, self._reader = FrameMaker(self._dice, LAYOUT), FrameReader(MAX_FRAME_BYTES)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(10)
        self._sock.connect(self._path)
        with contextlib.suppress(OSError):
            self._sock.sendall(self._maker.hello())
            self._sock.setblocking(False)

    def _answers(self) -> bytes:
        try:
            data = self._sock.recv(2**16)
        except BlockingIOError:
            return b""
        if not data:
            raise ConnectionResetError
        return data


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with daemon_directory() as directory:
        running = Daemon(directory, host_cache_size=256 * 8192, log_level="error", event_buffer_max_size=256)
        running.start()
        yield running
        running.close()


def anonymous(daemon: Daemon) -> int:
    assert daemon.process is not None
    rows = Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines()
    return next(1024 * int(row.split()[1]) for row in rows if row.startswith("RssAnon"))


def harass(daemon: Daemon, num_frames: int) -> int:
    """Send frames and check on the engine; by how many bytes the daemon grew after the first fifth."""
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    dice = random.Random(seed)
    engine, mine = daemon.client(timeout_s=20.0), OwnerId(b"B" * 16)
    names = chain("mine", 6)
    assert store(engine, names, priority=100, owner=mine) == ["stored"] * 6
    strangers = [Stranger(daemon.socket, dice) for _ in range(NUM_CONNECTIONS)]
    settled = 0
    for number in range(num_frames):
        dice.choice(strangers).send(list(TABLE.messages.values()))
        if number % CHECK_EVERY == 0:
            # Less than all only while the daemon verifies again what it was told to.
            wait_until(lambda: load(engine, names) == [content_of(name) for name in names], timeout_s=60)
            assert store(engine, chain(number, 1), owner=mine) in (["stored"], ["refused"])
        if number == num_frames // 5:
            settled = anonymous(daemon)
    for stranger in strangers:
        stranger.close()
    assert daemon.process is not None
    assert daemon.process.poll() is None
    assert engine.state == "ready"
    wait_until(lambda: daemon.stats()["sessions"] == 1, timeout_s=60)
    assert load(engine, names) == [content_of(name) for name in names]
    return anonymous(daemon) - settled


def test_an_engine_keeps_its_blocks_beside_strangers_that_send_anything(daemon: Daemon) -> None:
    harass(daemon, 500)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_an_engine_keeps_its_blocks_beside_fifty_thousand_strange_frames(daemon: Daemon) -> None:
    grown = harass(daemon, 50_000)

    print("grown by", grown)
    assert grown < 3 * 2**20

"""A real cache daemon in a process of its own, and what a test needs to store and load blocks through it."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xxhash import xxh3_64_intdigest

from cached.client import TierClient
from cached.keys import NO_OWNER, BlockHash, OwnerId
from cached.observer import TierObserver
from cached.protocol import OfferedBlock, Reserved, TierHello

BLOCK_BYTES = 5000
SLOT_BYTES = 8192
"""What a block takes in the arena: whole pages."""
HELLO = TierHello(b"test layout", BLOCK_BYTES, 16)

_PROGRAM = """
import sys, json
from cached.config import CachedConfig
from cached.main import run
sys.exit(run(CachedConfig(**json.loads(sys.argv[1]))))
"""


class Daemon:
    """One arena and one socket in `directory`; start it, stop it, kill it, as often as a test likes."""

    wrapper: tuple[str, ...] = ()
    """A command that runs the daemon."""

    def __init__(self, directory: Path, host_cache_size: int = 2**20, **settings: object) -> None:
        self.directory = directory
        self.socket = directory / "c.sock"
        self.arena_dir = directory / "arena"
        self.settings = {
            "socket": str(self.socket),
            "arena_dir": str(self.arena_dir),
            "host_cache_size": host_cache_size,
            "log_level": "warning",
            **settings,
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.clients: list[TierClient] = []

    def start(self) -> None:
        """Returns when the daemon answers."""
        self.process = self.spawn()
        deadline = time.monotonic() + 60
        while True:
            assert self.process.poll() is None, f"the daemon ended with {self.process.returncode}"
            assert time.monotonic() < deadline, "the daemon does not answer"
            probe = TierClient(self.socket, None, 1.0)
            if probe.stats() is not None:
                probe.close()
                return
            time.sleep(0.01)

    def spawn(self, **pipes: object) -> subprocess.Popen[bytes]:
        import json

        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [*self.wrapper, sys.executable, "-c", _PROGRAM, json.dumps(self.settings)]
        return subprocess.Popen(command, env=environment, **pipes)  # type: ignore[call-overload,no-any-return]

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=10)

    def client(self, timeout_s: float = 2.0, hello: TierHello | None = HELLO) -> TierClient:
        client = TierClient(self.socket, hello, timeout_s)
        self.clients.append(client)
        return client

    def observer(self) -> TierObserver:
        observer = TierObserver(self.socket, 2.0)
        self.clients.append(observer)
        return observer

    def stats(self) -> dict[str, object]:
        observer = TierClient(self.socket, None, 2.0)
        found = observer.stats()
        observer.close()
        assert found is not None
        return found

    def close(self) -> None:
        for client in self.clients:
            client.close()
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()


@contextmanager
def daemon_directory() -> Iterator[Path]:
    """A short path, on a tmpfs where there is one, since a unix socket's path must be short."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp"
    path = Path(tempfile.mkdtemp(prefix="hl", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def name_of(label: object) -> BlockHash:
    return BlockHash(hashlib.sha256(f"block {label}".encode()).digest())


def content_of(block_hash: bytes) -> bytes:
    """The bytes that belong to a name: any other bytes under it are wrong."""
    return (hashlib.sha512(block_hash).digest() * (BLOCK_BYTES // 64 + 1))[:BLOCK_BYTES]


def chain(label: object, length: int) -> list[BlockHash]:
    return [name_of(f"{label}/{depth}") for depth in range(length)]


def offers(
    names: list[BlockHash], priority: int = 35, owner: OwnerId = NO_OWNER, **changes: object
) -> list[OfferedBlock]:
    parents = [None, *names[:-1]]
    values = {"deadline": None, "on_expiry": "demote", **changes}
    return [
        OfferedBlock(name, parent, "0011aabb", priority, owner=owner, **values)  # type: ignore[arg-type]
        for name, parent in zip(names, parents, strict=True)
    ]


def store(client: TierClient, names: list[BlockHash], **changes: object) -> list[str]:
    """Offer a chain, copy what is taken, commit; the outcomes by name, as words."""
    outcomes = client.reserve(offers(names, **changes))  # type: ignore[arg-type]
    commits = []
    for name, outcome in zip(names, outcomes, strict=True):
        if isinstance(outcome, Reserved) and client.write(outcome, memoryview(content_of(name))):
            commits.append((outcome.reservation, xxh3_64_intdigest(content_of(name))))
    if len(commits) < sum(isinstance(each, Reserved) for each in outcomes):
        client.abort([each.reservation for each in outcomes if isinstance(each, Reserved)])
        return ["aborted"] * len(names)
    answers = iter(client.commit(commits))
    return [next(answers) if isinstance(each, Reserved) else type(each).__name__.lower() for each in outcomes]


def load(client: TierClient, names: list[BlockHash]) -> list[bytes]:
    """The bytes of the leading run that the tier gives out for good; each checked as an engine checks it."""
    lease = client.lease(names)
    if lease is None:
        return []
    copies: list[bytes] = []
    suspected = None
    for block in lease.blocks:
        copy = bytearray(BLOCK_BYTES)
        if not client.read(lease, block, memoryview(copy)):
            break
        if xxh3_64_intdigest(copy) != block.checksum:
            suspected = names[len(copies)]
            break
        copies.append(bytes(copy))
    held = client.release(lease)
    if suspected is not None:
        client.suspect([suspected])
    return copies if held else []


def wait_until(condition, timeout_s: float = 40.0) -> None:
    """Poll until true; the limit only bounds a failing test."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "this did not come true"
        time.sleep(0.01)

"""An engine's process that stores and loads without pause and journals what it did, for tests that kill what is around it.

A line is written before a block may come into the tier and another after the daemon has acknowledged it; both with one
`write`, so that a kill leaves whole lines. What was acknowledged must be served or have been evicted by rule; what never
was committed must not be served; and any bytes under a name but its own are wrong.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xxhash import xxh3_64_intdigest

from cached.client import TierClient
from cached.keys import NO_OWNER, BlockHash, owner_id
from cached.protocol import OfferedBlock, Reserved, TierHello
from cached.retention import OnExpiry

BLOCK_BYTES = 4096
HELLO = TierHello(b"journal", BLOCK_BYTES, 16)
LONGEST_CHAIN = 8
HIGH_PRIORITY = 90
PLAIN_PRIORITY = 35
DURATION_S = 0.3


@dataclass(slots=True)
class Journal:
    """What processes wrote down: `tried` and `acknowledged` by order of time, blocks that no one ever committed, those
    with a duration at whose end they are dropped, and what was served wrongly."""

    tried: list[tuple[float, tuple[bytes, ...]]] = field(default_factory=list)
    acknowledged: list[tuple[float, tuple[bytes, ...]]] = field(default_factory=list)
    high: set[bytes] = field(default_factory=set)
    timed: set[bytes] = field(default_factory=set)
    never: set[bytes] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    label_of: dict[bytes, str] = field(default_factory=dict)
    num_loaded: int = 0

    @classmethod
    def read(cls, directory: Path) -> Journal:
        """All journals in a directory."""
        journal = cls()
        for path in sorted(directory.glob("*.journal")):
            for line in path.read_text().splitlines():
                journal._take(path.stem, line.split())
        journal.tried.sort()
        journal.acknowledged.sort()
        return journal

    def _take(self, label: str, words: list[str]) -> None:
        kind, at, *rest = words
        names = tuple(map(bytes.fromhex, rest))
        match kind:
            case "tried":
                self.tried.append((float(at), names))
                self.label_of.update(dict.fromkeys(names, label))
            case "acknowledged":
                self.acknowledged.append((float(at), names))
            case "high":
                self.high.update(names)
            case "timed":
                self.timed.update(names)
            case "never":
                self.never.update(names)
            case "wrong":
                self.wrong.append(" ".join(words))
            case "loaded":
                self.num_loaded += len(names)
            case _:
                raise ValueError(f"no line of a journal: {words}")

    @property
    def all_tried(self) -> set[bytes]:
        """Every block that may be in the tier."""
        return {name for _, names in self.tried for name in names}

    def newest(self, num_blocks: int) -> set[bytes]:
        """What was acknowledged of the last `num_blocks` that were tried: whatever was given up before they were, these
        are the last to go."""
        window: set[bytes] = set()
        for _, names in reversed(self.tried):
            if len(window) + len(names) > num_blocks:
                break
            window.update(names)
        return {name for _, names in self.acknowledged for name in names if name in window}


def content_of(block_hash: bytes) -> bytes:
    """The bytes that belong to a name: any other bytes under it are wrong."""
    return block_hash * (BLOCK_BYTES // len(block_hash))


def start_journalist(
    socket: Path, directory: Path, label: str, most_blocks: int, most_high: int, has_pressure: bool
) -> subprocess.Popen[bytes]:
    """A process that works until it is killed or terminated; it stores at most `most_blocks`, of them `most_high` at a high
    priority. Under pressure it lets blocks expire and loads only what it has just stored, so that recency is the order of
    its journal."""
    root = Path(__file__).parents[2]
    path = directory / f"{label}.journal"
    words = [str(socket), str(path), label, *map(str, (most_blocks, most_high, int(has_pressure)))]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.Popen([sys.executable, "-m", "tests.support.cached_journal", *words], env=environment)


def load_checked(client: TierClient, names: Sequence[bytes]) -> int:
    """How many of a leading run are served for good; raises ValueError for a wrong byte. Checks no checksum: the daemon
    has promised that it verified these, and nobody damages them."""
    lease = client.lease(names)
    if lease is None:
        return 0
    copies = []
    for block in lease.blocks:
        copy = bytearray(BLOCK_BYTES)
        if not client.read(lease, block, memoryview(copy)):
            break
        copies.append(copy)
    if not client.release(lease):
        return 0
    for name, copy in zip(names, copies, strict=False):
        if copy != content_of(name):
            raise ValueError(f"wrong bytes under {name.hex()}")
    return len(copies)


class _Journalist:
    def __init__(
        self, socket: str, path: str, label: str, most_blocks: int, most_high: int, has_pressure: bool
    ) -> None:
        self._client = TierClient(socket, HELLO, 2.0)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._label = label
        self._left = most_blocks
        self._high_left = most_high
        # Among several owners it is not the eldest that goes first (kv-semantics 4.3).
        self._owner = NO_OWNER if has_pressure else owner_id(label)
        self._has_pressure = has_pressure
        self._dice = random.Random(label)
        self._number = 0
        self._mine: list[tuple[bytes, ...]] = []
        self._abandoned: list[int] = []

    def work(self) -> None:
        """One thing after the other, with pauses that let a machine of few cores do something else, while its test lives."""
        parent = os.getppid()
        while os.getppid() == parent:
            if self._client.poll() == "absent":
                time.sleep(0.01)
                continue
            choice = self._dice.random()
            if choice < 0.5:
                self._store()
            elif choice < 0.6:
                self._begin_and_give_up()
            elif choice < 0.7 and not self._has_pressure:
                self._touch()
            else:
                self._load()
            time.sleep(self._dice.random() * 0.004)

    def _note(self, kind: str, names: Sequence[bytes]) -> None:
        text = " ".join([kind, repr(time.monotonic()), *(name.hex() for name in names)])
        os.write(self._fd, text.encode() + b"\n")

    def _new_names(self, count: int) -> tuple[bytes, ...]:
        self._number += 1
        return tuple(
            hashlib.sha256(f"{self._label}/{self._number}/{depth}".encode()).digest() for depth in range(count)
        )

    def _store(self) -> None:
        names = self._new_names(self._dice.randrange(1, LONGEST_CHAIN + 1))
        if self._left < len(names):
            return
        self._left -= len(names)
        above: tuple[bytes, ...] = ()
        if self._mine and not self._has_pressure and self._dice.random() < 0.3:
            above = self._dice.choice(self._mine)[:1]
        priority, duration_s = PLAIN_PRIORITY, None
        if len(names) <= self._high_left and self._dice.random() < 0.1:
            priority = HIGH_PRIORITY
            self._high_left -= len(names)
            self._note("high", names)
        elif self._has_pressure and self._dice.random() < 0.1:
            duration_s = DURATION_S
            self._note("timed", names)
        granted = self._client.reserve(self._offers(names, above, priority, duration_s))
        commits = []
        for name, slot in zip(names, granted, strict=True):
            if isinstance(slot, Reserved) and self._client.write(slot, memoryview(content_of(name))):
                commits.append((slot.reservation, xxh3_64_intdigest(content_of(name))))
        numbers = [slot.reservation for slot in granted if isinstance(slot, Reserved)]
        if len(commits) < len(numbers) or not commits:
            self._client.abort(numbers)
            return
        self._note("tried", names[: len(commits)])
        outcomes = self._client.commit(commits)
        stored = tuple(name for name, outcome in zip(names, outcomes, strict=False) if outcome == "stored")
        if stored:
            self._note("acknowledged", stored)
            self._mine.append(stored)

    def _begin_and_give_up(self) -> None:
        """Reserve, write some of it, and abort: now, or after the daemon has maybe died."""
        self._client.abort(self._abandoned)
        self._abandoned = []
        names = self._new_names(self._dice.randrange(1, LONGEST_CHAIN + 1))
        self._note("never", names)
        answers = self._client.reserve(self._offers(names, (), PLAIN_PRIORITY, None))
        slots = [slot for slot in answers if isinstance(slot, Reserved)]
        for slot in slots[: self._dice.randrange(len(slots) + 1)]:
            self._client.write(slot, memoryview(os.urandom(BLOCK_BYTES)))
        self._abandoned = [slot.reservation for slot in slots]
        if self._dice.random() < 0.5:
            self._client.abort(self._abandoned)
            self._abandoned = []

    def _touch(self) -> None:
        if self._mine:
            names = self._dice.choice(self._mine)
            priority = self._dice.choice((10, 35, 80))
            self._client.touch([(name, priority, None, "demote") for name in names])

    def _load(self) -> None:
        if not self._mine:
            return
        names = self._mine[-1] if self._has_pressure else self._dice.choice(self._mine)
        try:
            served = load_checked(self._client, names)
        except ValueError as error:
            self._note("wrong", [])
            raise SystemExit(str(error)) from None
        self._note("loaded", names[:served])

    def _offers(
        self, names: Sequence[bytes], above: Sequence[bytes], priority: int, duration_s: float | None
    ) -> list[OfferedBlock]:
        deadline = None if duration_s is None else time.clock_gettime(time.CLOCK_BOOTTIME) + duration_s
        parents = [above[-1] if above else None, *names[:-1]]
        on_expiry: OnExpiry = "demote" if duration_s is None else "drop"
        return [
            OfferedBlock(BlockHash(name), parent, "0011aabb", priority, deadline, on_expiry, self._owner)
            for name, parent in zip(names, map(_as_hash, parents), strict=True)
        ]


def _as_hash(name: bytes | None) -> BlockHash | None:
    return None if name is None else BlockHash(name)


if __name__ == "__main__":
    _, where, journal_path, name, most, high, pressure = sys.argv
    _Journalist(where, journal_path, name, int(most), int(high), bool(int(pressure))).work()

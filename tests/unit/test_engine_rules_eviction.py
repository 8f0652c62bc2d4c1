"""Leaving a tier (kv-semantics 4.5, 4.6): it is told, nothing unreachable stays behind, and no victim costs a scan."""

from __future__ import annotations

import hashlib
import random
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest

from cached.events import REMOVED, STORED
from cached.keys import BlockHash, OwnerId
from cached.offers import Granted, Offer
from cached.protocol import NEVER
from cached.records import Holder, StoredRow
from cached.retention import Retention, RetentionConfig, TokenRange
from cached.store import BlockStore
from engine.block_pool import BlockPool
from engine.events import Removed, Stored
from engine.prefix_tree import root_of
from tests.support.engine_world import World, at, settings

SIZES = (500, 32_000)
OWNER = b"o" * 16


class Index:
    """What a listener knows: every block with its parent. Each event has to leave nothing without its parent."""

    def __init__(self) -> None:
        self.parent_of: dict[bytes, bytes | None] = {}

    def store(self, block_hash: bytes, parent: bytes | None) -> None:
        assert block_hash not in self.parent_of
        assert parent is None or parent in self.parent_of
        self.parent_of[block_hash] = parent

    def remove(self, block_hash: bytes) -> None:
        del self.parent_of[block_hash]
        assert block_hash not in self.parent_of.values(), "its children are still there, and cannot be reached"


@pytest.mark.parametrize("seed", range(4))
def test_rule_4_5_every_block_that_leaves_the_device_is_told_after_its_descendants(seed: int) -> None:
    """Eviction, expiry with `drop`, failed steps and takeovers by a partial match, in one life."""
    rng = random.Random(seed)
    world = World(settings(2, 24, max_num_tokens=12, copy_on_partial_reuse=bool(seed % 2)))
    drop = RetentionConfig((TokenRange(0, 4, Retention(80, 3.0, "drop")),))
    index = Index()
    seen = {Stored: 0, Removed: 0}
    for turn in range(60):
        start = rng.randrange(4)
        prompt = [start, *(rng.randrange(2) for _ in range(rng.randrange(1, 16)))]
        retention = rng.choice([drop, at(20), at(90, 5.0), at(35)])
        sequence = world.submit(prompt, max_tokens=3, retention=retention)
        if turn % 7 == 3 and world.start_step() is not None:
            world.finish_step(fail=(sequence,))
        world.run()
        world.now += rng.choice([0.5, 4.0])
        world.step()
        for event in world.events:
            match event:
                case Stored():
                    parent = event.parent_hash
                    for block in event.blocks:
                        index.store(block.block_hash, parent)
                        parent = block.block_hash
                    seen[Stored] += 1
                case Removed():
                    for block_hash in event.block_hashes:
                        index.remove(block_hash)
                    seen[Removed] += 1
        world.events.clear()

        told = {each.block_hash: each.parent_hash for each in world.core.snapshot()}
        assert told == index.parent_of
    assert min(seen.values()) > 20


def test_rule_4_5_every_block_that_leaves_the_host_is_told_after_its_descendants() -> None:
    rng = random.Random(7)
    store = host_store(12)
    index = Index()
    cursor = removed = 0
    names: list[str] = []
    for number in range(200):
        parent = rng.choice(names[-6:]) if names and rng.random() < 0.7 else None
        names.append(f"{number}")
        offer = host_offer(
            f"{number}", parent, rng.choice([20, 35, 60]), number + rng.choice([2.0, NEVER]), number % 5 == 0
        )
        keep(store, [offer], float(number))
        store.expire(float(number))
        store.check_invariants()
        run = store.events.after(cursor, 1000)
        assert not run.lost
        cursor = run.first + len(run.events) - 1
        for event in run.events:
            kind = event.kind
            if kind == STORED:
                index.store(event.key, event.parent if any(event.parent) else None)
            elif kind == REMOVED:
                index.remove(event.key)
                removed += 1

        assert set(store.blocks.index) == set(index.parent_of)
    assert removed > 50


@pytest.mark.parametrize("kind", ["single blocks", "chains", "many owners", "one hot parent"])
def test_rule_4_6_a_victim_on_the_device_costs_no_scan(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: the lines that are executed while 50 blocks are evicted, at two sizes of the pool; and no column
    is gone through from end to end by anything that executes no lines."""
    for module in ("engine.block_pool", "engine.prefix_tree", "cached.eviction"):
        forbid_scans(monkeypatch, module)
    small, large = (work_of(evict_on_device(num_blocks, kind)) for num_blocks in SIZES)

    assert large < 2 * small, f"{small} lines at {SIZES[0]} blocks, {large} at {SIZES[1]}"


@pytest.mark.parametrize("kind", ["one owner", "an owner per chain"])
def test_rule_4_6_a_victim_on_the_host_costs_no_scan(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the blocks nor of the owners: with 256 of them, each with a chain of 16, a newcomer once cost 300 µs."""
    for module in ("cached.blocks", "cached.eviction"):
        forbid_scans(monkeypatch, module)
    small, large = (work_of(evict_on_host(num_slots, kind)) for num_slots in SIZES)

    assert large < 2 * small, f"{small} lines at {SIZES[0]} blocks, {large} at {SIZES[1]}"


def evict_on_device(num_blocks: int, kind: str) -> Callable[[], object]:
    """A pool without a free block, and what makes it evict 50."""
    pool = BlockPool(num_blocks, 2, record_events=True)
    owners = [OwnerId(bytes([number]) * 16) for number in range(16 if kind == "many owners" else 1)]
    numbers = [pool.enter(owner, b"n" * 32) for owner in owners]
    length = {"chains": 25, "one hot parent": 1}.get(kind, 1)
    root = root_of(numbers[0][1])
    node = root
    for first in range(0, num_blocks, length):
        owner, namespace = numbers[first // length % len(numbers)]
        blocks = pool.allocate(length, owner)
        assert blocks is not None
        hashes = [BlockHash(hashlib.sha256(str(block).encode()).digest()) for block in blocks]
        keys = [block.to_bytes(8, "big") for block in blocks]
        pool.index_run(blocks, node, namespace, hashes, keys, is_written=True)
        pool.release(reversed(blocks), 0.0)
        if kind == "one hot parent" and node == root:
            node = blocks[0]
    assert (pool.num_free, pool.num_idle) == (0, num_blocks)
    return lambda: pool.allocate(50, numbers[0][0])


def evict_on_host(num_slots: int, kind: str) -> Callable[[], object]:
    """A full host tier, and what makes it evict 50."""
    store = host_store(num_slots)
    for number in range(num_slots):
        owner = OWNER if kind == "one owner" else OwnerId((number // 25).to_bytes(16, "big"))
        keep(store, [host_offer(f"{number}", f"{number - 1}" if number % 25 else None, owner=owner)], 0.0)
    # What of many stores is looked at when somebody first needs a victim is the price of those stores.
    keep(store, [host_offer("the first", None)], 0.0)
    newcomers = [host_offer(f"new {number}", None) for number in range(50)]

    def act() -> None:
        decisions = store.reserve(1, newcomers, 0.0)
        assert all(isinstance(each, Granted) for each in decisions)

    return act


def work_of(act: Callable[[], object]) -> int:
    """How many lines of Python are executed by `act`."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        result = act()
    finally:
        sys.settrace(former)
    assert result is None or isinstance(result, list)
    return lines


class Column(array):  # type: ignore[type-arg]
    """A column that nobody may go through from end to end: `min`, `sum`, `list` and `for` all begin with its iterator."""

    def __mul__(self, count: int) -> Column:
        return Column(self.typecode, super().__mul__(count))

    def __iter__(self) -> Iterator[Any]:
        assert len(self) < SIZES[0], "a column of the whole tier is scanned"
        return super().__iter__()

    def index(self, *arguments: Any) -> int:
        raise AssertionError("a column of the whole tier is searched")


def forbid_scans(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setattr(f"{module}.array", Column)


class NoRecords:
    """Forgets everything."""

    def write_stored(self, slots: Sequence[int], rows: Iterable[StoredRow]) -> None: ...

    def write_reserved(self, slots: Sequence[int], holder: Holder) -> None: ...

    def clear(self, slot: int) -> None: ...


def host_store(num_slots: int) -> BlockStore:
    store = BlockStore(num_slots, 4096, NoRecords(), lease_ttl_s=10, reservation_ttl_s=30, event_buffer=10_000)
    store.publish(0, num_slots)
    store.open_session(1, Holder(1, 1, bytes(16)))
    return store


def host_offer(
    label: str,
    parent: str | None,
    priority: int = 35,
    deadline: float = NEVER,
    drops: bool = False,
    owner: OwnerId = OWNER,
) -> Offer:
    name, above = (None if each is None else hashlib.sha256(each.encode()).digest() for each in (label, parent))
    assert name is not None
    return Offer(name, above, 0, priority, deadline, drops, owner)


def keep(store: BlockStore, offers: list[Offer], now: float) -> None:
    decisions = store.reserve(1, offers, now)
    store.commit(1, [(each.reservation, 0) for each in decisions if isinstance(each, Granted)], now)

"""What a block is, and what it is worth, when its parts are looked at one by one (kv-semantics 1.4, 2.1, 2.7)."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest

import engine.sequence
from cached import server
from cached.client import Lease
from cached.errors import RetentionError
from cached.keys import BlockHash
from cached.retention import DEFAULT_PRIORITY, Retention, parse_retention
from engine import loop
from engine.prefix_tree import PrefixTree, root_of
from tests.support.cached_daemon import Daemon, chain, daemon_directory, store, wait_until
from tests.support.engine_world import World, at, settings

KEY, OTHER_KEY = b"\1\0\0\0" * 4, b"\2\0\0\0" * 4
HASH, CHILD_HASH = BlockHash(b"h" * 32), BlockHash(b"c" * 32)


def test_rule_1_4_a_device_hit_compares_namespace_parent_and_tokens() -> None:
    """The hash alone is never believed: the same hash with anything else different is no hit."""
    tree = PrefixTree(8, 4)
    tree.insert_run([0, 1], root_of(0), [HASH, CHILD_HASH], [KEY, KEY])

    assert tree.find(HASH, root_of(0), KEY) == 0
    assert tree.find(CHILD_HASH, 0, KEY) == 1
    assert tree.find(HASH, root_of(1), KEY) is None  # another namespace
    assert tree.find(HASH, root_of(0), OTHER_KEY) is None  # other tokens
    assert tree.find(CHILD_HASH, root_of(0), KEY) is None  # another parent
    assert tree.find_run(root_of(0), [HASH, CHILD_HASH], KEY + KEY, 2) == [0, 1]
    assert tree.find_run(root_of(1), [HASH, CHILD_HASH], KEY + KEY, 2) == []
    assert tree.find_run(root_of(0), [HASH, CHILD_HASH], KEY + OTHER_KEY, 2) == [0]
    assert tree.find_run(root_of(0), [CHILD_HASH], KEY, 1) == []


def test_rule_1_4_prompts_whose_hashes_collide_are_served_nothing_of_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hash of one byte, so that collisions are everywhere: the world notices every read of wrong KV."""

    class ShortHash:
        def __init__(self, data: bytes = b"") -> None:
            self._data = data

        def copy(self) -> ShortHash:
            return ShortHash(self._data)

        def update(self, data: bytes) -> None:
            self._data += data

        def digest(self) -> bytes:
            return bytes(31) + hashlib.sha256(self._data).digest()[:1]

    class Hashing:
        sha256 = ShortHash

    monkeypatch.setattr(engine.sequence, "hashlib", Hashing)
    world = World(settings(4, 256))
    prompts = [[*range(each * 1000, each * 1000 + 5)] for each in range(100)]
    for prompt in prompts:
        world.ask(prompt)

    served = [world.pos(prompt) for prompt in prompts]

    # Who came second under a hash kept its block to itself, and is served nothing.
    num_indexed = len(world.core.snapshot())
    assert num_indexed < 100, "no two hashes were the same, so this showed nothing"
    assert (served.count(4), served.count(0)) == (num_indexed, 100 - num_indexed)


def test_rule_2_1_priorities_are_integers_from_0_to_100_and_35_where_nothing_is_said() -> None:
    for priority in (0, 35, 100):
        config = parse_retention({"token_ranges": [{"start": 0, "priority": priority}], "decode_priority": priority})
        assert (config.ranges[0].retention, config.decode.priority) == (Retention(priority, None), priority)
    for priority in (-1, 101, 35.0, True, "35", None):
        with pytest.raises(RetentionError, match="from 0 to 100"):
            parse_retention({"token_ranges": [{"start": 0, "priority": priority}]})

    assert DEFAULT_PRIORITY == 35
    world = World(settings(4, 8))
    world.ask(range(8), max_tokens=6)
    assert world.core.statistics().blocks_by_priority == {35: 4}
    assert world.core.next_deadline() is None, "no duration means for ever"


@pytest.mark.parametrize("higher", [1, 36, 100])
def test_rule_2_1_the_higher_priority_stays_longer(higher: int) -> None:
    world = World(settings(4, 4))
    world.ask(range(100, 108), retention=at(higher))
    world.ask(range(8), retention=at(higher - 1))  # Used last, and still the first to go.

    world.ask(range(200, 208), retention=at(100))

    assert world.core.statistics().blocks_by_priority == ({100: 4} if higher == 100 else {100: 2, higher: 2})
    assert world.pos(range(100, 108)) == 7


def test_rule_2_7_engine_and_daemon_read_one_clock_which_no_clock_step_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def clock_gettime(clock: int) -> float:
        asked.append(clock)
        return 77.5

    monkeypatch.setattr(time, "clock_gettime", clock_gettime)
    monkeypatch.setattr(time, "time", lambda: 1e12)  # Somebody sets the clock of the wall.

    assert (loop.now_s(), server.boottime()) == (77.5, 77.5)
    assert asked == [time.CLOCK_BOOTTIME] * 2


def test_rule_2_7_a_deadline_goes_through_another_process_as_the_seconds_it_was() -> None:
    """Another daemon, and an engine that was not there when it was set: the same moment of the same clock."""
    deadline = loop.now_s() + 3600.25
    with daemon_directory() as directory:
        daemon = Daemon(Path(directory))
        try:
            daemon.start()
            names = chain("timed", 2)
            assert store(daemon.client(), names, priority=80, deadline=deadline) == ["stored"] * 2
            daemon.kill()
            daemon.start()
            lease = lease_when_verified(daemon, names)
        finally:
            daemon.close()

    assert [(block.priority, block.deadline) for block in lease.blocks] == [(80, deadline)] * 2


def test_rule_2_7_a_deadline_that_passed_while_no_daemon_ran_has_passed() -> None:
    deadline = loop.now_s() + 0.5
    with daemon_directory() as directory:
        daemon = Daemon(Path(directory))
        try:
            daemon.start()
            names = chain("past", 1)
            assert store(daemon.client(), names, priority=80, deadline=deadline) == ["stored"]
            daemon.kill()
            wait_until(lambda: loop.now_s() > deadline)
            daemon.start()
            lease = lease_when_verified(daemon, names)
        finally:
            daemon.close()

    assert [(block.priority, block.deadline) for block in lease.blocks] == [(35, None)]


def lease_when_verified(daemon: Daemon, names: list[BlockHash]) -> Lease:
    """A daemon verifies what it took over before it gives it out."""
    client = daemon.client()
    found: list[Lease] = []

    def has_it() -> bool:
        lease = client.lease(names)
        if lease is not None:
            found.append(lease)
        return bool(found)

    wait_until(has_it)
    return found[0]

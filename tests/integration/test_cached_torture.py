"""The daemon is killed at random moments under load: what it acknowledged is served or was evicted by rule, no byte is
wrong, and nothing is served that was never committed.

Engines are processes that journal what they try before they try it and what was acknowledged after; some of them are
killed, too. In a tier with room for everything, everything acknowledged must be there in the end. In a small one the rules
of eviction say what must be: all of a high priority, and the newest of the others.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cached.client import prepare_copies
from cached.keys import owner_id
from tests.support.cached_daemon import Daemon, daemon_directory, wait_until
from tests.support.cached_journal import (
    BLOCK_BYTES,
    DURATION_S,
    HELLO,
    HIGH_PRIORITY,
    LONGEST_CHAIN,
    PLAIN_PRIORITY,
    Journal,
    load_checked,
    start_journalist,
)

MOST_JOURNALISTS = 3


@pytest.fixture
def directory() -> Iterator[Path]:
    with daemon_directory() as path:
        yield path


class Torture:
    """A daemon that is killed again and again, and the engines that use it."""

    def __init__(self, directory: Path, num_slots: int, most_blocks: int, has_pressure: bool, seed: int) -> None:
        # Reservations that a killed daemon's successor cannot undo must not fill the tier for long.
        self.daemon = Daemon(
            directory, host_cache_size=num_slots * BLOCK_BYTES, lease_ttl_s=2, reservation_ttl_s=2, log_level="error"
        )
        self.directory = directory
        self.dice = random.Random(seed)
        self.journalists: list[subprocess.Popen[bytes]] = []
        self.most_blocks, self.has_pressure = most_blocks, has_pressure
        self.num_started = self.num_kills = self.num_killed_starting = self.num_engines_killed = 0
        self.num_evicted = self.num_torn = 0

    def start_journalist(self, most_high: int) -> None:
        self.num_started += 1
        label = f"engine{self.num_started}"
        process = start_journalist(
            self.daemon.socket, self.directory, label, self.most_blocks, most_high, self.has_pressure
        )
        self.journalists.append(process)

    def kill_daemon(self, num_kills: int) -> None:
        """Most of them while engines store and load; some while it starts, which it then never finishes."""
        for _ in range(num_kills):
            if self.dice.random() < 0.2:
                self.daemon.process = self.daemon.spawn()
                time.sleep(self.dice.uniform(0.0, 0.5))
                self.num_killed_starting += 1
            else:
                self.daemon.start()
                time.sleep(self.dice.uniform(0.0, 0.3))
                self.look()
            self.daemon.kill()
            self.num_kills += 1

    def look(self) -> None:
        """What this life of the daemon says of itself, shortly before its end."""
        found = self.daemon.stats()
        assert found["corrupt"] == 0, "a committed block went bad"
        self.num_evicted += sum(found["evicted_by_priority"].values())  # type: ignore[attr-defined]
        self.num_torn += found["lost_at_restart"]  # type: ignore[operator]

    def kill_engine(self) -> None:
        self.num_engines_killed += 1
        victim = self.journalists.pop(0)
        assert victim.poll() is None, "an engine did not survive the daemon's death"
        victim.kill()
        victim.wait()
        self.start_journalist(0)

    def end_engines(self) -> None:
        for process in self.journalists:
            process.kill()
            process.wait()

    def end(self) -> None:
        self.end_engines()
        self.daemon.close()


def torture(directory: Path, num_kills: int, num_slots: int, has_pressure: bool, num_engines: int) -> None:
    seed = random.SystemRandom().randrange(10**6)
    most_blocks = 10**9 if has_pressure else num_slots // (num_engines + num_kills // 12 + 1) - 2 * LONGEST_CHAIN
    scene = Torture(directory, num_slots, most_blocks, has_pressure, seed)
    try:
        scene.daemon.start()
        for _ in range(num_engines):
            scene.start_journalist(LONGEST_CHAIN)
        wait_until(lambda: len(Journal.read(directory).acknowledged) >= 10, 60)
        scene.daemon.kill()
        while scene.num_kills < num_kills:
            scene.kill_daemon(min(12, num_kills - scene.num_kills))
            scene.kill_engine()
        assert all(process.poll() is None for process in scene.journalists), "an engine ended by itself"
        scene.end_engines()
        scene.daemon.start()
        judge(scene, num_slots)
    except AssertionError as error:
        raise AssertionError(f"{error} (seed {seed})") from error
    finally:
        scene.end()


def judge(scene: Torture, num_slots: int) -> None:
    """Compare what the tier serves in the end with what was written down."""
    daemon, journal = scene.daemon, Journal.read(scene.directory)
    if scene.has_pressure:
        time.sleep(2 * DURATION_S)
    wait_until(lambda: daemon.stats()["unverified"] == daemon.stats()["quarantined"] == 0, 60)
    prepare_copies()  # Within a lease it may outlast that.
    client = daemon.client(timeout_s=30.0, hello=HELLO)
    acknowledged = {name for _, names in journal.acknowledged for name in names}
    stored = {block.block_hash: block for block in daemon.observer().blocks()}
    served = {name for name in journal.all_tried | journal.never if load_checked(client, [name])}
    statistics = daemon.stats()

    print(
        f"{scene.num_kills} kills of the daemon, {scene.num_killed_starting} of them while it started, and "
        f"{scene.num_engines_killed} of engines; {len(journal.all_tried)} blocks tried, {len(acknowledged)} acknowledged, "
        f"{journal.num_loaded} loaded, {len(served)} of {num_slots} served in the end, {len(journal.never)} given up, "
        f"{scene.num_evicted} evictions and {scene.num_torn} records lost at restarts seen"
    )
    assert journal.wrong == []
    assert statistics["corrupt"] == 0, "a committed block went bad"
    assert set(stored) <= journal.all_tried, "a block is in the tier that was never committed"
    assert served == set(stored), "what is listed and what is served differ"
    assert journal.high & acknowledged <= served, "a block of high priority gave way to one of low priority"
    if scene.has_pressure:
        assert all(
            block.priority == (HIGH_PRIORITY if name in journal.high else PLAIN_PRIORITY)
            for name, block in stored.items()
        )
        assert not served & journal.timed, "a block outlived its duration"
        must = journal.newest(num_slots - len(journal.high) - held_back()) - journal.timed
        assert must
    else:
        assert all(block.owner == owner_id(journal.label_of[name]) for name, block in stored.items())
        assert scene.num_evicted == 0, "blocks were evicted from a tier with room for all"
        assert len(journal.all_tried) + held_back() < num_slots, "there was no room for everything"
        must = acknowledged
    assert must <= served, f"{len(must - served)} acknowledged blocks are gone without an eviction"


def held_back() -> int:
    """Slots that may have been held by reservations at once: by live engines, and by killed ones until that is noticed."""
    return 2 * LONGEST_CHAIN * (2 * MOST_JOURNALISTS + 1)


def test_a_daemon_killed_at_random_moments_loses_nothing_but_by_eviction(directory: Path) -> None:
    torture(directory, 4, 256, has_pressure=True, num_engines=2)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("has_pressure", "num_slots"), [(False, 65536), (True, 512)], ids=["room for all", "small"])
def test_three_hundred_kills_lose_nothing_but_by_eviction(directory: Path, has_pressure: bool, num_slots: int) -> None:
    torture(directory, 300, num_slots, has_pressure, MOST_JOURNALISTS)

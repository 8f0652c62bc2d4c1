"""What grows: memory by block, memory by time, and what killed processes leave behind. In the suite's long part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cached_daemon import Daemon, daemon_directory, wait_until

REPOSITORY = Path(__file__).parents[2]
MAX_BYTES_PER_BLOCK = 350
NUM_BLOCKS = 1_000_000

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

_FILL = """
    import gc, hashlib, json, sys
    sys.path.insert(0, {repository!r})
    from cached.offers import Granted, Offer, Retouch
    from cached.records import Holder
    from cached.store import BlockStore

    class Nowhere:
        def write_stored(self, slots, rows): ...
        def write_reserved(self, slots, holder): ...
        def clear(self, slot): ...

    def anonymous():
        gc.collect()
        with open("/proc/self/status") as status:
            return next(1024 * int(row.split()[1]) for row in status if row.startswith("RssAnon"))

    def put(number):
        run, parent = [], None
        for depth in range(16):
            key = hashlib.sha256(b"%d/%d" % (number, depth)).digest()
            run.append(Offer(key, parent, 7, 35, 1e9 + number % 1000, False, bytes(16)))
            parent = key
        granted = store.reserve(1, run, 0.0)
        store.commit(1, [(each.reservation, 1) for each in granted if type(each) is Granted], 0.0)

    blocks = {blocks}
    before = anonymous()
    store = BlockStore(blocks, 4096, Nowhere(), 10, 30, event_buffer=16384)
    store.publish(0, blocks)
    store.open_session(1, Holder(1, 1, bytes(16)))
    for number in range(blocks // 16):
        put(number)
    full = anonymous()
    assert store.statistics().used == blocks
    looks = []
    for turn in range(1, 4):
        for number in range(blocks // 32):
            put(turn * 10**7 + number)
        store.touch([Retouch(key, 35, 2e9 + turn, False) for key in list(store.blocks.index)[: blocks // 4]], 0.0)
        looks.append(anonymous())
    print(json.dumps([before, full, looks]))
"""


def test_a_million_entries_cost_what_they_may_and_then_nothing_more() -> None:
    """Every block has a deadline, and a quarter of them is given another while blocks come and go."""
    program = textwrap.dedent(_FILL).format(repository=str(REPOSITORY), blocks=NUM_BLOCKS)

    text = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True).stdout
    before, full, looks = json.loads(text)

    print(
        f"{(full - before) / NUM_BLOCKS:.0f} bytes a block, then {[(look - full) / 2**20 for look in looks]} MiB more"
    )
    assert (full - before) / NUM_BLOCKS <= MAX_BYTES_PER_BLOCK
    assert (looks[-1] - before) / NUM_BLOCKS <= MAX_BYTES_PER_BLOCK
    assert looks[-1] <= looks[0] * 1.01


@pytest.fixture
def directory() -> Iterator[Path]:
    with daemon_directory() as path:
        yield path


def resident(pid: int) -> int:
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(row.split()[1]) for row in rows if row.startswith("VmRSS"))


def shared(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def engine(daemon: Daemon, label: str) -> subprocess.Popen[str]:
    """An engine that stores and loads without pause until it is killed, with or without a daemon; as soon as it has loaded
    something it says so."""
    program = f"""
        import sys
        sys.path.insert(0, {str(REPOSITORY)!r})
        from tests.support.cached_daemon import *
        client = TierClient({str(daemon.socket)!r}, HELLO, 5.0)
        number, was_ready = 0, False
        while True:
            if client.poll() == "absent":
                was_ready = False
                time.sleep(0.01)
                continue
            number += 1
            names = chain(({label!r}, number), 6)
            store(client, names)
            if load(client, names) and not was_ready:
                was_ready = True
                print("loads", flush=True)
            time.sleep(0.001)
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)


class Kills:
    """A daemon and an engine that nobody kills while others are."""

    def __init__(self, directory: Path) -> None:
        self.daemon = Daemon(directory, host_cache_size=256 * 8192)
        self.daemon.start()
        self.survivor = engine(self.daemon, "survivor")
        self.num_killed = 0
        self.wait_loads(self.survivor)

    def wait_loads(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stdout.readline() == "loads\n"

    def kill_engine(self) -> None:
        self.num_killed += 1
        process = engine(self.daemon, f"engine {self.num_killed}")
        self.wait_loads(process)
        time.sleep(0.05)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        wait_until(lambda: self.daemon.stats()["sessions"] == 1 and self.daemon.stats()["quarantined"] == 0)

    def kill_daemon(self) -> None:
        self.daemon.kill()
        self.daemon.start()
        self.wait_loads(self.survivor)
        wait_until(lambda: self.daemon.stats()["quarantined"] == 0)

    def look(self, pid: int) -> tuple[int, int, int]:
        """Memory, open files, and what is shared."""
        return resident(pid), len(os.listdir(f"/proc/{pid}/fd")), shared(self.daemon.directory)

    def check(self, who: str, pid: int, before: tuple[int, int, int]) -> None:
        # A connection may be opened or closed at this moment.
        wait_until(lambda: self.look(pid)[1] == before[1])
        after = self.look(pid)
        print(f"{who}: bytes of memory, open files, bytes shared: {before} before, {after} after")
        assert after[0] <= before[0] * 1.01
        assert after[2] <= before[2] * 1.01

    def close(self) -> None:
        self.survivor.kill()
        self.survivor.wait()
        self.daemon.close()


def test_thirty_kills_of_engines_and_thirty_of_the_daemon_leave_the_survivors_as_they_were(directory: Path) -> None:
    kills = Kills(directory)
    try:
        for _ in range(5):  # What is allocated once for good.
            kills.kill_daemon()
            kills.kill_engine()
        assert kills.daemon.process is not None
        daemon_pid, engine_pid = kills.daemon.process.pid, kills.survivor.pid
        for _ in range(5):
            kills.kill_engine()
        before = kills.look(daemon_pid), kills.look(engine_pid)

        for _ in range(30):
            kills.kill_engine()
        kills.check("daemon", daemon_pid, before[0])
        for _ in range(30):
            kills.kill_daemon()
        kills.check("engine", engine_pid, before[1])
        assert kills.survivor.poll() is None
    finally:
        kills.close()

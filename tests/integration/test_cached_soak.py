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

from tests.support.cached_daemon import Daemon, chain, daemon_directory, load, offers, store, wait_until

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
    """An engine that stores and loads without pause until it is killed."""
    program = f"""
        import sys
        sys.path.insert(0, {str(REPOSITORY)!r})
        from tests.support.cached_daemon import *
        client = TierClient({str(daemon.socket)!r}, HELLO, 5.0)
        number = 0
        print("begins", flush=True)
        while True:
            number += 1
            names = chain(({label!r}, number), 6)
            store(client, names)
            load(client, names)
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)


def test_thirty_kills_of_engines_leave_the_daemon_as_it_was(directory: Path) -> None:
    daemon = Daemon(directory, host_cache_size=256 * 8192)
    daemon.start()
    assert daemon.process is not None
    pid = daemon.process.pid

    def kill_one(number: int) -> None:
        process = engine(daemon, f"engine {number}")
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        time.sleep(0.1)
        process.kill()
        process.wait()
        process.stdout.close()
        wait_until(lambda: daemon.stats()["sessions"] == 0 and daemon.stats()["quarantined"] == 0)

    for number in range(5):  # What is allocated once for good.
        kill_one(number)
    before = resident(pid), len(os.listdir(f"/proc/{pid}/fd")), shared(directory)

    for number in range(30):
        kill_one(100 + number)

    wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) == before[1])
    print("daemon's resident bytes:", before[0], resident(pid))
    assert resident(pid) <= before[0] * 1.01
    assert shared(directory) <= before[2] * 1.01
    assert daemon.stats()["reserved"] == 0
    daemon.close()


def test_thirty_kills_of_the_daemon_leave_the_engine_as_it_was(directory: Path) -> None:
    daemon = Daemon(directory, host_cache_size=256 * 8192)
    daemon.start()
    client = daemon.client()
    pid = os.getpid()

    def kill_once(number: int) -> None:
        names = chain(("daemon", number), 6)
        client.reserve(offers(chain(("left", number), 2)))
        daemon.kill()
        wait_until(lambda: client.poll() == "absent")
        daemon.start()
        client._link._stale.clear()  # The engine's copies are over: it never began one.
        wait_until(lambda: client.poll() == "ready")
        wait_until(lambda: daemon.stats()["quarantined"] == 0)
        assert store(client, names) == ["stored"] * 6
        assert load(client, names) != []

    for number in range(5):
        kill_once(number)
    before = resident(pid), len(os.listdir(f"/proc/{pid}/fd")), shared(directory)

    for number in range(30):
        kill_once(100 + number)

    print("engine's resident bytes:", before[0], resident(pid))
    assert resident(pid) <= before[0] * 1.01
    assert len(os.listdir(f"/proc/{pid}/fd")) == before[1]
    assert shared(directory) <= before[2] * 1.01
    daemon.close()

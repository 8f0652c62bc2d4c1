"""How long after a kill does a full tier serve again, when do engines have hits again, and how long does a fresh one take?

A 2 GiB arena full of blocks, daemon killed and started: until its socket answers a lookup with hits, and all the blocks
verified meanwhile. Then a whole stack whose daemon is killed: from its successor's first answer to the end of the first
request that was served from the host, at an engine that was told nothing. Then a fresh 8 GiB arena: until the first block is stored and loaded, and until all of it is allocated.
Expected: Python and its imports 0.3 s; a restart reads 2 GiB ÷ block size records; an engine tries five times a second;
the kernel zeroes 4 to 8 GiB/s.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

from bench import report
from bench.serving import model_argument
from cached.client import TierClient
from cached.protocol import Reserved, TierHello
from tests.support.cached_daemon import Daemon, chain, daemon_directory, offers
from tests.support.stack import Stack
from tests.support.tier_hits import SMALL_POOL, OffloadedPrompts

BLOCK_BYTES = 128 * 1024
FULL_BYTES = 2 * 2**30
FRESH_BYTES = 8 * 2**30
ROUNDS = 5
RESUME_ROUNDS = 10
HELLO = TierHello(b"restart", BLOCK_BYTES, 16)


def main() -> None:
    """Measure, print each figure, and the summary last."""
    model = model_argument(__doc__)
    with daemon_directory() as directory:
        again, verified = restarts(directory)
    with daemon_directory() as directory:
        fits = shutil.disk_usage(directory).free > FRESH_BYTES * 1.1
        first, whole = fresh(directory) if fits else (float("inf"), float("inf"))
    resumed = hits_resumed(model)
    holds = [
        show("restart of a full 2 GiB arena to the first hit", report.median(again), 1.5),
        show("daemon back to the first request served from the host, the slowest", max(resumed), 2.0),
        show("fresh 8 GiB arena to the first block served", first, 3.0),
        show("fresh 8 GiB arena, all of it allocated", whole, 10.0),
    ]
    report.finish(
        "restart",
        value=report.median(again),
        baseline=verified,
        ratio=report.median(again) / verified,
        bar="restart ≤ 1.5 s; hits resume ≤ 2 s; fresh 8 GiB: first service ≤ 3 s, all ≤ 10 s",
        holds=all(holds),
        spread=[min(again), max(again)],
        config={"block_bytes": BLOCK_BYTES, "full_bytes": FULL_BYTES, "fresh_bytes": FRESH_BYTES, "rounds": ROUNDS},
        details={"all_verified_s": verified, "hits_resumed_s": resumed, "fresh_first_s": first, "fresh_whole_s": whole},
    )


def restarts(directory: Path) -> tuple[list[float], float]:
    """Seconds from start to first hit, and, the last time, until every block was verified."""
    daemon = Daemon(directory, host_cache_size=FULL_BYTES)
    daemon.start()
    client = daemon.client(hello=HELLO)
    until(lambda: daemon.stats()["allocated_bytes"] == FULL_BYTES)
    count = FULL_BYTES // BLOCK_BYTES
    runs = [chain(number, 64) for number in range(count // 64)]
    for names in runs:
        put(client, names)
    seconds = []
    for _ in range(ROUNDS):
        daemon.kill()
        started = time.perf_counter()
        daemon.process = daemon.spawn()
        reader = TierClient(daemon.socket, HELLO, 1.0)
        until(lambda reader=reader: reader.lookup(runs[-1][:16]) == 16)
        seconds.append(time.perf_counter() - started)
        reader.close()
    assert daemon.stats()["used"] == count
    until(lambda: daemon.stats()["unverified"] == 0)
    verified = time.perf_counter() - started
    daemon.close()
    return seconds, verified


def hits_resumed(model: Path) -> list[float]:
    """Seconds from the daemon's being back to the end of the first request whose prompt came from the host tier."""
    with Stack.start(model, **SMALL_POOL) as stack:
        stack.wait_ready(tier="ready")
        prompts = OffloadedPrompts(stack)
        return [prompts.seconds_to_hits(lambda: stack.kill("cached")) for _ in range(RESUME_ROUNDS)]


def fresh(directory: Path) -> tuple[float, float]:
    """Seconds until the first block came back, and until the arena was whole."""
    daemon = Daemon(directory, host_cache_size=FRESH_BYTES)
    started = time.perf_counter()
    daemon.process = daemon.spawn()
    client = daemon.client(hello=HELLO, timeout_s=1.0)
    until(lambda: client.poll() == "ready")
    put(client, chain("first", 1))
    assert client.lookup(chain("first", 1)) == 1
    first = time.perf_counter() - started
    until(lambda: daemon.stats()["allocated_bytes"] == FRESH_BYTES)
    whole = time.perf_counter() - started
    daemon.close()
    return first, whole


def put(client: TierClient, names: list) -> None:
    import xxhash

    data = memoryview(os.urandom(BLOCK_BYTES))
    commits = []
    for slot in client.reserve(offers(names)):
        assert isinstance(slot, Reserved)
        assert client.write(slot, data)
        commits.append((slot.reservation, xxhash.xxh3_64_intdigest(data)))
    assert client.commit(commits) == ["stored"] * len(names)


def until(condition) -> None:  # type: ignore[no-untyped-def]
    while not condition():
        time.sleep(0.002)


def show(name: str, value: float, bar: float) -> bool:
    print(json.dumps({"figure": name, "value_s": round(value, 3), "bar_s": bar, "holds": value <= bar}), flush=True)
    return value <= bar


if __name__ == "__main__":
    main()

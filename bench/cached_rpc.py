"""How long does an engine wait for the cache daemon? Lookups of 256 hashes, reserve and commit of 64 blocks, eight at once.

Expected: a lookup is 256 probes of a dict (some 40 µs) between two wake-ups of a process; reserve and commit are 64 times
some 8 µs of bookkeeping, an eviction each, since the tier is full. No block is copied. The baseline is the same socket with
a request that does nothing (`stats` of an observer does more than a lookup's socket work, so it is a lookup of one hash).
"""

from __future__ import annotations

import gc
import json
import statistics
import threading
import time
from collections.abc import Callable

from bench import report
from cached.client import TierClient
from cached.protocol import Reserved
from tests.support.cached_daemon import Daemon, chain, daemon_directory, offers

NUM_SLOTS = 4096
ROUNDS = 1500
WARM_UP = 100
SESSIONS = 8


def main() -> None:
    """Measure, print each figure, and the summary last."""
    with daemon_directory() as directory:
        daemon = Daemon(directory, host_cache_size=NUM_SLOTS * 8192)
        daemon.start()
        client = daemon.client()
        names = chain("held", 256)
        put(client, offers(names, priority=90))
        bare = timed(lambda: client.lookup(names[:1]), ROUNDS)
        lookup = timed(lambda: client.lookup(names), ROUNDS)
        fresh = [offers(chain(number, 64)) for number in range(600)]
        supply = iter(fresh)
        gc.collect()
        gc.freeze()  # An engine's collector does not walk 38,400 offers in the middle of one.
        store = timed(lambda: put(client, next(supply)), len(fresh) - WARM_UP)
        crowd = together(daemon, names)
        daemon.close()
    holds = [
        show("lookup of 256 hashes, p50", pick(lookup, 0.5), 250e-6),
        show("lookup of 256 hashes, p99", pick(lookup, 0.99), 2e-3),
        show("reserve and commit of 64 blocks, p50", pick(store, 0.5), 1e-3),
        show("lookup of 256 hashes among 8 sessions, p99", pick(crowd, 0.99), 10e-3),
    ]
    report.finish(
        "cached_rpc",
        value=pick(lookup, 0.5),
        baseline=statistics.median(bare),
        ratio=pick(lookup, 0.5) / statistics.median(bare),
        bar="lookup p50 ≤ 250 µs, p99 ≤ 2 ms; reserve+commit of 64 ≤ 1 ms; 8 sessions p99 ≤ 10 ms",
        holds=all(holds),
        spread=[min(lookup), max(lookup)],
        config={"slots": NUM_SLOTS, "rounds": ROUNDS, "sessions": SESSIONS},
        details={
            "lookup_s": quantiles(lookup),
            "reserve_commit_s": quantiles(store),
            "lookup_of_8_s": quantiles(crowd),
        },
    )


def put(client: TierClient, chain_offered: list) -> None:
    """Reserve and commit, without a copy."""
    granted = [each for each in client.reserve(chain_offered) if isinstance(each, Reserved)]
    assert len(client.commit([(each.reservation, 1) for each in granted])) == len(chain_offered)


def timed(what: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each call after a warm-up."""
    seconds = []
    for _ in range(WARM_UP + rounds):
        started = time.perf_counter()
        what()
        seconds.append(time.perf_counter() - started)
    return seconds[WARM_UP:]


def together(daemon: Daemon, names: list) -> list[float]:
    """The same lookup from eight sessions at once."""
    results: list[list[float]] = []

    def work() -> None:
        client = TierClient(daemon.socket, daemon.clients[0].hello, 2.0)
        results.append(timed(lambda: client.lookup(names), ROUNDS // SESSIONS))
        client.close()

    threads = [threading.Thread(target=work) for _ in range(SESSIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [each for result in results for each in result]


def pick(seconds: list[float], share: float) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * share))]


def quantiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{round(share * 100)}": pick(seconds, share) for share in (0.5, 0.9, 0.99)}


def show(name: str, value: float, bar: float) -> bool:
    print(json.dumps({"figure": name, "value_s": round(value, 6), "bar_s": bar, "holds": value <= bar}), flush=True)
    return value <= bar


if __name__ == "__main__":
    main()

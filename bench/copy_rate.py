"""What part of a plain copy's rate do stores and loads reach, and what does verification cost?

Three times the same bytes in the same run, in turns: copied from memory to memory by numpy; stored and loaded through a
daemon as an engine does it (reserve, copy, commit; lease, copy, release), checksums off; the same with checksums. The share
is the median of the rounds' shares. Expected: the same copies through a mapping, plus some 3 ms of bookkeeping for 256
block copies of 1 MiB, so nine tenths of the plain rate. The device is the processor's memory, as in the embedded default.
"""

from __future__ import annotations

import json
import time

import numpy as np
import xxhash

from bench import report
from cached.client import TierClient
from cached.protocol import Reserved, TierHello
from tests.support.cached_daemon import Daemon, chain, daemon_directory, offers

BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 128
ROUNDS = 15
HELLO = TierHello(b"copy rate", BLOCK_BYTES, 16)


def main() -> None:
    """Measure in turns, print each figure, and the summary last."""
    pool = np.random.default_rng(1).integers(0, 255, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    arena = np.zeros_like(pool)
    rates: dict[str, list[float]] = {"plain": [], "off": [], "on": []}
    with daemon_directory() as directory:
        daemon = Daemon(directory, host_cache_size=2 * NUM_BLOCKS * BLOCK_BYTES)
        daemon.start()
        client = daemon.client(hello=HELLO, timeout_s=5.0)
        while client.poll() != "ready" or daemon.stats()["allocated_bytes"] != 2 * pool.nbytes:
            time.sleep(0.01)
        for number in range(ROUNDS + 1):
            off, on = chain(f"off {number}", NUM_BLOCKS), chain(f"on {number}", NUM_BLOCKS)
            for kind, what in (
                ("plain", lambda: plain(pool, arena)),
                ("off", lambda off=off: through(client, pool, off, False)),
                ("on", lambda on=on: through(client, pool, on, True)),
            ):
                started = time.perf_counter()
                what()
                rates[kind].append(2 * pool.nbytes / (time.perf_counter() - started))
        daemon.close()
    median = {kind: report.median(values[1:]) for kind, values in rates.items()}  # The first touches the memory.
    share = {
        kind: report.median([rate / plain for rate, plain in zip(rates[kind], rates["plain"], strict=True)][1:])
        for kind in ("off", "on")
    }
    for kind in ("off", "on"):
        line = {"figure": f"store and load, verification {kind}", "bytes_per_s": round(median[kind])}
        print(json.dumps({**line, "of_plain": round(share[kind], 4)}), flush=True)
    report.finish(
        "copy_rate",
        value=median["off"],
        baseline=median["plain"],
        ratio=share["off"],
        bar="store and load ≥ 85 % of a plain copy, verification off",
        holds=share["off"] >= 0.85,
        spread=[min(rates["off"][1:]), max(rates["off"][1:])],
        config={"block_bytes": BLOCK_BYTES, "blocks": NUM_BLOCKS, "rounds": ROUNDS},
        details={"verified_of_plain": share["on"], "verified": median["on"]},
    )


def plain(pool: np.ndarray, arena: np.ndarray) -> None:
    """There and back."""
    for block in range(NUM_BLOCKS):
        np.copyto(arena[block], pool[block])
    for block in range(NUM_BLOCKS):
        np.copyto(pool[block], arena[block])


def through(client: TierClient, pool: np.ndarray, names: list, verify: bool) -> None:
    """Store all blocks and load them again, straight from and to the pool's memory."""
    commits = []
    for block, slot in enumerate(client.reserve(offers(names))):
        assert isinstance(slot, Reserved)
        data = memoryview(pool[block])
        checksum = xxhash.xxh3_64_intdigest(data) if verify else 0
        assert client.write(slot, data)
        commits.append((slot.reservation, checksum))
    assert client.commit(commits) == ["stored"] * NUM_BLOCKS
    lease = client.lease(names)
    assert lease is not None
    for block, leased in enumerate(lease.blocks):
        data = memoryview(pool[block])
        assert client.read(lease, leased, data)
        assert not verify or xxhash.xxh3_64_intdigest(data) == leased.checksum
    assert client.release(lease)


if __name__ == "__main__":
    main()

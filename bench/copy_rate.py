"""What part of a plain copy's rate do an engine's stores and loads reach, and what does verification cost?

Three times the same bytes in the same run, in turns: copied from the pool's memory to other memory and back by numpy; stored
and loaded through a daemon by the engine's own tier worker, from `Offer` and `Load` to their answers, with `verify_loads` off;
the same with it on. A store computes its checksum in both, as an engine's does: a restarted daemon needs it. The share is the
median of the rounds' shares, by the clock and by the processor time of this process.

Expected: the copies past the caches, hashing on the way, take two thirds to nine tenths of a plain one's time, the verbs some
4 ms for 128 blocks of 1 MiB, so about the plain rate; a load's comparison hashes on the way as well, and costs a few per cent.
"""

from __future__ import annotations

import engine.environment  # noqa: F401  isort: skip

import json
import queue
import time
from collections.abc import Callable

import numpy as np
import torch

from bench import report
from cached.client import prepare_copies
from cached.keys import NO_OWNER
from cached.protocol import TierHello
from engine.kv_memory import KvMemory
from engine.layout import BlockLayout
from engine.tier import Loaded, Offered, TierAnswer, TierIs, TierWorker
from engine.tier_work import Load, Offer, OfferedDeviceBlock, TierWork
from engine.transfer import HostTransfer
from tests.support.cached_daemon import Daemon, chain, daemon_directory, wait_until

LAYOUT = BlockLayout(num_layers=32, tokens_per_block=16, num_kv_heads=4, head_dim=64, dtype="float32")
BLOCK_BYTES = LAYOUT.block_bytes
NUM_BLOCKS = 128
ROUNDS = 15
KINDS = ("plain", "off", "on")


def main() -> None:
    """Measure in turns, print each figure, and the summary last."""
    kv = KvMemory(LAYOUT, NUM_BLOCKS, torch.device("cpu"))
    pool = kv.pool.view(torch.uint8).view(NUM_BLOCKS, BLOCK_BYTES).numpy()
    pool[:] = np.random.default_rng(1).integers(0, 255, pool.shape, dtype=np.uint8)
    other = np.zeros_like(pool)
    prepare_copies()
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    processor: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with daemon_directory() as directory:
        daemon = Daemon(directory, host_cache_size=2 * pool.nbytes)
        daemon.start()
        engines = {kind: Engine(daemon, kv, verify=kind == "on") for kind in KINDS[1:]}
        wait_until(lambda: daemon.stats()["allocated_bytes"] == 2 * pool.nbytes, 60.0)
        time.sleep(1.0)  # The mappings are populated meanwhile, in threads of their own.
        ways: dict[str, Callable[[int], None]] = {kind: engine.there_and_back for kind, engine in engines.items()}
        ways["plain"] = lambda number: plain(pool, other)
        for number in range(ROUNDS + 1):
            for kind in KINDS:
                started, spent = time.perf_counter(), time.process_time()
                ways[kind](number)
                seconds[kind].append(time.perf_counter() - started)
                processor[kind].append(time.process_time() - spent)
        for engine in engines.values():
            engine.worker.stop(0.0)
        daemon.close()
    for kind in ("off", "on"):
        print(
            json.dumps({"figure": f"store and load, verify_loads {kind}", **figures(kind, seconds, processor)}),
            flush=True,
        )
    rates = {kind: [2 * pool.nbytes / each for each in seconds[kind][1:]] for kind in KINDS}
    off, on = (figures(kind, seconds, processor) for kind in ("off", "on"))
    report.finish(
        "copy_rate",
        value=report.median(rates["off"]),
        baseline=report.median(rates["plain"]),
        ratio=off["of_plain"],
        bar="store and load ≥ 85 % of a plain copy, verification off",
        holds=off["of_plain"] >= 0.85,
        spread=[min(rates["off"]), max(rates["off"])],
        config={"block_bytes": BLOCK_BYTES, "blocks": NUM_BLOCKS, "rounds": ROUNDS},
        details={"verified_of_plain": on["of_plain"], "verified": report.median(rates["on"]),
                 "of_plain_by_processor_time": off["of_plain_by_processor_time"],
                 "verified_of_plain_by_processor_time": on["of_plain_by_processor_time"]},
    )  # fmt: skip


def figures(kind: str, seconds: dict[str, list[float]], processor: dict[str, list[float]]) -> dict[str, float]:
    """A way's share of the plain rate; the first round touches the memory and does not count."""

    def share(taken: dict[str, list[float]]) -> float:
        pairs = zip(taken["plain"][1:], taken[kind][1:], strict=True)
        return round(report.median([plain / own for plain, own in pairs]), 4)

    return {"of_plain": share(seconds), "of_plain_by_processor_time": share(processor)}


def plain(pool: np.ndarray, other: np.ndarray) -> None:
    """There and back."""
    for block in range(NUM_BLOCKS):
        np.copyto(other[block], pool[block])
    for block in range(NUM_BLOCKS):
        np.copyto(pool[block], other[block])


class Engine:
    """An engine's tier worker over the pool, without the engine."""

    def __init__(self, daemon: Daemon, kv: KvMemory, verify: bool) -> None:
        self._answers: queue.Queue[TierAnswer] = queue.Queue()
        self._verify = verify
        hello = TierHello(b"copy rate", BLOCK_BYTES, LAYOUT.tokens_per_block)
        self.worker = TierWorker(
            lambda: daemon.client(hello=hello, timeout_s=5.0),
            HostTransfer(kv, BLOCK_BYTES),
            block_bytes=BLOCK_BYTES,
            tokens_per_block=LAYOUT.tokens_per_block,
            verify_loads=verify,
            answer=self._answers.put,
        )
        self.worker.start()
        assert self._answers.get(timeout=30) == TierIs("ready")

    def there_and_back(self, number: int) -> None:
        """Store all blocks, and load them again."""
        names = chain(f"{self._verify} {number}", NUM_BLOCKS)
        parents = (None, *names[:-1])
        offer = tuple(
            OfferedDeviceBlock(name, parent, block, 35, None, "demote", NO_OWNER, "0011aabb")
            for block, (name, parent) in enumerate(zip(names, parents, strict=True))
        )
        stored = self._ask(Offer(1, offer))
        assert isinstance(stored, Offered)
        assert stored.in_tier == (True,) * NUM_BLOCKS
        loaded = self._ask(Load(2, tuple((name, block) for block, name in enumerate(names))))
        assert isinstance(loaded, Loaded)
        assert loaded.num_blocks == NUM_BLOCKS

    def _ask(self, work: TierWork) -> TierAnswer:
        self.worker.hand_over([work], None)
        return self._answers.get(timeout=30)


if __name__ == "__main__":
    main()

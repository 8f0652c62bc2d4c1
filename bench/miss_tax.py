"""What does a host tier cost when nothing is ever found in it?

Two engines of one model, one with a tier and one without, get the same prompts that nobody has sent, in turns: the
seconds of processor time of each engine's process per round, stores of what it computed included. Baseline: the engine
without a tier in the same round. The daemon's own seconds and the median times to the first token stand beside it.

Prediction: a round computes for seconds; its lookups take a tenth of a millisecond each, and storing 28 blocks of 0.7 MB
some 10 ms of copying and hashing, so well below 1 %.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from bench import report
from bench.serving import Prompts, model_argument
from engine.client import EngineClient
from engine.protocol import Sampling
from tests.support.cached_daemon import Daemon, daemon_directory

ROUNDS = 22
PROMPTS_PER_ROUND = 4
PROMPT_TOKENS = 120
BAR = 0.03
T_QUANTILE = 2.080
"""Two-sided 95 % quantile of Student's t at 21 degrees of freedom."""
SETTLE_S = 0.3
"""Stores run in the background; their seconds belong to the round."""

_PROGRAM = """
import json, sys
import engine.environment
from engine.config import EngineConfig
from engine.main import run
sys.exit(run(EngineConfig(**json.loads(sys.argv[1]))))
"""


def main() -> NoReturn:
    model = model_argument(__doc__)
    with daemon_directory() as directory:
        daemon = Daemon(directory, host_cache_size=512 * 2**20)
        daemon.start()
        engines = {name: _engine(directory, model, name, daemon) for name in ("with", "without")}
        try:
            found = asyncio.run(_measure(directory, engines, Prompts(model), daemon))
        finally:
            for process in engines.values():
                process.terminate()
            for process in engines.values():
                process.wait()
            daemon.close()
    extras = [(on - off) / off for on, off in zip(found["with"], found["without"], strict=True)]
    mean = statistics.fmean(extras)
    bound = mean + T_QUANTILE * statistics.stdev(extras) / ROUNDS**0.5
    ttft = {name: statistics.median(found[f"ttft {name}"]) for name in engines}
    print(json.dumps({"figure": "TTFT p50 with and without a tier", "value_ms": ttft}), flush=True)
    report.finish(
        "miss_tax",
        value=statistics.fmean(found["with"]),
        baseline=statistics.fmean(found["without"]),
        ratio=1 + mean,
        bar=f"upper 95 % bound of the extra CPU <= {BAR:.0%}, nothing found in the tier",
        holds=bound <= BAR and found["hits"] == 0,
        spread=[min(extras), max(extras)],
        config={
            "rounds": ROUNDS,
            "prompts": PROMPTS_PER_ROUND,
            "prompt_tokens": PROMPT_TOKENS,
            "unit": "CPU s a round",
        },
        details={
            "mean_extra": mean,
            "upper_bound": bound,
            "ttft_ms": ttft,
            **{k: found[k] for k in ("stored", "daemon")},
        },
    )


def _engine(directory: Path, model: Path, name: str, daemon: Daemon) -> subprocess.Popen[bytes]:
    settings = {
        "socket": str(directory / f"{name}.sock"),
        "cached_socket": str(daemon.socket) if name == "with" else None,
        "host_cache_size": 512 * 2**20 if name == "with" else 0,
        "model_dir": str(model),
        "state_dir": str(directory),
        "device": "cpu",
        "device_cache_size": 256 * 2**20,
        "log_level": "warning",
    }
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen([sys.executable, "-c", _PROGRAM, json.dumps(settings)], env=environment)


async def _measure(
    directory: Path, engines: dict[str, subprocess.Popen[bytes]], prompts: Prompts, daemon: Daemon
) -> dict[str, Any]:
    clients = {name: EngineClient(str(directory / f"{name}.sock"), "miss tax") for name in engines}
    for client in clients.values():
        await client.start()
    while not all(client.connected for client in clients.values()):
        await asyncio.sleep(0.1)
    while daemon.stats()["sessions"] == 0:
        await asyncio.sleep(0.1)
    found: dict[str, Any] = {"with": [], "without": [], "ttft with": [], "ttft without": []}
    assert daemon.process is not None
    for number in range(ROUNDS + 1):
        batch = [prompts.fresh(PROMPT_TOKENS) for _ in range(PROMPTS_PER_ROUND)]
        for name in ("with", "without") if number % 2 else ("without", "with"):
            before = _cpu_seconds(engines[name].pid)
            times = [await _first_token_ms(clients[name], prompt) for prompt in batch]
            await asyncio.sleep(SETTLE_S)
            if number:  # The first round warms up.
                found[name].append(_cpu_seconds(engines[name].pid) - before)
                found[f"ttft {name}"] += times
    statistics_now: dict[str, Any] = daemon.stats()
    found |= {"hits": statistics_now["found"], "stored": statistics_now["stored"]}
    found["daemon"] = _cpu_seconds(daemon.process.pid)
    for client in clients.values():
        await client.close()
    return found


async def _first_token_ms(client: EngineClient, prompt: list[int]) -> float:
    began = time.perf_counter()
    first = None
    async with client.submit(prompt, 2, Sampling(temperature=0.0)) as stream:
        async for _ in stream:
            first = first or time.perf_counter()
    assert first is not None
    return 1e3 * (first - began)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()

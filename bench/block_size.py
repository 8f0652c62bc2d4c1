"""What does a smaller block win, where only whole blocks are reused?

Prompts of 80–400 tokens with shared heads, one after another, at every block size from 2 to 128, in two settings:
`enable_partial_reuse = false` on the device, and host-warm (heads come from the host tier, which has only whole blocks).
The core and the runner are real; gateway and daemon are left out, so that the figure is the block size's. Sizes take
turns, prompt by prompt, so that a busy moment of the machine hits all of them. Baseline: size 64 in the same run.

Prediction: at size B a prompt computes about B / 2 tokens more than its own tail; at 60 tokens of tail and 450 tokens a
second, 64 → 8 takes about 28 of 92 tokens away.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ByteSize

import engine.environment  # noqa: F401  (before torch)
from bench.report import finish, median
from bench.serving import Prompts, model_argument
from engine.config import EngineConfig
from engine.runner import load_runner
from tests.support.engine_harness import EngineHarness

SIZES = (2, 4, 8, 16, 32, 64, 128)
SMALL, LARGE = 8, 64
NUM_HEADS = 6
PROMPTS_PER_HEAD = 5
POOL_BYTES = 400 * 2**20
BAR = 0.07
CHART = Path(__file__).resolve().parents[1] / "docs" / "block-size.png"


def main() -> NoReturn:
    model = model_argument(__doc__)
    heads, tails = _workload(Prompts(model))
    times: dict[str, dict[int, list[float]]] = {
        setting: {size: [] for size in SIZES} for setting in ("no_partial", "host_warm")
    }
    with tempfile.TemporaryDirectory() as state:
        runners = {size: load_runner(_config(model, Path(state), size)) for size in SIZES}
        for setting, measured in times.items():
            _run(setting, measured, runners, heads, tails)
    means = {setting: {size: sum(all_) / len(all_) for size, all_ in by.items()} for setting, by in times.items()}
    gains = {setting: 1 - by[SMALL] / by[LARGE] for setting, by in means.items()}
    for setting, by in means.items():
        print(setting, {size: round(mean * 1e3, 1) for size, mean in by.items()}, file=sys.stderr)
    _draw(means)
    weaker = min(gains, key=gains.__getitem__)
    medians = {setting: {size: median(all_) for size, all_ in by.items()} for setting, by in times.items()}
    finish(
        "block_size",
        value=means[weaker][SMALL],
        baseline=means[weaker][LARGE],
        ratio=means[weaker][LARGE] / means[weaker][SMALL],
        bar=f"mean TTFT at {SMALL} better than at {LARGE} by >= {BAR:.0%}, with no partial reuse and host-warm",
        holds=min(gains.values()) >= BAR,
        spread=[min(gains.values()), max(gains.values())],
        config={"heads": NUM_HEADS, "prompts_per_head": PROMPTS_PER_HEAD, "unit": "s", "spread_of": "gain"},
        details={"gains": gains, "mean_ttft_s": means, "median_ttft_s": medians},
    )


def _draw(means: dict[str, dict[int, float]]) -> None:
    """The chart of docs/tuning.md; left as it is where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no chart: matplotlib is not installed (pip install 'halocline[plot]')", file=sys.stderr)
        return
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for setting, label in (("no_partial", "device, enable_partial_reuse = false"), ("host_warm", "from the host tier")):
        axes.plot(
            [str(size) for size in SIZES], [means[setting][size] * 1e3 for size in SIZES], marker="o", label=label
        )
    axes.set(xlabel="tokens_per_block", ylabel="mean time to first token, ms", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(CHART, dpi=110)


def _workload(prompts: Prompts) -> tuple[list[list[int]], list[list[list[int]]]]:
    dice = random.Random(5)
    heads = [prompts.fresh(dice.randrange(50, 301)) for _ in range(NUM_HEADS)]
    tails = [[prompts.fresh(dice.randrange(30, 101)) for _ in range(PROMPTS_PER_HEAD)] for _ in heads]
    return heads, tails


def _config(model: Path, state: Path, size: int) -> EngineConfig:
    return EngineConfig(
        socket=Path("/unused"),
        cached_socket=Path("/unused"),
        model_dir=model,
        state_dir=state,
        tokens_per_block=size,
        device_cache_size=ByteSize(POOL_BYTES),
        device="cpu",
    )


def _run(
    setting: str,
    measured: dict[int, list[float]],
    runners: dict[int, Any],
    heads: list[list[int]],
    tails: list[list[list[int]]],
) -> None:
    """Each head once untimed, then its prompts, all sizes in turn."""
    is_host = setting == "host_warm"
    hosts: dict[int, dict[bytes, bytes]] = {size: {} for size in SIZES}
    harnesses = {size: _harness(runners[size], hosts[size] if is_host else None) for size in SIZES}
    for head, own in zip(heads, tails, strict=True):
        for size in SIZES:
            if is_host:
                harnesses[size] = _harness(runners[size], hosts[size])
            harnesses[size].generate([head], 1)
            harnesses[size].settle()
        for tail in own:
            order = list(SIZES)
            random.Random(len(measured[SIZES[0]])).shuffle(order)
            for size in order:
                if is_host:  # An engine that has just started: nothing on its device.
                    harnesses[size] = _harness(runners[size], dict(hosts[size]))
                began = time.perf_counter()
                harnesses[size].generate([[*head, *tail]], 1)
                measured[size].append(time.perf_counter() - began)


def _harness(runner: Any, host: dict[bytes, bytes] | None) -> EngineHarness:
    return EngineHarness(runner, host, enable_partial_reuse=False, max_num_tokens=128)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    main()

"""What does early reuse cost when there is nothing to share?

Rounds of eight all-distinct prompts at once through the real core and runner, with `enable_block_reuse` on and off in
turn: process CPU seconds, the hashing, indexing and waiting rules included. Baseline: the round without reuse beside it.

Prediction: hashing and indexing a 200-token prompt takes well under a millisecond of about 450.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from pydantic import ByteSize

import engine.environment  # noqa: F401  (before torch)
from bench.report import finish
from bench.serving import Prompts, model_argument
from engine.config import EngineConfig
from engine.runner import ModelRunner, load_runner
from tests.support.engine_harness import EngineHarness

ROUNDS = 24
NUM_PROMPTS = 8
PROMPT_TOKENS = 100
BAR = 0.03
# Two-sided 95 % quantile of Student's t at 23 degrees of freedom; the upper bound of the mean of the paired extras.
T_QUANTILE = 2.069


def main() -> NoReturn:
    model = model_argument(__doc__)
    prompts = Prompts(model)
    with tempfile.TemporaryDirectory() as state:
        config = EngineConfig(
            socket=Path("/unused"),
            cached_socket=Path("/unused"),
            model_dir=model,
            state_dir=Path(state),
            device_cache_size=ByteSize(512 * 2**20),
            device="cpu",
        )
        runner = load_runner(config)
    with_reuse, without = [], []
    for number in range(ROUNDS + 1):
        batch = [prompts.fresh(PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]
        pair = {}
        for reuse in (True, False) if number % 2 else (False, True):
            pair[reuse] = _cpu_seconds(runner, batch, reuse)
        if number:  # The first pair warms up.
            with_reuse.append(pair[True])
            without.append(pair[False])
    extras = [(on - off) / off for on, off in zip(with_reuse, without, strict=True)]
    mean = statistics.fmean(extras)
    bound = mean + T_QUANTILE * statistics.stdev(extras) / ROUNDS**0.5
    finish(
        "early_reuse_tax",
        value=statistics.fmean(with_reuse),
        baseline=statistics.fmean(without),
        ratio=1 + mean,
        bar=f"upper 95 % bound of the extra CPU <= {BAR:.0%}",
        holds=bound <= BAR,
        spread=[min(extras), max(extras)],
        config={"rounds": ROUNDS, "prompts": NUM_PROMPTS, "prompt_tokens": PROMPT_TOKENS, "unit": "CPU s"},
        details={"mean_extra": mean, "upper_bound": bound},
    )


def _cpu_seconds(runner: ModelRunner, batch: list[list[int]], reuse: bool) -> float:
    harness = EngineHarness(runner, enable_block_reuse=reuse, max_num_tokens=128)
    began = time.process_time()
    harness.generate(batch, 4)
    return time.process_time() - began


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    main()

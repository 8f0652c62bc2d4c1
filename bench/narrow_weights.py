"""How much sooner is a product whose weights take two or three bytes, exactly, than the same one with four?

The same numbers, those of a checkpoint in bfloat16, held in four, three and two bytes each, by forty layers of 576 → 3,072, more
than any cache holds, multiplied in turn by 1 to 1,000 rows; medians of the rounds' ratios. Results are compared bit by bit.

Expected: where reading is all there is to do, one row, as the bytes, 0.75 and 0.5; from some twelve rows on products are what
takes the time, and weights are widened once for hundreds of rows: the same, and up to a tenth longer in between, where three
bytes cost two instructions for a register of weights.
"""

from __future__ import annotations

import engine.environment  # noqa: F401  isort: skip

import json
import time

import numba
import numpy as np

from bench import report
from engine.narrow_weights import WIDE, narrowed
from engine.panel_linear import WeightMemory
from engine.panel_products import multiply
from engine.register_tiles import MOST_ROWS, PANEL, PUT

INPUTS, OUTPUTS, LAYERS = 576, 3072, 40
ROWS = (1, 2, 4, 8, 12, 16, 57, 200, 1000)
WIDTHS = (WIDE, 3, 2)
ROUNDS = 9
BLOCK_ROWS = 18 * MOST_ROWS
NO_BIAS = np.empty(0, np.float32)


def main() -> None:
    """Measure in turns, print a line for each number of rows, and the summary last."""
    random = np.random.default_rng(1)
    weights = random.standard_normal((OUTPUTS // PANEL, INPUTS, PANEL)).astype(np.float32)
    weights.view(np.uint32)[:] &= np.uint32(0xFFFF0000)
    memory = WeightMemory()
    layers = {width: [_held(memory, weights, width) for _ in range(LAYERS)] for width in WIDTHS}
    found = {rows: _measure(layers, random.standard_normal((1, rows, INPUTS)).astype(np.float32)) for rows in ROWS}
    for rows, seconds in found.items():
        line = {f"{width}_bytes_us": round(1e6 * report.median(seconds[width]), 1) for width in WIDTHS}
        ratios = {f"{width}_of_4": _ratio(seconds, width) for width in WIDTHS[1:]}
        print(json.dumps({"figure": f"{rows} rows", **line, **ratios}), flush=True)
    one = found[1]
    ratio = _ratio(one, 2)
    report.finish(
        "narrow_weights",
        value=report.median(one[2]),
        baseline=report.median(one[WIDE]),
        ratio=ratio,
        bar="one row: two bytes ≤ 0.65 of four",
        holds=ratio <= 0.65,
        spread=[min(one[2]), max(one[2])],
        config={"inputs": INPUTS, "outputs": OUTPUTS, "layers": LAYERS, "rounds": ROUNDS},
        details={
            f"{rows}_rows": {f"{width}_of_4": _ratio(seconds, width) for width in WIDTHS[1:]}
            for rows, seconds in found.items()
        },
    )


def _held(memory: WeightMemory, weights: np.ndarray, width: int) -> np.ndarray:
    panels = memory.array(len(weights), INPUTS * PANEL * width)
    for panel, wide in zip(panels, weights, strict=True):
        panel[:] = narrowed(wide, width)
    return panels


def _measure(layers: dict[int, list[np.ndarray]], rows: np.ndarray) -> dict[int, list[float]]:
    """Seconds for one layer, of each round."""
    seconds: dict[int, list[float]] = {width: [] for width in WIDTHS}
    outs = {width: np.empty((1, rows.shape[1], OUTPUTS), np.float32) for width in WIDTHS}
    for number in range(ROUNDS + 1):
        for width in WIDTHS if number % 2 else reversed(WIDTHS):
            started = time.perf_counter()
            for panels in layers[width]:
                multiply(rows, panels, NO_BIAS, BLOCK_ROWS, outs[width], PUT, numba.get_num_threads())
            seconds[width].append((time.perf_counter() - started) / LAYERS)
    assert all(outs[width].tobytes() == outs[WIDE].tobytes() for width in WIDTHS), "not the same numbers"
    return {width: taken[1:] for width, taken in seconds.items()}


def _ratio(seconds: dict[int, list[float]], width: int) -> float:
    pairs = zip(seconds[width], seconds[WIDE], strict=True)
    return round(report.median([narrow / wide for narrow, wide in pairs]), 3)


if __name__ == "__main__":
    main()

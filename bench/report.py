"""How a benchmark ends: one JSON object on the last line, the same with machine, commit and config in `results/`.

`finish` exits 1 when the bar is missed, so that a script is also a check. A figure says how it was taken, never more
than that: the baseline comes from the same run.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

RESULTS = Path(__file__).resolve().parent / "results"


def finish(
    figure: str,
    *,
    value: float,
    baseline: float,
    ratio: float,
    bar: str,
    holds: bool,
    spread: Sequence[float],
    config: dict[str, Any],
    details: dict[str, Any] | None = None,
) -> NoReturn:
    """Print the result, keep it in `results/<figure>.json`, and exit 0 if the bar holds, else 1.

    `spread` is [min, max] of the repeated measurements behind `value`.
    """
    line = {
        "figure": figure,
        "value": round(value, 6),
        "baseline": round(baseline, 6),
        "ratio": round(ratio, 4),
        "bar": bar,
        "holds": bool(holds),
        "spread": [round(each, 6) for each in spread],
    }
    whole = {**line, "details": details or {}, "config": config, "commit": _commit(), "machine": machine()}
    whole["taken_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{figure}.json").write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n")
    print(json.dumps(line), flush=True)
    sys.exit(0 if holds else 1)


def median(values: Sequence[float]) -> float:
    """The median; raises ValueError for no values."""
    return float(statistics.median(values))


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores, memory, Python."""
    memory_kib = next((row.split()[1] for row in _lines("/proc/meminfo") if row.startswith("MemTotal")), "0")
    model = next((row.split(":", 1)[1].strip() for row in _lines("/proc/cpuinfo") if row.startswith("model name")), "?")
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory_kib) / 2**20, 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=RESULTS.parent, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"

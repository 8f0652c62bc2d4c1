"""Draws hit rate over capacity, one line a policy, with matplotlib where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from command.errors import CommandError

if TYPE_CHECKING:
    from engine.simulate import SimulationResult

MISSING = "--plot needs matplotlib, which is not installed here: pip install 'halocline[plot]'"


def is_available() -> bool:
    """Whether matplotlib can be imported; looks, without the second that importing takes."""
    try:
        return importlib.util.find_spec("matplotlib") is not None
    except ValueError:  # What stands in sys.modules is no module.
        return False


def save_chart(result: SimulationResult, path: Path) -> None:
    """Write the chart to `path`, in the format of its suffix. Raises CommandError."""
    if not is_available():
        raise CommandError(MISSING)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for policy in dict.fromkeys(run.policy for run in result.runs):
        runs = sorted((run for run in result.runs if run.policy == policy), key=lambda run: run.blocks)
        style = "--" if policy == "belady" else "-"
        axes.plot([r.blocks for r in runs], [r.hit_rate * 100 for r in runs], style, marker="o", label=policy)
    axes.set_xscale("log")
    capacities = sorted({run.blocks for run in result.runs})
    axes.set_xticks(capacities, [f"{each:,}" for each in capacities], rotation=30)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"capacity (blocks of {result.tokens_per_block} tokens)")
    axes.set_ylabel("prompt tokens served from cache (%)")
    axes.set_title(f"{result.requests:,} requests, {result.tokens_prompt:,} prompt tokens ({result.trace_format})")
    axes.grid(True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise CommandError(f"--plot {path}: {error}") from None

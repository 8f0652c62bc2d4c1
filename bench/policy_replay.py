"""What does marking by priority win over plain LRU, on an hour of a real chat service, in the engine's own pool?

The mooncake conversation trace (blocks of 512 tokens, no tenants) is replayed at 2, 5 and 10 % of its distinct blocks.
`priority` marks with what an operator knows when a request comes: its leading blocks that some earlier request had are
worth 80 for 240 s; nothing else is said, and nothing of the future is known. `adaptive` is what more can be had by
simple means (engine/policies.py); its thresholds were chosen on this very trace, so its figures are no forecast.
`belady` knows the future and is the ceiling. Expected: the pool is turned over every 72 s at 2 % and every 360 s at
10 %, half of all reuse comes within 150 s; so marking wins most at 2 %, and nothing where 240 s pass before eviction.

Traces are looked for in $HALOCLINE_TRACES, else in ../shared/data/traces beside the repository; without them the
script ends with 2.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bench.report import finish
from engine.simulate import Simulation, SimulationSettings
from engine.trace_files import Trace

FILE = "mooncake_conversation.jsonl.gz"
PERCENT = (2, 5, 10)
POLICIES = ("lru", "priority", "adaptive", "belady")
BARS = {2: 0.50, 5: 0.05, 10: 0.0}


def main() -> None:
    """Replay, compare, finish."""
    folder = Path(
        os.environ.get("HALOCLINE_TRACES") or Path(__file__).resolve().parents[2] / "shared" / "data" / "traces"
    )
    path = folder / FILE
    if not path.is_file():
        print(
            f"policy_replay: skipped, there is no {path}; set HALOCLINE_TRACES to the folder of {FILE}", file=sys.stderr
        )
        sys.exit(2)
    with Trace(path, None, print) as trace:
        assert trace.format == "mooncake"
        distinct = count_distinct(trace)
        capacities = tuple(distinct * percent // 100 for percent in PERCENT)
        simulation = Simulation(SimulationSettings(capacities, POLICIES), trace.format)
        for request in trace.requests():
            simulation.take(request)
    result = simulation.result()
    rates: dict[str, dict[int, float]] = {name: {} for name in POLICIES}
    for run in result.runs:
        rates[run.policy][PERCENT[capacities.index(run.blocks)]] = run.hit_rate
    gains = {name: {p: rates[name][p] / rates["lru"][p] - 1 for p in PERCENT} for name in POLICIES}
    for name in POLICIES:
        shown = ", ".join(f"{p} %: {rates[name][p]:.4f} ({gains[name][p]:+.1%})" for p in PERCENT)
        print(f"{name:9} {shown}", file=sys.stderr)
    won = gains["priority"]
    finish(
        "policy_replay",
        value=rates["priority"][2],
        baseline=rates["lru"][2],
        ratio=1 + won[2],
        bar="hit rate over plain LRU: ≥ +50 % at 2 %, ≥ +5 % at 5 %, never below at 10 %",
        holds=all(won[percent] >= bar for percent, bar in BARS.items()),
        spread=(rates["priority"][2], rates["priority"][2]),  # A replay has no chance in it.
        config={
            "trace": FILE,
            "requests": result.requests,
            "distinct_blocks": distinct,
            "blocks": dict(zip(map(str, PERCENT), capacities, strict=True)),
            "tokens_per_block": result.tokens_per_block,
            "marking": "leading blocks seen before: 80 for 240 s",
        },
        details={
            "hit_rate": {name: {str(p): round(each[p], 6) for p in PERCENT} for name, each in rates.items()},
            "over_lru": {name: {str(p): round(each[p], 6) for p in PERCENT} for name, each in gains.items()},
        },
    )


def count_distinct(trace: Trace) -> int:
    """Different ids, as the trace counts its blocks: those that are only partly full are among them."""
    ids: set[int] = set()
    for request in trace.requests():
        ids.update(request.known)
    return len(ids)


if __name__ == "__main__":
    main()

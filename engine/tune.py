"""Which tokens_per_block suits a trace: what each size would serve of it, cost, and take to the first token.

All sizes get the same KV memory. The estimate of a first token is what is left to compute at a given prefill rate, and
the engine's own work on the prompt's blocks; queueing, sampling and the network are equal for all sizes and left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.simulate import Simulation, SimulationSettings
from engine.traces import TracedRequest, TraceFormat, legal_sizes

METADATA_BASE_BYTES = 450
"""Per block, besides four bytes for each of its tokens; the bar of `bench/pool_cost.py`."""
BLOCK_COST_S = 8e-6
"""One block matched, allocated and freed; the bar of `bench/pool_cost.py`, for a thousand of them."""
INDIFFERENCE = 0.01
"""Sizes whose first token is estimated within this share of the best are as good; then metadata decides."""
MAX_SIZE = 128
MIN_SIZE = 2


@dataclass(frozen=True, slots=True)
class SizeFigures:
    """What one size would do."""

    tokens_per_block: int
    blocks: int
    hit_rate: float
    metadata_bytes: int
    ttft_s: float
    """Estimated, mean over all requests."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The size to choose, and why."""

    tokens_per_block: int
    reason: str


class BlockSizeTuner:
    """Replays one trace at every size that it can be replayed at."""

    def __init__(self, trace_format: TraceFormat, pool_tokens: int, prefill_tokens_per_s: float, partial: bool) -> None:
        self._rate = prefill_tokens_per_s
        sizes = [each for each in legal_sizes(trace_format) if MIN_SIZE <= each <= MAX_SIZE]
        self._runs = [
            Simulation(
                SimulationSettings((max(1, pool_tokens // size),), ("lru",), 0, size, partial_reuse=partial),
                trace_format,
            )
            for size in sizes
        ]
        self.num_requests = 0

    def take(self, request: TracedRequest) -> None:
        """The next request."""
        self.num_requests += 1
        for run in self._runs:
            run.take(request)

    def figures(self) -> list[SizeFigures]:
        """One row a size, smallest first; of no requests nothing can be said."""
        return [self._figures_of(each) for each in self._runs] if self.num_requests else []

    def _figures_of(self, simulation: Simulation) -> SizeFigures:
        seen = simulation.result()
        run = seen.runs[0]
        computed = run.tokens_prompt - run.tokens_device - run.tokens_host
        work_s = computed / self._rate + seen.blocks_referenced * BLOCK_COST_S
        size = seen.tokens_per_block
        metadata = run.blocks * (METADATA_BASE_BYTES + 4 * size)
        return SizeFigures(size, run.blocks, run.hit_rate, metadata, work_s / seen.requests)


def recommend(figures: Sequence[SizeFigures]) -> Recommendation:
    """The largest of the sizes that are as good as the best. Raises ValueError of nothing."""
    best = min(figures, key=lambda each: each.ttft_s)
    limit = best.ttft_s * (1 + INDIFFERENCE)
    chosen = max((each for each in figures if each.ttft_s <= limit), key=lambda each: each.tokens_per_block)
    said = f"{chosen.hit_rate:.1%} of prompt tokens reused, first token after about {_ms(chosen.ttft_s)}"
    if chosen is best:
        others = [each for each in figures if each is not best]
        next_best = min(others, key=lambda each: each.ttft_s) if others else None
        versus = "" if next_best is None else f"; next is {next_best.tokens_per_block} with {_ms(next_best.ttft_s)}"
        return Recommendation(chosen.tokens_per_block, f"{said}, the best of all sizes{versus}")
    saved = 1 - chosen.metadata_bytes / best.metadata_bytes
    return Recommendation(
        chosen.tokens_per_block,
        f"{said}, within {INDIFFERENCE:.0%} of the best ({best.tokens_per_block}: {_ms(best.ttft_s)}), "
        f"with {saved:.0%} less metadata",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"

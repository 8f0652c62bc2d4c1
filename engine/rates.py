"""Decides whether a prefix is loaded from the host tier or computed again (kv-semantics 5.7), from measured rates.

Pure: the step loop tells what prefills took, the tier worker what loads took. While one rate is unknown a load is
always tried, since only a load can measure loads; for the same reason every `PROBE_EVERY`th refusal is tried anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SMOOTHING: Final = 0.2
PROBE_EVERY: Final = 32


class Rate:
    """Exponentially weighted units per second; long observations weigh as much as short ones."""

    __slots__ = ("per_s",)

    def __init__(self) -> None:
        self.per_s: float | None = None

    def observe(self, amount: float, seconds: float) -> None:
        """One measurement; nothing is learnt from one without amount or time."""
        if amount <= 0 or seconds <= 0:
            return
        sample = amount / seconds
        self.per_s = sample if self.per_s is None else self.per_s + SMOOTHING * (sample - self.per_s)


@dataclass(frozen=True, slots=True)
class Recompute:
    """Loading was expected to take `load_s`, computing only `compute_s`."""

    load_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class Onboard:
    """Loading is faster, or it is not known yet which is."""


class LoadChoice:
    """Load or recompute, with the memory that probing needs."""

    def __init__(self, block_bytes: int, tokens_per_block: int) -> None:
        self.load_bytes = Rate()
        self._block_bytes = block_bytes
        self._tokens_per_block = tokens_per_block
        self._num_refusals = 0

    def choose(self, num_blocks: int, prefill_tokens_per_s: float | None) -> Onboard | Recompute:
        """What to do about `num_blocks` that the tier holds."""
        load_rate = self.load_bytes.per_s
        if load_rate is None or prefill_tokens_per_s is None:
            return Onboard()
        load_s = num_blocks * self._block_bytes / load_rate
        compute_s = num_blocks * self._tokens_per_block / prefill_tokens_per_s
        if load_s < compute_s:
            return Onboard()
        self._num_refusals += 1
        if self._num_refusals % PROBE_EVERY == 0:
            return Onboard()
        return Recompute(load_s, compute_s)

"""Chooses how many tokens a step may prefill beside running streams, from how long steps took.

A stream's pause between two tokens is one step, so a long prompt beside it must come in chunks; the smaller they are,
the more of each step goes into reading the weights. `decode_pace` is the trade: how many times as long as a step of
decodes alone a step may take while it also prefills. Measuring steps is for the loop, filling them for the planner.
"""

from __future__ import annotations

from typing import Final

# A step in so many that are remembered: long enough to forget noise, short enough to follow a machine that others use.
_MEMORY: Final = 64
# Steps seen before the figures are believed.
_ENOUGH: Final = 8


class StepRates:
    """What a step costs, as learnt: `fixed + per_token × tokens`, and how long steps of decodes alone take.

    Least squares over the last steps, older ones counting less; O(1) per step and no list of them.
    """

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0
        self._steps = 0
        self._decode_s: float | None = None

    def note(self, num_tokens: int, num_decodes: int, duration_s: float) -> None:
        """One step that ran to its end."""
        keep = 1 - 1 / _MEMORY
        self._weight = self._weight * keep + 1
        self._tokens = self._tokens * keep + num_tokens
        self._seconds = self._seconds * keep + duration_s
        self._squares = self._squares * keep + num_tokens * num_tokens
        self._products = self._products * keep + num_tokens * duration_s
        self._steps += 1
        if num_decodes == num_tokens:
            known = self._decode_s
            self._decode_s = duration_s if known is None else known + (duration_s - known) / 8

    def line(self) -> tuple[float, float] | None:
        """(fixed seconds, seconds a token); None before enough different steps were seen."""
        spread = self._weight * self._squares - self._tokens**2
        if self._steps < _ENOUGH or spread <= 1e-6 * self._weight * self._squares:
            return None
        per_token = (self._weight * self._products - self._tokens * self._seconds) / spread
        fixed = (self._seconds - per_token * self._tokens) / self._weight
        return (max(0.0, fixed), per_token) if per_token > 0 else None

    @property
    def decode_s(self) -> float | None:
        """How long a step of decodes alone takes, lately."""
        return self._decode_s


def step_budget(rates: StepRates, num_decodes: int, decode_pace: float, most: int, least_prefill: int) -> int:
    """Tokens that the next step may have, decodes included: `most` where nobody decodes or nothing is known, and never
    so few that a prefill stands still (`least_prefill` beside the decodes, as far as `most` allows)."""
    line, decode_s = rates.line(), rates.decode_s
    if num_decodes == 0 or line is None or decode_s is None:
        return most
    fixed, per_token = line
    allowed = int((decode_pace * decode_s - fixed) / per_token)
    return min(most, max(allowed, num_decodes + least_prefill))

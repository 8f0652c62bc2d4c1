"""Finds the highest logit of each row, and whether all of them are finite, in one reading; compiled by numba.

torch reads a row three times for it, one row after another: 3.5 ms of a step of sixteen decodes. What is done with the
answer is for `engine/sampler.py`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

# Few enough to stay in the first cache while they are looked at twice.
_PART = 2048

_SUM: dict[str, Any] = {"fastmath": {"reassoc", "contract", "nsz"}, "nogil": True, "inline": "never"}


def scan_compiled(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """As `engine.sampler.scan`, of contiguous float32 logits on the CPU."""
    best = np.empty(len(logits), np.int64)
    finite = np.empty(len(logits), np.bool_)
    _scan(logits.numpy(), best, finite)
    return best.tolist(), finite.tolist()


# That no number is NaN may be taken for granted here alone: the answer is not used where one is.
@numba.njit(fastmath={"reassoc", "nnan", "nsz"}, nogil=True, inline="never", cache=True)  # type: ignore[untyped-decorator]
def _highest(values: Any) -> Any:
    found = values[0]
    for i in range(len(values)):
        found = max(found, values[i])
    return found


@numba.njit(cache=True, **_SUM)  # type: ignore[untyped-decorator]
def _nothing(values: Any) -> Any:
    """0, or NaN where a value is not finite."""
    found = np.float32(0.0)
    for i in range(len(values)):
        found += values[i] * np.float32(0.0)
    return found


@numba.njit(parallel=True, nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _scan(logits: Any, best: Any, finite: Any) -> None:
    rows, vocabulary = logits.shape
    for row in numba.prange(rows):
        values = logits[row]
        highest, at, spoilt = np.float32(-np.inf), 0, np.float32(0.0)
        for begin in range(0, vocabulary, _PART):
            part = values[begin : begin + _PART]
            here = _highest(part)
            spoilt += _nothing(part)
            if here > highest:
                highest, at = here, begin
        finite[row] = spoilt == 0.0
        while at < vocabulary and values[at] != highest:
            at += 1
        best[row] = at

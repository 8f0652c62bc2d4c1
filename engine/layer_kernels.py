"""The cheap parts of a layer on the CPU in float32, each in one pass: norms, rotation, gating; compiled by numba.

torch takes three to eight passes and as many calls for each of them; between prepacked linears that is what is left
to save. Each kernel comes twice: for few rows, where waking a second thread costs more than the work, and for many.
Which layer calls what is for `engine/fused.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from engine.vector_exp import exp32

Floats = NDArray[np.float32]

PARALLEL_ROWS = 24
"""From how many rows on the work is shared out."""

# Sums may be reordered, which is what lets LLVM use vectors. NaN and infinity keep their meaning.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp", "afn"}


def add_normalise(residual: Floats, delta: Floats, weight: Floats, epsilon: float, out: Floats) -> None:
    """`residual += delta`, and its RMS norm times `weight` into `out`; all `[row, width]`."""
    kernel = _add_normalise_many if len(residual) >= PARALLEL_ROWS else _add_normalise_few
    kernel(residual, delta, weight, np.float32(epsilon), out)


def normalise(rows: Floats, weight: Floats, epsilon: float, out: Floats) -> None:
    """The RMS norm of each row times `weight` into `out`."""
    kernel = _normalise_many if len(rows) >= PARALLEL_ROWS else _normalise_few
    kernel(rows, weight, np.float32(epsilon), out)


def rotate(rows: Floats, cos: Floats, sin: Floats, num_heads: int) -> None:
    """RoPE in place on the first `num_heads` heads of each row; `cos` and `sin` are `[row, head_dim]`, halves equal."""
    kernel = _rotate_many if len(cos) >= PARALLEL_ROWS else _rotate_few
    kernel(rows, cos, sin, num_heads)


def normalise_heads(rows: Floats, weight: Floats, epsilon: float, first_head: int, num_heads: int) -> None:
    """The RMS norm of each of some heads of each row, in place (Qwen3)."""
    kernel = _normalise_heads_many if len(rows) >= PARALLEL_ROWS else _normalise_heads_few
    kernel(rows, weight, np.float32(epsilon), first_head, num_heads)


def gate(gate_up: Floats, out: Floats) -> None:
    """silu(first half) × second half of each row, cut into pieces: `out` is `[piece, row, width of a piece]`."""
    pieces, rows, width = out.shape
    kernel = _gate_many if rows >= PARALLEL_ROWS else _gate_few
    # Whole last axes: only then does the compiler know that they are contiguous.
    kernel(gate_up.reshape(rows, 2, pieces, width), out)


def _both(function: Callable[..., None]) -> tuple[Any, Any]:
    """The kernel for few rows and the one for many."""
    # With Python's error model every division is a branch, and no loop with one becomes vectors.
    options: dict[str, Any] = {"fastmath": _FASTMATH, "nogil": True, "cache": True, "error_model": "numpy"}
    return numba.njit(**options)(function), numba.njit(parallel=True, **options)(function)


def _add_normalise(residual: Any, delta: Any, weight: Any, epsilon: Any, out: Any) -> None:
    width = residual.shape[1]
    for row in numba.prange(residual.shape[0]):
        kept, added, result = residual[row], delta[row], out[row]
        squares = np.float32(0.0)
        for i in range(width):
            value = kept[i] + added[i]
            kept[i] = value
            squares += value * value
        factor = np.float32(1.0) / np.sqrt(squares / np.float32(width) + epsilon)
        for i in range(width):
            result[i] = kept[i] * factor * weight[i]


def _normalise(rows: Any, weight: Any, epsilon: Any, out: Any) -> None:
    width = rows.shape[1]
    for row in numba.prange(rows.shape[0]):
        values, result = rows[row], out[row]
        squares = np.float32(0.0)
        for i in range(width):
            squares += values[i] * values[i]
        factor = np.float32(1.0) / np.sqrt(squares / np.float32(width) + epsilon)
        for i in range(width):
            result[i] = values[i] * factor * weight[i]


def _normalise_heads(rows: Any, weight: Any, epsilon: Any, first_head: int, num_heads: int) -> None:
    head_dim = weight.shape[0]
    for row in numba.prange(rows.shape[0]):
        for head in range(first_head, first_head + num_heads):
            values = rows[row, head * head_dim : (head + 1) * head_dim]
            squares = np.float32(0.0)
            for i in range(head_dim):
                squares += values[i] * values[i]
            factor = np.float32(1.0) / np.sqrt(squares / np.float32(head_dim) + epsilon)
            for i in range(head_dim):
                values[i] = values[i] * factor * weight[i]


def _rotate(rows: Any, cos: Any, sin: Any, num_heads: int) -> None:
    half = cos.shape[1] // 2
    for row in numba.prange(cos.shape[0]):
        c, s = cos[row], sin[row]
        for head in range(num_heads):
            begin = head * 2 * half
            low, high = rows[row, begin : begin + half], rows[row, begin + half : begin + 2 * half]
            for i in range(half):
                a, b = low[i], high[i]
                low[i] = a * c[i] - b * s[i]
                high[i] = b * c[i] + a * s[i]


def _gate(gate_up: Any, out: Any) -> None:
    pieces, num_rows, width = out.shape
    one = np.float32(1.0)
    for row in numba.prange(num_rows):
        for piece in range(pieces):
            gates, ups, result = gate_up[row, 0, piece], gate_up[row, 1, piece], out[piece, row]
            for i in range(width):
                result[i] = gates[i] / (one + exp32(-gates[i])) * ups[i]


_add_normalise_few, _add_normalise_many = _both(_add_normalise)
_normalise_few, _normalise_many = _both(_normalise)
_normalise_heads_few, _normalise_heads_many = _both(_normalise_heads)
_rotate_few, _rotate_many = _both(_rotate)
_gate_few, _gate_many = _both(_gate)

"""The cheap parts of a layer on the CPU in float32, each in one pass: norms, rotation, gating; compiled by numba.

torch takes three to eight passes and as many calls for each of them; between products that is what is left
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
Ints = NDArray[np.int64]

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
    kernel = normalise_many if len(rows) >= PARALLEL_ROWS else normalise_few
    kernel(rows, weight, np.float32(epsilon), out)


def rotate_and_store(
    rows: Floats, cos: Floats, sin: Floats, pool: Floats, layer: int, blocks: Ints, offsets: Ints
) -> None:
    """RoPE in place on Q and K of each row, `[row, heads of Q, K, V one after another, head_dim]`, and K and V into the
    pool (`[block, layer, K or V, token, kv_head, head_dim]`) at each row's block and offset. `cos` and `sin` are `[row,
    head_dim]`, halves equal; there may be more rows than of them, which are left alone."""
    kernel = _rotate_and_store_many if len(cos) >= PARALLEL_ROWS else _rotate_and_store_few
    kernel(rows, cos, sin, pool, layer, blocks, offsets)


def normalise_heads(rows: Floats, weight: Floats, epsilon: float, first_head: int, num_heads: int) -> None:
    """The RMS norm of each of some heads of each row, in place (Qwen3): `[row, head, head_dim]`."""
    kernel = _normalise_heads_many if len(rows) >= PARALLEL_ROWS else _normalise_heads_few
    kernel(rows, weight, np.float32(epsilon), first_head, num_heads)


def gate(gate_up: Floats, out: Floats) -> None:
    """silu(first half) × second half of each row, cut into pieces: `out` is `[piece, row, width of a piece]`."""
    pieces, rows, width = out.shape
    kernel = _gate_many if rows >= PARALLEL_ROWS else _gate_few
    # Whole last axes: only then does the compiler know that they are contiguous.
    kernel(gate_up.reshape(rows, 2, pieces, width), out)


def compile_both(function: Callable[..., None]) -> tuple[Any, Any]:
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
            values = rows[row, head]
            squares = np.float32(0.0)
            for i in range(head_dim):
                squares += values[i] * values[i]
            factor = np.float32(1.0) / np.sqrt(squares / np.float32(head_dim) + epsilon)
            for i in range(head_dim):
                values[i] = values[i] * factor * weight[i]


def _rotate_and_store(rows: Any, cos: Any, sin: Any, pool: Any, layer: Any, blocks: Any, offsets: Any) -> None:
    head_dim = rows.shape[2]
    half = head_dim // 2
    kv_heads = pool.shape[4]
    first_key = rows.shape[1] - 2 * kv_heads
    for row in numba.prange(cos.shape[0]):
        c, s = cos[row], sin[row]
        for head in range(first_key + kv_heads):
            values = rows[row, head]
            low, high = values[:half], values[half:]
            for i in range(half):
                a, b = low[i], high[i]
                low[i] = a * c[i] - b * s[i]
                high[i] = b * c[i] + a * s[i]
        block, offset = blocks[row], offsets[row]
        for head in range(kv_heads):
            key, value = rows[row, first_key + head], rows[row, first_key + kv_heads + head]
            kept_key, kept_value = pool[block, layer, 0, offset, head], pool[block, layer, 1, offset, head]
            for i in range(head_dim):
                kept_key[i] = key[i]
                kept_value[i] = value[i]


def _gate(gate_up: Any, out: Any) -> None:
    pieces, num_rows, width = out.shape
    one = np.float32(1.0)
    for row in numba.prange(num_rows):
        for piece in range(pieces):
            gates, ups, result = gate_up[row, 0, piece], gate_up[row, 1, piece], out[piece, row]
            for i in range(width):
                result[i] = gates[i] / (one + exp32(-gates[i])) * ups[i]


_add_normalise_few, _add_normalise_many = compile_both(_add_normalise)
normalise_few, normalise_many = compile_both(_normalise)
_normalise_heads_few, _normalise_heads_many = compile_both(_normalise_heads)
_rotate_and_store_few, _rotate_and_store_many = compile_both(_rotate_and_store)
_gate_few, _gate_many = compile_both(_gate)

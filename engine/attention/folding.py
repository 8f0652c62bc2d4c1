"""Folds the attention over one part of a context into what the parts before it gave; compiled by numba.

Two softmaxes over disjoint keys make the softmax over all of them, each weighed by the exponential of its logarithm
of the sum of exponentials.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from engine.vector_exp import exp32

_PARALLEL_ROWS = 24
_FASTMATH = {"reassoc", "contract", "nsz", "arcp", "afn"}


def fold(
    part: NDArray[np.float32],
    part_weights: NDArray[np.float32],
    rows: NDArray[np.int64],
    out: NDArray[np.float32],
    weights: NDArray[np.float32],
) -> None:
    """`part` (`[kv_head, row of the part, group, head_dim]`) and its weights (`[kv_head, row of the part, group]`,
    logarithms) into `out` (`[row, head, head_dim]`) and `weights` (`[row, head]`); −infinity: nothing is there."""
    kernel = _fold_many if len(rows) >= _PARALLEL_ROWS else _fold_few
    kernel(part, part_weights, rows, out, weights)


def _fold(part: Any, part_weights: Any, rows: Any, out: Any, weights: Any) -> None:
    kv_heads, num_rows, group, head_dim = part.shape
    for index in numba.prange(num_rows):
        row = rows[index]
        for kv_head in range(kv_heads):
            for member in range(group):
                head = kv_head * group + member
                result, added = out[row, head], part[kv_head, index, member]
                there, new = weights[row, head], part_weights[kv_head, index, member]
                if there == -np.inf:
                    weights[row, head] = new
                    for d in range(head_dim):
                        result[d] = added[d]
                    continue
                # NaN, on whichever side, reaches the result through the shares.
                highest = there if there >= new else new
                share_there, share_new = exp32(there - highest), exp32(new - highest)
                total = share_there + share_new
                weights[row, head] = highest + np.log(total)
                share_there /= total
                share_new /= total
                for d in range(head_dim):
                    result[d] = result[d] * share_there + added[d] * share_new


_options: dict[str, Any] = {"fastmath": _FASTMATH, "nogil": True, "cache": True, "error_model": "numpy"}
_fold_few = numba.njit(**_options)(_fold)
_fold_many = numba.njit(parallel=True, **_options)(_fold)

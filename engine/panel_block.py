"""Runs what lies between two attentions in one call: products over panels, norms and gating; compiled by numba.

Between products of one row, going back to Python after each costs as much as some of the products, and whoever else waits
for the interpreter meanwhile (the server, for one) holds the step up. Which models are run like this is for
`engine/fused.py`; the parts are those of `panel_linear.py` and `layer_kernels.py`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine import layer_kernels as parts
from engine.layer_kernels import PARALLEL_ROWS
from engine.panel_products import multiply
from engine.register_tiles import ADD, GATE, PUT


@numba.njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _between_attentions(
    attended: Any,  # float32 [1, row, heads × head_dim]: what attention gave
    residual: Any,  # float32 [1, row, hidden]: the stream that all layers add to
    normed: Any,  # float32 [1, row, hidden]
    gated: Any,  # float32 [piece, row, intermediate ÷ pieces]
    following: Any,  # float32 [1, row, output of the last product]
    attention_out: Any,  # of each product (panels, bias, rows in a block); see `PanelLinear.held`
    gate_up: Any,  # its outputs in the order of `paired`
    mlp_down: Any,
    next_product: Any,
    mlp_norm: Any,
    next_norm: Any,
    epsilon: Any,
    num_threads: int,
) -> None:
    """The output projection, the MLP, and the first product of what comes next, of all rows: into `following`. All else
    is scratch, but `residual`, which goes on."""
    # For a number that it knows, numba would compile a product of its own.
    multiply(attended, attention_out[0], attention_out[1], attention_out[2], residual, np.int64(ADD), num_threads)
    _normalise(residual[0], mlp_norm, epsilon, normed[0])
    multiply(normed, gate_up[0], gate_up[1], gate_up[2], gated, np.int64(GATE), num_threads)
    multiply(gated, mlp_down[0], mlp_down[1], mlp_down[2], residual, np.int64(ADD), num_threads)
    _normalise(residual[0], next_norm, epsilon, normed[0])
    multiply(normed, next_product[0], next_product[1], next_product[2], following, np.int64(PUT), num_threads)


between_attentions: Any = _between_attentions  # mypy takes a kernel for a function of one argument.


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _normalise(rows: Any, weight: Any, epsilon: Any, out: Any) -> None:
    if len(rows) >= PARALLEL_ROWS:
        parts.normalise_many(rows, weight, epsilon, out)
    else:
        parts.normalise_few(rows, weight, epsilon, out)

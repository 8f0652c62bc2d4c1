"""A linear layer on the CPU in float32, over weights held once in panels, compiled for this processor's registers.

A panel (`engine/register_tiles.py`) holds some outputs' weights, input after input, so that they are read from one end to
the other. One row reads memory at the rate that there is, many multiply at the rate that there is; between the
two oneDNN, whose few-row kernels were measured, takes 1.4 to 3 times as long (docs/decisions/0013). Rows are cut into
blocks that stay in a core's cache while panel after panel passes by.

Which layers are held like this is for `engine/fused.py`; a processor without such instructions
is served by transformers' layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numba
import numpy as np
import torch

from engine.huge_pages import huge_pages
from engine.linears import joined_bias
from engine.narrow_weights import bytes_behind, fewest_bytes, narrowed
from engine.panel_products import multiply
from engine.register_tiles import CACHE_LINE, LANES, MOST_ROWS, PANEL, PUT

# What a block of rows may take of a core's second cache; the panel that passes by takes some 100 KB.
_BLOCK_BYTES: Final = 512 * 1024
_CHUNK_BYTES: Final = 64 * 2**20

Held = tuple[np.ndarray, np.ndarray, int]
"""Weights as `multiply` is given them: panels, bias (empty: none), rows in a block."""


class WeightMemory:
    """Memory for weights in pages as large as the system gives them: with small ones one core was measured to read 21 GB/s
    instead of 32, and a decode reads all weights once."""

    def __init__(self) -> None:
        self._free: np.ndarray = np.empty(0, np.uint8)

    def array(self, *shape: int) -> np.ndarray:
        """Zeros (uint8), on a cache line's boundary, and behind them as many as may be read."""
        num_bytes = int(np.prod(shape))
        taken = -(-(num_bytes + bytes_behind(LANES)) // CACHE_LINE) * CACHE_LINE
        if len(self._free) < taken:
            self._free = huge_pages(max(taken, _CHUNK_BYTES))
        found, self._free = self._free[:num_bytes], self._free[taken:]
        return found.reshape(shape)


class PanelLinear:
    """Several linear layers of one input as one; their outputs lie one after another.

    With more than one of `pieces`, the input is `[piece, row, input of a piece]` instead of `[row, input]`, and sums are
    rounded piece by piece. A weight takes as many bytes as all of them need (`engine/narrow_weights.py`).
    """

    def __init__(self, memory: WeightMemory, linears: Sequence[torch.nn.Linear], pieces: int = 1) -> None:
        self.num_inputs = linears[0].in_features
        self.num_outputs = sum(linear.out_features for linear in linears)
        self.pieces = pieces
        weights = [linear.weight.detach().numpy() for linear in linears]
        width = max(map(fewest_bytes, weights))
        panels = memory.array(-(-self.num_outputs // PANEL), self.num_inputs * PANEL * width)
        for panel, wide in zip(panels, _panels(weights, self.num_inputs), strict=True):
            panel[:] = narrowed(wide, width)
        bias: np.ndarray = np.empty(0, np.float32)
        if any(linear.bias is not None for linear in linears):
            bias = joined_bias(linears)
        piece_bytes = 4 * self.num_inputs // pieces
        block_rows = max(1, _BLOCK_BYTES // piece_bytes // MOST_ROWS) * MOST_ROWS
        self.held: Held = (panels, bias, block_rows)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """`[row, input]`, or pieces of that, contiguous, to `[row, output]`."""
        assert rows.is_contiguous(), "the kernel reads by address"
        given = rows.numpy().reshape(self.pieces, -1, self.num_inputs // self.pieces)
        found = torch.empty((given.shape[1], self.num_outputs))
        multiply(given, *self.held, found.numpy()[np.newaxis], PUT, numba.get_num_threads())
        return found


def can_gate(gate: torch.nn.Linear, up: torch.nn.Linear, pieces: int) -> bool:
    """Whether `multiply` can gate as it multiplies, into so many pieces."""
    has_bias = gate.bias is not None or up.bias is not None
    return not has_bias and gate.out_features == up.out_features and gate.out_features % (pieces * LANES) == 0


def paired(gate: torch.nn.Linear, up: torch.nn.Linear) -> torch.nn.Linear:
    """Both as one, of which each panel has some outputs of `gate` in its first half and the same of `up` in its second."""
    weights = [one.weight.detach().view(-1, LANES, one.in_features) for one in (gate, up)]
    both = torch.nn.Linear(gate.in_features, 2 * gate.out_features, bias=False, device="meta")
    both.weight = torch.nn.Parameter(torch.stack(weights, 1).view(-1, gate.in_features), requires_grad=False)
    return both


def _panels(weights: Sequence[np.ndarray], num_inputs: int) -> Iterator[np.ndarray]:
    """`[output, input]`, of outputs one after another, panel by panel: `[input, output of the panel]`. What one gives is
    good until the next."""
    panel, filled = np.zeros((num_inputs, PANEL), np.float32), 0
    for weight in weights:
        done = 0
        while done < len(weight):
            count = min(len(weight) - done, PANEL - filled)
            panel[:, filled : filled + count] = weight[done : done + count].T
            done, filled = done + count, filled + count
            if filled == PANEL:
                yield panel
                filled = 0
    if filled:
        panel[:, filled:] = 0
        yield panel

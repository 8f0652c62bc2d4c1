"""What a linear layer of a fused model offers, however its weights are held, and what all kinds do alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

# Above so many products float32 adds them up in pieces, since rounding grows with their number; down projections, whose
# inputs are the most uneven, lose four times less by it.
_PIECE_INPUTS = 1024


class Linear(Protocol):
    """Several linear layers of one input as one; their outputs lie one after another.

    With more than one of `pieces`, the input is `[piece, row, input of a piece]` instead of `[row, input]`, contiguous.
    """

    num_inputs: int
    pieces: int

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


LinearFactory = Callable[..., Linear]
"""Called with the layers, and with the number of pieces in which float32 best adds up their inputs where that is not
one; how many it is to be, the layer that comes back says."""


def joined_bias(linears: Sequence[torch.nn.Linear]) -> np.ndarray:
    """The biases one after another, zeros for none."""
    return np.concatenate(
        [
            np.zeros(linear.out_features, np.float32) if linear.bias is None else linear.bias.detach().float().numpy()
            for linear in linears
        ]
    )


def pieces_of(num_inputs: int) -> int:
    """In how many pieces of equal width so many inputs are best added up."""
    fewest = -(-num_inputs // _PIECE_INPUTS)
    return next((pieces for pieces in range(fewest, 2 * fewest + 1) if num_inputs % pieces == 0), 1)

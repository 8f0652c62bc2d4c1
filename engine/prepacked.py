"""A linear layer whose weight is held once, in the order in which oneDNN reads it.

torch's own `linear` brings a weight into that order at every call, which for few rows costs as much as the product.
Used where `engine/panel_linear.py` cannot be; what every linear layer offers is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import torch

# oneDNN asks for how many rows to pack; the order for 16 is as quick as any from 1 to 512 rows.
_PACKED_FOR_ROWS = 16


# oneDNN adds up all of a row's products one after another, so that its rounding grows with their number; above this
# many they are added up in pieces. Down projections, whose inputs are the most uneven, lose four times less by it.
_PIECE_INPUTS = 1024


class Linear(Protocol):
    """Several linear layers of one input as one, however their weights are held. `fewest_rows` are the numbers to which
    a single row may be worth padding."""

    fewest_rows: ClassVar[tuple[int, ...]]
    num_inputs: int
    pieces: int

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


LinearFactory = Callable[..., Linear]
"""Called with the layers, and with the number of pieces in which float32 best adds up their inputs where that is not
one; how many it is to be, the layer that comes back says."""


class PackedLinear:
    """Several linear layers of one input, as one; their outputs lie one after another.

    With more than one of `pieces`, the input is `[piece, row, input of a piece]` instead of `[row, input]`.
    """

    # On AVX-512 oneDNN takes less time for four rows than for one.
    fewest_rows: ClassVar[tuple[int, ...]] = (1, 4)

    def __init__(self, linears: Sequence[torch.nn.Linear], pieces: int = 1) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self.num_outputs, self.num_inputs = weight.shape
        self.pieces = pieces
        self._weights = [
            torch.ops.mkldnn._reorder_linear_weight(part.contiguous(), _PACKED_FOR_ROWS)
            for part in weight.chunk(pieces, dim=1)
        ]
        biases = [linear.bias for linear in linears]
        self._bias: torch.Tensor | None = None
        if any(bias is not None for bias in biases):
            self._bias = torch.cat(
                [
                    torch.zeros(linear.out_features) if bias is None else bias.detach()
                    for linear, bias in zip(linears, biases, strict=True)
                ]
            )
        self._call = torch.ops.mkldnn._linear_pointwise.default
        self._call_and_add = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """`[row, input]`, or pieces of that, contiguous, to `[row, output]`."""
        first = rows[0] if rows.dim() == 3 else rows
        found = self._call(first, self._weights[0], self._bias, "none", [], None)
        for piece in range(1, self.pieces):
            found = self._call_and_add(rows[piece], found, self._weights[piece], None, "add")
        return found  # type: ignore[no-any-return]


def pieces_of(num_inputs: int) -> int:
    """In how many pieces of equal width so many inputs are best added up."""
    fewest = -(-num_inputs // _PIECE_INPUTS)
    return next((pieces for pieces in range(fewest, 2 * fewest + 1) if num_inputs % pieces == 0), 1)

"""A linear layer whose weight is held once, in the order in which oneDNN reads it.

torch's own `linear` brings a weight into that order at every call, which for few rows costs as much as the product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# oneDNN asks for how many rows to pack; the order for 16 is as quick as any from 1 to 512 rows.
_PACKED_FOR_ROWS = 16


class PackedLinear:
    """Several linear layers of one input, as one; their outputs lie one after another."""

    def __init__(self, linears: Sequence[torch.nn.Linear]) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self.num_outputs, self.num_inputs = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        biases = [linear.bias for linear in linears]
        self._bias: torch.Tensor | None = None
        if any(bias is not None for bias in biases):
            self._bias = torch.cat(
                [
                    torch.zeros(linear.out_features) if bias is None else bias.detach().float()
                    for linear, bias in zip(linears, biases, strict=True)
                ]
            )
        self._call = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """`[row, input]` (contiguous) to `[row, output]`."""
        found: torch.Tensor = self._call(rows, self._weight, self._bias, "none", [], None)
        return found

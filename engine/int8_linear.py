"""A linear layer with int8 weights, by FBGEMM, which comes with torch: a quarter of the bytes that a decode reads.

Only the weights lose precision, one scale for each output. FBGEMM multiplies integers alone, so each row of the input
goes in as two rows of 7 bits, a coarse one and what it leaves, and comes out as their sum: 13 bits, far below the
error of the weights. What a row becomes depends on no other row of the step. Seven bits, because FBGEMM adds up pairs
of products in 16 bits where the processor has no instruction for more (AVX2): with eight they would saturate.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numba
import numpy as np
import torch

from engine.layer_kernels import PARALLEL_ROWS, compile_both
from engine.linears import joined_bias

ROUNDING = "int8/1"
"""What caches know these weights by; it changes with everything that changes the values that K and V come out with."""

_ENGINE = "fbgemm"
_HIGHEST_WEIGHT = 127
_HIGHEST = np.float32(63.0)
_ZERO_POINT = 64
# The rest of a coarse value is at most half a step, so that twice as many fine steps as values fit into one.
_FINE_STEPS = np.float32(126.0)
_SMALLEST = np.float32(1e-30)


def is_available() -> bool:
    """Whether this build of torch has FBGEMM for this processor (x86 with AVX2)."""
    return _ENGINE in torch.backends.quantized.supported_engines and hasattr(
        torch, "_make_per_channel_quantized_tensor"
    )


class Int8Linear:
    """As `engine.panel_linear.PanelLinear`, in one piece: its sums are exact."""

    def __init__(self, linears: Sequence[torch.nn.Linear], pieces: int = 1) -> None:
        self.num_inputs = linears[0].in_features
        self.num_outputs = sum(linear.out_features for linear in linears)
        self.pieces = 1
        self._weight = _pack([linear.weight.detach() for linear in linears])
        self._bias = joined_bias(linears)  # Zeros for none: one kernel less, and no difference that could be measured.
        self._call = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """`[row, input]`, or one piece of that, to `[row, output]`."""
        given = rows.view(-1, self.num_inputs).numpy()
        num_rows = len(given)
        split = torch.empty((2 * num_rows, self.num_inputs))
        steps = np.empty(num_rows, np.float32)
        found = torch.empty((num_rows, self.num_outputs))
        many = num_rows >= PARALLEL_ROWS
        (_split_many if many else _split_few)(given, given.view(np.int32), split.numpy(), steps, steps.view(np.int32))
        products = self._call(split, 1.0, _ZERO_POINT, self._weight)
        (_join_many if many else _join_few)(products.numpy(), steps, self._bias, found.numpy())
        return found


def _pack(weights: Sequence[torch.Tensor]) -> Any:
    """The rounded weights, one below another, in FBGEMM's order, with their scales."""
    both = [_rounded(weight) for weight in weights]
    rounded, scales = torch.cat([values for values, _ in both]), torch.cat([of for _, of in both])
    zeros = torch.zeros(len(scales), dtype=torch.long)
    with _packing_for(_ENGINE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")
        quantised = torch._make_per_channel_quantized_tensor(rounded, scales.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(quantised, None)


def _rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each output's weights in steps of its own, symmetrically, so that what was 0 stays 0."""
    least, most = weight.aminmax(dim=1)
    scales = torch.maximum(-least, most).clamp_(min=float(_SMALLEST)) / _HIGHEST_WEIGHT
    return (weight / scales[:, None]).round_().to(torch.int8), scales


@contextlib.contextmanager
def _packing_for(name: str) -> Iterator[None]:
    """torch packs for the engine that is set at that moment; the packed weight knows its own afterwards."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def _split(given: Any, bits: Any, out: Any, steps: Any, step_bits: Any) -> None:
    """Each row as whole numbers: coarse steps, and (as many rows further down) fine steps of what is left. A row that
    is not finite gets a step that is not. The highest is sought among the bits, because a loop that compares floats
    does not become vectors."""
    num_rows, width = given.shape
    for row in numba.prange(num_rows):
        values, patterns, coarse, fine = given[row], bits[row], out[row], out[num_rows + row]
        highest_bits = np.int32(0)
        for i in range(width):
            highest_bits = max(highest_bits, patterns[i] & np.int32(0x7FFFFFFF))
        step_bits[row] = highest_bits
        highest = steps[row]
        if highest_bits >= np.int32(0x7F800000):
            coarse[:] = np.float32(0.0)
            fine[:] = np.float32(0.0)
            steps[row] = np.float32(np.nan)
            continue
        factor = _HIGHEST / highest if highest > _SMALLEST else np.float32(0.0)
        steps[row] = highest / _HIGHEST
        for i in range(width):
            scaled = values[i] * factor
            whole = np.rint(scaled)
            coarse[i] = whole
            fine[i] = np.rint((scaled - whole) * _FINE_STEPS)


def _join(products: Any, steps: Any, bias: Any, out: Any) -> None:
    """The sum of each row's two products, in the scale of the row, and the bias."""
    num_rows, width = out.shape
    for row in numba.prange(num_rows):
        coarse, fine, result, step = products[row], products[num_rows + row], out[row], steps[row]
        fine_step = step / _FINE_STEPS
        for i in range(width):
            result[i] = coarse[i] * step + fine[i] * fine_step + bias[i]


_split_few, _split_many = compile_both(_split)
_join_few, _join_many = compile_both(_join)

"""A linear layer on the CPU in float32, over weights held once in panels, compiled for this processor's registers.

A panel is as many outputs as two vector registers hold, its weights input after input, so that they are read from one
end to the other. A tile multiplies a few rows by one panel and keeps all their sums in registers: as many rows as there
are registers for. One row reads memory at the rate that there is, many multiply at the rate that there is; between the
two oneDNN, whose few-row kernels were measured, takes 1.4 to 3 times as long (docs/decisions/0013). Rows are cut into
blocks that stay in a core's cache while panel after panel passes by.

Which layers are held like this is for `engine/fused.py`; where this cannot be compiled, `engine/prepacked.py` serves.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_FEATURES: Final = llvmlite.binding.get_host_cpu_features()
_HAS_AVX512: Final = bool(_FEATURES.get("avx512f"))
# Of 32 registers of 16 numbers, or 16 of 8: two hold weights, and each row of a tile takes two for its sums.
_LANES: Final = 16 if _HAS_AVX512 else 8
_PANEL: Final = 2 * _LANES
_PANEL_BYTES: Final = 4 * _PANEL
_MOST_ROWS: Final = 12 if _HAS_AVX512 else 6
# What a block of rows may take of a core's second cache; the panel that passes by takes some 100 KB.
_BLOCK_BYTES: Final = 512 * 1024
_HUGE_PAGE: Final = 2 * 2**20
_CHUNK_BYTES: Final = 64 * 2**20

_FLOAT, _INT, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, _LANES)


def is_available() -> bool:
    """Whether this processor multiplies and adds vectors in one instruction, which the tiles are made of."""
    return _HAS_AVX512 or bool(_FEATURES.get("avx2") and _FEATURES.get("fma"))


class WeightMemory:
    """Memory for weights in pages as large as the system gives them: with small ones, a decode, which reads all weights
    once, waits for the translation of their addresses a third of its time."""

    def __init__(self) -> None:
        self._free: np.ndarray = np.empty(0, np.float32)

    def array(self, *shape: int) -> np.ndarray:
        """Zeros, on a cache line's boundary."""
        count = -(-int(np.prod(shape)) // 16) * 16
        if len(self._free) < count:
            self._free = _huge_pages(max(4 * count, _CHUNK_BYTES))
        found, self._free = self._free[:count], self._free[count:]
        return found[: int(np.prod(shape))].reshape(shape)


def _huge_pages(num_bytes: int) -> np.ndarray:
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # A kernel without them: slower, and right.
            memory.madvise(mmap.MADV_HUGEPAGE)
    everything = np.frombuffer(memory, np.float32)
    ahead = -everything.ctypes.data % _HUGE_PAGE // 4
    return everything[ahead : ahead + num_bytes // 4]


class PanelLinear:
    """Several linear layers of one input as one; their outputs lie one after another.

    With more than one of `pieces`, the input is `[piece, row, input of a piece]` instead of `[row, input]`, and sums are
    rounded piece by piece.
    """

    fewest_rows: ClassVar[tuple[int, ...]] = (1,)

    def __init__(self, memory: WeightMemory, linears: Sequence[torch.nn.Linear], pieces: int = 1) -> None:
        self.num_inputs = linears[0].in_features
        self.num_outputs = sum(linear.out_features for linear in linears)
        self.pieces = pieces
        num_panels = -(-self.num_outputs // _PANEL)
        self._panels = memory.array(num_panels, self.num_inputs, _PANEL)
        begin = 0
        for linear in linears:
            _put(linear.weight.detach().numpy(), begin, self._panels)
            begin += linear.out_features
        self._bias = np.empty(0, np.float32)
        if any(linear.bias is not None for linear in linears):
            self._bias = np.concatenate([_bias(linear) for linear in linears])
        piece_bytes = 4 * self.num_inputs // pieces
        self._block_rows = max(1, _BLOCK_BYTES // piece_bytes // _MOST_ROWS) * _MOST_ROWS

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """`[row, input]`, or pieces of that, contiguous, to `[row, output]`."""
        given = rows.numpy().reshape(self.pieces, -1, self.num_inputs // self.pieces)
        found = torch.empty((given.shape[1], self.num_outputs))
        _multiply(given, self._panels, self._bias, found.numpy(), self._block_rows)
        return found


def _bias(linear: torch.nn.Linear) -> np.ndarray:
    if linear.bias is None:
        return np.zeros(linear.out_features, np.float32)
    found: np.ndarray = linear.bias.detach().numpy()
    return found


def _put(weight: np.ndarray, begin: int, panels: np.ndarray) -> None:
    """Writes the outputs from `begin` on; `[output, input]`."""
    done = 0
    while done < len(weight):
        panel, lane = divmod(begin + done, _PANEL)
        count = min(len(weight) - done, _PANEL - lane)
        panels[panel, :, lane : lane + count] = weight[done : done + count].T
        done += count


def _tile(num_rows: int) -> Any:
    """Multiplies `num_rows` rows by one panel: `out (+)= rows × panel`. Addresses and distances between rows in bytes."""

    @intrinsic  # type: ignore[misc]
    def tile(
        typing_context: Any, rows: Any, row_bytes: Any, panel: Any, inputs: Any, out: Any, out_bytes: Any, is_added: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _emit_tile(builder, num_rows, *arguments)
            return context.get_dummy_value()

        address, number = types.uint64, types.int64
        return types.void(address, number, address, number, address, number, types.boolean), generate

    return tile


def _emit_tile(
    builder: Any,
    num_rows: int,
    rows: Any,
    row_bytes: Any,
    panel: Any,
    inputs: Any,
    out: Any,
    out_bytes: Any,
    is_added: Any,
) -> None:
    """The loop over inputs, two sums for each row in registers; then the sums to `out`."""
    number = lambda value: ir.Constant(_INT64, value)  # noqa: E731
    multiply_add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{_LANES}f32"
    )
    float_pointer, vector_pointer = _FLOAT.as_pointer(), _VECTOR.as_pointer()
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    everywhere = ir.Constant(ir.VectorType(_INT, _LANES), [0] * _LANES)

    before, loop, after = builder.block, builder.append_basic_block("inputs"), builder.append_basic_block("sums")
    row_pointers = [
        builder.inttoptr(builder.add(rows, builder.mul(row_bytes, number(row))), float_pointer)
        for row in range(num_rows)
    ]
    panel_pointer = builder.inttoptr(panel, float_pointer)
    builder.branch(loop)

    builder.position_at_end(loop)
    at = builder.phi(_INT64)
    at.add_incoming(number(0), before)
    sums = [[builder.phi(_VECTOR), builder.phi(_VECTOR)] for _ in range(num_rows)]
    begin = builder.mul(at, number(_PANEL))
    weights = [
        builder.load(
            builder.bitcast(builder.gep(panel_pointer, [builder.add(begin, number(half * _LANES))]), vector_pointer),
            align=4,
        )
        for half in range(2)
    ]
    added = []
    for row in range(num_rows):
        value = builder.load(builder.gep(row_pointers[row], [at]), align=4)
        spread = builder.shuffle_vector(
            builder.insert_element(undefined, value, ir.Constant(_INT, 0)), undefined, everywhere
        )
        added.append([builder.call(multiply_add, [spread, weights[half], sums[row][half]]) for half in range(2)])
        for half in range(2):
            sums[row][half].add_incoming(ir.Constant(_VECTOR, [0.0] * _LANES), before)
            sums[row][half].add_incoming(added[row][half], loop)
    following = builder.add(at, number(1))
    at.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, inputs), loop, after)

    builder.position_at_end(after)
    with builder.if_else(is_added) as (add, put):
        for block, is_adding in ((add, True), (put, False)):
            with block:
                for row in range(num_rows):
                    first = builder.inttoptr(builder.add(out, builder.mul(out_bytes, number(row))), float_pointer)
                    for half in range(2):
                        place = builder.bitcast(builder.gep(first, [number(half * _LANES)]), vector_pointer)
                        total = added[row][half]
                        if is_adding:
                            total = builder.fadd(total, builder.load(place, align=4))
                        builder.store(total, place, align=4)


_tile_1, _tile_2, _tile_4, _tile_most = _tile(1), _tile(2), _tile(4), _tile(_MOST_ROWS)
_tile_8 = _tile(8) if _MOST_ROWS > 8 else _tile_4
_HAS_EIGHT: Final = _MOST_ROWS > 8


@numba.njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _multiply_panel(
    rows: Any, row_bytes: Any, num_rows: Any, panel: Any, inputs: Any, out: Any, out_bytes: Any, is_added: Any
) -> None:
    """All rows by one panel, the largest tiles first."""
    while num_rows >= _MOST_ROWS:
        _tile_most(np.uint64(rows), row_bytes, np.uint64(panel), inputs, np.uint64(out), out_bytes, is_added)
        rows, out, num_rows = rows + _MOST_ROWS * row_bytes, out + _MOST_ROWS * out_bytes, num_rows - _MOST_ROWS
    if _HAS_EIGHT and num_rows >= 8:
        _tile_8(np.uint64(rows), row_bytes, np.uint64(panel), inputs, np.uint64(out), out_bytes, is_added)
        rows, out, num_rows = rows + 8 * row_bytes, out + 8 * out_bytes, num_rows - 8
    if num_rows >= 4:
        _tile_4(np.uint64(rows), row_bytes, np.uint64(panel), inputs, np.uint64(out), out_bytes, is_added)
        rows, out, num_rows = rows + 4 * row_bytes, out + 4 * out_bytes, num_rows - 4
    if num_rows >= 2:
        _tile_2(np.uint64(rows), row_bytes, np.uint64(panel), inputs, np.uint64(out), out_bytes, is_added)
        rows, out, num_rows = rows + 2 * row_bytes, out + 2 * out_bytes, num_rows - 2
    if num_rows >= 1:
        _tile_1(np.uint64(rows), row_bytes, np.uint64(panel), inputs, np.uint64(out), out_bytes, is_added)


@numba.njit(parallel=True, nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _multiply(
    rows: Any,  # float32 [piece, row, input of a piece]
    panels: Any,  # float32 [panel, input, output of the panel]
    bias: Any,  # float32 [output], or empty
    out: Any,  # float32 [row, output]
    block_rows: int,
) -> None:
    pieces, num_rows, inputs = rows.shape
    num_panels = panels.shape[0]
    num_outputs = out.shape[1]
    num_blocks = (num_rows + block_rows - 1) // block_rows
    row_bytes = inputs * 4
    has_bias = len(bias) > 0
    rows_at, panels_at, out_at = np.int64(rows.ctypes.data), np.int64(panels.ctypes.data), np.int64(out.ctypes.data)
    for task in numba.prange(num_blocks * num_panels):
        first_row = task // num_panels * block_rows
        panel = task % num_panels
        count = min(block_rows, num_rows - first_row)
        first_output = panel * _PANEL
        width = min(_PANEL, num_outputs - first_output)
        target, target_bytes = out_at + (first_row * num_outputs + first_output) * 4, num_outputs * 4
        # The last panel may have more outputs than there are; what it gives is copied as far as it counts.
        beside = np.empty((count if width < _PANEL else 0, _PANEL), np.float32)
        if width < _PANEL:
            target, target_bytes = np.int64(beside.ctypes.data), _PANEL_BYTES
        if has_bias:
            for row in range(count):
                for output in range(width):
                    if width < _PANEL:
                        beside[row, output] = bias[first_output + output]
                    else:
                        out[first_row + row, first_output + output] = bias[first_output + output]
        for piece in range(pieces):
            _multiply_panel(
                rows_at + (piece * num_rows + first_row) * row_bytes,
                row_bytes,
                count,
                panels_at + (panel * pieces + piece) * inputs * _PANEL_BYTES,
                inputs,
                target,
                target_bytes,
                has_bias or piece > 0,
            )
        if width < _PANEL:
            for row in range(count):
                for output in range(width):
                    out[first_row + row, first_output + output] = beside[row, output]

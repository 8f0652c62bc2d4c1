"""Emits the inner loop of products: a few rows by one panel, all sums in registers; for kernels compiled by numba.

A panel is as many outputs as two vector registers hold. A tile keeps two registers of sums for each of its rows, as many
rows as there are registers for, and multiplies and adds once for each; so it computes at the rate that the core has, as
long as what it reads comes in time. What panels hold, and where they lie, is for the kernels that use it.
"""

from __future__ import annotations

from typing import Any, Final

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_FEATURES: Final = llvmlite.binding.get_host_cpu_features()
_HAS_AVX512: Final = bool(_FEATURES.get("avx512f"))
# Of 32 registers of 16 numbers, or 16 of 8: two hold the panel, and each row of a tile takes two for its sums.
_LANES: Final = 16 if _HAS_AVX512 else 8
PANEL: Final = 2 * _LANES
"""Outputs of a panel."""
MOST_ROWS: Final = 12 if _HAS_AVX512 else 6
"""Rows of the largest tile: multiples of it are multiplied at the best rate."""

_FLOAT, _INT, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_BYTE_POINTER = ir.IntType(8).as_pointer()
_VECTOR = ir.VectorType(_FLOAT, _LANES)


def is_available() -> bool:
    """Whether this processor multiplies and adds vectors in one instruction, which tiles are made of."""
    return _HAS_AVX512 or bool(_FEATURES.get("avx2") and _FEATURES.get("fma"))


def _tile(num_rows: int) -> Any:
    """`out (+)= rows × panel` for so many rows. All places are addresses, all distances bytes: between rows, between a
    row's inputs, between the panel's inputs, between rows of `out`."""

    @intrinsic  # type: ignore[misc]
    def tile(
        typing_context: Any,
        rows: Any,
        row_bytes: Any,
        input_bytes: Any,
        panel: Any,
        panel_bytes: Any,
        inputs: Any,
        out: Any,
        out_bytes: Any,
        is_added: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _emit(builder, num_rows, *arguments)
            return context.get_dummy_value()

        number = types.int64
        return types.void(*[number] * 8, types.boolean), generate

    return tile


def _emit(
    builder: Any,
    num_rows: int,
    rows: Any,
    row_bytes: Any,
    input_bytes: Any,
    panel: Any,
    panel_bytes: Any,
    inputs: Any,
    out: Any,
    out_bytes: Any,
    is_added: Any,
) -> None:
    """The loop over inputs, two sums for each row in registers; then the sums to `out`."""
    multiply_add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{_LANES}f32"
    )
    undefined, zero = ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_VECTOR, [0.0] * _LANES)
    everywhere = ir.Constant(ir.VectorType(_INT, _LANES), [0] * _LANES)

    def place(base: Any, offset: Any, kind: Any) -> Any:
        return builder.bitcast(builder.gep(base, [offset]), kind.as_pointer())

    before, loop, after = builder.block, builder.append_basic_block("inputs"), builder.append_basic_block("sums")
    row_bases = [
        builder.inttoptr(builder.add(rows, builder.mul(row_bytes, ir.Constant(_INT64, row))), _BYTE_POINTER)
        for row in range(num_rows)
    ]
    panel_base = builder.inttoptr(panel, _BYTE_POINTER)
    builder.branch(loop)

    builder.position_at_end(loop)
    at = builder.phi(_INT64)
    at.add_incoming(ir.Constant(_INT64, 0), before)
    sums = [[builder.phi(_VECTOR), builder.phi(_VECTOR)] for _ in range(num_rows)]
    begin, input_at = builder.mul(at, panel_bytes), builder.mul(at, input_bytes)
    weights = [
        builder.load(place(panel_base, builder.add(begin, ir.Constant(_INT64, half * 4 * _LANES)), _VECTOR), align=4)
        for half in range(2)
    ]
    added = []
    for row in range(num_rows):
        value = builder.load(place(row_bases[row], input_at, _FLOAT), align=4)
        spread = builder.shuffle_vector(
            builder.insert_element(undefined, value, ir.Constant(_INT, 0)), undefined, everywhere
        )
        added.append([builder.call(multiply_add, [spread, weights[half], sums[row][half]]) for half in range(2)])
        for half in range(2):
            sums[row][half].add_incoming(zero, before)
            sums[row][half].add_incoming(added[row][half], loop)
    following = builder.add(at, ir.Constant(_INT64, 1))
    at.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, inputs), loop, after)

    builder.position_at_end(after)
    with builder.if_else(is_added) as (add, put):
        for block, is_adding in ((add, True), (put, False)):
            with block:
                for row in range(num_rows):
                    first = builder.inttoptr(
                        builder.add(out, builder.mul(out_bytes, ir.Constant(_INT64, row))), _BYTE_POINTER
                    )
                    for half in range(2):
                        target = place(first, ir.Constant(_INT64, half * 4 * _LANES), _VECTOR)
                        total = added[row][half]
                        if is_adding:
                            total = builder.fadd(total, builder.load(target, align=4))
                        builder.store(total, target, align=4)


# Sizes between these would win a little for few row counts, and cost each first start a second of compiling.
_tile_1, _tile_4, _tile_most = _tile(1), _tile(4), _tile(MOST_ROWS)


@numba.njit(nogil=True, error_model="numpy", inline="never")  # type: ignore[untyped-decorator]
def multiply_panel(
    num_rows: Any,
    rows: Any,
    row_bytes: Any,
    input_bytes: Any,
    panel: Any,
    panel_bytes: Any,
    inputs: Any,
    out: Any,
    out_bytes: Any,
    is_added: Any,
) -> None:
    """All rows by one panel, the largest tiles first; see `_tile`. Everything is an int64 but `is_added`."""
    while num_rows >= MOST_ROWS:
        _tile_most(rows, row_bytes, input_bytes, panel, panel_bytes, inputs, out, out_bytes, is_added)
        rows, out, num_rows = rows + MOST_ROWS * row_bytes, out + MOST_ROWS * out_bytes, num_rows - MOST_ROWS
    while num_rows >= 4:
        _tile_4(rows, row_bytes, input_bytes, panel, panel_bytes, inputs, out, out_bytes, is_added)
        rows, out, num_rows = rows + 4 * row_bytes, out + 4 * out_bytes, num_rows - 4
    while num_rows >= 1:
        _tile_1(rows, row_bytes, input_bytes, panel, panel_bytes, inputs, out, out_bytes, is_added)
        rows, out, num_rows = rows + row_bytes, out + out_bytes, num_rows - 1

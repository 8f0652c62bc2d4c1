"""Emits the inner loop of products: a few rows by one panel, all sums in registers; for kernels compiled by numba.

A panel is as many outputs as two vector registers hold. A tile keeps two registers of sums for each of its rows, as many
rows as there are registers for, and multiplies and adds once for each; so it computes at the rate that the core has, as
long as what it reads comes in time. What panels hold, and where they lie, is for the kernels that use it; in how many bytes
each of their numbers lies there is `narrow_weights.py`'s.
"""

from __future__ import annotations

from typing import Any, Final

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.narrow_weights import WIDE, emit_widened
from engine.vector_exp import emit_exp

_FEATURES: Final = llvmlite.binding.get_host_cpu_features()
_HAS_AVX512: Final = bool(_FEATURES.get("avx512f"))
# Of 32 registers of 16 numbers, or 16 of 8: two hold the panel, and each row of a tile takes two for its sums.
LANES: Final = 16 if _HAS_AVX512 else 8
CACHE_LINE: Final = 64
PANEL: Final = 2 * LANES
"""Outputs of a panel."""
WIDE_BYTES: Final = WIDE * PANEL
"""Of one input of a panel, in four bytes a weight."""
MOST_ROWS: Final = 12 if _HAS_AVX512 else 6
"""Rows of the largest tile: multiples of it are multiplied at the best rate."""
PUT, ADD, GATE = 0, 1, 2
"""What becomes of sums: they are put where results go, or added to what is there; or silu of the panel's first half times
its second half is put, half as many numbers."""

_FLOAT, _INT, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_BYTE_POINTER = ir.IntType(8).as_pointer()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_VECTOR_BYTES: Final = 4 * LANES


def is_available() -> bool:
    """Whether this processor multiplies and adds vectors in one instruction, which tiles are made of."""
    return _HAS_AVX512 or bool(_FEATURES.get("avx2") and _FEATURES.get("fma"))


def _tile(num_rows: int, is_scattered: bool = False, num_vectors: int = 2, width: int = WIDE) -> Any:
    """`out = rows × panel` for so many rows, or what else `use` says. All places are addresses, all distances bytes: between
    rows, between a row's inputs, between the panel's inputs, between rows of `out`. The largest asks for the panel at `ahead`,
    and of one whose weights take `width` bytes, and not four, it leaves what they are in four at `widened`.

    Of a scattered tile, rows and the panel's inputs lie anywhere: `rows` and `panel` are where their addresses stand, and
    `panel_bytes` is added to each of the panel's. With one vector, the second half of a panel is left out."""

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
        use: Any,
        ahead: Any,
        widened: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _Tile(builder, num_rows, is_scattered, num_vectors, width).emit(*arguments)
            return context.get_dummy_value()

        number = types.int64
        return types.void(*[number] * 11), generate

    return tile


class _Tile:
    """Emits the loop over inputs, two sums for each row in registers; then the sums to `out`."""

    def __init__(self, builder: Any, num_rows: int, is_scattered: bool, num_vectors: int, width: int) -> None:
        self._builder = builder
        self._width = width
        self._is_largest = num_rows == MOST_ROWS and not is_scattered
        self._vectors = range(num_vectors)
        self._num_rows = num_rows
        self._is_scattered = is_scattered
        self._can_gate = not is_scattered  # No other product wants it.

    def emit(
        self,
        rows: Any,
        row_bytes: Any,
        input_bytes: Any,
        panel: Any,
        panel_bytes: Any,
        inputs: Any,
        out: Any,
        out_bytes: Any,
        use: Any,
        ahead: Any,
        widened: Any,
    ) -> None:
        builder = self._builder
        before, loop, after = builder.block, builder.append_basic_block("inputs"), builder.append_basic_block("sums")
        row_bases = self._row_bases(rows, row_bytes)
        builder.branch(loop)

        builder.position_at_end(loop)
        at = builder.phi(_INT64)
        at.add_incoming(ir.Constant(_INT64, 0), before)
        sums = [[builder.phi(_VECTOR) for _ in self._vectors] for _ in range(self._num_rows)]
        weights = self._weights(panel, panel_bytes, at)
        added = self._input(sums, row_bases, builder.mul(at, input_bytes), weights)
        if self._is_largest:
            self._ask_ahead(ahead, inputs, at)
            if self._width != WIDE:
                place = builder.add(widened, builder.mul(at, ir.Constant(_INT64, 2 * _VECTOR_BYTES)))
                self._put(weights, builder.inttoptr(place, _BYTE_POINTER))
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        for of_row, added_of_row in zip(sums, added, strict=True):
            for total, new in zip(of_row, added_of_row, strict=True):
                total.add_incoming(zero, before)
                total.add_incoming(new, loop)
        following = builder.add(at, ir.Constant(_INT64, 1))
        at.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, inputs), loop, after)

        builder.position_at_end(after)
        end = builder.append_basic_block("end")
        choice = builder.switch(use, end)
        for one_use in (PUT, ADD, GATE) if self._can_gate else (PUT, ADD):
            block = builder.append_basic_block("use")
            choice.add_case(ir.Constant(_INT64, one_use), block)
            builder.position_at_end(block)
            self._finish(added, out, out_bytes, one_use)
            builder.branch(end)
        builder.position_at_end(end)

    def _row_bases(self, rows: Any, row_bytes: Any) -> list[Any]:
        builder = self._builder
        if self._is_scattered:
            table = builder.inttoptr(rows, _INT64.as_pointer())
            addresses = [
                builder.load(builder.gep(table, [ir.Constant(_INT64, row)]), align=8) for row in range(self._num_rows)
            ]
        else:
            addresses = [
                builder.add(rows, builder.mul(row_bytes, ir.Constant(_INT64, row))) for row in range(self._num_rows)
            ]
        return [builder.inttoptr(address, _BYTE_POINTER) for address in addresses]

    def _ask_ahead(self, ahead: Any, inputs: Any, at: Any) -> None:
        """One line of each part of the next panel for each input of this; of half a part the same for two of them."""
        builder = self._builder
        for begin in range(0, self._width * PANEL, CACHE_LINE):
            line = builder.mul(at, ir.Constant(_INT64, min(self._width * PANEL - begin, CACHE_LINE)))
            distance = builder.mul(inputs, ir.Constant(_INT64, begin))
            _emit_prefetch(builder, builder.add(ahead, builder.add(line, distance)))

    def _weights(self, panel: Any, panel_bytes: Any, at: Any) -> list[Any]:
        builder = self._builder
        if self._width != WIDE:
            return emit_widened(builder, self._width, LANES, panel, at)
        first = self._panel_input(panel, panel_bytes, at)
        return [builder.load(self._place(first, half * _VECTOR_BYTES, _VECTOR), align=4) for half in self._vectors]

    def _panel_input(self, panel: Any, panel_bytes: Any, at: Any) -> Any:
        """Where the weights of one input begin."""
        builder = self._builder
        if self._is_scattered:
            table = builder.inttoptr(panel, _INT64.as_pointer())
            address = builder.add(builder.load(builder.gep(table, [at]), align=8), panel_bytes)
            return builder.inttoptr(address, _BYTE_POINTER)
        return builder.gep(builder.inttoptr(panel, _BYTE_POINTER), [builder.mul(at, panel_bytes)])

    def _input(self, sums: list[list[Any]], row_bases: list[Any], input_at: Any, weights: list[Any]) -> list[list[Any]]:
        """The sums with one input's products added."""
        builder = self._builder
        multiply_add = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
        )
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        everywhere = ir.Constant(ir.VectorType(_INT, LANES), [0] * LANES)
        added = []
        for base, of_row in zip(row_bases, sums, strict=True):
            value = builder.load(self._place(base, input_at, _FLOAT), align=4)
            spread = builder.shuffle_vector(
                builder.insert_element(undefined, value, ir.Constant(_INT, 0)), undefined, everywhere
            )
            added.append([builder.call(multiply_add, [spread, weights[half], of_row[half]]) for half in self._vectors])
        return added

    def _finish(self, sums: list[list[Any]], out: Any, out_bytes: Any, use: int) -> None:
        builder = self._builder
        if use == GATE:
            sums = [[self._gated(*of_row)] for of_row in sums]
        for row, of_row in enumerate(sums):
            first = builder.inttoptr(builder.add(out, builder.mul(out_bytes, ir.Constant(_INT64, row))), _BYTE_POINTER)
            if use == ADD:
                places = [self._place(first, half * _VECTOR_BYTES, _VECTOR) for half in range(len(of_row))]
                of_row = [
                    builder.fadd(total, builder.load(place, align=4))
                    for total, place in zip(of_row, places, strict=True)
                ]
            self._put(of_row, first)

    def _put(self, vectors: list[Any], first: Any) -> None:
        for half, vector in enumerate(vectors):
            self._builder.store(vector, self._place(first, half * _VECTOR_BYTES, _VECTOR), align=4)

    def _gated(self, gate: Any, up: Any) -> Any:
        builder, one = self._builder, ir.Constant(_VECTOR, [1.0] * LANES)
        shrunk = builder.fadd(one, emit_exp(builder, builder.fneg(gate)))
        return builder.fmul(builder.fdiv(gate, shrunk), up)

    def _place(self, base: Any, offset: Any, kind: Any) -> Any:
        if isinstance(offset, int):
            offset = ir.Constant(_INT64, offset)
        return self._builder.bitcast(self._builder.gep(base, [offset]), kind.as_pointer())


def _emit_prefetch(builder: Any, address: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _INT, _INT, _INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    read, into_second_cache, data = (ir.Constant(_INT, number) for number in (0, 2, 1))
    builder.call(function, [builder.inttoptr(address, _BYTE_POINTER), read, into_second_cache, data])


@intrinsic  # type: ignore[misc]
def _prefetch(typing_context: Any, address: Any) -> Any:
    """Asks for the cache line at `address` (an int64) without waiting for it; any address may be asked for."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _emit_prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


prefetch: Any = _prefetch  # Called without the first argument, which is numba's.

# Sizes between these would win a little for few row counts, and cost each first start a second of compiling.
_tile_1, _tile_4, _tile_most = (_tile(num_rows) for num_rows in (1, 4, MOST_ROWS))
_two_1, _two_4, _two_most = (_tile(num_rows, width=2) for num_rows in (1, 4, MOST_ROWS))
_three_1, _three_4, _three_most = (_tile(num_rows, width=3) for num_rows in (1, 4, MOST_ROWS))
_scattered_1, _scattered_4, _scattered_most = (_tile(num_rows, is_scattered=True) for num_rows in (1, 4, MOST_ROWS))
_half_scattered_most = _tile(MOST_ROWS, is_scattered=True, num_vectors=1)
_ADDRESS_BYTES: Final = 8


@numba.njit(nogil=True, error_model="numpy", inline="never")  # type: ignore[untyped-decorator]
def multiply_panel(
    num_rows: Any,
    rows: Any,
    row_bytes: Any,
    input_bytes: Any,
    panel: Any,
    width: Any,
    inputs: Any,
    out: Any,
    out_bytes: Any,
    use: Any,
    ahead: Any,
    widened: Any,
) -> None:
    """All rows by one panel, whose weights take `width` bytes each, the largest tiles first; see `_tile`. Everything is an
    int64. The first of the largest tiles asks for the panel at `ahead`, so that whoever multiplies by that one next need
    not wait for memory, and leaves a narrow one in four bytes at `widened` for those behind it."""
    size = np.int64(WIDE_BYTES)
    if num_rows >= MOST_ROWS and width != WIDE:
        if width == 2:
            _two_most(rows, row_bytes, input_bytes, panel, size, inputs, out, out_bytes, use, ahead, widened)
        else:
            _three_most(rows, row_bytes, input_bytes, panel, size, inputs, out, out_bytes, use, ahead, widened)
        rows, out, num_rows = rows + MOST_ROWS * row_bytes, out + MOST_ROWS * out_bytes, num_rows - MOST_ROWS
        panel = ahead = widened
        width = np.int64(WIDE)
    while num_rows >= MOST_ROWS:
        _tile_most(rows, row_bytes, input_bytes, panel, size, inputs, out, out_bytes, use, ahead, widened)
        rows, out, num_rows = rows + MOST_ROWS * row_bytes, out + MOST_ROWS * out_bytes, num_rows - MOST_ROWS
        ahead = panel
    while num_rows >= 4:
        if width == WIDE:
            _tile_4(rows, row_bytes, input_bytes, panel, size, inputs, out, out_bytes, use, ahead, widened)
        elif width == 2:
            _two_4(rows, row_bytes, input_bytes, panel, size, inputs, out, out_bytes, use, ahead, widened)
        else:
            _three_4(rows, row_bytes, input_bytes, panel, size, inputs, out, out_bytes, use, ahead, widened)
        rows, out, num_rows = rows + 4 * row_bytes, out + 4 * out_bytes, num_rows - 4
    while num_rows >= 1:
        if width == WIDE:
            _tile_1(rows, row_bytes, input_bytes, panel, size, inputs, out, out_bytes, use, ahead, widened)
        elif width == 2:
            _two_1(rows, row_bytes, input_bytes, panel, size, inputs, out, out_bytes, use, ahead, widened)
        else:
            _three_1(rows, row_bytes, input_bytes, panel, size, inputs, out, out_bytes, use, ahead, widened)
        rows, out, num_rows = rows + row_bytes, out + out_bytes, num_rows - 1


@numba.njit(nogil=True, error_model="numpy", inline="never")  # type: ignore[untyped-decorator]
def multiply_scattered(
    num_rows: Any,
    row_addresses: Any,
    input_bytes: Any,
    panel_addresses: Any,
    panel_offset: Any,
    inputs: Any,
    out: Any,
    out_bytes: Any,
    use: Any,
    is_half: Any,
) -> None:
    """As `multiply_panel`, of rows and inputs of a panel that lie anywhere: tables of their addresses are given. Of the
    panel's second half nothing need be right with `is_half`."""
    table, unused = row_addresses, np.int64(0)
    while is_half and num_rows >= MOST_ROWS:
        _half_scattered_most(
            table, unused, input_bytes, panel_addresses, panel_offset, inputs, out, out_bytes, use, unused, unused
        )
        table, out, num_rows = table + MOST_ROWS * _ADDRESS_BYTES, out + MOST_ROWS * out_bytes, num_rows - MOST_ROWS
    while num_rows >= MOST_ROWS:
        _scattered_most(
            table, unused, input_bytes, panel_addresses, panel_offset, inputs, out, out_bytes, use, unused, unused
        )
        table, out, num_rows = table + MOST_ROWS * _ADDRESS_BYTES, out + MOST_ROWS * out_bytes, num_rows - MOST_ROWS
    while num_rows >= 4:
        _scattered_4(
            table, unused, input_bytes, panel_addresses, panel_offset, inputs, out, out_bytes, use, unused, unused
        )
        table, out, num_rows = table + 4 * _ADDRESS_BYTES, out + 4 * out_bytes, num_rows - 4
    while num_rows >= 1:
        _scattered_1(
            table, unused, input_bytes, panel_addresses, panel_offset, inputs, out, out_bytes, use, unused, unused
        )
        table, out, num_rows = table + _ADDRESS_BYTES, out + out_bytes, num_rows - 1

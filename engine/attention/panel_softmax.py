"""Emits the softmax of a panel of queries as it goes, in vector registers; for kernels compiled by numba.

A round's scores are `[key, query]`, as many queries as a panel has lanes, so nothing is shuffled. Left to the compiler, each
key is a loop of two vectors with checks of what overlaps before it. What scores are, and what becomes of the weights, is for
`tiled.py`.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from engine.register_tiles import LANES, PANEL
from engine.vector_exp import emit_exp

_INT64 = ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_HALVES: Final = PANEL // LANES


@intrinsic  # type: ignore[misc]
def _soften(typing_context: Any, scores: Any, num_keys: Any, highest: Any, total: Any, shrink: Any) -> Any:
    """Makes weights of `num_keys` rows of scores, and brings `highest` and `total` up to date; `shrink` is by what
    factor that which was summed up with the former maximum is to be multiplied. Everything is an int64: a number and
    addresses of float32, `[key, PANEL]` and `[PANEL]`. Where all is −infinity, weights are 0; NaN is nowhere the highest,
    and makes its weight and the total NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _Softmax(builder, *arguments).emit()
        return context.get_dummy_value()

    number = types.int64
    return types.void(number, number, number, number, number), generate


soften: Any = _soften  # Called without the first argument, which is numba's.


class _Softmax:
    def __init__(self, builder: Any, scores: Any, num_keys: Any, highest: Any, total: Any, shrink: Any) -> None:
        self._builder = builder
        self._scores, self._num_keys = scores, num_keys
        self._highest, self._total, self._shrink = highest, total, shrink

    def emit(self) -> None:
        builder = self._builder
        before = [builder.load(self._place(self._highest, half), align=4) for half in range(_HALVES)]
        highest = self._over_keys(before, self._higher)
        infinite, zero = _constant(-float("inf")), _constant(0.0)
        bases, totals = [], []
        for half in range(_HALVES):
            builder.store(highest[half], self._place(self._highest, half), align=4)
            # Where nothing was seen yet, any number does; of the infinite there is no difference.
            bases.append(builder.select(builder.fcmp_ordered("==", highest[half], infinite), zero, highest[half]))
            shrink = emit_exp(builder, builder.fsub(before[half], bases[half]))
            builder.store(shrink, self._place(self._shrink, half), align=4)
            kept = builder.load(self._place(self._total, half), align=4)
            totals.append(builder.fmul(kept, shrink))

        def weigh(half: int, total: Any, place: Any) -> Any:
            weight = emit_exp(builder, builder.fsub(builder.load(place, align=4), bases[half]))
            builder.store(weight, place, align=4)
            return builder.fadd(total, weight)

        for half, total in enumerate(self._over_keys(totals, weigh)):
            builder.store(total, self._place(self._total, half), align=4)

    def _higher(self, half: int, highest: Any, place: Any) -> Any:
        score = self._builder.load(place, align=4)
        return self._builder.select(self._builder.fcmp_ordered(">", score, highest), score, highest)

    def _over_keys(self, begin: list[Any], step: Any) -> list[Any]:
        """What `step(half, value, place of a key's scores)` makes of `begin`, key after key; there is at least one."""
        builder = self._builder
        before, loop, after = builder.block, builder.append_basic_block("keys"), builder.append_basic_block("seen")
        builder.branch(loop)
        builder.position_at_end(loop)
        at = builder.phi(_INT64)
        at.add_incoming(ir.Constant(_INT64, 0), before)
        values = [builder.phi(_VECTOR) for _ in begin]
        row = builder.add(self._scores, builder.mul(at, ir.Constant(_INT64, PANEL * 4)))
        found = [step(half, value, self._place(row, half)) for half, value in enumerate(values)]
        for value, first, next_one in zip(values, begin, found, strict=True):
            value.add_incoming(first, before)
            value.add_incoming(next_one, loop)
        following = builder.add(at, ir.Constant(_INT64, 1))
        at.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, self._num_keys), loop, after)
        builder.position_at_end(after)
        return found

    def _place(self, base: Any, half: int) -> Any:
        address = self._builder.add(base, ir.Constant(_INT64, half * 4 * LANES))
        return self._builder.inttoptr(address, _VECTOR.as_pointer())


def _constant(number: float) -> Any:
    return ir.Constant(_VECTOR, [number] * LANES)

"""Copies spans of memory past the processor's caches: what is stored or loaded is not read again soon, and a copy that
fetches every line it is about to overwrite moves half as many bytes again.

Machine code by numba, many spans in one call and without the interpreter's lock. Which spans, and whether they may be
copied, is the caller's: addresses are trusted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

SMALLEST_STREAMED_BYTES = 32 * 1024
"""Smaller spans are copied through the caches, where they fit beside everything else."""
_LINE_BYTES = 64

CopySpans = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


@functools.cache
def compiled() -> CopySpans:
    """`copy(targets, sources, sizes)`: three arrays of int64, addresses and bytes, span by span; on return every byte is
    visible to other processors. The first call compiles (half a second)."""
    import numba
    from llvmlite import ir
    from numba import extending, types
    from numba.core import cgutils

    def stream(_typing: Any, target: Any, source: Any, lines: Any) -> Any:
        def build(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            vector = ir.VectorType(ir.IntType(64), _LINE_BYTES // 8)
            to, of = (builder.inttoptr(each, vector.as_pointer()) for each in arguments[:2])
            past_caches = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
            with cgutils.for_range(builder, arguments[2]) as loop:
                line = builder.load(builder.gep(of, [loop.index]), align=1)
                written = builder.store(line, builder.gep(to, [loop.index]), align=_LINE_BYTES)
                written.set_metadata("nontemporal", past_caches)
            builder.fence("seq_cst")  # Such stores are not ordered with any others.
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp), build

    def move(_typing: Any, target: Any, source: Any, size: Any) -> Any:
        def build(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            to, of = (builder.inttoptr(each, cgutils.voidptr_t) for each in arguments[:2])
            cgutils.raw_memcpy(builder, to, of, arguments[2], 1)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp), build

    stream_lines: Any = extending.intrinsic(stream)
    move_bytes: Any = extending.intrinsic(move)

    @numba.njit("void(int64[::1], int64[::1], int64[::1])", nogil=True)
    def copy(targets: Any, sources: Any, sizes: Any) -> None:
        for at in range(len(targets)):
            to, of, size = targets[at], sources[at], sizes[at]
            if size < SMALLEST_STREAMED_BYTES:
                move_bytes(to, of, size)
                continue
            head = -to % _LINE_BYTES
            lines = (size - head) // _LINE_BYTES
            done = head + lines * _LINE_BYTES
            move_bytes(to, of, head)
            stream_lines(to + head, of + head, lines)
            move_bytes(to + done, of + done, size - done)

    return copy  # type: ignore[no-any-return]

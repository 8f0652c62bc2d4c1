"""Copies spans of memory and hashes them (xxh3-64) in one pass, so that a checksum costs no second reading.

Each line of memory is loaded once, added to the hash, and stored past the caches: the hash is of what was stored, whatever
somebody else writes into the source meanwhile. It is the hash that `xxhash` computes, laid out after the specification of
XXH3 with its default secret; only for whole lines, of a kilobyte and more, to an aligned place: `can_hash` says so, and the
caller has another way. Machine code by numba, as in `streaming_copy.py`; addresses are trusted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np

SMALLEST_BYTES: Final = 1024
LINE_BYTES: Final = 64
"""XXH3's stripe: eight lanes of 64 bits."""
_LINES_PER_BLOCK: Final = 16
_LANES: Final = 8

_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364ea"
    "c5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64: Final = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_FIRST: Final = (
    _PRIME32[2], _PRIME64[0], _PRIME64[1], _PRIME64[2], _PRIME64[3], _PRIME32[1], _PRIME64[4], _PRIME32[0],
)  # fmt: skip
_AVALANCHE: Final = 0x165667919E3779F9
_LAST_KEY: Final = len(_SECRET) - LINE_BYTES - 7
_MERGE_KEY: Final = 11

HashSpans = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def can_hash(targets: np.ndarray, sizes: np.ndarray) -> bool:
    """Whether these spans can be copied and hashed in one pass."""
    return bool(
        (targets % LINE_BYTES == 0).all() and (sizes % LINE_BYTES == 0).all() and (sizes >= SMALLEST_BYTES).all()
    )


@functools.cache
def compiled() -> HashSpans:
    """`copy(targets, sources, sizes)`: three arrays of int64, addresses and bytes, span by span; the hashes, as uint64. On
    return every byte is visible to other processors. The first call compiles (half a second)."""
    import numba
    from llvmlite import ir
    from numba import extending, types
    from numba.core import cgutils

    lanes = ir.VectorType(ir.IntType(64), _LANES)

    def constant(values: Any) -> Any:
        return ir.Constant(lanes, [int(value) for value in values])

    def key_at(place: int) -> Any:
        return constant(np.frombuffer(_SECRET, "<u8", _LANES, place))

    swap = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [lane ^ 1 for lane in range(_LANES)])
    low, half = constant([0xFFFFFFFF] * _LANES), constant([32] * _LANES)

    def add_line(builder: Any, sums: Any, key: Any, to: Any, of: Any, index: Any) -> None:
        """One line, loaded once (so `volatile`: a second load could give something else), stored, and added."""
        line = builder.load(builder.gep(of, [index]), align=1)
        line.opname = "load volatile"
        written = builder.store(line, builder.gep(to, [index]), align=LINE_BYTES)
        written.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        keyed = builder.xor(line, key)
        product = builder.mul(builder.and_(keyed, low), builder.lshr(keyed, half))
        crossed = builder.shuffle_vector(line, line, swap)
        builder.store(builder.add(builder.load(sums), builder.add(product, crossed)), sums)

    def scramble(builder: Any, sums: Any) -> None:
        value = builder.load(sums)
        value = builder.xor(value, builder.lshr(value, constant([47] * _LANES)))
        value = builder.xor(value, key_at(len(_SECRET) - LINE_BYTES))
        builder.store(builder.mul(value, constant([_PRIME32[0]] * _LANES)), sums)

    def accumulate(_typing: Any, target: Any, source: Any, lines: Any, result: Any) -> Any:
        def build(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            word = arguments[2].type
            to, of, out = (builder.inttoptr(each, lanes.as_pointer()) for each in (*arguments[:2], arguments[3]))
            sums = cgutils.alloca_once_value(builder, constant(_FIRST))
            last = builder.sub(arguments[2], word(1))
            blocks = builder.udiv(last, word(_LINES_PER_BLOCK))
            with cgutils.for_range(builder, blocks) as block:
                first = builder.mul(block.index, word(_LINES_PER_BLOCK))
                for at in range(_LINES_PER_BLOCK):
                    add_line(builder, sums, key_at(8 * at), to, of, builder.add(first, word(at)))
                scramble(builder, sums)
            done = builder.mul(blocks, word(_LINES_PER_BLOCK))
            rest = builder.sub(last, done)
            for at in range(_LINES_PER_BLOCK - 1):
                with builder.if_then(builder.icmp_unsigned(">", rest, word(at))):
                    add_line(builder, sums, key_at(8 * at), to, of, builder.add(done, word(at)))
            add_line(builder, sums, key_at(_LAST_KEY), to, of, last)
            builder.store(builder.load(sums), out, align=8)
            builder.fence("seq_cst")  # Stores past the caches are not ordered with any others.
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp, types.intp), build

    def fold(_typing: Any, first: Any, second: Any) -> Any:
        def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            wide = ir.IntType(128)
            product = builder.mul(*(builder.zext(each, wide) for each in arguments))
            upper = builder.trunc(builder.lshr(product, wide(64)), ir.IntType(64))
            return builder.xor(builder.trunc(product, ir.IntType(64)), upper)

        return types.uint64(types.uint64, types.uint64), build

    accumulate_lines: Any = extending.intrinsic(accumulate)
    folded: Any = extending.intrinsic(fold)
    merge_keys = np.frombuffer(_SECRET, "<u8", _LANES, _MERGE_KEY).copy()
    prime, avalanche = np.uint64(_PRIME64[0]), np.uint64(_AVALANCHE)
    by_37, by_32 = np.uint64(37), np.uint64(32)

    @numba.njit("uint64[::1](int64[::1], int64[::1], int64[::1])", nogil=True)
    def copy(targets: Any, sources: Any, sizes: Any) -> Any:
        hashes = np.empty(len(targets), np.uint64)
        sums = np.empty(_LANES, np.uint64)
        for at in range(len(targets)):
            accumulate_lines(targets[at], sources[at], sizes[at] // LINE_BYTES, sums.ctypes.data)
            value = np.uint64(sizes[at]) * prime
            for lane in range(0, _LANES, 2):
                value += folded(sums[lane] ^ merge_keys[lane], sums[lane + 1] ^ merge_keys[lane + 1])
            value ^= value >> by_37
            value *= avalanche
            hashes[at] = value ^ (value >> by_32)
        return hashes

    return copy  # type: ignore[no-any-return]

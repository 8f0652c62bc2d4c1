"""Holds float32 weights in two or three bytes each where that loses nothing, and widens them in registers.

A decode reads every weight once, so its time is the bytes that they take. Those of a checkpoint in bfloat16 are float32 numbers
whose last two bytes are zero, of one in float16 the last is, and so it is of most that were rounded to eight bits or
fewer: what is zero need not be read. The numbers that are multiplied are the same, to the bit.

How inputs of a panel lie (`engine/register_tiles.py`) in so many bytes a weight, n being half a panel's outputs:

    4  as float32, output after output
    3  the same without the last bytes
    2  n words: the first two bytes of output i in the upper half of output n + i's word … in its lower half

so that two bytes cost one instruction for a register of weights, and three cost two.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

WIDE: Final = 4
"""Bytes of a weight that is held as it is."""
_SAMPLE: Final = 2**16
_INT, _INT64 = ir.IntType(32), ir.IntType(64)


def fewest_bytes(weight: NDArray[np.float32]) -> int:
    """In how many bytes, 2, 3 or 4, each of these can be held exactly."""
    words = weight.reshape(-1).view(np.uint32)
    used = np.bitwise_or.reduce(words[:_SAMPLE], initial=np.uint32(0))
    if not used & 0xFF:
        used = np.bitwise_or.reduce(words, initial=np.uint32(0))
    return WIDE if used & 0xFF else 3 if used & 0xFF00 else 2


def narrowed(panel: NDArray[np.float32], width: int) -> NDArray[np.uint8]:
    """A panel, `[input, output]`, in `width` bytes a weight; `[byte]`. Of each the bytes left out must be zero."""
    words = np.ascontiguousarray(panel).view(np.uint32)
    if width == 3:
        octets, kept = words.view(np.uint8).reshape(-1, WIDE), np.empty((words.size, 3), np.uint8)
        for place in range(3):  # Four times as quick as all three at once.
            kept[:, place] = octets[:, place + 1]
        return kept.reshape(-1)
    if width == 2:
        half = words.shape[1] // 2
        words = words[:, :half] >> np.uint32(16) | words[:, half:] & np.uint32(0xFFFF0000)
    return words.view(np.uint8).reshape(-1)


def bytes_behind(lanes: int) -> int:
    """How far behind the last weight `emit_widened` may read, of registers of so many numbers: of three bytes it takes twelve
    for every four numbers, and loads sixteen."""
    return lanes


def emit_widened(builder: Any, width: int, lanes: int, panel: Any, at: Any) -> list[Any]:
    """Two registers with the weights of input `at` of the panel at address `panel`, held in 2 or 3 bytes."""
    first = builder.add(panel, builder.mul(at, ir.Constant(_INT64, 2 * lanes * width)))
    halves = _from_two(builder, lanes, first) if width == 2 else _from_three(builder, lanes, first)
    return [builder.bitcast(one, ir.VectorType(ir.FloatType(), lanes)) for one in halves]


def _from_two(builder: Any, lanes: int, first: Any) -> tuple[Any, Any]:
    kind = ir.VectorType(_INT, lanes)
    words = builder.load(builder.inttoptr(first, kind.as_pointer()), align=4)
    upper = builder.and_(words, ir.Constant(kind, [0xFFFF0000] * lanes))
    return builder.shl(words, ir.Constant(kind, [16] * lanes)), upper


def _from_three(builder: Any, lanes: int, first: Any) -> list[Any]:
    """Four weights' twelve bytes go to each sixteen of the register, and there each three to the upper ones of four."""
    kind, octets = ir.VectorType(_INT, lanes), ir.VectorType(ir.IntType(8), 4 * lanes)
    apart = [lane // 4 * 3 + min(lane % 4, 2) for lane in range(lanes)]
    places = []
    for octet in range(4 * lanes):
        group, number, part = octet // 16 * 16, octet % 16 // 4, octet % 4
        places.append(group + 3 * number + part - 1 if part else 4 * lanes)  # Beyond the register: a zero.
    found = []
    for half in range(2):
        address = builder.add(first, ir.Constant(_INT64, 3 * lanes * half))
        loaded = builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)
        spread = builder.shuffle_vector(loaded, ir.Constant(kind, ir.Undefined), ir.Constant(kind, apart))
        zeros = ir.Constant(octets, [0] * (4 * lanes))
        places_at = ir.Constant(ir.VectorType(_INT, 4 * lanes), places)
        found.append(builder.bitcast(builder.shuffle_vector(builder.bitcast(spread, octets), zeros, places_at), kind))
    return found

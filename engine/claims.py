"""Lets threads of a kernel take over one another's work: whoever claims a task first does it; for kernels compiled by numba.

numba deals the turns of a parallel loop out before it begins. On a machine that others use too, the server of the same
process first of all, one core then waits for the other at the end of each product. So each thread has a share of its own, which it
goes through from the beginning, and then helps the others from the ends of theirs.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

_BYTE = ir.IntType(8)


@intrinsic  # type: ignore[misc]
def _xchg(typing_context: Any, address: Any) -> Any:
    """Sets the byte at `address` (an int64) to 1 and gives what it was, at once for all threads."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _BYTE.as_pointer())
        before = builder.atomic_rmw("xchg", place, ir.Constant(_BYTE, 1), "monotonic")
        return builder.zext(before, ir.IntType(64))

    return types.int64(types.int64), generate


_exchange: Any = _xchg  # Called without the first argument, which is numba's.


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def claim(claims: Any, task: Any) -> Any:
    """Whether the caller is the first to ask for this task. `claims` is a byte for each task, zero at first."""
    return claims[task] == 0 and _exchange(np.int64(claims.ctypes.data) + task) == 0

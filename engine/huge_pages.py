"""Memory in pages as large as the system gives them: fewer first touches, and fewer places that a core must look up."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

_HUGE_PAGE: Final = 2 * 2**20
_PIECE: Final = 16 * 2**20
_MOST_THREADS: Final = 8


def huge_pages(num_bytes: int) -> np.ndarray:
    """So many zeros (uint8), on a huge page's boundary; a page is taken when first written."""
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # A kernel without them: slower, and right.
            memory.madvise(mmap.MADV_HUGEPAGE)
    everything = np.frombuffer(memory, np.uint8)
    ahead = -everything.ctypes.data % _HUGE_PAGE
    return everything[ahead : ahead + num_bytes]


def take_pages(memory: np.ndarray, progress: Callable[[float], None]) -> None:
    """Writes a zero into every page of `memory`, to which nobody has written, so that they are there: nobody pays for them
    later, and the system has not promised what it does not have. On a virtual machine whose host gives memory only when it
    is touched, that takes up to three seconds a gigabyte the first time. `progress` is told the share that is done."""

    def take(begin: int) -> None:
        memory[begin : begin + _PIECE : mmap.PAGESIZE] = 0

    begins = range(0, len(memory), _PIECE)
    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
        for done, _ in enumerate(threads.map(take, begins), 1):
            progress(done / len(begins))

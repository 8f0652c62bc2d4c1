"""Memory in large pages: zeros on a boundary, there when it is asked for, and kept as long as anybody looks at it."""

from __future__ import annotations

import engine.environment  # noqa: F401  isort: skip

import ctypes
import mmap

import numpy as np
import pytest
import torch

from engine.huge_pages import _PIECE, huge_pages, take_pages
from engine.kv_memory import KvMemory
from engine.layout import BlockLayout

MIB = 2**20


@pytest.mark.parametrize("num_bytes", [1, 4096, 3 * MIB + 5])
def test_memory_is_zero_and_begins_on_a_huge_pages_boundary(num_bytes: int) -> None:
    memory = huge_pages(num_bytes)

    assert memory.nbytes == num_bytes
    assert memory.ctypes.data % (2 * MIB) == 0
    assert not memory.any()


def test_memory_stays_as_long_as_a_view_of_it() -> None:
    view = torch.from_numpy(huge_pages(8 * MIB)).view(torch.bfloat16)
    view.fill_(2.0)

    others = [huge_pages(8 * MIB) for _ in range(4)]

    assert (view == 2.0).all()
    assert not any(other.any() for other in others)


def test_pages_are_resident_once_they_are_taken() -> None:
    """Small ones, where the system has no others; whoever writes first would pay for them."""
    memory = huge_pages(5 * _PIECE // 2)
    told: list[float] = []
    before = _resident_bytes(memory)

    take_pages(memory, told.append)

    assert before == 0
    assert _resident_bytes(memory) >= memory.nbytes
    assert told == [1 / 3, 2 / 3, 1.0]
    assert not memory.any()


def test_the_pool_takes_its_pages() -> None:
    layout = BlockLayout(num_layers=3, tokens_per_block=4, num_kv_heads=2, head_dim=8, dtype="bfloat16")
    kv = KvMemory(layout, 4 * MIB // layout.block_bytes, torch.device("cpu"))

    kv.take_pages(lambda share: None)

    pool = kv.pool.view(torch.uint8).numpy().reshape(-1)
    assert _resident_bytes(pool) >= pool.nbytes


def test_a_neighbour_that_somebody_holds_is_not_counted() -> None:
    """The system joins mappings that lie side by side: what was there of the one was taken for the other's."""
    neighbours = [huge_pages(8 * MIB) for _ in range(8)]
    for neighbour in neighbours[::2]:
        neighbour[:] = 1

    assert [_resident_bytes(memory) for memory in neighbours] == [8 * MIB, 0] * 4


def _resident_bytes(memory: np.ndarray) -> int:
    """Of these very pages, as mincore(2) says. What /proc/self/smaps says of a mapping is not it: the system joins
    neighbouring mappings, so an array somebody else still held was counted."""
    first = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    num_pages = -(-(memory.ctypes.data + memory.nbytes - first) // mmap.PAGESIZE)
    pages = np.empty(num_pages, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(
        ctypes.c_void_p(first), ctypes.c_size_t(num_pages * mmap.PAGESIZE), ctypes.c_void_p(pages.ctypes.data)
    ):
        raise OSError(ctypes.get_errno(), "mincore")
    return int((pages & 1).sum()) * mmap.PAGESIZE

"""Memory in large pages: zeros on a boundary, there when it is asked for, and kept as long as anybody looks at it."""

from __future__ import annotations

import engine.environment  # noqa: F401  isort: skip

import re
from pathlib import Path

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
    assert _resident_bytes(pool) >= pool.nbytes // 4096 * 4096


def _resident_bytes(memory: np.ndarray) -> int:
    """Of the mapping in which it begins."""
    of_mapping = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            of_mapping = int(bounds[1], 16) <= memory.ctypes.data < int(bounds[2], 16)
        elif of_mapping and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no such mapping")

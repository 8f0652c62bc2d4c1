"""Which copies of a batch are one: blocks that are neighbours on both sides travel together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """`num_blocks` device blocks from `device_block` on, and as many on the host from `offset` on."""

    device_block: int
    offset: int
    num_blocks: int


def runs_of(blocks: Sequence[tuple[int, int]], block_bytes: int) -> list[Run]:
    """Pairs of device block and host offset as few runs, in their order. On the host blocks are neighbours where one begins
    where the other ends: slots with a gap between them are not."""
    runs: list[Run] = []
    for device_block, offset in blocks:
        if runs:
            last = runs[-1]
            ends = last.device_block + last.num_blocks, last.offset + last.num_blocks * block_bytes
            if ends == (device_block, offset):
                runs[-1] = Run(last.device_block, last.offset, last.num_blocks + 1)
                continue
        runs.append(Run(device_block, offset, 1))
    return runs

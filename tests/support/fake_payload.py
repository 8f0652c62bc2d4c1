"""A tier's client as block transfers need it, over a payload of its own and without a daemon."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from cached.client import Lease, RegistrableMemory
from cached.protocol import LeasedBlock, Reserved


@dataclass
class FakePayload:
    """`ends_after` questions about its session that session is over; `copied_by_host` says which slots went through the
    processor."""

    num_slots: int
    slot_bytes: int
    block_bytes: int
    ends_after: int | None = None
    copied_by_host: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        fd = os.memfd_create("payload")
        os.truncate(fd, self.slot_bytes * self.num_slots)
        self.mapping = mmap.mmap(fd, self.slot_bytes * self.num_slots)
        os.close(fd)
        self.array = np.frombuffer(self.mapping, np.uint8)
        self.array[:] = 0

    @property
    def payload(self) -> memoryview:
        return self.array.data

    @property
    def registrable(self) -> RegistrableMemory:
        return RegistrableMemory(self.payload, self.slot_bytes, self.num_slots, 2**30)

    def slot(self, number: int) -> np.ndarray:
        return self.array[number * self.slot_bytes : number * self.slot_bytes + self.block_bytes]

    def may_copy(self, numbers: Sequence[int]) -> bool:
        if self.ends_after is None:
            return True
        self.ends_after -= 1
        return self.ends_after >= 0

    def read_many(self, lease: Lease, blocks: Sequence[LeasedBlock], outs: Sequence[memoryview]) -> bool:
        for block, out in zip(blocks, outs, strict=True):
            self.copied_by_host.append(block.slot_offset // self.slot_bytes)
            out[:] = self.payload[block.slot_offset : block.slot_offset + self.block_bytes]
        return True

    def write_many(self, reserved: Sequence[Reserved], data: Sequence[memoryview]) -> bool:
        for slot, content in zip(reserved, data, strict=True):
            self.copied_by_host.append(slot.slot_offset // self.slot_bytes)
            self.payload[slot.slot_offset : slot.slot_offset + self.block_bytes] = content
        return True

    def reserved(self, slot: int) -> Reserved:
        return Reserved(slot + 1, slot * self.slot_bytes)

    def leased(self, slot: int, checksum: int | None = None) -> LeasedBlock:
        own = xxhash.xxh3_64_intdigest(self.slot(slot))
        return LeasedBlock(slot * self.slot_bytes, 1, own if checksum is None else checksum, 35, None, "demote")

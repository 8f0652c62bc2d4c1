"""Copies one block between the device's KV memory and its slot in the arena, with its checksum.

What is copied and when is the tier worker's decision; how bytes reach a device is `KvMemory`'s. A block's checksum is
xxh3-64 of its whole slot, computed on the bytes in the arena: by the writer after its copy, by the reader before it.
"""

from __future__ import annotations

from typing import Protocol

import xxhash


class BlockMemory(Protocol):
    """What this module needs of the device's KV memory. Both calls return when the copy is complete, and may be made
    from another thread than the one that runs steps, as long as no step writes (or, for `write_block`, reads) the block.
    """

    def read_block(self, block_id: int, out: memoryview) -> None:
        """Copy a whole block from the device."""

    def write_block(self, block_id: int, data: memoryview) -> None:
        """Copy a whole block to the device."""


def store_block(kv: BlockMemory, device_block: int, payload: memoryview, offset: int, block_bytes: int) -> int:
    """Copy `device_block` to the slot at `offset` and return the checksum to commit."""
    slot = payload[offset : offset + block_bytes]
    kv.read_block(device_block, slot)
    return xxhash.xxh3_64_intdigest(slot)


def load_block(
    kv: BlockMemory,
    device_block: int,
    payload: memoryview,
    offset: int,
    block_bytes: int,
    checksum: int | None,
) -> bool:
    """Copy the slot at `offset` to `device_block`; False, and nothing copied, when its bytes do not give `checksum`.

    `checksum` None skips the comparison. A slot that changes between comparison and copy is caught by the release of
    its lease, which is then answered no.
    """
    slot = payload[offset : offset + block_bytes]
    if checksum is not None and xxhash.xxh3_64_intdigest(slot) != checksum:
        return False
    kv.write_block(device_block, slot)
    return True

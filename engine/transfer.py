"""Copies one block between the device's KV memory and a buffer of the engine's own, with its checksum.

What is copied and when is the tier worker's decision; how bytes reach a device is `KvMemory`'s, how they reach the arena
the tier client's. The checksum is xxh3-64 of the whole block, computed on the engine's own copy: what a peer scribbles
into the arena meanwhile is neither hashed by the writer nor, once compared, read again by the reader.
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


def store_block(kv: BlockMemory, device_block: int, scratch: memoryview) -> int:
    """Copy `device_block` into `scratch` and return the checksum to commit."""
    kv.read_block(device_block, scratch)
    return xxhash.xxh3_64_intdigest(scratch)


def load_block(kv: BlockMemory, device_block: int, scratch: memoryview, checksum: int | None) -> bool:
    """Copy `scratch` to `device_block`; False, and nothing copied, when its bytes do not give `checksum`. None skips the
    comparison."""
    if checksum is not None and xxhash.xxh3_64_intdigest(scratch) != checksum:
        return False
    kv.write_block(device_block, scratch)
    return True

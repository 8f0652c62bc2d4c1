"""Copies blocks between the device's KV memory and the tier's payload, some at a time, with their checksums.

What is copied and when is the tier worker's decision; whether a slot may be touched the tier client's. The checksum is
xxh3-64 of the whole block, and always of memory that no peer can reach: a store's of what the device holds, a load's of
what has arrived there. So what is compared is what is used, whatever a peer scribbles into the arena meanwhile.

Here is the way for a device whose memory is the processor's; `copy_streams.py` has the one for devices with streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from cached.client import Lease, RegistrableMemory
from cached.protocol import LeasedBlock, Reserved

COPY_BYTES: Final = 4 * 2**20
"""Copied in one call: a fraction of a millisecond, after which whoever waits for an answer gets it."""


class Payload(Protocol):
    """What copies need of the tier's client."""

    @property
    def payload(self) -> memoryview | None:
        """All bytes of the arena, mapped; None without a session."""

    @property
    def registrable(self) -> RegistrableMemory | None:
        """The same, once it may be registered with a device."""

    def may_copy(self, numbers: Sequence[int]) -> bool:
        """Whether these leases and reservations are of the session that is open."""

    def read_many(self, lease: Lease, blocks: Sequence[LeasedBlock], outs: Sequence[memoryview]) -> bool:
        """Copy leased blocks out; False: nothing of it counts."""

    def read_hashed(self, lease: Lease, blocks: Sequence[LeasedBlock], outs: Sequence[memoryview]) -> list[int] | None:
        """The same, and xxh3-64 of what has arrived; None: nothing of it counts."""

    def write_many(self, reserved: Sequence[Reserved], data: Sequence[memoryview]) -> bool:
        """Copy blocks into reserved slots; False: nothing of it counts."""

    def write_hashed(self, reserved: Sequence[Reserved], data: Sequence[memoryview]) -> list[int] | None:
        """The same, and xxh3-64 of each block; None: nothing of it counts."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Every block of the batch is on the device."""


@dataclass(frozen=True, slots=True)
class Mismatched:
    """The first `num_good` blocks are on the device; the one after them is not what was stored."""

    num_good: int


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The session is over, or the payload was cut short, which the daemon sees to. None of the batch counts."""


LoadOutcome = Arrived | Mismatched | Unreadable


class BlockTransfer(Protocol):
    """What the tier worker needs of a device. Called from its thread only, while steps run on other blocks; every call
    returns when its copies are complete. A batch has at most `batch_blocks` blocks."""

    batch_blocks: int

    def store(self, payload: Payload, blocks: Sequence[tuple[int, Reserved]]) -> list[int] | None:
        """Copy device blocks into their slots; the checksums to commit, or None when the slots cannot be written."""

    def load(
        self, payload: Payload, lease: Lease, blocks: Sequence[tuple[int, LeasedBlock]], verify: bool
    ) -> LoadOutcome:
        """Copy leased blocks into device blocks. One that does not count may have been overwritten all the same."""

    def look(self, payload: Payload) -> None:
        """Between copies, while there is a session: make ready for the payload that it came with, if that is another."""

    def close(self) -> None:
        """Let go of everything; nothing is copied afterwards."""

    def statistics(self) -> dict[str, int]:
        """How much of the payload is pinned: `pinned_bytes`, `unpinned_bytes`, `pin_failures`. Asked by any thread."""


class HostBlocks(Protocol):
    """KV memory that the processor reaches."""

    def block_view(self, block_id: int) -> memoryview:
        """The bytes of one block, in place."""


class HostTransfer:
    """Straight between the pool's memory and the slots: nothing lies between, and nothing is asynchronous."""

    def __init__(self, memory: HostBlocks, block_bytes: int) -> None:
        self.batch_blocks = max(1, COPY_BYTES // block_bytes)
        self._memory = memory

    def store(self, payload: Payload, blocks: Sequence[tuple[int, Reserved]]) -> list[int] | None:
        """See `BlockTransfer`."""
        views = [self._memory.block_view(device_block) for device_block, _ in blocks]
        return payload.write_hashed([slot for _, slot in blocks], views)

    def load(
        self, payload: Payload, lease: Lease, blocks: Sequence[tuple[int, LeasedBlock]], verify: bool
    ) -> LoadOutcome:
        """See `BlockTransfer`."""
        views = [self._memory.block_view(device_block) for device_block, _ in blocks]
        leased = [block for _, block in blocks]
        if not verify:
            return Arrived() if payload.read_many(lease, leased, views) else Unreadable()
        hashes = payload.read_hashed(lease, leased, views)
        return Unreadable() if hashes is None else compare(leased, hashes)

    def look(self, payload: Payload) -> None:
        """See `BlockTransfer`. Whoever looks at the bytes has them mapped, and populated in the background."""
        _ = payload.payload

    def close(self) -> None:
        """See `BlockTransfer`."""

    def statistics(self) -> dict[str, int]:
        """See `BlockTransfer`. The processor needs nothing pinned."""
        return {"pinned_bytes": 0, "unpinned_bytes": 0, "pin_failures": 0}


def compare(blocks: Sequence[LeasedBlock], hashes: Sequence[int]) -> Arrived | Mismatched:
    """Which of the blocks with these hashes, from the first on, are what was stored."""
    for at, (block, found) in enumerate(zip(blocks, hashes, strict=True)):
        if found != block.checksum:
            return Mismatched(at)
    return Arrived()

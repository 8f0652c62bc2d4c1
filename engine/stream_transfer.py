"""Stores and loads batches of blocks of a device with streams: by itself where the arena is pinned, else through a buffer.

    store   device ──▶ staging: hashed; and ──▶ slot by the device where it is pinned, else staging ──▶ slot by the processor
    load    slot ──▶ device where it is pinned, then back ──▶ staging to be compared; else slot ──▶ staging, compared ──▶ device

The staging buffer is the engine's own, so that what is hashed or compared is out of every peer's reach; and it is what the
device holds, so that what is compared is what is used. The order of copies and steps is `copy_streams.py`'s, what is pinned
`pinning.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from cached.client import Lease
from cached.protocol import LeasedBlock, Reserved
from engine.copy_runs import runs_of
from engine.copy_streams import CopyStreams, HostRun
from engine.pinning import PayloadPins, StagingBuffer
from engine.transfer import Arrived, LoadOutcome, Mismatched, Payload, Unreadable, compare


class StreamTransfer:
    """`engine.transfer.BlockTransfer` for a device with streams."""

    def __init__(self, streams: CopyStreams, pins: PayloadPins, buffer: StagingBuffer, block_bytes: int) -> None:
        staging = buffer.memory
        self.batch_blocks = len(staging) // block_bytes
        assert self.batch_blocks > 0, "the staging buffer does not hold one block"
        self._streams = streams
        self._pins = pins
        self._buffer = buffer
        self._staging = staging
        self._block_bytes = block_bytes
        self._places = [staging[at * block_bytes : (at + 1) * block_bytes] for at in range(self.batch_blocks)]

    def store(self, payload: Payload, blocks: Sequence[tuple[int, Reserved]]) -> list[int] | None:
        """See `BlockTransfer`."""
        slots = [slot for _, slot in blocks]
        if not payload.may_copy([slot.reservation for slot in slots]):
            return None
        memory, direct = self._direct(payload, [slot.slot_offset for slot in slots])
        copies = self._runs([(block, at * self._block_bytes) for at, (block, _) in enumerate(blocks)], self._staging)
        copies += self._runs(
            [(block, slot.slot_offset) for at, (block, slot) in enumerate(blocks) if direct[at]], memory
        )
        self._do(lambda: self._streams.store([block for block, _ in blocks], copies))
        checksums = [xxhash.xxh3_64_intdigest(place) for place in self._places[: len(blocks)]]
        staged = [at for at, is_direct in enumerate(direct) if not is_direct]
        if staged and not payload.write_many([slots[at] for at in staged], [self._places[at] for at in staged]):
            return None
        is_good = payload.may_copy([slot.reservation for slot in slots]) and self._is_still_direct(
            payload, slots, direct
        )
        return checksums if is_good else None

    def load(
        self, payload: Payload, lease: Lease, blocks: Sequence[tuple[int, LeasedBlock]], verify: bool
    ) -> LoadOutcome:
        """See `BlockTransfer`."""
        leased = [block for _, block in blocks]
        if not payload.may_copy([lease.lease_id]):
            return Unreadable()
        memory, direct = self._direct(payload, [block.slot_offset for block in leased])
        staged = [at for at, is_direct in enumerate(direct) if not is_direct]
        if staged and not payload.read_many(lease, [leased[at] for at in staged], [self._places[at] for at in staged]):
            return Unreadable()
        outcome = self._compare(leased, staged) if verify else Arrived()
        if isinstance(outcome, Mismatched):  # What follows it is of no use to anybody.
            blocks, direct = blocks[: outcome.num_good], direct[: outcome.num_good]
        if not blocks:
            return outcome
        places = [
            (block, slot.slot_offset if direct[at] else at * self._block_bytes)
            for at, (block, slot) in enumerate(blocks)
        ]
        copies = self._runs([places[at] for at in range(len(blocks)) if direct[at]], memory)
        copies += self._runs([places[at] for at in range(len(blocks)) if not direct[at]], self._staging)
        arrived = [at for at in range(len(blocks)) if direct[at] and verify]
        back = self._runs([(blocks[at][0], at * self._block_bytes) for at in arrived], self._staging)
        self._do(lambda: self._streams.load([block for block, _ in blocks], copies, back))
        if not self._is_still_direct(payload, leased[: len(blocks)], direct):
            return Unreadable()
        found = self._compare(leased, arrived)
        return found if isinstance(found, Mismatched) else outcome

    def look(self, payload: Payload) -> None:
        """See `BlockTransfer`."""
        self._pins.look(payload)

    def close(self) -> None:
        """See `BlockTransfer`."""
        self._streams.drain()
        self._pins.close()
        self._buffer.close()

    def statistics(self) -> dict[str, int]:
        """See `BlockTransfer`."""
        return self._pins.statistics()

    def _direct(self, payload: Payload, offsets: Sequence[int]) -> tuple[memoryview, list[bool]]:
        """The payload's bytes, and which of these slots the device may copy from and to by itself."""
        usable = self._pins.usable(payload, offsets, self._block_bytes)
        memory = payload.payload
        return (memory, usable) if memory is not None else (self._staging, [False] * len(offsets))

    def _is_still_direct(self, payload: Payload, slots: Sequence[Reserved | LeasedBlock], direct: list[bool]) -> bool:
        """Asked after the copies: whether those that the device made were of the payload's pages to the end."""
        offsets = [slot.slot_offset for slot, is_direct in zip(slots, direct, strict=True) if is_direct]
        return not offsets or all(self._pins.usable(payload, offsets, self._block_bytes))

    def _compare(self, leased: Sequence[LeasedBlock], places: Sequence[int]) -> Arrived | Mismatched:
        hashes = [xxhash.xxh3_64_intdigest(self._places[at]) for at in places]
        outcome = compare([leased[at] for at in places], hashes)
        return Mismatched(places[outcome.num_good]) if isinstance(outcome, Mismatched) else outcome

    def _runs(self, blocks: Sequence[tuple[int, int]], memory: memoryview) -> list[HostRun]:
        return [(run, memory) for run in runs_of(blocks, self._block_bytes)]

    def _do(self, submit: Callable[[], Any]) -> None:
        """Whatever goes wrong, nobody may say that slots are free while the device still copies from or to them."""
        try:
            self._streams.finish(submit())
        except BaseException:
            self._streams.drain()
            raise

"""A host tier in memory with the verbs of `cached.client.TierClient`, which loses, corrupts and hangs when told to."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from xxhash import xxh3_64_intdigest

from cached.client import Lease, RegistrableMemory
from cached.protocol import LeasedBlock, OfferedBlock, OwnerShare, Present, Refused, Reserved


@dataclass(slots=True)
class _Block:
    offset: int
    offered: OfferedBlock
    checksum: int


class FakeTier:
    """What is stored, and what every client of it sees."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.num_slots = num_slots
        self.memory = mmap.mmap(-1, num_slots * block_bytes)
        self.memory[:] = bytes(len(self.memory))  # So that its pages are there, to be registered with a device.
        self.stored: dict[bytes, _Block] = {}
        self.reserved: dict[int, tuple[int, OfferedBlock]] = {}
        self.leases: set[int] = set()
        self.touched: list[tuple[bytes, int, float | None, str]] = []
        self.suspected: list[bytes] = []
        self.owners: list[tuple[int, tuple[OwnerShare, ...]]] = []
        self.aborted: list[int] = []
        self.is_there = True
        self.loses_leases = False
        self.fails_with: Exception | None = None
        self.calls: list[str] = []
        self._last_id = 0
        self._next_slot = 0

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def take_slot(self) -> int | None:
        if self._next_slot == self.num_slots:
            return None
        self._next_slot += 1
        return (self._next_slot - 1) * self.block_bytes

    def corrupt(self, block_hash: bytes) -> None:
        """Flip one bit of a stored block."""
        self.memory[self.stored[block_hash].offset + 3] ^= 1


class FakeTierClient:
    """One client; after `restart` it is absent until it polls twice, as with a restarted daemon."""

    def __init__(self, tier: FakeTier) -> None:
        self.tier = tier
        self.closed = False
        self.refusal = None
        self._payload = memoryview(tier.memory)
        self._polls_to_miss = 0

    def restart(self) -> None:
        self._polls_to_miss = 2

    @property
    def state(self) -> Literal["ready", "absent"]:
        return "ready" if self.tier.is_there and not self._polls_to_miss else "absent"

    @property
    def num_slots(self) -> int:
        return self.tier.num_slots if self.state == "ready" else 0

    @property
    def payload(self) -> memoryview | None:
        return self._payload if self.state == "ready" else None

    @property
    def registrable(self) -> RegistrableMemory | None:
        if self.state != "ready":
            return None
        return RegistrableMemory(self._payload, self.tier.block_bytes, self.tier.num_slots, 2**30)

    def may_copy(self, numbers: Sequence[int]) -> bool:
        return self.state == "ready"

    def read_many(self, lease: Lease, blocks: Sequence[LeasedBlock], outs: Sequence[memoryview]) -> bool:
        if self.state != "ready":
            return False
        for block, out in zip(blocks, outs, strict=True):
            out[:] = self._payload[block.slot_offset : block.slot_offset + len(out)]
        return True

    def write_many(self, reserved: Sequence[Reserved], data: Sequence[memoryview]) -> bool:
        if self.state != "ready":
            return False
        for slot, content in zip(reserved, data, strict=True):
            self._payload[slot.slot_offset : slot.slot_offset + len(content)] = content
        return True

    def read_hashed(self, lease: Lease, blocks: Sequence[LeasedBlock], outs: Sequence[memoryview]) -> list[int] | None:
        return [xxh3_64_intdigest(out) for out in outs] if self.read_many(lease, blocks, outs) else None

    def write_hashed(self, reserved: Sequence[Reserved], data: Sequence[memoryview]) -> list[int] | None:
        return [xxh3_64_intdigest(each) for each in data] if self.write_many(reserved, data) else None

    def set_owners(self, version: int, shares: Sequence[OwnerShare]) -> str:
        self._called("set_owners")
        if self.state != "ready":
            return "absent"
        self.tier.owners.append((version, tuple(shares)))
        return "taken"

    def poll(self) -> Literal["ready", "absent"]:
        self._polls_to_miss = max(0, self._polls_to_miss - 1)
        return self.state

    def lookup(self, hashes: Sequence[bytes]) -> int:
        self._called("lookup")
        return self._run_of(hashes)

    def lease(self, hashes: Sequence[bytes]) -> Lease | None:
        self._called("lease")
        blocks = [self.tier.stored[each] for each in hashes[: self._run_of(hashes)]]
        if not blocks:
            return None
        lease_id = self.tier.next_id()
        self.tier.leases.add(lease_id)
        return Lease(
            lease_id,
            1,
            tuple(
                LeasedBlock(
                    block.offset,
                    1,
                    block.checksum,
                    block.offered.priority,
                    block.offered.deadline,
                    block.offered.on_expiry,
                )
                for block in blocks
            ),
        )

    def release(self, lease: Lease) -> bool:
        self._called("release")
        self.tier.leases.discard(lease.lease_id)
        return self.tier.is_there and not self.tier.loses_leases

    def reserve(self, chain: Sequence[OfferedBlock]) -> list[Reserved | Present | Refused]:
        self._called("reserve")
        outcomes: list[Reserved | Present | Refused] = []
        for block in chain:
            if not self.tier.is_there:
                outcomes.append(Refused("absent"))
            elif block.block_hash in self.tier.stored:
                outcomes.append(Present())
            elif (offset := self.tier.take_slot()) is None:
                outcomes.append(Refused("full"))
            else:
                reservation = self.tier.next_id()
                self.tier.reserved[reservation] = (offset, block)
                outcomes.append(Reserved(reservation, offset))
        return outcomes

    def commit(self, items: Sequence[tuple[int, int]]) -> list[Literal["stored", "orphan", "expired"]]:
        self._called("commit")
        outcomes: list[Literal["stored", "orphan", "expired"]] = []
        for reservation, checksum in items:
            found = self.tier.reserved.pop(reservation, None)
            if found is None:
                outcomes.append("expired")
                continue
            offset, block = found
            self.tier.stored[block.block_hash] = _Block(offset, block, checksum)
            outcomes.append("stored")
        return outcomes

    def abort(self, reservations: Sequence[int]) -> None:
        self._called("abort")
        for reservation in reservations:
            self.tier.reserved.pop(reservation, None)
            self.tier.aborted.append(reservation)

    def touch(self, items: Sequence[tuple[bytes, int, float | None, str]]) -> None:
        self._called("touch")
        self.tier.touched += items

    def suspect(self, hashes: Sequence[bytes]) -> None:
        self._called("suspect")
        self.tier.suspected += hashes

    def stats(self) -> dict[str, object] | None:
        return {}

    def close(self) -> None:
        self.closed = True

    def _run_of(self, hashes: Sequence[bytes]) -> int:
        if not self.tier.is_there:
            return 0
        for at, each in enumerate(hashes):
            if each not in self.tier.stored:
                return at
        return len(hashes)

    def _called(self, verb: str) -> None:
        self.tier.calls.append(verb)
        if self.tier.fails_with is not None:
            error, self.tier.fails_with = self.tier.fails_with, None
            raise error

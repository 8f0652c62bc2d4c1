"""Where slots lie in a payload that engines register with their device chunk by chunk: no slot crosses a chunk's end.

A copy across two registrations fails on the device, or is silently slow; daemon and client compute places alike, from what
the daemon's welcome says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotPlaces:
    """Slots of `slot_bytes`, as many as fit into each chunk of `registration_bytes`; what is left of a chunk is unused."""

    slot_bytes: int
    registration_bytes: int

    @property
    def slots_per_chunk(self) -> int:
        """Slots that fit into one whole chunk."""
        return self.registration_bytes // self.slot_bytes

    def offset(self, slot: int) -> int:
        """Where a slot begins."""
        chunk, place = divmod(slot, self.slots_per_chunk)
        return chunk * self.registration_bytes + place * self.slot_bytes

    def offsets(self, slots: Iterable[int]) -> list[int]:
        """Where slots begin."""
        slot_bytes, per_chunk = self.slot_bytes, self.slots_per_chunk
        # Most payloads are one chunk, and this runs for every block that anybody stores or loads.
        return [slot * slot_bytes if slot < per_chunk else self.offset(slot) for slot in slots]

    def slots_within(self, num_bytes: int) -> int:
        """How many slots lie whole in a payload's first bytes."""
        chunks, rest = divmod(num_bytes, self.registration_bytes)
        return chunks * self.slots_per_chunk + rest // self.slot_bytes

"""In which pieces the payload is registered with CUDA: small enough for any driver, and no slot in two of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PinChunk:
    """Bytes of the payload that are registered by one call, or not at all."""

    offset: int
    num_bytes: int


def pin_chunks(num_slots: int, slot_bytes: int, registration_bytes: int, chunk_bytes: int) -> tuple[PinChunk, ...]:
    """All slots, in chunks of at most `chunk_bytes`, or of one slot where that is larger.

    As many slots as fit lie in each `registration_bytes` of the payload, whatever is left of it unused; so no slot crosses a
    multiple of it, and no chunk does here.
    """
    slots_per_part = registration_bytes // slot_bytes
    slots_per_chunk = min(max(1, chunk_bytes // slot_bytes), slots_per_part)
    chunks = []
    for part, first_of_part in enumerate(range(0, num_slots, slots_per_part)):
        slots_in_part = min(slots_per_part, num_slots - first_of_part)
        for first in range(0, slots_in_part, slots_per_chunk):
            offset = part * registration_bytes + first * slot_bytes
            chunks.append(PinChunk(offset, min(slots_per_chunk, slots_in_part - first) * slot_bytes))
    return tuple(chunks)

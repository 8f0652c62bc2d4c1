"""What the core asks of the host tier, as values; the transfer shell carries it out and answers by ticket.

Every ticket is answered exactly once: `looked_up`, `loaded` or `offered`, with nothing when the tier has gone. A
`Touch` has no ticket and wants no answer. The order in which work is taken is the order in which it was decided: a
`Touch` that follows an `Offer` of the same block has to reach the tier after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from cached.keys import BlockHash, OwnerId
from cached.retention import OnExpiry


@dataclass(frozen=True, slots=True)
class Lookup:
    """How many of these blocks, from the first, does the tier hold? Answered by `looked_up(ticket, num_blocks)`."""

    ticket: int
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Copy these host blocks into these device blocks. Answered by `loaded`, after the last byte was written: until
    then nobody else may write the device blocks, even if the request is cancelled."""

    ticket: int
    blocks: tuple[tuple[BlockHash, int], ...]


@dataclass(frozen=True, slots=True)
class LoadedBlock:
    """What travels with a block that was loaded (kv-semantics 2.6): the lease's answer, given to `loaded`."""

    priority: int
    deadline: float | None
    on_expiry: OnExpiry


@dataclass(frozen=True, slots=True)
class OfferedDeviceBlock:
    """One full block of an offer; its content does not change before the offer is answered."""

    block_hash: BlockHash
    parent: BlockHash | None
    device_block: int
    priority: int
    deadline: float | None
    on_expiry: OnExpiry
    owner: OwnerId
    namespace_fingerprint: str


@dataclass(frozen=True, slots=True)
class Offer:
    """A chain, root first, that the tier may store (kv-semantics 5.1). Answered by `offered`."""

    ticket: int
    chain: tuple[OfferedDeviceBlock, ...]


@dataclass(frozen=True, slots=True)
class TouchedBlock:
    """The newest retention of a block that the tier may hold a copy of (kv-semantics 2.6)."""

    block_hash: BlockHash
    priority: int
    deadline: float | None
    on_expiry: OnExpiry


@dataclass(frozen=True, slots=True)
class Touch:
    """One release; one tick of recency in the tier for all blocks of it."""

    items: tuple[TouchedBlock, ...]


TierWork = Lookup | Load | Offer | Touch

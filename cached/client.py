"""An engine's end of the cache daemon's link: verbs with a deadline that answer a miss when the daemon does not.

Owned by one thread. The engine does the copies itself, through `payload`; what is stored or evicted is the daemon's
to decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cached.protocol import CommitOutcome, LeasedBlock, OfferedBlock, ReserveOutcome, TierHello


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to read `blocks` until `release`; bound to the session it was given in."""

    lease_id: int
    session: int
    blocks: tuple[LeasedBlock, ...]


class TierClient:
    """A blocking client. No verb raises for what the world does: each has an answer that means "not in the tier"."""

    def __init__(self, socket_path: str | Path, hello: TierHello | None, timeout_s: float) -> None:
        raise NotImplementedError

    state: Literal["ready", "absent"]
    payload: memoryview | None

    def poll(self) -> Literal["ready", "absent"]:
        """Bring a reconnect forward without asking anything; call it now and then while idle."""
        raise NotImplementedError

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, the tier holds; 0 when it is absent."""
        raise NotImplementedError

    def lease(self, hashes: Sequence[bytes]) -> Lease | None:
        """Lease a leading run of these blocks, maybe shorter than asked; None when there is none."""
        raise NotImplementedError

    def release(self, lease: Lease) -> bool:
        """End a lease; True only if it held to its end. Without a True every copy made under it is a miss."""
        raise NotImplementedError

    def reserve(self, chain: Sequence[OfferedBlock]) -> list[ReserveOutcome]:
        """Offer a chain, root first; one outcome per block."""
        raise NotImplementedError

    def commit(self, items: Sequence[tuple[int, int]]) -> list[CommitOutcome]:
        """`(reservation, xxh3_64 of the payload)` of blocks that are in place; one outcome each."""
        raise NotImplementedError

    def abort(self, reservations: Sequence[int]) -> None:
        """Give reservations up; nothing may be written into their slots afterwards."""
        raise NotImplementedError

    def touch(self, items: Sequence[tuple[bytes, int, float | None, str]]) -> None:
        """`(block_hash, priority, deadline, on_expiry)` of blocks a sequence released."""
        raise NotImplementedError

    def suspect(self, hashes: Sequence[bytes]) -> None:
        """Tell the daemon that these blocks' bytes did not match their checksums."""
        raise NotImplementedError

    def stats(self) -> dict[str, object] | None:
        """The daemon's statistics (`protocol.TierStatistics` as a dict), or None when it is absent."""
        raise NotImplementedError

    def close(self) -> None:
        """End the session orderly: no copy may be under way."""
        raise NotImplementedError

"""What a session asks of the store and what the store decides: the sum types that both are matched on.

Plain named tuples, since thousands of them are made a second and none lives longer than its message; what the daemon's
own path from wire to wire needs of a whole chain stays columns.
"""

from __future__ import annotations

from typing import NamedTuple

from cached.protocol import FIRST_REFUSAL, PRESENT, REFUSAL_REASONS, RESERVED, RefusalReason


class Offer(NamedTuple):
    """One block of a chain that a session wants to store. `parent` None: a first block."""

    key: bytes
    parent: bytes | None
    namespace: int
    priority: int
    deadline: float
    drops: int
    owner: bytes


OfferRow = tuple[bytes, bytes | None, int, int, float, int, bytes]
"""An `Offer` or a tuple like it."""


class Granted(NamedTuple):
    """A reservation and the slot to copy into."""

    reservation: int
    slot: int


class Present(NamedTuple):
    """The block is stored."""


class Pending(NamedTuple):
    """The block is being stored."""


class Refused(NamedTuple):
    """The block is not taken."""

    reason: RefusalReason


Decision = Granted | Present | Pending | Refused

_PRESENT = Present()
_PENDING = Pending()
_REFUSED = {FIRST_REFUSAL + code: Refused(reason) for code, reason in enumerate(REFUSAL_REASONS)}


class Decided(NamedTuple):
    """What became of a chain: the code of `protocol.ReserveReply` for each block; the slots of those that were granted, in
    order, whose reservations are numbered from `first_reservation` on."""

    outcomes: bytes
    first_reservation: int
    slots: list[int]

    def decisions(self) -> list[Decision]:
        """The same, block by block."""
        granted = map(Granted, range(self.first_reservation, self.first_reservation + len(self.slots)), self.slots)
        return [next(granted) if code == RESERVED else _decision_of(code) for code in self.outcomes]


def _decision_of(code: int) -> Decision:
    if code >= FIRST_REFUSAL:
        return _REFUSED[code]
    return _PRESENT if code == PRESENT else _PENDING


class Retouch(NamedTuple):
    """New retention for a block that was released somewhere (kv-semantics 2.6)."""

    key: bytes
    priority: int
    deadline: float
    drops: bool


class LeasedRun(NamedTuple):
    """A lease and the slots it covers."""

    lease_id: int
    slots: list[int]


class Unverified(NamedTuple):
    """A slot whose bytes must be checked, and against what; `generation` names the content it is about."""

    slot: int
    generation: int
    checksum: int

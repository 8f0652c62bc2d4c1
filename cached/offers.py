"""What a session asks of the store and what the store decides: the sum types that both are matched on.

Plain named tuples, since thousands of them are made a second and none lives longer than its message.
"""

from __future__ import annotations

from typing import NamedTuple

from cached.protocol import RefusalReason


class Offer(NamedTuple):
    """One block of a chain that a session wants to store. `parent` None: a first block."""

    key: bytes
    parent: bytes | None
    namespace: int
    priority: int
    deadline: float
    drops: bool
    owner: bytes


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

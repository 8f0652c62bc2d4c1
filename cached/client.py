"""An engine's verbs over the cache daemon's link, each of which answers a miss when the daemon does not.

Owned by one thread. The engine does the copies itself, through `read` and `write`; what is stored or evicted is the
daemon's to decide, whether it is there the link's. No verb raises for what the world does: every question has an answer
that means "not in the tier".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from cached import translation
from cached.keys import OwnerId
from cached.link import Link
from cached.mapped_payload import RegistrableMemory, prepare_copies
from cached.protocol import (
    Abort,
    Commit,
    CommitOutcome,
    CommitReply,
    Done,
    Drop,
    DropReply,
    EventsReply,
    EventsRequest,
    HelloRefused,
    LeasedBlock,
    LeaseReply,
    ListedBlock,
    ListReply,
    ListRequest,
    Lookup,
    LookupReply,
    OfferedBlock,
    OwnerShare,
    OwnersOutcome,
    OwnersSet,
    Refused,
    Release,
    ReleaseReply,
    Reserved,
    ReserveOutcome,
    ReserveReply,
    Stats,
    StatsRequest,
    Suspect,
    TierEvents,
    TierHello,
    read_u64s,
    u64s,
)
from cached.protocol import Lease as LeaseRequest
from cached.shares import ShareTable, fault_of
from cached.translation import TouchedRow

__all__ = ["Lease", "ListedPage", "RegistrableMemory", "TierClient", "prepare_copies"]

ROWS_AT_ONCE = 512
"""Blocks in one message, of which the protocol would allow more: everybody else waits while the daemon is at it."""

_Reply = TypeVar("_Reply")
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to read `blocks` until `release`; bound to the session it was given in."""

    lease_id: int
    session: int
    blocks: tuple[LeasedBlock, ...]


@dataclass(frozen=True, slots=True)
class ListedPage:
    """Some stored blocks; ask for the next ones with `next_after`, None: these were the last."""

    blocks: tuple[ListedBlock, ...]
    next_after: int | None


class TierClient:
    """A blocking client of one daemon. `hello` None: an observer, which may only ask for `stats` and `drop_owner`.

    Verbs take at most `timeout_s`.
    """

    def __init__(self, socket_path: str | Path, hello: TierHello | None, timeout_s: float) -> None:
        self.hello = hello
        self._link = Link(socket_path, hello, timeout_s)

    @property
    def state(self) -> Literal["ready", "absent"]:
        """Whether a session is open, as far as is known."""
        return self._link.state

    @property
    def refusal(self) -> HelloRefused | None:
        """Why the daemon did not take the session, when it said so."""
        return self._link.refusal

    @property
    def payload(self) -> memoryview | None:
        """The arena's bytes, mapped and writable, while there is a session; a former mapping lives as long as it is
        referenced. None in a child forked since, until that has a session of its own. For handing to a device's driver:
        copies go through `read` and `write`, which notice when a peer has cut the payload short.
        """
        return self._link.payload.view() if self.state == "ready" and self._link.holds(()) else None

    @property
    def registrable(self) -> RegistrableMemory | None:
        """The same bytes and how slots lie in them, once all of their memory is there to be registered with a device."""
        welcome = self._link.welcome
        if welcome is None or not welcome.payload_bytes or not self._link.holds(()):
            return None
        return self._link.payload.registrable(welcome)

    @property
    def num_slots(self) -> int:
        """How many blocks of this layout the tier can hold; 0 without a session."""
        welcome = self._link.welcome
        return welcome.num_slots if welcome is not None else 0

    def poll(self) -> Literal["ready", "absent"]:
        """Bring a reconnect forward without asking anything; call it now and then while idle."""
        self._link.poll()
        return self._link.state

    def close(self) -> None:
        """End the session orderly: no copy may be under way."""
        self._link.close()

    # --- Reading --------------------------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, the tier holds; 0 when it is absent."""
        if not hashes:
            return 0
        reply = self._ask(Lookup(self._request_id(), translation.joined(hashes)), LookupReply)
        return 0 if reply is None else min(reply.num_blocks, len(hashes))

    def lease(self, hashes: Sequence[bytes]) -> Lease | None:
        """Lease a leading run of these blocks, maybe shorter than asked; None when there is none."""
        if not hashes:
            return None
        reply = self._ask(LeaseRequest(self._request_id(), translation.joined(hashes)), LeaseReply)
        welcome = self._link.welcome
        if reply is None or welcome is None or reply.lease_id == 0:
            return None
        blocks = self._understood(lambda: translation.leased_blocks(reply, welcome))
        if blocks is None:
            return None
        self._link.hand_out((reply.lease_id,))
        return Lease(reply.lease_id, welcome.session, blocks)

    def release(self, lease: Lease) -> bool:
        """End a lease; True only if it held to its end. Without a True every copy made under it is a miss."""
        if not self._link.give_back((lease.lease_id,)):
            return False
        reply = self._ask(Release(self._request_id(), lease.lease_id), ReleaseReply)
        return reply is not None and reply.held

    def read(self, lease: Lease, block: LeasedBlock, out: memoryview) -> bool:
        """`read_many` of one block."""
        return self.read_many(lease, [block], [out])

    def read_many(self, lease: Lease, blocks: Sequence[LeasedBlock], outs: Sequence[memoryview]) -> bool:
        """Copy leased blocks out, each into its own of `outs`, in one call. False, and `outs` worth nothing, when the
        session is over or a peer has cut the payload short. The copies count only if `release` answers True afterwards."""
        offsets = [block.slot_offset for block in blocks]
        return self.may_copy((lease.lease_id,)) and self._link.payload.copy_out(offsets, outs)

    def read_hashed(self, lease: Lease, blocks: Sequence[LeasedBlock], outs: Sequence[memoryview]) -> list[int] | None:
        """`read_many`, and xxh3-64 of what has arrived in each of `outs`, to be compared with the blocks' checksums."""
        offsets = [block.slot_offset for block in blocks]
        return self._link.payload.copy_out_hashed(offsets, outs) if self.may_copy((lease.lease_id,)) else None

    def may_copy(self, numbers: Iterable[int]) -> bool:
        """Whether these leases and reservations are of the session that is open, so that their slots may be copied from
        and to. For copies made elsewhere than in `read` and `write`: ask before and after."""
        return self._link.holds(numbers)

    # --- Writing --------------------------------------------------------------------------------------------

    def reserve(self, chain: Sequence[OfferedBlock]) -> list[ReserveOutcome]:
        """Offer a chain, root first; one outcome per block."""
        outcomes: list[ReserveOutcome] = []
        for start in range(0, len(chain), ROWS_AT_ONCE):
            rows = chain[start : start + ROWS_AT_ONCE]
            outcomes += self._reserve(rows) or [Refused("absent")] * len(rows)
        return outcomes

    def write(self, reserved: Reserved, data: memoryview) -> bool:
        """`write_many` of one block."""
        return self.write_many([reserved], [data])

    def write_many(self, reserved: Sequence[Reserved], data: Sequence[memoryview]) -> bool:
        """Copy blocks into the slots that were reserved for them, in one call. False when the session is over, so that the
        slots may be another's by now, or when there is no memory for them: abort these reservations then."""
        offsets = [each.slot_offset for each in reserved]
        return self.may_copy([each.reservation for each in reserved]) and self._link.payload.copy_in(offsets, data)

    def write_hashed(self, reserved: Sequence[Reserved], data: Sequence[memoryview]) -> list[int] | None:
        """`write_many`, and xxh3-64 of each block, for `commit`."""
        offsets = [each.slot_offset for each in reserved]
        is_ours = self.may_copy([each.reservation for each in reserved])
        return self._link.payload.copy_in_hashed(offsets, data) if is_ours else None

    def commit(self, items: Sequence[tuple[int, int]]) -> list[CommitOutcome]:
        """`(reservation, xxh3_64 of the payload)` of blocks that are in place; one outcome each."""
        live = self._link.give_back([reservation for reservation, _ in items])
        asked = items if len(live) == len(items) else [item for item in items if item[0] in live]
        outcomes: list[CommitOutcome] = []
        for start in range(0, len(asked), ROWS_AT_ONCE):
            rows = asked[start : start + ROWS_AT_ONCE]
            outcomes += self._commit(rows) or ["expired"] * len(rows)
        if len(asked) == len(items):
            return outcomes
        answered = dict(zip((reservation for reservation, _ in asked), outcomes, strict=True))
        return [answered.get(reservation, "expired") for reservation, _ in items]

    def abort(self, reservations: Sequence[int]) -> None:
        """Give reservations up; nothing may be written into their slots afterwards."""
        live = self._link.give_back(reservations)
        asked = [reservation for reservation in reservations if reservation in live]
        for start in range(0, len(asked), ROWS_AT_ONCE):
            self._ask(Abort(self._request_id(), u64s(asked[start : start + ROWS_AT_ONCE])), Done)

    def _reserve(self, rows: Sequence[OfferedBlock]) -> list[ReserveOutcome] | None:
        reply = self._ask(translation.reserve_request(self._request_id(), rows), ReserveReply)
        welcome = self._link.welcome
        if reply is None or welcome is None:
            return None
        outcomes = self._understood(lambda: translation.reserve_outcomes(reply, len(rows), welcome))
        if outcomes is not None:
            self._link.hand_out(read_u64s(reply.reservations))
        return outcomes

    def _commit(self, rows: Sequence[tuple[int, int]]) -> list[CommitOutcome] | None:
        numbers, checksums = zip(*rows, strict=True)
        reply = self._ask(Commit(self._request_id(), u64s(numbers), u64s(checksums)), CommitReply)
        return None if reply is None else self._understood(lambda: translation.commit_outcomes(reply, len(rows)))

    # --- Shares and events ----------------------------------------------------------------------------------

    def set_owners(self, version: int, shares: Sequence[OwnerShare]) -> OwnersOutcome | Literal["absent", "invalid"]:
        """Forward the gateway's table of shares; the daemon keeps the newest. One that it would end the session for is
        not sent."""
        if fault_of(ShareTable(version, tuple(shares))) is not None:
            return "invalid"
        reply = self._ask(translation.owners_request(self._request_id(), version, shares), OwnersSet)
        return "absent" if reply is None else reply.outcome

    def events(self, after: int, part: int = 0) -> TierEvents | None:
        """What happened in the tier after the cursor `after`, as far as one reply holds it: ask again with `last` until
        no events come. Of an engine's own layout; an observer says which `part`. None when the daemon is absent."""
        reply = self._ask(EventsRequest(self._request_id(), after, part), EventsReply)
        events = None if reply is None else self._understood(lambda: translation.events_of(reply))
        if reply is None or events is None:
            return None
        return TierEvents(reply.incarnation, reply.last, reply.lost, events)

    def list_blocks(
        self, after: int = -1, namespace_fingerprint: str | None = None, part: int = 0
    ) -> ListedPage | None:
        """Stored blocks in slots above `after`, of one namespace or of all, as far as one reply holds them. Blocks that
        come or go between pages may be in one or not. Of an engine's own layout; an observer says which `part`. None when
        the daemon is absent."""
        namespace = bytes.fromhex(namespace_fingerprint) if namespace_fingerprint else b""
        reply = self._ask(ListRequest(self._request_id(), namespace, after, part), ListReply)
        blocks = None if reply is None else self._understood(lambda: tuple(translation.listed_blocks(reply)))
        if reply is None or blocks is None:
            return None
        return ListedPage(blocks, reply.next_after if reply.next_after > after else None)

    # --- Retention ------------------------------------------------------------------------------------------

    def touch(self, items: Sequence[TouchedRow]) -> None:
        """`(block_hash, priority, deadline, on_expiry)` of blocks a sequence released."""
        for start in range(0, len(items), ROWS_AT_ONCE):
            self._ask(translation.touch_request(self._request_id(), items[start : start + ROWS_AT_ONCE]), Done)

    def suspect(self, hashes: Sequence[bytes]) -> None:
        """Tell the daemon that these blocks' bytes did not match their checksums: it verifies them before it serves
        them again. A leading run; to report single blocks, call once for each."""
        if hashes:
            self._ask(Suspect(self._request_id(), translation.joined(hashes)), Done)

    def drop_owner(self, owner: OwnerId) -> int | None:
        """Remove every block of an owner; how many went, or None when the daemon is absent."""
        reply = self._ask(Drop(self._request_id(), owner), DropReply)
        return None if reply is None else reply.num_blocks

    def stats(self) -> dict[str, object] | None:
        """The daemon's statistics (`protocol.TierStatistics` as a dict, labelled counts and layouts as dicts), or None when it
        is absent."""
        reply = self._ask(StatsRequest(self._request_id()), Stats)
        return None if reply is None else translation.statistics_fields(reply.statistics)

    # --- One question ---------------------------------------------------------------------------------------

    def _request_id(self) -> int:
        return self._link.next_request_id()

    def _ask(self, message: Any, kind: type[_Reply]) -> _Reply | None:
        return self._link.ask(message, kind)

    def _understood(self, read: Callable[[], _Value]) -> _Value | None:
        """What a reply says, or None: it says nothing that makes sense, and the session ends for it."""
        try:
            return read()
        except ValueError:
            self._link.lose(is_breach=True)
            return None

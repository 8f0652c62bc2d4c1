"""The host tier as a whole: its parts, which of them a layout gets, who is connected, and what holds for all of them.

What an engine's verbs answer is its part's; frames and order of messages are the session's, sockets and processes the
server's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cached.columns import check_owner
from cached.errors import ArenaError, PeerError
from cached.keys import fingerprint, self_test_vector
from cached.offers import Unverified
from cached.part import Part, PartFiles, TierSettings
from cached.parts import NoPart, choose_part
from cached.protocol import CLIENT_ID_BYTES, PROTOCOL_VERSION, Hello, Layout, TierStatistics
from cached.records import MAX_FINGERPRINT_BYTES, MAX_LABEL_BYTES, Holder
from cached.totals import total_of

__all__ = ["Admitted", "NotAdmitted", "Part", "Tier", "TierSettings"]

MAX_BLOCK_BYTES = 2**32
MAX_TOKENS_PER_BLOCK = 2**16


@dataclass(frozen=True, slots=True)
class Admitted:
    """A session is open; for an engine `part` is where its layout's blocks are."""

    session: int
    part: Part | None


@dataclass(frozen=True, slots=True)
class NotAdmitted:
    """A session is not opened; `reason` is one word, `message` says what to do."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class _Engine:
    holder: Holder
    part: Part


class Tier:
    """The parts of one arena. `first_id` is new at every start, so that ids of a former life mean nothing."""

    def __init__(self, files: Sequence[PartFiles], settings: TierSettings, first_id: int, now: float) -> None:
        tier_bytes = sum(each.payload_bytes for each in files)
        self.parts = tuple(Part(each, settings, first_id, now, tier_bytes) for each in files)
        self._first_id = first_id
        self._next_session = 1
        self._engines: dict[int, _Engine] = {}
        self._settled_by: dict[bytes, int] = {}
        self._next_to_verify = 0
        self.sockets_remade = 0
        """How often the shell had to make its socket again; it counts, and it is shown with the rest."""
        for part in self.parts:
            part.take_over(iter(self._new_session, None), now)

    # --- Sessions -------------------------------------------------------------------------------------------

    def admit(self, hello: Hello, pid: int, started: int, now: float) -> Admitted | NotAdmitted:
        """Open a session for a peer, whose process is `pid`, started at `started`; or say why not."""
        if len(hello.client_id) != CLIENT_ID_BYTES:
            raise PeerError(f"client_id has {len(hello.client_id)} bytes, not {CLIENT_ID_BYTES}")
        if hello.version != PROTOCOL_VERSION:
            return NotAdmitted(
                "version", f"this daemon speaks protocol {PROTOCOL_VERSION}, the peer {hello.version}; run one version"
            )
        if hello.self_test != self_test_vector():
            return NotAdmitted("hash", "peer and daemon do not hash alike; run one version of both")
        if hello.layout is None:
            return Admitted(self._new_session(), None)
        part = self._part_for(hello.layout, _shown(hello.label), now)
        if isinstance(part, NotAdmitted):
            return part
        session, holder = self._new_session(), Holder(pid, started, hello.client_id)
        part.open_session(session, holder)
        self._engines[session] = _Engine(holder, part)
        return Admitted(session, part)

    def end_session(self, session: int, clean: bool, now: float) -> bool:
        """Undo what a session held; True when its process must be gone, or settle, before all of it is free."""
        engine = self._engines.pop(session, None)
        if engine is None:
            return False
        # Its client may have said in a later session that nothing of this one is under way, and be heard first.
        client_id = engine.holder.client_id
        settled_by = self._settled_by.get(client_id, 0)
        clean = clean or settled_by > session
        if settled_by == session:
            del self._settled_by[client_id]
        return engine.part.end_session(session, clean, now)

    def process_gone(self, session: int) -> None:
        """The process behind an ended session is gone."""
        for part in self.parts:
            if part.store is not None:
                part.store.settle(session)

    def settled(self, session: int, holder: Holder) -> None:
        """This client, in this session, has no copy of an earlier one under way. Those whose end has not been seen yet
        will be settled when it is."""
        self._settled_by[holder.client_id] = session
        # By its id, which nobody else knows: its process may have had another number for a daemon before this one.
        for each, other in self.quarantined().items():
            if other.client_id == holder.client_id:
                self.process_gone(each)

    def quarantined(self) -> dict[int, Holder]:
        """Ended sessions whose processes must be watched."""
        found: dict[int, Holder] = {}
        for part in self.parts:
            if part.store is not None:
                found.update(part.store.quarantined_sessions())
        return found

    def clients(self) -> set[bytes]:
        """The ids of all clients that hold something here, or may."""
        held = [engine.holder for engine in self._engines.values()]
        return {holder.client_id for holder in [*held, *self.quarantined().values()]}

    def allocated(self) -> None:
        """More of the arena's memory is there."""
        for part in self.parts:
            part.allocated()

    # --- For all parts --------------------------------------------------------------------------------------

    def part_at(self, number: int) -> Part | None:
        """One part by its place in the statistics; None where there is none."""
        return self.parts[number] if 0 <= number < len(self.parts) else None

    def incarnation(self) -> int:
        """What distinguishes this life of the daemon from others, for readers of events."""
        return self._first_id

    def verify_all(self) -> int:
        """Have every block verified again in the background; how many."""
        return sum(part.store.suspect_all() for part in self.parts if part.store is not None)

    def drop_owner(self, owner: bytes, now: float) -> int:
        """Remove an owner's blocks, of whatever layout; how many went."""
        check_owner(owner)
        return sum(part.store.drop_owner(owner, now) for part in self.parts if part.store is not None)

    def expire(self, now: float) -> None:
        """Let happen what is due."""
        for part in self.parts:
            if part.store is not None:
                part.store.expire(now)

    def next_deadline(self) -> float | None:
        """When `expire` may next have something to do."""
        earliest = None
        for part in self.parts:
            due = part.store.next_deadline() if part.store is not None else None
            if due is not None and (earliest is None or due < earliest):
                earliest = due
        return earliest

    def next_unverified(self, count: int) -> tuple[Part, list[Unverified]] | None:
        """Blocks of one part to verify in the background, part by part in turn."""
        for _ in self.parts:
            part = self.parts[self._next_to_verify]
            self._next_to_verify = (self._next_to_verify + 1) % len(self.parts)
            batch = part.store.next_unverified(count) if part.store is not None else []
            if batch:
                return part, batch
        return None

    def statistics(self) -> TierStatistics:
        """A frozen snapshot: the sum of all parts, and a line for each."""
        found = [part.statistics() for part in self.parts]
        lines = tuple(part.line(each) for part, each in zip(self.parts, found, strict=True))
        cut = [line for line in lines if line.slot_bytes]
        return replace(
            total_of(found),
            layout_fingerprint=cut[0].fingerprint if len(cut) == 1 else "",
            slot_bytes=cut[0].slot_bytes if len(cut) == 1 else 0,
            capacity_bytes=sum(line.capacity_bytes for line in lines),
            allocated_bytes=sum(line.allocated_bytes for line in lines),
            sessions=len(self._engines),
            sockets_remade=self.sockets_remade,
            owners=len({owner for part in self.parts if part.store for owner in part.store.owners.counts()}),
            layouts=lines,
        )

    # --- Layouts --------------------------------------------------------------------------------------------

    def _part_for(self, layout: Layout, label: str, now: float) -> Part | NotAdmitted:
        """The part that holds `layout` from now on, or why none does."""
        _check_layout(layout, label)
        name = fingerprint(layout.fingerprint)
        for part in self.parts:
            other = part.files.layout
            if other is not None and other.fingerprint == layout.fingerprint and other != layout:
                return NotAdmitted(
                    "layout_contradicts",
                    f"blocks of layout {name} have {other.block_bytes} bytes here, {layout.block_bytes} there; run one "
                    "version of the engine",
                )
        chosen = choose_part([part.state(now) for part in self.parts], layout, label)
        if isinstance(chosen, NoPart):
            return NotAdmitted(chosen.reason, chosen.message)
        part = self.parts[chosen]
        if part.files.layout == layout:
            if part.files.label != label:
                part.files.relabel(label)
            return part
        if part.files.slots_for(layout) == 0:
            return NotAdmitted(
                "block_too_large",
                f"one block has {layout.block_bytes} bytes, its part of the arena {part.files.payload_bytes} and a "
                f"registration {part.files.registration_bytes}; raise host_cache_size or its share in `layouts`",
            )
        try:
            part.cut_for(layout, label)
        except ArenaError as error:
            return NotAdmitted("no_room", str(error))
        return part

    def _new_session(self) -> int:
        self._next_session += 1
        return self._next_session - 1


def _shown(label: str) -> str:
    """A label as it may be printed on a terminal and kept."""
    return "".join(character if character.isprintable() else "?" for character in label)


def _check_layout(layout: Layout, label: str) -> None:
    if not 0 < len(layout.fingerprint) <= MAX_FINGERPRINT_BYTES or not 0 < layout.block_bytes <= MAX_BLOCK_BYTES:
        raise PeerError("a layout needs a fingerprint of 1 to 64 bytes and a block of 1 byte to 4 GiB")
    if not 0 < layout.tokens_per_block <= MAX_TOKENS_PER_BLOCK:
        raise PeerError(f"a layout of {layout.tokens_per_block} tokens a block is none")
    if len(label.encode(errors="replace")) > MAX_LABEL_BYTES:
        raise PeerError(f"a layout's label has at most {MAX_LABEL_BYTES} bytes")

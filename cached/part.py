"""One part of the tier: the store of one layout's blocks upon the files that hold them, and what its peers' verbs answer.

Composes the store with its part of the arena. Which part a layout gets and who is connected is the tier's; frames and the
order of messages are the session's; `PartFiles` is what it asks of the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cached.columns import check_hashes, read_offers, read_share_table, read_touches
from cached.events import Run
from cached.keys import HASH_BYTES, fingerprint
from cached.offers import Decided, LeasedRun, Unverified
from cached.parts import PartState
from cached.places import SlotPlaces
from cached.protocol import (
    FIRST_REFUSAL,
    MAX_ROWS,
    REFUSAL_REASONS,
    Layout,
    LayoutLine,
    OwnersOutcome,
    Reserve,
    SetOwners,
    TierStatistics,
    Touch,
)
from cached.records import Holder, StoredRecord
from cached.shares import NO_TABLE, pack, unpack
from cached.store import BlockStore, Records

_NO_LAYOUT = FIRST_REFUSAL + REFUSAL_REASONS.index("no_layout")


class PartFiles(Records, Protocol):
    """What a part needs of its files on tmpfs."""

    name: str
    label: str
    layout: Layout | None
    places: SlotPlaces
    payload_fd: int
    payload_bytes: int
    registration_bytes: int
    allocated_bytes: int
    num_slots: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot; 0 while it is cut for nothing."""

    @property
    def allocated_slots(self) -> int:
        """Slots, from the first on, whose memory is there."""

    def format(self, layout: Layout, label: str = "") -> None:
        """Cut the payload for `layout`; no record is left."""

    def relabel(self, label: str) -> None:
        """Note what engines call the layout now."""

    def slots_for(self, layout: Layout) -> int:
        """How many blocks of `layout` fit."""

    def scan(self) -> Iterator[tuple[int, StoredRecord | Holder | None]]:
        """Every slot that is not free; None for a record that cannot be read."""

    def write_shares(self, data: bytes) -> None:
        """Keep the owners' shares for the next daemon."""

    def read_shares(self) -> bytes:
        """What was kept; empty when nothing was."""

    def verify(self, wanted: Sequence[tuple[int, int]], budget_s: float) -> list[bool]:
        """Check `(slot, checksum)` for about as long as the budget; answers for the first so many."""

    def is_sound(self, slot: int, checksum: int, buffer: bytearray | None = None) -> bool:
        """Whether the bytes in a slot hash to `checksum`; in any thread that brings its own buffer."""

    def mend(self) -> bool:
        """Make the payload whole again; True when it was not."""


@dataclass(frozen=True, slots=True)
class TierSettings:
    """The times in force."""

    lease_ttl_s: float
    reservation_ttl_s: float
    layout_linger_s: float
    verify_budget_s: float = 0.005
    event_buffer: int = 0


class Part:
    """One layout at a time, and one store for it. `first_id` is new at every start, so that ids of a former life mean
    nothing."""

    def __init__(
        self, files: PartFiles, settings: TierSettings, first_id: int, now: float, tier_bytes: int = 0
    ) -> None:
        self.files = files
        # Of what an owner may count on in the whole tier, each part grants as large a share as it is of the tier.
        self._tier_bytes = tier_bytes or files.payload_bytes
        self.store: BlockStore | None = None
        self.num_sessions = 0
        self._settings = settings
        self._first_id = first_id
        self._last_seen = now
        self._published = 0
        self._kept_shares = unpack(files.read_shares()) or NO_TABLE
        self._are_shares_kept = True

    # --- Layout ---------------------------------------------------------------------------------------------

    def state(self, now: float) -> PartState:
        """How it stands when a layout asks for a part."""
        store = self.store
        return PartState(
            self.files.name,
            self.files.layout,
            is_in_use=store is not None and store.has_holdings(),
            is_vacant=store is None or store.is_vacant(),
            left_s=self._last_seen + self._settings.layout_linger_s - now,
        )

    def cut_for(self, layout: Layout, label: str) -> None:
        """Begin anew for another layout. Raises ArenaError, and holds nothing, when there is no room."""
        self.store = None  # Its records go now, whatever comes.
        self.files.format(layout, label)
        self.store = self._new_store()
        self.allocated()

    def take_over(self, sessions: Iterator[int], now: float) -> None:
        """Take over what a former daemon left; each of its holders gets one of the numbers of `sessions`."""
        if self.files.layout is None:
            return
        self.store = self._new_store()
        stored: list[tuple[int, StoredRecord]] = []
        held: dict[Holder, list[int]] = {}
        torn: list[int] = []
        for slot, record in self.files.scan():
            match record:
                case StoredRecord():
                    stored.append((slot, record))
                case Holder():
                    held.setdefault(record, []).append(slot)
                case None:
                    torn.append(slot)
        for slot in torn:
            self.files.clear(slot)
        self.store.counters.lost_at_restart += len(torn)
        self.store.restore(iter(stored), now)
        for holder, slots in held.items():
            self.store.restore_quarantine(next(sessions), holder, slots)
        self.allocated()

    def allocated(self) -> None:
        """More of the payload's memory is there."""
        if self.store is not None:
            end = self.files.allocated_slots
            self.store.publish(self._published, end)
            self._published = end

    # --- Sessions -------------------------------------------------------------------------------------------

    def open_session(self, session: int, holder: Holder) -> None:
        """An engine of this layout has come."""
        self.require_store().open_session(session, holder)
        self.num_sessions += 1

    def end_session(self, session: int, clean: bool, now: float) -> bool:
        """An engine has gone; True when its process must be gone, or settle, before all it held is free."""
        self.num_sessions -= 1
        self._last_seen = now
        return self.require_store().end_session(session, clean, now)

    # --- Verbs ----------------------------------------------------------------------------------------------

    def lookup(self, hashes: bytes, now: float) -> int:
        """The leading run of blocks that can be leased; verifies what a restart left unverified, within a budget."""
        store = self._checked(hashes)
        self._verify_run(store, hashes)
        found = store.lookup(hashes, now)
        store.count_lookup(len(hashes) // HASH_BYTES, found)
        return found

    def lease(self, session: int, hashes: bytes, now: float) -> LeasedRun | None:
        """Lease the leading run."""
        store = self._checked(hashes)
        self._verify_run(store, hashes)
        return store.lease(session, hashes, now)

    def reserve(self, session: int, message: Reserve, now: float) -> Decided:
        """Decide an offered chain."""
        store = self.require_store()
        offers = read_offers(message)
        if store.blocks.num_slots == 0:
            return Decided(bytes([_NO_LAYOUT]) * len(message.priorities), 0, [])
        return store.decide(session, offers, now)

    def touch(self, message: Touch, now: float) -> None:
        """New retention for blocks that were released elsewhere."""
        self.require_store().touch(list(read_touches(message)), now)

    def suspect(self, hashes: bytes) -> None:
        """A peer saw wrong bytes; they are verified before they are served again."""
        self._checked(hashes).suspect(hashes)

    def set_owners(self, message: SetOwners, now: float) -> tuple[OwnersOutcome, int]:
        """A table of owners' shares: what became of it, and which version is in force. One that is taken is kept for the
        next daemon before it is answered."""
        store = self.require_store()
        table = read_share_table(message)
        outcome = store.set_shares(table.in_blocks(self._tier_bytes, self.files.num_slots), now)
        if outcome == "taken":
            self._kept_shares, self._are_shares_kept = table, False
        if (
            not self._are_shares_kept
        ):  # There may have been no room when it was taken; then it comes again, and is known.
            self.files.write_shares(pack(self._kept_shares))
            self._are_shares_kept = True
        return outcome, store.shares.version

    def happened(self, after: int) -> Run:
        """Events after a reader's cursor."""
        return self.store.events.after(after, MAX_ROWS) if self.store is not None else Run(1, [], after != 0)

    def mended(self) -> None:
        """The payload was damaged and is whole again: no byte of it is believed before it is verified."""
        if self.store is not None:
            self.store.count_mending()
            self.store.suspect_all()

    def statistics(self) -> TierStatistics:
        """A frozen snapshot of this part alone."""
        return self.store.statistics() if self.store is not None else TierStatistics()

    def line(self, found: TierStatistics) -> LayoutLine:
        """This part as one line of what operators see; `found` are its statistics."""
        files, layout = self.files, self.files.layout
        return LayoutLine(
            name=files.name,
            fingerprint=fingerprint(layout.fingerprint) if layout is not None else "",
            label=files.label,
            tokens_per_block=layout.tokens_per_block if layout is not None else 0,
            capacity_bytes=files.payload_bytes,
            allocated_bytes=files.allocated_bytes,
            slot_bytes=files.slot_bytes,
            capacity_slots=found.capacity_slots,
            allocated_slots=found.allocated_slots,
            sessions=self.num_sessions,
            used=found.used,
            leased=found.leased,
            unverified=found.unverified,
            quarantined=found.quarantined,
            looked_up=found.looked_up,
            found=found.found,
            stored=found.stored,
            loaded=found.loaded,
            evicted=sum(count.value for count in found.evicted_by_priority),
            refused=sum(count.value for count in found.refused_by_reason),
            verified=found.verified,
            corrupt=found.corrupt,
        )

    def require_store(self) -> BlockStore:
        """The store; an engine's session exists only with a layout."""
        assert self.store is not None, "an engine's session exists only with a layout"
        return self.store

    # --- Helpers --------------------------------------------------------------------------------------------

    def _new_store(self) -> BlockStore:
        layout = self.files.layout
        assert layout is not None
        self._published = 0
        store = BlockStore(
            self.files.num_slots,
            layout.block_bytes,
            self.files,
            self._settings.lease_ttl_s,
            self._settings.reservation_ttl_s,
            self._first_id,
            self._settings.event_buffer,
        )
        # In a tier too small for its floors a kept table is not in force; the gateway's next one is judged afresh.
        kept = self._kept_shares.in_blocks(self._tier_bytes, self.files.num_slots)
        store.set_shares(kept, self._last_seen)
        return store

    def _checked(self, hashes: bytes) -> BlockStore:
        check_hashes(hashes)
        return self.require_store()

    def _verify_run(self, store: BlockStore, hashes: bytes) -> None:
        unverified: list[Unverified] = store.unverified_run(hashes)
        if not unverified:
            return
        wanted = [(item.slot, item.checksum) for item in unverified]
        answers = self.files.verify(wanted, self._settings.verify_budget_s)
        for item, is_sound in zip(unverified, answers, strict=False):
            store.verified(item, is_sound)

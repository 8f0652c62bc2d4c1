"""Which block lives in which slot: admission, eviction, two-phase stores, leased reads, expiry (kv-semantics §2, 4, 5).

Pure: `now` is an argument, sessions are numbers, and what must outlive the daemon goes through `Records`, a port the
arena implements. Bytes are never looked at here; whether a block's bytes are sound is told by `verified`. What a decision
means for everything that is known of a block is the contents' business.

A block is in the index from `reserve` on and is served once it and all its ancestors are committed. Its slot goes back
to the free ones only after its record is cleared, and after whoever may write into it has said that it will not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from cached import blocks as slots
from cached.blocks import INDEXED, NO_SLOT, VISIBLE, Blocks, Owners
from cached.contents import Contents, Records
from cached.counters import StoreCounters
from cached.events import EventRing
from cached.holdings import Holdings, LeaseHolding, SessionHoldings
from cached.keys import HASH_BYTES
from cached.offers import (
    Decided,
    Decision,
    Granted,
    LeasedRun,
    Offer,
    OfferRow,
    Pending,
    Present,
    Refused,
    Retouch,
    Unverified,
)
from cached.protocol import (
    FIRST_REFUSAL,
    NEVER,
    PENDING,
    PRESENT,
    REFUSAL_REASONS,
    RESERVED,
    CommitOutcome,
    OwnersOutcome,
    RefusalReason,
    TierStatistics,
    cut,
)
from cached.rebuild import rebuild
from cached.records import Holder, StoredRecord
from cached.retention import demoted_priority
from cached.shares import NO_TABLE, ShareTable, judge

__all__ = ["BlockStore", "Granted", "Offer", "Pending", "Present", "Records", "Refused", "Retouch"]

TURN_BLOCKS = 256
"""Most blocks that expire, or give way to a lowered ceiling, in one turn, so that no mass of them keeps peers waiting."""


class BlockStore:
    """The blocks of one layout. One thread owns it; every verb leaves `check_invariants()` true."""

    def __init__(
        self,
        num_slots: int,
        block_bytes: int,
        records: Records,
        lease_ttl_s: float,
        reservation_ttl_s: float,
        first_id: int = 1,
        event_buffer: int = 0,
    ) -> None:
        self._contents = Contents(num_slots, block_bytes, records, event_buffer)
        self.shares = NO_TABLE
        self._lease_ttl_s = lease_ttl_s
        self._reservation_ttl_s = reservation_ttl_s
        self._holdings = Holdings(first_id)
        self._postponed: list[int] = []
        self._unverified: deque[tuple[int, int]] = deque()
        self._above_ceiling: list[int] = []
        self._now = 0.0

    @property
    def contents(self) -> Contents:
        """What is here; for reading."""
        return self._contents

    @property
    def blocks(self) -> Blocks:
        """What is known of each slot; for reading."""
        return self._contents.blocks

    @property
    def owners(self) -> Owners:
        """Who holds how much; for reading."""
        return self._contents.owners

    @property
    def counters(self) -> StoreCounters:
        """What has been done; for reading."""
        return self._contents.counters

    @property
    def events(self) -> EventRing:
        """What has happened; for reading."""
        return self._contents.events

    # --- Slots and sessions ---------------------------------------------------------------------------------

    def publish(self, first: int, end: int) -> None:
        """The memory of slots [first, end) is there: those that hold nothing are free from now on."""
        self._contents.publish(first, end)

    def open_session(self, session: int, holder: Holder) -> None:
        """A peer may reserve and lease from now on."""
        self._holdings.open(session, holder)

    def end_session(self, session: int, clean: bool, now: float) -> bool:
        """Undo what a session holds. A peer that ended without a word may still be copying: what it was copying into
        or from stays untouchable until `settle`. True when there is something to settle."""
        self.expire(now)
        held = self._holdings.close(session)
        if held is None:
            return False
        for slot in held.reservations.values():
            if self.blocks.state[slot] == slots.RESERVED:
                self._contents.forget_family(slot)
        if clean:
            self._give_back(held)
            return False
        for slot in held.reservations.values():
            self.blocks.move(slot, slots.QUARANTINED)
        return self._holdings.quarantine(session, held)

    def settle(self, session: int) -> None:
        """The process behind an ended session is gone, or says that none of its copies is under way."""
        held = self._holdings.leave_quarantine(session)
        if held is not None:
            self._give_back(held)

    # --- Reading --------------------------------------------------------------------------------------------

    def lookup(self, hashes: bytes, now: float) -> int:
        """How many of these blocks, from the first on, can be leased now."""
        self.expire(now)
        return len(self._run(hashes))

    def count_lookup(self, asked: int, found: int) -> None:
        """Note the outcome of one lookup, as it was answered."""
        self.counters.looked_up += asked
        self.counters.found += found

    def unverified_run(self, hashes: bytes) -> list[Unverified]:
        """The blocks a lookup would find were they verified, in order; empty in the life after a restart's first pass."""
        if not self.blocks.num_in_state[slots.UNVERIFIED]:
            return []
        state = self.blocks.state
        found: list[Unverified] = []
        for slot in self._slots_of(hashes):
            if state[slot] == slots.UNVERIFIED:
                found.append(self._unverified_at(slot))
            elif state[slot] != slots.STORED:
                break
        return found

    def lease(self, session: int, hashes: bytes, now: float) -> LeasedRun | None:
        """Keep the leading run of these blocks in place until `release`, at most for the time to live of leases."""
        self.expire(now)
        run = self._run(hashes)
        if not run:
            return None
        for slot in run:
            self._contents.pin(slot)
        generations = [self.blocks.generation[slot] for slot in run]
        lease = LeaseHolding(session, self._now + self._lease_ttl_s, run, generations)
        return LeasedRun(self._holdings.add_lease(lease), run)

    def release(self, session: int, lease_id: int, now: float) -> bool:
        """End a lease. True only if it held until now: the one place that decides whether a copy counts."""
        self.expire(now)
        lease = self._holdings.take_lease(session, lease_id)
        if lease is None or not self._end_lease(lease):
            self.counters.leases_broken += 1
            return False
        self.counters.loaded += len(lease.slots)
        for slot in lease.slots:
            self.blocks.reused[slot] = 1
        return True

    # --- Writing --------------------------------------------------------------------------------------------

    def reserve(self, session: int, offers: Iterable[OfferRow], now: float) -> list[Decision]:
        """Decide a chain, root first, block by block (kv-semantics 5.1); a refused block changes nothing."""
        return self.decide(session, offers, now).decisions()

    def decide(self, session: int, offers: Iterable[OfferRow], now: float) -> Decided:
        """`reserve` in columns. The records of all that were granted are written before this returns, in place of those of
        the blocks that gave way to them."""
        self.expire(now)
        answers = [self._admit(offer) for offer in offers]
        granted = [answer for answer in answers if answer >= 0]
        first = 0
        if granted:
            self._contents.records.write_reserved(granted, self._holdings.holder_of(session))
            first = self._holdings.add_reservations(session, self._now + self._reservation_ttl_s, granted)
        if len(granted) == len(answers):
            return Decided(bytes([RESERVED]) * len(answers), first, granted)
        return Decided(bytes([RESERVED if answer >= 0 else -answer for answer in answers]), first, granted)

    def commit(self, session: int, items: Iterable[tuple[int, int]], now: float) -> list[CommitOutcome]:
        """`(reservation, checksum)` of copies that are done; one tick of recency for all of them."""
        self.expire(now)
        contents, columns = self._contents, self.blocks
        contents.tick += 1
        mine = self._holdings.reservations_of(session)
        outcomes: list[CommitOutcome] = []
        in_place: list[int] = []
        for reservation, checksum in items:
            slot = mine.pop(reservation, NO_SLOT)
            if slot == NO_SLOT:
                outcomes.append("expired")
            elif columns.state[slot] == slots.RESERVED:
                columns.checksum[slot] = checksum
                columns.tick[slot] = contents.tick
                in_place.append(slot)
                outcomes.append("stored")
            else:
                outcomes.append("orphan" if columns.state[slot] == slots.ORPHANED else "expired")
                contents.free_slot(slot)
        contents.take_in(in_place)
        return outcomes

    def abort(self, session: int, reservations: Iterable[int], now: float) -> None:
        """Give up reservations and, with them, whatever was reserved or waits below them; unknown ones are ignored."""
        self.expire(now)
        mine = self._holdings.reservations_of(session)
        for reservation in reservations:
            slot = mine.pop(reservation, NO_SLOT)
            if slot == NO_SLOT:
                continue
            self.counters.aborted += 1
            if self.blocks.state[slot] == slots.RESERVED:
                self._contents.forget_family(slot)
            self._contents.free_slot(slot)

    # --- Retention ------------------------------------------------------------------------------------------

    def touch(self, items: Iterable[Retouch], now: float) -> None:
        """A release elsewhere: new retention for blocks that are here, and one tick of recency for the message."""
        self.expire(now)
        self._contents.tick += 1
        columns, contents = self.blocks, self._contents
        written: list[int] = []
        for key, priority, deadline, drops in items:
            slot = columns.index.get(key)
            if slot is not None:
                columns.tick[slot] = contents.tick
                if contents.set_retention(slot, priority, deadline, drops):
                    written.append(slot)
        contents.write_records(written)

    def drop_owner(self, owner: bytes, now: float) -> int:
        """Remove every block of an owner and all that descend from them; leases on them no longer hold."""
        self.expire(now)
        number = self.owners.number_of(owner)
        before = len(self.blocks.index)
        if number is not None:
            for slot in [slot for slot, owner in enumerate(self.blocks.owner) if owner == number]:
                if self.blocks.state[slot] in INDEXED and self.blocks.owner[slot] == number:
                    self._contents.forget_family(slot)
        gone = before - len(self.blocks.index)
        self.counters.dropped += gone
        return gone

    def expire(self, now: float) -> None:
        """Let happen what was due by `now`: leases, reservations, blocks' durations. Of the last at most `TURN_BLOCKS`;
        the others follow at the next calls, and a block that is asked for meanwhile is looked at first."""
        self._now = now = max(now, self._now)
        for lease in self._holdings.leases_due(now):
            self._end_lease(lease)
        for slot in self._holdings.reservations_due(now):
            self._expire_reservation(slot)
        expiries = self._contents.expiries
        left = TURN_BLOCKS
        while left and expiries.first <= now:
            deadline, slot = expiries.pop()
            if not self._expire_block(slot, deadline):
                self._postponed.append(slot)
            left -= 1
        if self._above_ceiling:
            self._shed(left)

    def next_deadline(self) -> float | None:
        """When `expire` may next have something to do; None: not until somebody asks for something."""
        due = self._holdings.next_deadline()
        earliest = self._now if self._above_ceiling else min(due, self._contents.expiries.first)
        return None if earliest == NEVER else earliest

    # --- Shares ---------------------------------------------------------------------------------------------

    def set_shares(self, table: ShareTable, now: float) -> OwnersOutcome:
        """Put a table of floors and ceilings in force, unless it is not newer or promises more than there is. Owners
        above a lowered ceiling give up what is idle, at most `TURN_BLOCKS` blocks a turn."""
        self.expire(now)
        outcome = judge(table, self.shares, self.blocks.num_slots)
        if outcome == "taken":
            self.shares = table
            self.owners.set_shares(table.shares)
            self._above_ceiling = self.owners.above_ceiling()
        return outcome

    def _shed(self, budget: int) -> None:
        owners, order = self.owners, self._contents.order
        while self._above_ceiling and budget:
            number = self._above_ceiling[-1]
            victim = order.least_valuable(number) if owners.held[number] > owners.ceilings[number] else None
            if victim is None:
                self._above_ceiling.pop()
            else:
                self._contents.evict(victim)
                budget -= 1

    # --- Verification ---------------------------------------------------------------------------------------

    def verified(self, item: Unverified, is_sound: bool) -> bool:
        """The bytes of an unverified block were read: it is served from now on, or it goes with its descendants, which
        True tells. Nothing happens when another block has come into its slot, whose bytes these were then."""
        columns = self.blocks
        if columns.state[item.slot] != slots.UNVERIFIED or columns.generation[item.slot] != item.generation:
            return False
        if is_sound:
            self.counters.verified += 1
            columns.move(item.slot, slots.STORED)
        else:
            self.counters.corrupt += 1
            self._contents.forget_family(item.slot)
        return not is_sound

    def suspect(self, hashes: bytes) -> None:
        """A peer found bytes that do not match: these blocks are verified before they are served again."""
        columns = self.blocks
        for slot in self._slots_of(hashes):
            if columns.state[slot] == slots.STORED:
                columns.move(slot, slots.UNVERIFIED)
                self._unverified.append((slot, columns.generation[slot]))

    def suspect_all(self) -> int:
        """Any of the bytes may have changed: every block is verified before it is served again; says how many."""
        columns = self.blocks
        stored = [slot for slot in range(columns.num_slots) if columns.state[slot] == slots.STORED]
        for slot in stored:
            columns.move(slot, slots.UNVERIFIED)
            self._unverified.append((slot, columns.generation[slot]))
        return len(stored)

    def count_mending(self) -> None:
        """The payload had been cut short or holed by a peer, and is whole again."""
        self.counters.payload_mended += 1

    def next_unverified(self, count: int) -> list[Unverified]:
        """Up to `count` blocks to verify in the background, each handed out once."""
        batch: list[Unverified] = []
        while self._unverified and len(batch) < count:
            slot, generation = self._unverified.popleft()
            if self.blocks.state[slot] == slots.UNVERIFIED and self.blocks.generation[slot] == generation:
                batch.append(self._unverified_at(slot))
        return batch

    # --- Restart --------------------------------------------------------------------------------------------

    def restore(self, found: Iterator[tuple[int, StoredRecord]], now: float) -> None:
        """Take over, once and before anything else, the blocks that a former daemon left; a block whose chain has a
        gap goes, as does the elder of two of one name. All of them are unverified."""
        self._now = now
        kept, lost = rebuild(found)
        for slot, record in kept:
            self._contents.restore(slot, record)
        for slot in lost:
            self._contents.records.clear(slot)
        self.counters.restored += len(kept)
        self.counters.lost_at_restart += len(lost)
        recent_first = sorted(kept, key=lambda pair: (-pair[1].tick, self.blocks.depth[pair[0]]))
        self._unverified.extend((slot, record.generation) for slot, record in recent_first)
        # The former daemon may have died while owners were giving up what they have above a lowered ceiling.
        self._above_ceiling = self.owners.above_ceiling()
        self.expire(now)

    def restore_quarantine(self, session: int, holder: Holder, held: Sequence[int]) -> None:
        """Slots that a peer of a former daemon may still be writing into: untouchable until `settle(session)`."""
        for slot in held:
            self.blocks.move(slot, slots.QUARANTINED)
        self._holdings.restore_quarantine(session, holder, held)

    # --- What it looks like ---------------------------------------------------------------------------------

    def quarantined_sessions(self) -> dict[int, Holder]:
        """Ended sessions that wait for `settle`, and who is behind them."""
        return self._holdings.quarantined_sessions()

    def is_vacant(self) -> bool:
        """Nothing here that anybody could miss or be harmed by: no block, no reservation, no quarantine."""
        return not self.blocks.index and not self.has_holdings()

    def has_holdings(self) -> bool:
        """Whether some session, open or ended, is attached."""
        return self._holdings.has_any()

    def statistics(self) -> TierStatistics:
        """A frozen snapshot."""
        in_state = self.blocks.num_in_state
        used = in_state[slots.STORED] + in_state[slots.UNVERIFIED]
        held_back = in_state[slots.QUARANTINED] + in_state[slots.ORPHANED] + in_state[slots.EXPIRED]
        return TierStatistics(
            capacity_slots=self.blocks.num_slots,
            allocated_slots=self.blocks.num_slots - in_state[slots.UNALLOCATED],
            used=used,
            idle=used - self._contents.leased,
            leased=self._contents.leased,
            reserved=in_state[slots.RESERVED],
            waiting=in_state[slots.WAITING],
            quarantined=held_back,
            unverified=in_state[slots.UNVERIFIED],
            owners=len(self.owners),
            shares_version=self.shares.version,
            floors_total=self.shares.floors_total,
            **self.counters.as_fields(),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when anything here contradicts anything else; slow, complete."""
        self._contents.check_invariants()
        columns = self.blocks
        leases = [0] * columns.num_slots
        for lease in self._holdings.leases.values():
            for slot, generation in zip(lease.slots, lease.generations, strict=True):
                leases[slot] += columns.generation[slot] == generation
        assert leases == columns.leases.tolist()
        assert self._contents.leased == sum(count > 0 for count in leases)
        for slot in range(columns.num_slots):
            if columns.state[slot] in VISIBLE and slot not in self._postponed:
                due = self._contents.expiries.deadline_of(slot)
                assert due == columns.deadline[slot] or columns.deadline[slot] == NEVER, f"slot {slot} will not expire"
        self._holdings.check_invariants(columns.state)

    # --- Decisions ------------------------------------------------------------------------------------------

    def _admit(self, offer: OfferRow) -> int:
        """The slot that an offered block is to be written into, or minus the code of what it is answered instead."""
        contents = self._contents
        columns, owners = contents.blocks, contents.owners
        key, parent_key, _, priority, _, _, owner_id = offer
        known = columns.index.get(key)
        if known is not None:
            return -PRESENT if columns.state[known] in VISIBLE else -PENDING
        parent = NO_SLOT
        if parent_key is not None:
            parent = columns.index.get(parent_key, NO_SLOT)
            if parent == NO_SLOT:
                return self._refuse(owner_id, "orphan")
            # A newcomer's ancestors are never its victims (5.1); of them only the parent can be a leaf.
            contents.order.discard(parent)
        owner = owners.enter(owner_id)
        at_ceiling = owners.held[owner] > owners.ceilings[owner]
        victim = NO_SLOT
        if at_ceiling or not contents.free:
            found = contents.givers.victim(owner, priority, at_ceiling)
            if found is None:
                reason = self._reason(owner, priority, at_ceiling)
                owners.leave(owner)
                contents.settle_order(parent)
                return self._refuse(owner_id, reason)
            victim = found
        return contents.admit(offer, owner, parent, victim)

    def _reason(self, owner: int, priority: int, at_ceiling: bool) -> RefusalReason:
        """Why nothing gives way to it."""
        if at_ceiling:
            return "ceiling"
        if not len(self._contents.order):
            return "full"
        return "floors" if self._contents.givers.are_others_guarded(owner, priority) else "outranked"

    def _refuse(self, owner: bytes, reason: RefusalReason) -> int:
        self.counters.count_refusal(owner, reason)
        return -(FIRST_REFUSAL + REFUSAL_REASONS.index(reason))

    def _expire_reservation(self, slot: int) -> None:
        if self.blocks.state[slot] == slots.RESERVED:
            self.counters.reservations_expired += 1
            self._contents.forget_family(slot)
            self.blocks.move(slot, slots.EXPIRED)

    def _expire_block(self, slot: int, deadline: float) -> bool:
        """A duration has passed (kv-semantics 2.5). False: the block, or one that would go with it, is in use, and it
        waits for the end of that."""
        columns = self.blocks
        if columns.deadline[slot] != deadline or columns.state[slot] not in VISIBLE:
            return True
        # Itself first: of a leased chain every block would go through all that descend from it.
        if columns.leases[slot] or (
            columns.drops[slot] and any(columns.leases[each] for each in columns.subtree(slot))
        ):
            return False
        self.counters.expired += 1
        if columns.drops[slot]:
            self._contents.forget_family(slot)
        else:
            self._contents.set_retention(slot, demoted_priority(columns.priority[slot]), NEVER, drops=False)
            self._contents.write_records([slot])
        return True

    # --- Bookkeeping ----------------------------------------------------------------------------------------

    def _run(self, hashes: bytes) -> list[int]:
        if self._contents.expiries.first <= self._now:
            self._catch_up(hashes)
        index, state = self.blocks.index, self.blocks.state
        run: list[int] = []
        if hashes[:HASH_BYTES] not in index:  # Most of what is asked for in a cold cache.
            return run
        for slot in map(index.get, cut(hashes, HASH_BYTES)):
            if slot is None or state[slot] != slots.STORED:
                break
            run.append(slot)
        return run

    def _catch_up(self, hashes: bytes) -> None:
        """More is due than one turn lets expire: what is asked for, and what that descends from, goes first."""
        columns = self.blocks
        asked = list(self._slots_of(hashes))
        ancestor = columns.parent[asked[0]] if asked else NO_SLOT
        while ancestor != NO_SLOT:
            asked.append(ancestor)
            ancestor = columns.parent[ancestor]
        for slot, deadline in [(slot, columns.deadline[slot]) for slot in asked]:
            if deadline <= self._now:
                self._expire_block(slot, deadline)

    def _slots_of(self, hashes: bytes) -> Iterator[int]:
        """The slots of the leading run of indexed hashes."""
        for start in range(0, len(hashes), HASH_BYTES):
            slot = self.blocks.index.get(hashes[start : start + HASH_BYTES])
            if slot is None:
                return
            yield slot

    def _unverified_at(self, slot: int) -> Unverified:
        return Unverified(slot, self.blocks.generation[slot], self.blocks.checksum[slot])

    def _end_lease(self, lease: LeaseHolding) -> bool:
        """Unpin what a lease covered, in one tick; says whether all of it is what it was."""
        columns = self.blocks
        self._contents.tick += 1
        held = True
        for slot, generation in zip(lease.slots, lease.generations, strict=True):
            if columns.generation[slot] != generation:
                held = False
                continue
            self._contents.unpin(slot)
        for slot in self._postponed:
            self._contents.schedule_expiry(slot)
        self._postponed.clear()
        return held

    def _give_back(self, held: SessionHoldings) -> None:
        for slot in (*held.reservations.values(), *held.slots):
            self._contents.free_slot(slot)
        for lease_id in held.leases:
            self._end_lease(self._holdings.leases.pop(lease_id))

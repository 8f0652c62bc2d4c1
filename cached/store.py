"""Which block lives in which slot: admission, eviction, two-phase stores, leased reads, expiry (kv-semantics §2, 4, 5).

Pure: `now` is an argument, sessions are numbers, and what must outlive the daemon goes through `Records`, a port the
arena implements. Bytes are never looked at here; whether a block's bytes are sound is told by `verified`.

A block is in the index from `reserve` on and is served once it and all its ancestors are committed. Its slot goes back
to the free ones only after its record is cleared, and after whoever may write into it has said that it will not.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from cached import blocks as slots
from cached.blocks import INDEXED, NO_SLOT, VISIBLE, Blocks, Owners
from cached.counters import StoreCounters
from cached.eviction import EvictionOrder, host_victim
from cached.holdings import Holdings, LeaseHolding, ReservationHolding, SessionHoldings
from cached.keys import HASH_BYTES
from cached.offers import (
    Decision,
    Granted,
    LeasedRun,
    Offer,
    Pending,
    Present,
    Refused,
    Retouch,
    Unverified,
)
from cached.protocol import NEVER, NO_PARENT, CommitOutcome, RefusalReason, TierStatistics
from cached.rebuild import rebuild
from cached.records import Holder, StoredRecord
from cached.retention import demoted_priority

__all__ = ["BlockStore", "Granted", "Offer", "Pending", "Present", "Records", "Refused", "Retouch"]

_SLACK = 64
"""Outdated entries tolerated in the heap of deadlines beyond as many as there are blocks."""


class Records(Protocol):
    """Where the store writes what must survive the daemon."""

    def write_stored(self, slot: int, record: StoredRecord) -> None:
        """Make `record` the slot's record."""

    def write_reserved(self, slot: int, holder: Holder) -> None:
        """Note that `holder` may be writing into the slot."""

    def clear(self, slot: int) -> None:
        """Make the slot free, for good, before this returns."""


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
    ) -> None:
        self.blocks = Blocks(num_slots)
        self.owners = Owners()
        self.counters = StoreCounters()
        self._order = EvictionOrder(num_slots)
        self._records = records
        self._block_bytes = block_bytes
        self._lease_ttl_s = lease_ttl_s
        self._reservation_ttl_s = reservation_ttl_s
        self._holdings = Holdings(first_id)
        self._free: list[int] = []
        self._expiries: list[tuple[float, int, int]] = []
        self._postponed: list[tuple[float, int, int]] = []
        self._unverified: deque[tuple[int, int]] = deque()
        self._leased = 0
        self._tick = 0
        self._generation = 0
        self._now = 0.0

    # --- Slots and sessions ---------------------------------------------------------------------------------

    def publish(self, first: int, end: int) -> None:
        """The memory of slots [first, end) is there: those that hold nothing are free from now on."""
        fresh = [slot for slot in range(first, end) if self.blocks.state[slot] == slots.UNALLOCATED]
        for slot in fresh:
            self.blocks.move(slot, slots.FREE)
        self._free[:0] = reversed(fresh)

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
        for reservation in held.reservations:
            slot = self._holdings.reservations[reservation].slot
            if self.blocks.state[slot] == slots.RESERVED:
                self._forget_family(slot)
        if clean:
            self._give_back(held)
            return False
        for reservation in held.reservations:
            self.blocks.move(self._holdings.reservations[reservation].slot, slots.QUARANTINED)
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
        columns = self.blocks
        for slot in run:
            if columns.leases[slot] == 0:
                self._leased += 1
                if columns.first_child[slot] == NO_SLOT:
                    self._order.discard(slot)
            columns.leases[slot] += 1
        generations = [columns.generation[slot] for slot in run]
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

    def reserve(self, session: int, offers: Iterable[Offer], now: float) -> list[Decision]:
        """Decide a chain, root first, block by block (kv-semantics 5.1); a refused block changes nothing."""
        self.expire(now)
        decisions: list[Decision] = []
        for offer in offers:
            decision = self._reserve_one(session, offer)
            if isinstance(decision, Refused):
                self.counters.refused[decision.reason] += 1
            decisions.append(decision)
        return decisions

    def commit(self, session: int, items: Iterable[tuple[int, int]], now: float) -> list[CommitOutcome]:
        """`(reservation, checksum)` of copies that are done; one tick of recency for all of them."""
        self.expire(now)
        self._tick += 1
        return [self._commit_one(session, reservation, checksum) for reservation, checksum in items]

    def abort(self, session: int, reservations: Iterable[int], now: float) -> None:
        """Give up reservations and, with them, whatever was reserved or waits below them; unknown ones are ignored."""
        self.expire(now)
        for reservation in reservations:
            held = self._holdings.take_reservation(session, reservation)
            if held is None:
                continue
            self.counters.aborted += 1
            if self.blocks.state[held.slot] == slots.RESERVED:
                self._forget_family(held.slot)
            self._free_slot(held.slot)

    # --- Retention ------------------------------------------------------------------------------------------

    def touch(self, items: Iterable[Retouch], now: float) -> None:
        """A release elsewhere: new retention for blocks that are here, and one tick of recency for the message."""
        self.expire(now)
        self._tick += 1
        columns = self.blocks
        for item in items:
            slot = columns.index.get(item.key)
            if slot is None:
                continue
            columns.tick[slot] = self._tick
            self._set_retention(slot, item.priority, item.deadline, item.drops)

    def drop_owner(self, owner: bytes, now: float) -> int:
        """Remove every block of an owner and all that descend from them; leases on them no longer hold."""
        self.expire(now)
        number = self.owners.number_of(owner)
        before = len(self.blocks.index)
        if number is not None:
            for slot in range(self.blocks.num_slots):
                if self.blocks.state[slot] in INDEXED and self.blocks.owner[slot] == number:
                    self._forget_family(slot)
        gone = before - len(self.blocks.index)
        self.counters.dropped += gone
        return gone

    def expire(self, now: float) -> None:
        """Let everything happen that was due by `now`: leases, reservations, blocks' durations."""
        self._now = now = max(now, self._now)
        for lease in self._holdings.leases_due(now):
            self._end_lease(lease)
        for held in self._holdings.reservations_due(now):
            self._expire_reservation(held)
        while self._expiries and self._expiries[0][0] <= now:
            self._expire_block(heapq.heappop(self._expiries))

    def next_deadline(self) -> float | None:
        """When `expire` may next have something to do; None: not until somebody asks for something."""
        due = self._holdings.next_deadline()
        block = self._expiries[0][0] if self._expiries else NEVER
        earliest = min(due, block)
        return None if earliest == NEVER else earliest

    # --- Verification ---------------------------------------------------------------------------------------

    def verified(self, item: Unverified, is_sound: bool) -> None:
        """The bytes of an unverified block were read: it is served from now on, or it goes with its descendants."""
        columns = self.blocks
        if columns.state[item.slot] != slots.UNVERIFIED or columns.generation[item.slot] != item.generation:
            return
        if is_sound:
            self.counters.verified += 1
            columns.move(item.slot, slots.STORED)
        else:
            self.counters.corrupt += 1
            self._forget_family(item.slot)

    def suspect(self, hashes: bytes) -> None:
        """A peer found bytes that do not match: these blocks are verified before they are served again."""
        columns = self.blocks
        for slot in self._slots_of(hashes):
            if columns.state[slot] == slots.STORED:
                columns.move(slot, slots.UNVERIFIED)
                self._unverified.append((slot, columns.generation[slot]))

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
            self._restore_one(slot, record)
        for slot in lost:
            self._records.clear(slot)
        self.counters.restored += len(kept)
        self.counters.lost_at_restart += len(lost)
        recent_first = sorted(kept, key=lambda pair: (-pair[1].tick, self.blocks.depth[pair[0]]))
        self._unverified.extend((slot, record.generation) for slot, record in recent_first)
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
            idle=used - self._leased,
            leased=self._leased,
            reserved=in_state[slots.RESERVED],
            waiting=in_state[slots.WAITING],
            quarantined=held_back,
            unverified=in_state[slots.UNVERIFIED],
            owners=len(self.owners),
            **self.counters.as_fields(),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when anything here contradicts anything else; slow, complete."""
        columns = self.blocks
        columns.check_invariants()
        self._order.check_invariants()
        assert len(set(self._free)) == len(self._free) == columns.num_in_state[slots.FREE]
        leases = [0] * columns.num_slots
        for lease in self._holdings.leases.values():
            for slot, generation in zip(lease.slots, lease.generations, strict=True):
                leases[slot] += columns.generation[slot] == generation
        assert leases == columns.leases.tolist()
        assert self._leased == sum(count > 0 for count in leases)
        held: dict[bytes, int] = {}
        used = [0] * len(self.counters.used)
        for slot in range(columns.num_slots):
            self._check_slot(slot)
            used[columns.priority[slot]] += columns.state[slot] in VISIBLE
            if columns.state[slot] in INDEXED:
                owner = self.owners.id_of(columns.owner[slot])
                held[owner] = held.get(owner, 0) + 1
        assert held == self.owners.counts()
        assert used == self.counters.used
        self._holdings.check_invariants(columns.state)

    # --- Decisions ------------------------------------------------------------------------------------------

    def _reserve_one(self, session: int, offer: Offer) -> Decision:
        columns = self.blocks
        known = columns.index.get(offer.key)
        if known is not None:
            return Present() if columns.state[known] in VISIBLE else Pending()
        parent = NO_SLOT
        if offer.parent is not None:
            parent = columns.index.get(offer.parent, NO_SLOT)
            if parent == NO_SLOT:
                return Refused("orphan")
            # A newcomer's ancestors are never its victims (5.1); of them only the parent can be a leaf.
            self._order.discard(parent)
        owner = self.owners.enter(offer.owner)
        if not self._free and not self._make_room(owner, offer.priority):
            reason: RefusalReason = "outranked" if len(self._order) else "full"
            self.owners.leave(owner)
            self._settle_order(parent)
            return Refused(reason)
        slot = self._free.pop()
        self._fill(slot, offer, owner, parent)
        # Making room may have evicted the parent's last other child and so put the parent into the order.
        self._settle_order(parent)
        self._records.write_reserved(slot, self._holdings.holder_of(session))
        deadline = self._now + self._reservation_ttl_s
        return Granted(self._holdings.add_reservation(ReservationHolding(session, deadline, slot)), slot)

    def _fill(self, slot: int, offer: Offer, owner: int, parent: int) -> None:
        columns = self.blocks
        columns.move(slot, slots.RESERVED)
        columns.enter(slot, offer.key, parent)
        columns.namespace[slot] = offer.namespace
        columns.priority[slot] = offer.priority
        columns.deadline[slot] = offer.deadline
        columns.drops[slot] = offer.drops
        columns.reused[slot] = 0
        columns.owner[slot] = owner
        self._generation += 1
        columns.generation[slot] = self._generation

    def _make_room(self, owner: int, priority: int) -> bool:
        victim = host_victim(self._order, self.owners.held, self._floor, owner, priority)
        if victim is None:
            return False
        self.counters.evicted[self.blocks.priority[victim]] += 1
        self._forget(victim, slots.FREE)
        return True

    def _floor(self, _owner: int) -> float:
        """Host blocks an owner always keeps (5.9); none until the table of owners arrives."""
        return 0.0

    def _commit_one(self, session: int, reservation: int, checksum: int) -> CommitOutcome:
        held = self._holdings.take_reservation(session, reservation)
        if held is None:
            return "expired"
        columns, slot = self.blocks, held.slot
        if columns.state[slot] != slots.RESERVED:
            outcome: CommitOutcome = "orphan" if columns.state[slot] == slots.ORPHANED else "expired"
            self._free_slot(slot)
            return outcome
        columns.checksum[slot] = checksum
        columns.tick[slot] = self._tick
        parent = columns.parent[slot]
        if parent == NO_SLOT or columns.state[parent] in VISIBLE:
            self._reveal(slot)
        else:
            columns.move(slot, slots.WAITING)
        return "stored"

    def _reveal(self, slot: int) -> None:
        """Make a committed block visible, and with it those that waited for it."""
        columns = self.blocks
        todo = [slot]
        for each in todo:  # Grows while it is walked.
            columns.move(each, slots.STORED)
            self.counters.stored += 1
            self.counters.used[columns.priority[each]] += 1
            self._write_record(each)
            self._schedule_expiry(each)
            self._settle_order(each)
            if columns.first_child[each] != NO_SLOT:
                todo += [child for child in columns.children(each) if columns.state[child] == slots.WAITING]

    def _expire_reservation(self, held: ReservationHolding) -> None:
        if self.blocks.state[held.slot] == slots.RESERVED:
            self.counters.reservations_expired += 1
            self._forget_family(held.slot)
            self.blocks.move(held.slot, slots.EXPIRED)

    def _expire_block(self, entry: tuple[float, int, int]) -> None:
        """A duration has passed (kv-semantics 2.5); a block in use waits for the end of its use."""
        deadline, slot, generation = entry
        columns = self.blocks
        if columns.generation[slot] != generation or columns.deadline[slot] != deadline:
            return
        family = columns.subtree(slot) if columns.drops[slot] else [slot]
        if any(columns.leases[each] for each in family):
            self._postponed.append(entry)
            return
        self.counters.expired += 1
        if columns.drops[slot]:
            self._forget_family(slot)
        else:
            self._set_retention(slot, demoted_priority(columns.priority[slot]), NEVER, drops=False)

    # --- Bookkeeping ----------------------------------------------------------------------------------------

    def _run(self, hashes: bytes) -> list[int]:
        index, state = self.blocks.index, self.blocks.state
        run: list[int] = []
        for start in range(0, len(hashes), HASH_BYTES):
            slot = index.get(hashes[start : start + HASH_BYTES])
            if slot is None or state[slot] != slots.STORED:
                break
            run.append(slot)
        return run

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
        self._tick += 1
        held = True
        for slot, generation in zip(lease.slots, lease.generations, strict=True):
            if columns.generation[slot] != generation:
                held = False
                continue
            columns.leases[slot] -= 1
            columns.tick[slot] = self._tick
            if columns.leases[slot] == 0:
                self._leased -= 1
                if columns.first_child[slot] == NO_SLOT:
                    self._settle_order(slot)
        for entry in self._postponed:
            heapq.heappush(self._expiries, entry)
        self._postponed.clear()
        return held

    def _give_back(self, held: SessionHoldings) -> None:
        for reservation in held.reservations:
            self._free_slot(self._holdings.reservations.pop(reservation).slot)
        for slot in held.slots:
            self._free_slot(slot)
        for lease_id in held.leases:
            self._end_lease(self._holdings.leases.pop(lease_id))

    def _set_retention(self, slot: int, priority: int, deadline: float, drops: bool) -> None:
        columns = self.blocks
        if columns.state[slot] in VISIBLE:
            self.counters.used[columns.priority[slot]] -= 1
            self.counters.used[priority] += 1
        columns.priority[slot] = priority
        columns.deadline[slot] = deadline
        columns.drops[slot] = drops
        if columns.state[slot] in VISIBLE:
            self._write_record(slot)
            self._schedule_expiry(slot)
            self._settle_order(slot)

    def _schedule_expiry(self, slot: int) -> None:
        columns = self.blocks
        if columns.deadline[slot] == NEVER:
            return
        heapq.heappush(self._expiries, (columns.deadline[slot], slot, columns.generation[slot]))
        if len(self._expiries) > 2 * len(columns.index) + _SLACK:
            live = {e for e in self._expiries if columns.generation[e[1]] == e[2] and columns.deadline[e[1]] == e[0]}
            self._expiries = sorted(live)

    def _settle_order(self, slot: int) -> None:
        """Evictable is membership in the order: an idle, visible leaf is in it, anything else is not."""
        columns = self.blocks
        if slot == NO_SLOT:
            return
        if columns.state[slot] in VISIBLE and columns.first_child[slot] == NO_SLOT and columns.leases[slot] == 0:
            self._order.add(slot, columns.owner[slot], columns.priority[slot], columns.tick[slot], columns.depth[slot])
        else:
            self._order.discard(slot)

    def _forget_family(self, slot: int) -> None:
        """Take a block and its descendants out of the tier, dependents first. A slot somebody may be writing into
        becomes ORPHANED: its reservation still answers for it."""
        for each in reversed(self.blocks.subtree(slot)):
            self._forget(each, slots.ORPHANED if self.blocks.state[each] == slots.RESERVED else slots.FREE)

    def _forget(self, slot: int, state: int) -> None:
        columns = self.blocks
        if columns.state[slot] in VISIBLE:
            self.counters.used[columns.priority[slot]] -= 1
            self.counters.dropped_unused += not columns.reused[slot]
        if columns.leases[slot]:
            self._leased -= 1
            columns.leases[slot] = 0
        self._order.discard(slot)
        parent = columns.leave(slot)
        # No generation is 0, so leases, expiries and verifications of this content end here.
        columns.generation[slot] = 0
        self.owners.leave(columns.owner[slot])
        if state == slots.FREE:
            self._free_slot(slot)
        else:
            columns.move(slot, state)
        self._settle_order(parent)

    def _free_slot(self, slot: int) -> None:
        # The record goes first: a daemon killed in between finds a free slot, never an old name on new bytes.
        self._records.clear(slot)
        self.blocks.move(slot, slots.FREE)
        self._free.append(slot)

    def _write_record(self, slot: int) -> None:
        columns = self.blocks
        key, parent = columns.key[slot], columns.parent[slot]
        assert key is not None
        parent_key = NO_PARENT if parent == NO_SLOT else columns.key[parent]
        assert parent_key is not None
        record = StoredRecord(
            key,
            parent_key,
            columns.namespace[slot],
            columns.priority[slot],
            columns.deadline[slot],
            bool(columns.drops[slot]),
            self.owners.id_of(columns.owner[slot]),
            self._block_bytes,
            columns.checksum[slot],
            columns.generation[slot],
            columns.tick[slot],
        )
        self._records.write_stored(slot, record)

    def _restore_one(self, slot: int, record: StoredRecord) -> None:
        columns = self.blocks
        parent = NO_SLOT if record.parent == NO_PARENT else columns.index[record.parent]
        columns.move(slot, slots.UNVERIFIED)
        columns.enter(slot, record.key, parent)
        columns.namespace[slot] = record.namespace
        columns.priority[slot] = record.priority
        columns.deadline[slot] = record.deadline
        columns.drops[slot] = record.drops
        columns.owner[slot] = self.owners.enter(record.owner)
        columns.checksum[slot] = record.checksum
        columns.tick[slot] = record.tick
        columns.generation[slot] = record.generation
        self._generation = max(self._generation, record.generation)
        self._tick = max(self._tick, record.tick)
        self.counters.used[record.priority] += 1
        self._schedule_expiry(slot)
        self._settle_order(slot)
        self._settle_order(parent)

    def _check_slot(self, slot: int) -> None:
        columns = self.blocks
        state = columns.state[slot]
        idle_leaf = state in VISIBLE and columns.first_child[slot] == NO_SLOT and columns.leases[slot] == 0
        assert (slot in self._order) == idle_leaf, f"slot {slot} and the eviction order disagree"
        if idle_leaf:
            assert self._order.key_of(slot) == (columns.priority[slot], columns.tick[slot], -columns.depth[slot])
        if state in VISIBLE:
            parent = columns.parent[slot]
            assert parent == NO_SLOT or columns.state[parent] in VISIBLE, f"slot {slot} is served, its parent is not"
            assert columns.generation[slot] > 0
        if state == slots.WAITING:
            assert columns.state[columns.parent[slot]] in (slots.WAITING, slots.RESERVED)

"""What is in the tier, kept whole: blocks, owners, eviction order, records, counters and events change here together.

Whether a block may come, must go or may be served is the store's to decide; here is what each of those means for
everything that is known of a block, so that no part of it falls out of step. A slot goes back to the free ones only after
its record is cleared.
"""

from __future__ import annotations

import heapq
from typing import Protocol

from cached import blocks as slots
from cached import events
from cached.blocks import INDEXED, NO_SLOT, VISIBLE, Blocks, Owners
from cached.counters import StoreCounters
from cached.events import EventRing, Happened
from cached.eviction import EvictionOrder
from cached.offers import Offer
from cached.protocol import NEVER, NO_PARENT
from cached.records import Holder, StoredRecord

_SLACK = 64
"""Outdated entries tolerated in the heap of deadlines beyond as many as there are blocks."""


class Records(Protocol):
    """Where what must survive the daemon is written."""

    def write_stored(self, slot: int, record: StoredRecord) -> None:
        """Make `record` the slot's record."""

    def write_reserved(self, slot: int, holder: Holder) -> None:
        """Note that `holder` may be writing into the slot."""

    def clear(self, slot: int) -> None:
        """Make the slot free, for good, before this returns."""


class Contents:
    """The blocks of one layout and all that is known of them. `tick` and `generation` are the last ones given out."""

    def __init__(self, num_slots: int, block_bytes: int, records: Records, event_buffer: int) -> None:
        self.blocks = Blocks(num_slots)
        self.owners = Owners()
        self.counters = StoreCounters()
        self.order = EvictionOrder(num_slots)
        self.events = EventRing(event_buffer)
        self.records = records
        self.free: list[int] = []
        self.expiries: list[tuple[float, int, int]] = []
        self.leased = 0
        self.tick = 0
        self.generation = 0
        self._block_bytes = block_bytes

    # --- A block comes --------------------------------------------------------------------------------------

    def publish(self, first: int, end: int) -> None:
        """The memory of slots [first, end) is there: those that hold nothing are free from now on."""
        fresh = [slot for slot in range(first, end) if self.blocks.state[slot] == slots.UNALLOCATED]
        for slot in fresh:
            self.blocks.move(slot, slots.FREE)
        self.free[:0] = reversed(fresh)

    def fill(self, offer: Offer, owner: int, parent: int, holder: Holder) -> int:
        """Give a free slot to an offered block of `owner`, who has been counted for it, below `parent`; says which."""
        slot = self.free.pop()
        columns = self.blocks
        columns.move(slot, slots.RESERVED)
        key, _, namespace, priority, deadline, drops, _ = offer
        columns.enter(slot, key, parent)
        columns.namespace[slot] = namespace
        columns.priority[slot] = priority
        columns.deadline[slot] = deadline
        columns.drops[slot] = drops
        columns.reused[slot] = 0
        columns.owner[slot] = owner
        self.generation += 1
        columns.generation[slot] = self.generation
        if parent != NO_SLOT:
            self.order.discard(parent)  # It is no leaf any more.
        self.records.write_reserved(slot, holder)
        return slot

    def reveal(self, slot: int) -> None:
        """Make a committed block visible, and with it those that waited for it."""
        columns, counters = self.blocks, self.counters
        todo = [slot]
        for each in todo:  # Grows while it is walked.
            columns.move(each, slots.STORED)
            counters.stored += 1
            counters.used[columns.priority[each]] += 1
            self._write_record(each)
            if columns.deadline[each] != NEVER:
                self._schedule_expiry(each)
            self._happened(events.STORED, each)
            if columns.first_child[each] == NO_SLOT:
                self.order.add(
                    each, columns.owner[each], columns.priority[each], columns.tick[each], columns.depth[each]
                )
            else:
                todo += [child for child in columns.children(each) if columns.state[child] == slots.WAITING]

    def restore(self, slot: int, record: StoredRecord) -> None:
        """Take over a block that a former daemon left; its parent has been taken over before it."""
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
        self.generation = max(self.generation, record.generation)
        self.tick = max(self.tick, record.tick)
        self.counters.used[record.priority] += 1
        self._schedule_expiry(slot)
        self.settle_order(slot)
        self.settle_order(parent)

    # --- A block changes ------------------------------------------------------------------------------------

    def set_retention(self, slot: int, priority: int, deadline: float, drops: bool) -> None:
        """Give a block a new priority and deadline."""
        columns = self.blocks
        old = columns.priority[slot]
        columns.priority[slot] = priority
        columns.deadline[slot] = deadline
        columns.drops[slot] = drops
        if columns.state[slot] not in VISIBLE:
            return
        self.counters.used[old] -= 1
        self.counters.used[priority] += 1
        self._write_record(slot)
        self._schedule_expiry(slot)
        self.settle_order(slot)
        if priority != old:
            self._happened(events.UPDATED, slot, old)

    def pin(self, slot: int) -> None:
        """One lease more on a block."""
        columns = self.blocks
        if columns.leases[slot] == 0:
            self.leased += 1
            if columns.first_child[slot] == NO_SLOT:
                self.order.discard(slot)
        columns.leases[slot] += 1

    def unpin(self, slot: int) -> None:
        """One lease less, at the current tick."""
        columns = self.blocks
        columns.leases[slot] -= 1
        columns.tick[slot] = self.tick
        if columns.leases[slot] == 0:
            self.leased -= 1
            if columns.first_child[slot] == NO_SLOT:
                self.settle_order(slot)

    def settle_order(self, slot: int) -> None:
        """Evictable is membership in the order: an idle, visible leaf is in it, anything else is not."""
        if slot == NO_SLOT:
            return
        columns = self.blocks
        if columns.first_child[slot] == NO_SLOT and columns.leases[slot] == 0 and columns.state[slot] in VISIBLE:
            self.order.add(slot, columns.owner[slot], columns.priority[slot], columns.tick[slot], columns.depth[slot])
        else:
            self.order.discard(slot)

    # --- A block goes ---------------------------------------------------------------------------------------

    def evict(self, slot: int) -> None:
        """An idle leaf gives way."""
        columns, counters = self.blocks, self.counters
        priority, owner = columns.priority[slot], columns.owner[slot]
        counters.count_eviction(self.owners.id_of(owner), priority)
        # What `_forget` does, for a slot of which much is known already: this is the price of every store when full.
        counters.used[priority] -= 1
        counters.dropped_unused += not columns.reused[slot]
        self._happened(events.REMOVED, slot)
        self.order.discard(slot)
        parent = columns.leave(slot)
        columns.generation[slot] = 0
        self.owners.leave(owner)
        self.free_slot(slot)
        if parent != NO_SLOT and columns.first_child[parent] == NO_SLOT:
            self.settle_order(parent)

    def forget_family(self, slot: int) -> None:
        """Take a block and its descendants out of the tier, dependents first. A slot somebody may be writing into
        becomes ORPHANED: its reservation still answers for it."""
        for each in reversed(self.blocks.subtree(slot)):
            self._forget(each, slots.ORPHANED if self.blocks.state[each] == slots.RESERVED else slots.FREE)

    def free_slot(self, slot: int) -> None:
        """Nobody writes into this slot any more and no block is in it."""
        # The record goes first: a daemon killed in between finds a free slot, never an old name on new bytes.
        self.records.clear(slot)
        self.blocks.move(slot, slots.FREE)
        self.free.append(slot)

    def _forget(self, slot: int, state: int) -> None:
        columns = self.blocks
        if columns.state[slot] in VISIBLE:
            self.counters.used[columns.priority[slot]] -= 1
            self.counters.dropped_unused += not columns.reused[slot]
            self._happened(events.REMOVED, slot)
        if columns.leases[slot]:
            self.leased -= 1
            columns.leases[slot] = 0
        self.order.discard(slot)
        parent = columns.leave(slot)
        # No generation is 0, so leases, expiries and verifications of this content end here.
        columns.generation[slot] = 0
        self.owners.leave(columns.owner[slot])
        if state == slots.FREE:
            self.free_slot(slot)
        else:
            columns.move(slot, state)
        if parent != NO_SLOT and columns.first_child[parent] == NO_SLOT:
            self.settle_order(parent)

    # --- What goes with it ----------------------------------------------------------------------------------

    def parent_key(self, slot: int) -> bytes:
        """The name of a block's parent; zeros for a first block."""
        parent = self.blocks.parent[slot]
        if parent == NO_SLOT:
            return NO_PARENT
        key = self.blocks.key[parent]
        assert key is not None
        return key

    def _happened(self, kind: int, slot: int, old_priority: int | None = None) -> None:
        if not self.events.is_on:
            return
        columns = self.blocks
        key = columns.key[slot]
        assert key is not None
        priority = columns.priority[slot]
        old = priority if old_priority is None else old_priority
        owner = self.owners.id_of(columns.owner[slot])
        self.events.append(Happened(kind, key, self.parent_key(slot), columns.namespace[slot], owner, old, priority))

    def _schedule_expiry(self, slot: int) -> None:
        columns = self.blocks
        if columns.deadline[slot] == NEVER:
            return
        heapq.heappush(self.expiries, (columns.deadline[slot], slot, columns.generation[slot]))
        if len(self.expiries) > 2 * len(columns.index) + _SLACK:
            live = {e for e in self.expiries if columns.generation[e[1]] == e[2] and columns.deadline[e[1]] == e[0]}
            self.expiries[:] = sorted(live)

    def _write_record(self, slot: int) -> None:
        columns = self.blocks
        key = columns.key[slot]
        assert key is not None
        record = StoredRecord(
            key,
            self.parent_key(slot),
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
        self.records.write_stored(slot, record)

    # --- Invariants -----------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise AssertionError when anything here contradicts anything else; slow, complete."""
        columns = self.blocks
        columns.check_invariants()
        self.order.check_invariants()
        assert len(set(self.free)) == len(self.free) == columns.num_in_state[slots.FREE]
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

    def _check_slot(self, slot: int) -> None:
        columns = self.blocks
        state = columns.state[slot]
        idle_leaf = state in VISIBLE and columns.first_child[slot] == NO_SLOT and columns.leases[slot] == 0
        assert (slot in self.order) == idle_leaf, f"slot {slot} and the eviction order disagree"
        if idle_leaf:
            assert self.order.key_of(slot) == (columns.priority[slot], columns.tick[slot], -columns.depth[slot])
        if state in VISIBLE:
            parent = columns.parent[slot]
            assert parent == NO_SLOT or columns.state[parent] in VISIBLE, f"slot {slot} is served, its parent is not"
            assert columns.generation[slot] > 0
        if state == slots.WAITING:
            assert columns.state[columns.parent[slot]] in (slots.WAITING, slots.RESERVED)

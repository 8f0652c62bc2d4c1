"""What is in the tier, kept whole: blocks, owners, eviction order, records, counters and events change here together.

Whether a block may come, must go or may be served is the store's to decide; here is what each of those means for
everything that is known of a block, so that no part of it falls out of step. A slot goes back to the free ones only after
its record is cleared. Records are written message by message, the parents' before their children's, and before the message
is answered: a daemon killed in between has promised nothing yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from cached import blocks as slots
from cached import events
from cached.blocks import INDEXED, NO_SLOT, VISIBLE, Blocks, Owners
from cached.counters import StoreCounters
from cached.deadlines import DeadlineHeap
from cached.events import EventRing
from cached.eviction import EvictionOrder
from cached.givers import Givers
from cached.offers import OfferRow
from cached.protocol import NEVER, NO_PARENT
from cached.records import Holder, StoredRecord, StoredRow


class Records(Protocol):
    """Where what must survive the daemon is written."""

    def write_stored(self, slots: Sequence[int], rows: Iterable[StoredRow]) -> None:
        """Make `rows` the slots' records, one after the other."""

    def write_reserved(self, slots: Sequence[int], holder: Holder) -> None:
        """Note that `holder` may be writing into the slots, one after the other."""

    def clear(self, slot: int) -> None:
        """Make the slot free, for good, before this returns."""


class Contents:
    """The blocks of one layout and all that is known of them. `tick` and `generation` are the last ones given out."""

    def __init__(self, num_slots: int, block_bytes: int, records: Records, event_buffer: int) -> None:
        self.blocks = Blocks(num_slots)
        self.owners = Owners()
        self.counters = StoreCounters()
        self.order = EvictionOrder(num_slots, self.owners.changed)
        self.givers = Givers(self.order, self.owners.held, self.owners.floors, self.owners.changed)
        self.events = EventRing(event_buffer)
        self.records = records
        self.free: list[int] = []
        self.expiries = DeadlineHeap(num_slots)
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

    def admit(self, offer: OfferRow, owner: int, parent: int, victim: int) -> int:
        """Give an offered block of `owner`, who has been counted for it, a place below `parent`: that of `victim`, an idle
        leaf that gives way to it, or a free one (NO_SLOT). Says which slot; its record is the caller's to overwrite."""
        columns = self.blocks
        if victim == NO_SLOT:
            slot = self.free.pop()
        else:
            slot = victim
            self._give_way(victim, parent)
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
        return slot

    def take_in(self, committed: Sequence[int]) -> None:
        """These blocks are in place: each is visible from now on, and with it those that waited for it, unless it has to
        wait for an ancestor itself."""
        columns = self.blocks
        revealed: list[int] = []
        for slot in committed:
            parent = columns.parent[slot]
            if parent == NO_SLOT or columns.state[parent] in VISIBLE:
                self._reveal(slot, revealed)
            else:
                columns.move(slot, slots.WAITING)
        if not revealed:
            return
        rows = self.write_records(revealed)
        used = self.counters.used
        self.counters.stored += len(rows)
        for slot, row in zip(revealed, rows, strict=True):
            used[row[1]] += 1
            if row[7] != NEVER:
                self.schedule_expiry(slot)
        if self.events.is_on:
            self.events.extend([(events.STORED, row[4], row[5], row[2], row[6], row[1], row[1]) for row in rows])

    def _reveal(self, slot: int, revealed: list[int]) -> None:
        """Make a block visible and those that waited for it; `revealed` is added to, parents first."""
        columns = self.blocks
        columns.move(slot, slots.STORED)
        revealed.append(slot)
        if columns.first_child[slot] == NO_SLOT:
            self.order.add(slot, columns.owner[slot], columns.priority[slot], columns.tick[slot], columns.depth[slot])
        elif columns.num_in_state[slots.WAITING]:
            freed = [slot]
            for each in freed:  # Grows while it is walked.
                ready = [child for child in columns.children(each) if columns.state[child] == slots.WAITING]
                for child in ready:
                    columns.move(child, slots.STORED)
                    self.settle_order(child)
                revealed += ready
                freed += ready

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
        self.schedule_expiry(slot)
        self.settle_order(slot)
        self.settle_order(parent)

    # --- A block changes ------------------------------------------------------------------------------------

    def set_retention(self, slot: int, priority: int, deadline: float, drops: bool) -> bool:
        """Give a block a new priority and deadline. True: it has a record, which is the caller's to write again."""
        columns = self.blocks
        old = columns.priority[slot]
        columns.priority[slot] = priority
        columns.deadline[slot] = deadline
        columns.drops[slot] = drops
        if columns.state[slot] not in VISIBLE:
            return False
        self.counters.used[old] -= 1
        self.counters.used[priority] += 1
        self.schedule_expiry(slot)
        self.settle_order(slot)
        if priority != old:
            self._happened(events.UPDATED, slot, old)
        return True

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
        """An idle leaf goes, and its slot is free."""
        self._give_way(slot)
        self.blocks.generation[slot] = 0
        self.free_slot(slot)

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

    def _give_way(self, slot: int, newcomers_parent: int = NO_SLOT) -> None:
        """What `_forget` does, for an idle leaf, of which much is known already: this is the price of every store when full.
        State, generation and record stay the caller's to change."""
        columns, counters = self.blocks, self.counters
        priority, owner, parent = columns.priority[slot], columns.owner[slot], columns.parent[slot]
        owner_id = self.owners.id_of(owner)
        if self.events.is_on:
            key, above = columns.key[slot], NO_PARENT if parent == NO_SLOT else columns.key[parent]
            assert key is not None
            assert above is not None
            self.events.append((events.REMOVED, key, above, columns.namespace[slot], owner_id, priority, priority))
        counters.count_eviction(owner_id, priority)
        counters.used[priority] -= 1
        if not columns.reused[slot]:
            counters.dropped_unused += 1
        self.order.discard(slot)
        columns.leave(slot)
        self.owners.leave(owner)
        if parent not in (NO_SLOT, newcomers_parent) and columns.first_child[parent] == NO_SLOT:
            self.settle_order(parent)

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
        # No generation is 0, so leases and verifications of this content end here.
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
        self.events.append((kind, key, self.parent_key(slot), columns.namespace[slot], owner, old, priority))

    def schedule_expiry(self, slot: int) -> None:
        """The block in a slot is looked at when its duration ends."""
        deadline = self.blocks.deadline[slot]
        if deadline != NEVER:
            self.expiries.set(slot, deadline)

    def write_records(self, written: Sequence[int]) -> list[StoredRow]:
        """Write the records of blocks as they are now; says what was written."""
        columns, id_of = self.blocks, self.owners.id_of
        key, parent_of = columns.key, columns.parent
        rows: list[StoredRow] = []
        for slot in written:
            name, parent = key[slot], parent_of[slot]
            above = NO_PARENT if parent == NO_SLOT else key[parent]
            assert name is not None
            assert above is not None
            rows.append(
                (
                    columns.drops[slot],
                    columns.priority[slot],
                    columns.namespace[slot],
                    self._block_bytes,
                    name,
                    above,
                    id_of(columns.owner[slot]),
                    columns.deadline[slot],
                    columns.checksum[slot],
                    columns.generation[slot],
                    columns.tick[slot],
                )
            )
        self.records.write_stored(written, rows)
        return rows

    # --- Invariants -----------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise AssertionError when anything here contradicts anything else; slow, complete."""
        columns = self.blocks
        columns.check_invariants()
        self.order.check_invariants()
        self.givers.check_invariants()
        self.expiries.check_invariants()
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

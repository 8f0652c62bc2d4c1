"""The store against a naive model: whatever is asked in whatever order, both answer alike, and invariants hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cached.offers import Granted, Offer, Pending, Present, Refused, Retouch
from cached.protocol import NEVER, OwnerShare
from cached.records import Holder, StoredRecord, StoredRow
from cached.shares import NO_TABLE, ShareTable
from cached.store import BlockStore

LEASE_S = 10.0
RESERVATION_S = 30.0
NUM_KEYS = 14


def key_of(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


# A small forest: block n's parent is n // 2 - 1 (as in a heap), and the first two are roots.
PARENT = {number: (number // 2 - 1 if number > 1 else None) for number in range(NUM_KEYS)}
OWNERS = [bytes([number]) * 16 for number in range(3)]


def chain_to(number: int) -> list[int]:
    chain = [number]
    while (parent := PARENT[chain[0]]) is not None:
        chain.insert(0, parent)
    return chain


@dataclass
class Block:
    number: int
    priority: int
    deadline: float
    drops: bool
    owner: bytes
    state: str
    checksum: int = 0
    tick: int = 0
    leases: set[int] = field(default_factory=set)

    @property
    def depth(self) -> int:
        return len(chain_to(self.number)) - 1

    @property
    def is_visible(self) -> bool:
        return self.state in ("stored", "unverified")


class FakeRecords:
    """The table as a dict."""

    def __init__(self) -> None:
        self.records: dict[int, StoredRecord | Holder] = {}

    def write_stored(self, slots: Sequence[int], rows: Iterable[StoredRow]) -> None:
        self.records.update(zip(slots, (StoredRecord(*row) for row in rows), strict=True))

    def write_reserved(self, slots: Sequence[int], holder: Holder) -> None:
        self.records.update(dict.fromkeys(slots, holder))

    def clear(self, slot: int) -> None:
        self.records.pop(slot, None)


class StoreMachine(RuleBasedStateMachine):
    """`reservations`: id → (session, block number, standing); `held_back`: slots that nobody may be given yet."""

    @initialize(capacity=st.integers(1, 7))
    def begin(self, capacity: int) -> None:
        self.capacity = capacity
        self.records = FakeRecords()
        self.now = 100.0
        self.sessions: set[int] = set()
        self.quarantine: dict[int, tuple[list[int], list[int]]] = {}
        self.next_session = 1
        self.store = self.new_store(1)
        self.store.publish(0, capacity)
        self.blocks: dict[int, Block] = {}
        self.reservations: dict[int, tuple[int, int, str, float]] = {}
        self.leases: dict[int, tuple[int, list[int], float, bool]] = {}
        self.tick = 0
        self.table = NO_TABLE
        self.shares: dict[bytes, tuple[int, int | None]] = {}

    def new_store(self, first_id: int) -> BlockStore:
        store = BlockStore(self.capacity, 4096, self.records, LEASE_S, RESERVATION_S, first_id)
        if hasattr(self, "table"):  # As the tier does after a restart.
            store.set_shares(self.table, self.now)
        return store

    # --- What the peers do ---

    @rule()
    @precondition(lambda self: len(self.sessions) < 3)
    def open_session(self) -> None:
        self.sessions.add(self.next_session)
        self.store.open_session(self.next_session, Holder(self.next_session, 7, bytes(16)))
        self.next_session += 1

    @rule(
        data=st.data(),
        number=st.integers(0, NUM_KEYS - 1),
        whole_chain=st.booleans(),
        priority=st.sampled_from([0, 20, 35, 35, 80, 100]),
        duration=st.sampled_from([None, None, 5.0, 20.0]),
        drops=st.booleans(),
        owner=st.sampled_from(OWNERS),
    )
    @precondition(lambda self: self.sessions)
    def reserve(self, data, number, whole_chain, priority, duration, drops, owner) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        deadline = NEVER if duration is None else self.now + duration
        for each in chain_to(number) if whole_chain else [number]:
            parent = PARENT[each]
            offer = Offer(key_of(each), None if parent is None else key_of(parent), 5, priority, deadline, drops, owner)
            before = set(self.store.blocks.index)
            [decision] = self.store.reserve(session, [offer], self.now)
            self.expire()
            self.check_decision(session, each, offer, decision, before)

    def check_decision(self, session, number, offer, decision, before) -> None:
        known = self.blocks.get(number)
        parent = PARENT[number]
        if known is not None:
            assert decision == (Present() if known.is_visible else Pending())
            return
        if parent is not None and parent not in self.blocks:
            assert decision == Refused("orphan")
            return
        gone = [n for n in list(self.blocks) if key_of(n) in before and key_of(n) not in self.store.blocks.index]
        held = self.held()
        held[offer.owner] += 1
        at_ceiling = held[offer.owner] > self.ceiling(offer.owner)
        if self.num_free() > 0 and not at_ceiling:
            assert not gone
        else:
            candidates = [b for b in self.blocks.values() if self.is_idle_leaf(b) and b.number != parent]
            acceptable = self.victims(candidates, offer, held, at_ceiling)
            if not acceptable:
                assert decision == Refused(self.reason(candidates, offer, held, at_ceiling))
                assert not gone
                return
            assert len(gone) == 1
            assert gone[0] in acceptable
            del self.blocks[gone[0]]
        assert isinstance(decision, Granted)
        self.blocks[number] = Block(number, offer.priority, offer.deadline, offer.drops, offer.owner, "reserved")
        self.reservations[decision.reservation] = (session, number, "live", self.now + RESERVATION_S)

    def held(self) -> dict[bytes, int]:
        return {owner: sum(b.owner == owner for b in self.blocks.values()) for owner in OWNERS}

    def floor(self, owner: bytes) -> int:
        return self.shares.get(owner, (0, None))[0]

    def ceiling(self, owner: bytes) -> float:
        ceiling = self.shares.get(owner, (0, None))[1]
        return float("inf") if ceiling is None else ceiling

    def may_go(self, block: Block, offer: Offer, held: dict[bytes, int]) -> bool:
        """kv-semantics 5.3 and 5.9 (its first half): by priority, or because the newcomer's owner has not got its floor yet."""
        entitled = block.owner != offer.owner and held[offer.owner] <= self.floor(offer.owner)
        return entitled or block.priority <= offer.priority

    def victims(self, candidates: list[Block], offer: Offer, held: dict[bytes, int], at_ceiling: bool) -> set[int]:
        own = [b for b in candidates if b.owner == offer.owner and b.priority <= offer.priority]
        above = [b for b in candidates if self.may_go(b, offer, held) and held[b.owner] > self.floor(b.owner)]
        if at_ceiling or not above:
            giving = own
        else:
            most = max(held[b.owner] - self.floor(b.owner) for b in above)
            giving = [b for b in above if held[b.owner] - self.floor(b.owner) == most]
        first = min(((b.priority, b.tick, -b.depth) for b in giving), default=None)
        return {b.number for b in giving if (b.priority, b.tick, -b.depth) == first}

    def reason(self, candidates: list[Block], offer: Offer, held: dict[bytes, int], at_ceiling: bool) -> str:
        if at_ceiling:
            return "ceiling"
        if not candidates:
            return "full"
        return "floors" if any(self.may_go(b, offer, held) for b in candidates) else "outranked"

    @rule(
        floors=st.lists(st.integers(0, 4), min_size=3, max_size=3),
        rooms=st.lists(st.sampled_from([None, None, 0, 1, 3]), min_size=3, max_size=3),
        step=st.integers(-1, 2),
    )
    def set_shares(self, floors, rooms, step) -> None:
        """A table comes: newer, known or older; with floors that fit or not."""
        shares = tuple(
            OwnerShare(owner, 1.0, floor, None if room is None else floor + room)
            for owner, floor, room in zip(OWNERS, floors, rooms, strict=True)
        )
        version = max(1, self.table.version + step)
        before = self.held()
        outcome = self.store.set_shares(ShareTable(version, shares), self.now)
        self.expire()
        if version <= self.table.version:
            assert outcome == ("known" if version == self.table.version else "older")
        elif sum(floors) > self.capacity:
            assert outcome == "floors_exceed_capacity"
        else:
            assert outcome == "taken"
            self.table = ShareTable(version, shares)
            self.shares = {share.owner: (share.floor, share.ceiling) for share in shares}
        self.store.expire(self.now)
        self.forget_what_is_above_ceilings(before)

    @rule(
        data=st.data(),
        number=st.integers(0, NUM_KEYS - 1),
        priority=st.sampled_from([20, 35, 80]),
        duration=st.sampled_from([None, 5.0, 20.0]),
        drops=st.booleans(),
        owner=st.sampled_from(OWNERS),
    )
    @precondition(lambda self: self.sessions)
    def store_chain(self, data, number, priority, duration, drops, owner) -> None:
        """What an engine mostly does: offer a chain and commit what was taken."""
        self.reserve(data, number, True, priority, duration, drops, owner)
        self.commit(data, None)

    @rule(data=st.data(), stranger=st.booleans())
    @precondition(lambda self: self.sessions and self.reservations)
    def commit(self, data, stranger) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        if stranger is None:
            ids = sorted(self.reservations)
        else:
            ids = data.draw(st.lists(st.sampled_from(sorted(self.reservations)), unique=True, max_size=4))
        if not stranger:
            ids = [i for i in ids if self.reservations[i][0] == session]
        self.expire()
        answers = self.store.commit(session, [(i, i * 11) for i in ids], self.now)
        self.tick += 1
        expected = []
        for i in ids:
            owner_session, number, standing, _ = self.reservations[i]
            if owner_session != session:
                expected.append("expired")
                continue
            del self.reservations[i]
            if standing == "live":
                block = self.blocks[number]
                block.checksum, block.tick, block.state = i * 11, self.tick, "waiting"
                self.reveal()
                expected.append("stored")
            else:
                expected.append(standing)
        assert answers == expected

    @rule(data=st.data())
    @precondition(lambda self: self.sessions and self.reservations)
    def abort(self, data) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        ids = data.draw(st.lists(st.sampled_from(sorted(self.reservations)), unique=True, max_size=3))
        self.store.abort(session, ids, self.now)
        self.expire()
        for i in ids:
            if self.reservations[i][0] == session:
                _, number, standing, _ = self.reservations.pop(i)
                if standing == "live":
                    self.forget_family(number)

    @rule(data=st.data(), number=st.integers(0, NUM_KEYS - 1))
    @precondition(lambda self: self.sessions)
    def lease(self, data, number) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        hashes = b"".join(key_of(n) for n in chain_to(number))
        found = self.store.lookup(hashes, self.now)
        lease = self.store.lease(session, hashes, self.now)
        self.expire()
        run = self.run(chain_to(number))
        assert found == len(run)
        assert (lease is None) == (not run)
        if lease is not None:
            assert [self.store.blocks.key[slot] for slot in lease.slots] == [key_of(n) for n in run]
            self.leases[lease.lease_id] = (session, run, self.now + LEASE_S, True)
            for n in run:
                self.blocks[n].leases.add(lease.lease_id)

    @rule(data=st.data())
    @precondition(lambda self: self.sessions and self.leases)
    def release(self, data) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        answer = self.store.release(session, lease_id, self.now)
        self.expire()
        if lease_id not in self.leases or self.leases[lease_id][0] != session:
            assert not answer
            return
        assert answer == self.leases[lease_id][3]
        self.end_lease(lease_id)

    @rule(
        numbers=st.lists(st.integers(0, NUM_KEYS - 1), max_size=4),
        priority=st.sampled_from([0, 35, 90]),
        duration=st.sampled_from([None, 3.0, 15.0]),
        drops=st.booleans(),
    )
    def touch(self, numbers, priority, duration, drops) -> None:
        deadline = NEVER if duration is None else self.now + duration
        self.store.touch([Retouch(key_of(n), priority, deadline, drops) for n in numbers], self.now)
        self.expire()
        self.tick += 1
        for n in numbers:
            if n in self.blocks:
                block = self.blocks[n]
                block.priority, block.deadline, block.drops, block.tick = priority, deadline, drops, self.tick

    @rule(owner=st.sampled_from(OWNERS))
    def drop(self, owner) -> None:
        before = len(self.store.blocks.index)
        gone = self.store.drop_owner(owner, self.now)
        self.expire()
        expected = len(self.blocks)
        for number in [n for n, b in self.blocks.items() if b.owner == owner]:
            self.forget_family(number)
        assert gone == expected - len(self.blocks)
        assert before >= expected

    @rule(seconds=st.sampled_from([0.5, 0.5, 4.0, 4.0, 11.0, 31.0]))
    def pass_time(self, seconds) -> None:
        self.now += seconds
        due = self.store.next_deadline()
        if self.overdue():
            assert due is not None
            assert due <= self.now
        self.store.expire(self.now)
        self.expire()

    @rule(data=st.data(), clean=st.booleans())
    @precondition(lambda self: self.sessions)
    def end_session(self, data, clean) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        self.expire()
        unsettled = self.store.end_session(session, clean, self.now)
        self.sessions.remove(session)
        reservations = [i for i, held in self.reservations.items() if held[0] == session]
        leases = [i for i, held in self.leases.items() if held[0] == session]
        for i in reservations:
            if self.reservations[i][2] == "live":
                self.forget_family(self.reservations[i][1])
        if clean:
            self.give_back(reservations, leases)
        elif reservations or leases:
            self.quarantine[session] = (reservations, leases)
        assert unsettled == (session in self.quarantine)

    @rule(data=st.data())
    @precondition(lambda self: self.quarantine)
    def process_gone(self, data) -> None:
        session = data.draw(st.sampled_from(sorted(self.quarantine)))
        self.store.settle(session)
        self.give_back(*self.quarantine.pop(session))

    @rule(number=st.integers(0, NUM_KEYS - 1))
    def suspect(self, number) -> None:
        self.store.suspect(b"".join(key_of(n) for n in chain_to(number)))
        for n in chain_to(number):
            if n not in self.blocks:
                break
            if self.blocks[n].state == "stored":
                self.blocks[n].state = "unverified"

    @rule(count=st.integers(1, 3), sound=st.booleans())
    def verify(self, count, sound) -> None:
        for item in self.store.next_unverified(count):
            [number] = [n for n in self.blocks if self.store.blocks.key[item.slot] == key_of(n)] or [None]
            self.store.verified(item, sound)
            if number is None:
                continue
            assert self.blocks[number].state == "unverified"
            if sound:
                self.blocks[number].state = "stored"
            else:
                self.forget_family(number)

    @rule(really=st.sampled_from([False, False, False, True]))
    def restart(self, really) -> None:
        """SIGKILL and a new daemon: what was visible is there, unverified; what was being written is untouchable."""
        if not really:
            return
        held_back = (
            self.capacity
            - self.num_free()
            - sum(b.state in ("stored", "unverified", "waiting") for b in self.blocks.values())
        )
        waiting = sum(b.state == "waiting" for b in self.blocks.values())
        self.store = self.new_store(self.next_session * 1000)
        records = self.records.records
        self.store.restore(iter([(s, r) for s, r in records.items() if isinstance(r, StoredRecord)]), self.now)
        for slot, holder in list(records.items()):
            if isinstance(holder, Holder):
                self.store.restore_quarantine(-self.next_session, holder, [slot])
                self.quarantine[-self.next_session] = ([], [])
                self.next_session += 1
        self.store.publish(0, self.capacity)
        assert self.store.blocks.num_in_state[8] == held_back + waiting
        for session in list(self.store.quarantined_sessions()):
            self.store.settle(session)
        self.sessions, self.quarantine, self.reservations, self.leases = set(), {}, {}, {}
        self.blocks = {n: b for n, b in self.blocks.items() if b.is_visible}
        for block in self.blocks.values():
            block.state, block.leases = "unverified", set()
        self.expire()  # What was only in use until now.
        self.forget_what_is_above_ceilings(self.held())
        for block in self.blocks.values():
            slot = self.store.blocks.index[key_of(block.number)]
            block.tick = self.store.blocks.tick[slot]
        self.tick = max([0, *(r.tick for r in records.values() if isinstance(r, StoredRecord))])

    # --- The model ---

    def forget_what_is_above_ceilings(self, before: dict[bytes, int]) -> None:
        """Idle blocks of owners that held more than they may are gone, and none of anybody else."""
        gone = [n for n in self.blocks if key_of(n) not in self.store.blocks.index]
        for number in gone:
            block = self.blocks.pop(number)
            assert not block.leases
            assert block.is_visible
        after = self.held()
        for owner in OWNERS:
            assert after[owner] == before[owner] or before[owner] > after[owner] >= self.ceiling(owner)

    def num_free(self) -> int:
        writing = len(self.reservations)
        written = sum(b.state != "reserved" for b in self.blocks.values())
        return self.capacity - writing - written

    def is_idle_leaf(self, block: Block) -> bool:
        has_child = any(PARENT[n] == block.number for n in self.blocks)
        return block.is_visible and not has_child and not block.leases

    def run(self, numbers: list[int]) -> list[int]:
        run = []
        for n in numbers:
            if n not in self.blocks or self.blocks[n].state != "stored":
                break
            run.append(n)
        return run

    def family(self, number: int) -> list[int]:
        return [n for n in self.blocks if number in chain_to(n)]

    def forget_family(self, number: int) -> None:
        for n in self.family(number):
            block = self.blocks.pop(n)
            for lease_id in block.leases:
                session, run, deadline, _ = self.leases[lease_id]
                self.leases[lease_id] = (session, [r for r in run if r != n], deadline, False)
            for i, (session, reserved, standing, deadline) in list(self.reservations.items()):
                if reserved == n and standing == "live":
                    self.reservations[i] = (session, n, "orphan", deadline)

    def reveal(self) -> None:
        for n in sorted(self.blocks):
            parent = PARENT[n]
            parent_visible = parent is None or self.blocks[parent].is_visible
            if self.blocks[n].state == "waiting" and parent_visible:
                self.blocks[n].state = "stored"

    def end_lease(self, lease_id: int) -> None:
        _, run, _, _ = self.leases.pop(lease_id)
        self.tick += 1
        for n in run:
            self.blocks[n].leases.discard(lease_id)
            self.blocks[n].tick = self.tick

    def give_back(self, reservations: list[int], leases: list[int]) -> None:
        for i in reservations:
            del self.reservations[i]
        for i in leases:
            self.end_lease(i)

    def overdue(self) -> bool:
        leases = [held[2] for held in self.leases.values() if held[0] in self.sessions]
        live = [held[3] for held in self.reservations.values() if held[0] in self.sessions and held[2] == "live"]
        return any(deadline <= self.now for deadline in leases + live)

    def expire(self) -> None:
        for i, (session, _, deadline, _) in sorted(self.leases.items()):
            if session in self.sessions and deadline <= self.now:
                self.end_lease(i)
        for i, (session, number, standing, deadline) in sorted(self.reservations.items()):
            if session in self.sessions and standing == "live" and deadline <= self.now:
                if self.reservations[i][2] != "live":
                    continue
                self.forget_family(number)
                self.reservations[i] = (session, number, "expired", deadline)
        due = sorted(
            (b for b in self.blocks.values() if b.is_visible and b.deadline <= self.now), key=lambda b: b.deadline
        )
        for block in due:
            if block.number not in self.blocks:
                continue
            family = self.family(block.number) if block.drops else [block.number]
            if any(self.blocks[n].leases for n in family):
                continue
            if block.drops:
                self.forget_family(block.number)
            else:
                block.priority, block.deadline = min(block.priority, 35), NEVER

    @invariant()
    def both_agree(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.expire(self.now)
        self.expire()
        self.store.check_invariants()
        columns = self.store.blocks
        names = {"reserved": 2, "waiting": 3, "stored": 4, "unverified": 5}
        real = {
            key: (columns.state[slot], columns.priority[slot], columns.deadline[slot], columns.owner[slot])
            for key, slot in columns.index.items()
        }
        expected = {
            key_of(n): (names[b.state], b.priority, b.deadline, self.store.owners.number_of(b.owner))
            for n, b in self.blocks.items()
        }
        assert real == expected
        assert columns.num_in_state[1] == self.num_free()
        stored = {r.key: r for r in self.records.records.values() if isinstance(r, StoredRecord)}
        assert set(stored) == {key_of(n) for n, b in self.blocks.items() if b.is_visible}
        for n, b in self.blocks.items():
            if b.is_visible:
                record = stored[key_of(n)]
                assert (record.priority, record.deadline, record.checksum) == (b.priority, b.deadline, b.checksum)
                assert columns.tick[columns.index[key_of(n)]] == b.tick
        statistics = self.store.statistics()
        assert statistics.leased == sum(bool(b.leases) for b in self.blocks.values())


TestStoreAgainstModel = StoreMachine.TestCase
TestStoreAgainstModel.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)

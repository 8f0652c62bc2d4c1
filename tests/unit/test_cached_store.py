"""The host tier's rules one at a time (kv-semantics §2, 4, 5), on a store without files or sockets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import pytest

from cached.offers import Decision, Granted, Offer, Pending, Present, Refused, Retouch
from cached.protocol import NEVER, NO_PARENT, OwnerShare
from cached.records import Holder, StoredRecord, StoredRow
from cached.shares import ShareTable
from cached.store import TURN_BLOCKS, BlockStore

ENGINE, OTHER = 1, 2
X, Y = b"x" * 16, b"y" * 16


class NoRecords:
    """Forgets everything."""

    def write_stored(self, slots: Sequence[int], rows: Iterable[StoredRow]) -> None: ...

    def write_reserved(self, slots: Sequence[int], holder: Holder) -> None: ...

    def clear(self, slot: int) -> None: ...


def make_store(num_slots: int) -> BlockStore:
    store = BlockStore(num_slots, 4096, NoRecords(), lease_ttl_s=10, reservation_ttl_s=30)
    store.publish(0, num_slots)
    for session in (ENGINE, OTHER):
        store.open_session(session, Holder(session, 1, bytes(16)))
    return store


def name(label: str) -> bytes:
    return hashlib.sha256(label.encode()).digest()


def offer(label: str, parent: str | None = None, priority: int = 35, **changes: object) -> Offer:
    values = {"deadline": NEVER, "drops": False, "owner": X, **changes}
    return Offer(name(label), None if parent is None else name(parent), 0, priority, **values)  # type: ignore[arg-type]


def put(store: BlockStore, *offers: Offer, now: float = 0.0, session: int = ENGINE) -> list[Decision]:
    decisions = store.reserve(session, offers, now)
    store.commit(session, [(each.reservation, 0) for each in decisions if isinstance(each, Granted)], now)
    store.check_invariants()
    return decisions


def put_quickly(store: BlockStore, *offers: Offer) -> None:
    """The same without looking at everything after each."""
    decisions = store.reserve(ENGINE, offers, 0.0)
    store.commit(ENGINE, [(each.reservation, 0) for each in decisions if isinstance(each, Granted)], 0.0)


def holds(store: BlockStore, *labels: str, now: float = 0.0) -> list[bool]:
    return [store.lookup(name(label), now) == 1 for label in labels]


def test_a_full_tier_does_not_give_up_a_90_for_a_35() -> None:
    """kv-semantics 5.3."""
    store = make_store(1)
    put(store, offer("precious", priority=90))

    assert put(store, offer("newcomer", priority=35)) == [Refused("outranked")]

    assert holds(store, "precious") == [True]
    assert store.counters.refused["outranked"] == 1


def test_equal_priority_gives_way_to_the_newcomer_least_recently_used_first() -> None:
    """kv-semantics 4.2 and 5.3."""
    store = make_store(2)
    put(store, offer("old"))
    put(store, offer("new"))
    store.touch([Retouch(name("old"), 35, NEVER, False)], 0.0)

    put(store, offer("newcomer"))

    assert holds(store, "old", "new", "newcomer") == [True, False, True]


def test_a_block_without_its_parent_is_an_orphan_counted_once() -> None:
    """kv-semantics 5.1."""
    store = make_store(4)

    assert put(store, offer("child", parent="below threshold", priority=80)) == [Refused("orphan")]

    assert store.counters.refused["orphan"] == 1
    assert len(store.blocks.index) == 0


def test_dependents_go_before_their_parents_whatever_the_priorities() -> None:
    store = make_store(3)
    put(store, offer("root", priority=10), offer("a", "root", 90), offer("b", "a", 90))

    put(store, offer("newcomer", priority=95))

    assert holds(store, "root", "a", "b", "newcomer") == [True, True, False, True]


def test_a_newcomers_ancestors_are_never_its_victims() -> None:
    store = make_store(1)
    put(store, offer("parent"))

    assert put(store, offer("child", "parent")) == [Refused("full")]

    assert holds(store, "parent") == [True]


def test_a_leased_block_and_its_ancestors_survive_any_pressure() -> None:
    """kv-semantics 4.4."""
    store = make_store(3)
    put(store, offer("root"), offer("leaf", "root"))
    store.lease(ENGINE, name("leaf"), 0.0)

    decisions = [put(store, offer(f"flood {number}", priority=100))[0] for number in range(5)]

    assert holds(store, "root", "leaf") == [True, True]
    assert sum(isinstance(each, Granted) for each in decisions) == 5, "the third slot is reused"


def test_a_lease_past_its_deadline_does_not_hold() -> None:
    store = make_store(1)
    put(store, offer("block"))
    lease = store.lease(ENGINE, name("block"), 0.0)
    assert lease is not None

    assert store.release(ENGINE, lease.lease_id, 10.0) is False

    assert store.counters.loaded == 0


def test_nobody_releases_another_sessions_lease() -> None:
    store = make_store(1)
    put(store, offer("block"))
    lease = store.lease(ENGINE, name("block"), 0.0)
    assert lease is not None

    assert store.release(OTHER, lease.lease_id, 1.0) is False
    assert store.release(ENGINE, lease.lease_id, 1.0) is True


def test_a_commit_is_visible_only_with_all_its_ancestors() -> None:
    store = make_store(3)
    [root, child] = store.reserve(ENGINE, [offer("root"), offer("child", "root")], 0.0)
    assert isinstance(root, Granted)
    assert isinstance(child, Granted)

    assert store.commit(ENGINE, [(child.reservation, 1)], 0.0) == ["stored"]
    assert holds(store, "root", "child") == [False, False]
    store.commit(ENGINE, [(root.reservation, 1)], 0.0)

    assert holds(store, "root", "child") == [True, True]


def test_an_abort_orphans_what_others_reserved_below() -> None:
    store = make_store(3)
    [root] = store.reserve(ENGINE, [offer("root")], 0.0)
    [pending, child] = store.reserve(OTHER, [offer("root"), offer("child", "root")], 0.0)
    assert isinstance(root, Granted)
    assert isinstance(child, Granted)
    assert pending == Pending()

    store.abort(ENGINE, [root.reservation], 0.0)

    assert store.statistics().quarantined == 1, "the other engine may still be writing"
    assert store.commit(OTHER, [(child.reservation, 1)], 0.0) == ["orphan"]
    assert store.statistics().quarantined == 0
    store.check_invariants()


def test_an_expired_reservation_keeps_its_slot_from_others_and_its_key_free() -> None:
    store = make_store(2)
    [late] = store.reserve(ENGINE, [offer("block")], 0.0)
    assert isinstance(late, Granted)

    [again] = store.reserve(OTHER, [offer("block")], 31.0)

    assert isinstance(again, Granted)
    assert again.slot != late.slot
    assert store.commit(ENGINE, [(late.reservation, 1)], 31.0) == ["expired"]
    assert store.statistics().quarantined == 0


def test_expiry_demotes_and_leaves_recency_alone() -> None:
    store = make_store(2)
    put(store, offer("timed", priority=80, deadline=5.0), offer("steady", priority=50))

    decisions = put(store, offer("newcomer", priority=36), now=6.0)

    assert isinstance(decisions[0], Granted)
    assert holds(store, "timed", "steady", now=6.0) == [False, True]
    assert store.counters.expired == 1


def test_expiry_never_raises_a_priority() -> None:
    store = make_store(1)
    put(store, offer("low", priority=10, deadline=5.0))

    store.expire(6.0)

    assert store.statistics().used_by_priority[0].label == "10"


def test_a_dropping_block_takes_its_descendants_at_expiry() -> None:
    store = make_store(3)
    put(store, offer("secret", deadline=5.0, drops=True), offer("child", "secret", 90))

    assert holds(store, "secret", "child", now=5.0) == [False, False]


def test_a_block_in_use_expires_only_when_its_use_ends() -> None:
    store = make_store(3)
    put(store, offer("secret", deadline=5.0, drops=True), offer("child", "secret", 90))
    lease = store.lease(ENGINE, name("child"), 0.0)
    assert lease is not None

    store.expire(6.0)
    assert holds(store, "secret", "child", now=6.0) == [True, True]
    assert store.release(ENGINE, lease.lease_id, 7.0) is True

    assert holds(store, "secret", "child", now=7.0) == [False, False]


def test_the_owner_that_holds_most_gives_first() -> None:
    store = make_store(4)
    put(store, offer("y", owner=Y))
    put(store, *[offer(f"x{number}") for number in range(3)])

    put(store, offer("newcomer", owner=Y))

    assert holds(store, "y", "x0", "x1", "x2") == [True, False, True, True]


def test_a_drop_ends_leases_and_frees_slots() -> None:
    store = make_store(2)
    put(store, offer("block"))
    lease = store.lease(ENGINE, name("block"), 0.0)
    assert lease is not None

    assert store.drop_owner(X, 1.0) == 1

    assert store.release(ENGINE, lease.lease_id, 1.0) is False
    store.check_invariants()


def test_what_leaves_without_ever_being_loaded_is_counted() -> None:
    store = make_store(2)
    put(store, offer("loaded"), offer("unloved"))
    lease = store.lease(ENGINE, name("loaded"), 0.0)
    assert lease is not None
    store.release(ENGINE, lease.lease_id, 0.0)

    store.drop_owner(X, 0.0)

    assert store.counters.dropped_unused == 1


def test_an_unclean_end_keeps_slots_until_the_process_is_gone_and_keys_not_at_all() -> None:
    store = make_store(2)
    store.reserve(ENGINE, [offer("block")], 0.0)

    assert store.end_session(ENGINE, clean=False, now=0.0) is True

    [again] = store.reserve(OTHER, [offer("block")], 0.0)
    assert isinstance(again, Granted)
    assert store.reserve(OTHER, [offer("more")], 0.0) == [Refused("full")]
    store.settle(ENGINE)
    [more] = store.reserve(OTHER, [offer("more")], 0.0)
    assert isinstance(more, Granted)
    store.check_invariants()


def test_present_is_said_of_what_is_stored() -> None:
    store = make_store(2)
    put(store, offer("block"))

    assert store.reserve(OTHER, [offer("block")], 0.0) == [Present()]


def test_a_mass_of_expiries_is_spread_over_turns_and_what_is_asked_for_goes_first() -> None:
    store = make_store(TURN_BLOCKS * 2)
    for number in range(TURN_BLOCKS * 2):
        put_quickly(store, offer(f"due {number}", priority=80, deadline=5.0, drops=True))

    store.expire(6.0)
    left = len(store.blocks.index)
    last = next(number for number in range(TURN_BLOCKS * 2) if name(f"due {number}") in store.blocks.index)
    due = store.next_deadline()
    found = store.lookup(name(f"due {last}"), 6.0)

    assert left == TURN_BLOCKS
    assert due is not None
    assert due <= 6.0
    assert found == 0
    assert len(store.blocks.index) == 0
    store.check_invariants()


def test_an_expired_ancestor_is_seen_to_before_its_descendant_is_served() -> None:
    store = make_store(TURN_BLOCKS * 2)
    put_quickly(store, offer("root", deadline=5.5, drops=True), offer("child", parent="root"))
    for number in range(TURN_BLOCKS + 10):
        put_quickly(store, offer(f"due {number}", deadline=5.0))

    assert store.lookup(name("child"), 6.0) == 0


def test_below_its_floor_an_owner_takes_from_others_whatever_their_priority() -> None:
    store = make_store(2)
    put(store, offer("a", owner=Y, priority=100), offer("b", owner=Y, priority=100))
    table = ShareTable(1, (OwnerShare(X, 1.0, 1, None), OwnerShare(Y, 1.0, 1, None)))
    assert store.set_shares(table, 0.0) == "taken"

    put(store, offer("mine", priority=0))

    assert holds(store, "mine") == [True]
    assert store.owners.counts()[Y] == 1


def test_nothing_of_others_goes_for_an_owner_that_has_its_floor_and_the_refusal_says_floors() -> None:
    store = make_store(2)
    put(store, offer("theirs", owner=Y, priority=0))
    put(store, offer("mine", priority=90))
    store.set_shares(ShareTable(1, (OwnerShare(Y, 1.0, 1, None),)), 0.0)

    assert put(store, offer("newcomer", priority=50)) == [Refused("floors")]

    assert store.counters.refused_by_owner[X] == {"floors": 1}


def test_at_its_ceiling_an_owner_evicts_its_own_though_there_is_room() -> None:
    store = make_store(4)
    store.set_shares(ShareTable(1, (OwnerShare(X, 1.0, 0, 1),)), 0.0)
    put(store, offer("old"))

    put(store, offer("new"))
    refused = put(store, offer("humble", priority=10))

    assert holds(store, "old", "new") == [False, True]
    assert refused == [Refused("ceiling")]


def test_a_lowered_ceiling_is_reached_at_the_next_turn() -> None:
    store = make_store(4)
    put(store, offer("a"), offer("b"), offer("c"))

    store.set_shares(ShareTable(1, (OwnerShare(X, 1.0, 0, 1),)), 0.0)
    store.expire(0.0)

    assert store.owners.counts() == {X: 1}
    store.check_invariants()


def test_a_lowered_ceiling_is_reached_though_the_daemon_is_killed_on_the_way() -> None:
    """What was above it when the daemon died stayed so: the table was known, and each new block replaced one."""
    rows = [
        StoredRecord(0, 35, 0, 4096, name(label), NO_PARENT, X, NEVER, 0, 1 + at, 1) for at, label in enumerate("abc")
    ]
    store = BlockStore(3, 4096, NoRecords(), lease_ttl_s=10, reservation_ttl_s=30)
    store.set_shares(ShareTable(1, (OwnerShare(X, 1.0, 0, 1),)), 0.0)

    store.restore(iter(enumerate(rows)), 0.0)
    store.publish(0, 3)
    store.expire(0.0)

    assert store.owners.counts() == {X: 1}
    store.check_invariants()


def test_a_leased_chain_whose_duration_has_passed_costs_one_look_at_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block went through all that descend from it: half a second for a chain of 4,000, and all peers waited."""
    length = 2 * TURN_BLOCKS
    store = make_store(length)
    labels = [str(number) for number in range(length)]
    parents = [None, *labels[:-1]]
    put_quickly(
        store, *(offer(one, above, deadline=5.0, drops=True) for one, above in zip(labels, parents, strict=True))
    )
    asked = b"".join(map(name, labels))
    assert store.lease(ENGINE, asked, 1.0) is not None
    walks: list[int] = []
    monkeypatch.setattr(store.blocks, "subtree", lambda slot: walks.append(slot) or [slot])

    assert store.lookup(asked, 6.0) == length

    assert walks == []

"""The host index against a naive tier: what leaves it always fits, and in the end a consumer has what the tier has."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cached.keys import HASH_ALGO, OwnerId
from cached.protocol import ListedBlock, TierEvent
from engine.event_index import EventIndex, IndexedBlock, Taken
from engine.event_messages import EventBatch, Subscribed, to_page, to_row
from engine.events import NumberedEvent
from engine.host_index import HOST, HostIndex, HostList
from tests.support.cached_daemon import name_of

LIFE = "life"


class HostIndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tier: dict[bytes, ListedBlock] = {}
        self.log: list[TierEvent] = []
        self.host = HostIndex(8)
        self.read = 0
        self.events = 0
        self.consumer = EventIndex()
        subscription = self.consumer.begin()
        self.number = subscription.number
        self.consumer.receive(self.number, Subscribed(self.number, LIFE, HASH_ALGO, 0, 0))
        self.consumer.receive(self.number, to_page(LIFE, HASH_ALGO, 0, 0, True, []))
        self.tell(list(self.host.resize(16)))

    def tell(self, steps) -> None:  # type: ignore[no-untyped-def]
        for happened in steps:
            for event in happened:
                row = to_row(NumberedEvent(self.events, LIFE, HASH_ALGO, event))
                outcome = self.consumer.receive(self.number, EventBatch(LIFE, HASH_ALGO, (row,)))
                assert isinstance(outcome, Taken), outcome
                self.events += 1

    def note(self, kind: str, block: ListedBlock, old: int | None = None) -> None:
        self.log.append(
            TierEvent(
                len(self.log) + 1,
                kind,  # type: ignore[arg-type]
                block.block_hash,
                block.parent,
                block.namespace_fingerprint,
                block.owner,
                block.priority if old is None else old,
                block.priority,
            )
        )

    @rule(data=st.data(), priority=st.integers(0, 100), owner=st.integers(0, 1), label=st.integers(0, 11))
    def the_tier_stores(self, data: st.DataObject, priority: int, owner: int, label: int) -> None:
        parents = [None, *sorted(self.tier)]
        parent = data.draw(st.sampled_from(parents))
        depth = 0
        above = parent
        while above is not None:
            depth, above = depth + 1, self.tier[above].parent
        name = name_of(f"{label} below {parent!r}")
        if depth < 4 and name not in self.tier:
            block = ListedBlock(0, name, parent, "0011aabb", priority, None, OwnerId(bytes([owner]) * 16), "stored")
            self.tier[name] = block
            self.note("stored", block)

    @precondition(lambda self: self.tier)
    @rule(data=st.data())
    def the_tier_drops_a_subtree(self, data: st.DataObject) -> None:
        gone = [data.draw(st.sampled_from(sorted(self.tier)))]
        for each in gone:
            gone.extend(name for name, block in self.tier.items() if block.parent == each)
        for each in reversed(gone):
            self.note("removed", self.tier.pop(each))

    @precondition(lambda self: self.tier)
    @rule(data=st.data(), priority=st.integers(0, 100))
    def the_tier_updates(self, data: st.DataObject, priority: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.tier)))
        old = self.tier[name]
        self.tier[name] = replace(old, priority=priority)
        self.note("updated", self.tier[name], old.priority)

    @rule()
    def the_engine_reads_events(self) -> None:
        self.tell([self.host.apply(self.log[self.read :])])
        self.read = len(self.log)
        self.is_equal()

    @rule()
    def the_engine_lists_and_then_reads_events_from_before_the_list(self) -> None:
        """As where the tier changes while it is listed."""
        listed = HostList()
        listed.add(self.tier.values())
        self.tell(self.host.become(listed))
        self.the_engine_reads_events()

    @rule()
    def the_tier_is_lost_and_a_new_one_listed(self) -> None:
        listed = HostList()
        blocks = sorted(self.tier.values(), key=lambda block: block.block_hash)
        for start in range(0, len(blocks), 3):
            listed.add(blocks[start : start + 3])
        self.tell(self.host.become(listed))
        self.log.clear()
        self.read = 0
        self.is_equal()

    @rule()
    def the_tier_is_of_another_size(self) -> None:
        assert self.host.num_blocks is not None
        self.tell(self.host.resize(self.host.num_blocks + 1))
        assert not len(self.host)
        self.the_tier_is_lost_and_a_new_one_listed()

    def is_equal(self) -> None:
        assert dict(self.consumer.blocks(HOST)) == {
            name: IndexedBlock(block.parent, block.priority, block.namespace_fingerprint, OwnerId(block.owner))  # type: ignore[arg-type]
            for name, block in self.tier.items()
        }

    @invariant()
    def what_is_known_fits_together(self) -> None:
        self.host.check_invariants()
        self.consumer.check_invariants()
        snapshot = {row.block_hash: (row.parent_hash, row.priority, row.owner) for row in self.host.columns()}
        assert snapshot == {
            name: (block.parent_hash, block.priority, block.owner) for name, block in self.consumer.blocks(HOST).items()
        }


HostIndexMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestHostIndex = HostIndexMachine.TestCase

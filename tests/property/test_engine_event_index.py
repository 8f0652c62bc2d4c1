"""Snapshot and events give the engine's index, whatever happens on the way (kv-semantics 6.3).

Both ends are real: a core and its feed on one side, the consumer's index on the other; the links between them lose,
repeat and hold back messages, old ones go on delivering after new ones have begun, and either end starts anew.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine import event_feed, event_log
from engine.event_feed import EventFeed, EventReader
from engine.event_index import EventIndex, IndexedBlock, Stale
from engine.event_messages import Subscribe, Subscribed
from tests.property.test_engine_core_world import act
from tests.support.engine_world import World, settings


class Engine:
    """One life of an engine and its feed."""

    def __init__(self, life: int, capacity: int) -> None:
        config = settings(4, 12, max_num_tokens=24, offload_policy="on_evict", tier_enabled=True)
        self.world = World(config, tier_blocks=10, check=False)
        self.feed = EventFeed(capacity, f"life {life}")

    def tell(self) -> None:
        events = [*self.world.events, *self.world.core.take_events()]
        self.world.events.clear()
        self.feed.append(events)  # type: ignore[arg-type]
        if self.feed.wants_snapshot():
            self.feed.take_snapshot(self.world.core.snapshot())

    def index(self) -> dict[bytes, IndexedBlock]:
        return {
            each.block_hash: IndexedBlock(each.parent_hash, each.priority, each.namespace_fingerprint, each.owner)
            for each in self.world.core.snapshot()
        }


@dataclass
class Link:
    """One connection; `number` is that of the last `Subscribed` that came through it."""

    reader: EventReader
    on_the_way: deque[object] = field(default_factory=deque)
    number: int = 0

    def send(self) -> bool:
        message = self.reader.next_message()
        if message is not None:
            self.on_the_way.append(message)
        return message is not None


class Scene:
    """An engine, a consumer, and the links there are or were between them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.lives = 0
        self.heads = [[rng.randrange(3) for _ in range(rng.randrange(1, 30))] for _ in range(3)]
        self.links: list[Link] = []
        self.restart_engine()
        self.restart_consumer()

    def restart_engine(self) -> None:
        self.lives += 1
        self.engine = Engine(self.lives, self.rng.choice([4, 30, 1000]))

    def restart_consumer(self) -> None:
        self.index = EventIndex()
        self.links.clear()
        self.connect()

    def connect(self) -> None:
        for link in self.links:
            self.engine.feed.leave(link.reader)  # Nothing new comes through it; what is on the way may still arrive.
        self.links.append(Link(self.engine.feed.enter()))
        self.ask()

    def ask(self) -> None:
        subscription = self.index.begin()
        self.links[-1].reader.subscribe(Subscribe(subscription.number, subscription.cursor, subscription.incarnation))

    def another_asks(self) -> None:
        """Another consumer wants a snapshot of its own, for which ours may be given up."""
        feed = self.engine.feed
        feed.age_snapshot()
        feed.enter().subscribe(Subscribe(1, None, None))

    def deliver(self, link: Link, is_repeated: bool = False) -> None:
        message = link.on_the_way[0] if is_repeated else link.on_the_way.popleft()
        if isinstance(message, Subscribed):
            link.number = message.token
        outcome = self.index.receive(link.number, message)  # type: ignore[arg-type]
        if isinstance(outcome, Stale):
            self.ask()
        self.check()

    def check(self) -> None:
        """A copy that is current and has seen everything is the engine's index."""
        self.index.check_invariants()
        feed = self.engine.feed
        if not self.index.is_current or self.index.incarnation != feed.incarnation:
            return
        assert self.index.cursor <= feed.ring.next_event_id
        if self.index.cursor == feed.ring.next_event_id:
            assert dict(self.index.blocks()) == self.engine.index()

    def happen(self) -> None:
        kind = self.rng.choices(
            ["act", "send", "deliver", "repeat", "lose", "reconnect", "other", "engine", "consumer"],
            [30, 40, 40, 8, 2, 3, 3, 1, 1],
        )[0]
        waiting = [link for link in self.links if link.on_the_way]
        if kind == "act":
            act(self.engine.world, self.rng, self.heads)
            self.engine.tell()
        elif kind == "send":
            self.links[-1].send()
        elif kind == "reconnect":
            self.connect()
        elif kind == "other":
            self.another_asks()
        elif kind == "engine":
            self.restart_engine()
        elif kind == "consumer":
            self.restart_consumer()
        elif waiting and kind == "lose":
            self.rng.choice(waiting).on_the_way.popleft()
        elif waiting:
            self.deliver(self.rng.choice(waiting), is_repeated=kind == "repeat")

    def settle(self) -> None:
        """The links are good from now on."""
        self.engine.tell()
        self.connect()
        for _ in range(1000):
            self.engine.tell()
            waiting = [link for link in self.links if link.on_the_way]
            if waiting:
                self.deliver(self.rng.choice(waiting))
            elif not self.links[-1].send():
                return
        raise AssertionError("the consumer asks for ever")


def drive(seed: int, num_events: int) -> None:
    rng = random.Random(seed)
    scene = Scene(rng)
    for _ in range(num_events):
        scene.happen()
    scene.settle()

    assert scene.index.is_current
    assert dict(scene.index.blocks()) == scene.engine.index()


@pytest.fixture(autouse=True, scope="module")
def short_messages() -> object:
    """So that snapshots have several pages, and runs several events."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_feed, "BLOCKS_PER_PAGE", 3)
        patch.setattr(event_feed, "MAX_SNAPSHOTS", 1)
        patch.setattr(event_feed, "MAX_EVENTS_PER_BATCH", 3)
        patch.setattr(event_log, "MAX_BLOCKS_PER_EVENT", 2)
        yield


@hypothesis_settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.integers(100, 500))
def test_snapshot_and_events_give_the_index_whatever_happens_on_the_way(seed: int, num_events: int) -> None:
    drive(seed, num_events)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_snapshot_and_events_give_the_index_in_many_lives() -> None:
    for seed in range(3000):
        drive(seed, 600)

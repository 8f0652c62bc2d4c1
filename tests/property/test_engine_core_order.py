"""Who is admitted next: what is cached decides between requests of one owner only (kv-semantics 3.3, security.md)."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cached.keys import Namespace, OwnerId
from engine.scheduler import MAX_PASSED, WaitingQueue
from engine.sequence import Sequence
from engine.values import NewRequest
from tests.support.engine_world import World, settings

ONE, OTHER = OwnerId(b"1" * 16), OwnerId(b"2" * 16)

# What may happen to a queue: a request of an owner comes, or someone is admitted, or parked and woken later.
events = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 2), st.integers(0, 5)),
        st.tuples(st.just("take")),
        st.tuples(st.just("hold")),
        st.tuples(st.just("wake")),
    ),
    max_size=80,
)


def sequence_of(arrival: int, owner: int) -> Sequence:
    return Sequence(
        request=NewRequest(arrival, (1, 2), 1),
        arrival=arrival,
        namespace=Namespace(b"n" * 32),
        owner_index=owner,
        namespace_index=0,
        tokens_per_block=4,
        submitted_at=0.0,
    )


@dataclass
class Queue:
    """A waiting queue, and what `num_cached` says of each of its sequences."""

    knows_hits: bool
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    hits: dict[int, int] = field(default_factory=dict)
    sequences: list[Sequence] = field(default_factory=list)
    held: list[Sequence] = field(default_factory=list)
    admitted: list[tuple[int, int]] = field(default_factory=list)  # owner, arrival

    def play(self, steps: list[tuple]) -> None:
        for step in steps:
            if step[0] == "push":
                arrival = len(self.hits) + 1
                self.hits[arrival] = step[2]
                self.sequences.append(sequence_of(arrival, step[1]))
                self.queue.push(self.sequences[-1])
            elif step[0] == "wake" and self.held:
                self.queue.push(self.held.pop(0))
            elif step[0] in ("take", "hold"):
                self.next(step[0] == "take")
            self.queue.check_invariants()
        while self.next(True):
            pass

    def next(self, is_taken: bool) -> bool:
        chosen = self.queue.candidate((lambda each: self.hits[each.arrival]) if self.knows_hits else None)
        if chosen is None:
            return False
        if is_taken:
            self.queue.take(chosen)
            self.admitted.append((chosen.owner_index, chosen.arrival))
        else:
            self.queue.hold(chosen)
            self.held.append(chosen)
        return True


@hypothesis_settings(max_examples=200, deadline=None)
@given(events)
def test_the_order_of_owners_is_the_same_whatever_is_cached(steps: list[tuple]) -> None:
    steps = [step for step in steps if step[0] in ("push", "take")]
    blind, aware = Queue(False), Queue(True)

    blind.play(steps)
    aware.play(steps)

    assert [owner for owner, _ in aware.admitted] == [owner for owner, _ in blind.admitted]
    assert sorted(aware.admitted) == sorted(blind.admitted)


@hypothesis_settings(max_examples=200, deadline=None)
@given(events)
def test_everyone_is_admitted_and_nobody_passed_more_often_than_the_bound(steps: list[tuple]) -> None:
    queue = Queue(True)

    queue.play(steps)

    assert all(each.num_passed <= MAX_PASSED for each in queue.sequences)
    assert sorted(arrival for _, arrival in queue.admitted) == sorted(
        each.arrival for each in queue.sequences if each not in queue.held
    )


def test_of_one_owners_requests_the_one_with_most_in_the_cache_goes_first() -> None:
    world = World(settings(4, 64, max_batch_size=1, enable_partial_reuse=False))
    world.ask(range(17), owner=ONE)
    missing = world.submit(range(100, 117), owner=ONE)
    part = world.submit([*range(8), *range(200, 209)], owner=ONE)
    whole = world.submit(range(17), owner=ONE)

    world.run()

    order = [sequence for _, sequence, _ in world.chunks]
    assert order[-3:] == [whole, part, missing]


def test_another_owners_hits_do_not_change_the_turns() -> None:
    world = World(settings(4, 64, max_batch_size=1))
    world.ask(range(17), owner=OTHER)
    first = world.submit(range(100, 117), owner=ONE)
    hit = world.submit(range(17), owner=OTHER)
    second = world.submit(range(300, 317), owner=ONE)

    world.run()

    assert [sequence for _, sequence, _ in world.chunks][-3:] == [first, hit, second]


def test_one_that_misses_is_passed_at_most_so_often() -> None:
    world = World(settings(4, 64, max_batch_size=1))
    world.ask(range(17), owner=ONE)
    missing = world.submit(range(100, 117), owner=ONE)
    for _ in range(MAX_PASSED + 5):
        world.submit(range(17), owner=ONE)
    world.chunks.clear()

    world.run()

    order = [sequence for _, sequence, _ in world.chunks]
    assert order.index(missing) == MAX_PASSED


def test_equal_requests_come_in_the_order_of_their_arrival() -> None:
    world = World(settings(4, 64, max_batch_size=1))
    asked = [world.submit(range(start, start + 9), owner=ONE) for start in range(0, 400, 100)]

    world.run()

    assert [sequence for _, sequence, _ in world.chunks] == asked


def test_owners_are_those_of_preempted_sequences_too() -> None:
    queue = WaitingQueue()
    preempted, other = sequence_of(1, 7), sequence_of(2, 8)
    preempted.was_preempted = True
    for each in (preempted, other):
        queue.push(each)

    assert queue.ready_owners() == {7, 8}
    queue.hold(other)
    assert queue.ready_owners() >= {7}


def test_who_is_first_is_found_behind_all_that_have_left_meanwhile() -> None:
    """Two that were cancelled stood before the third, and it was taken for nobody: its first chunk had 8 tokens."""
    queue = WaitingQueue()
    sequences = [sequence_of(arrival, 0) for arrival in range(1, 5)]
    for each in sequences:
        queue.push(each)
    for each in sequences[:2]:
        queue.remove(each)

    assert queue.first(1) == sequences[2:3]
    assert queue.first(5) == sequences[2:]
    queue.remove(sequences[2])
    queue.remove(sequences[3])
    assert queue.first(1) == []

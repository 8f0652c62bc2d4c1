"""Who makes a block when its producer no longer does (kv-semantics 3.3): preempted, gone while it loads, or stopped."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from cached.keys import OwnerId
from engine.events import Stored
from tests.support.engine_world import World, at, expected_output, settings

HEAD = range(100, 124)


def preempted_producer() -> tuple[World, int, list[int]]:
    """A decoding sequence took a block from the youngest: the producer of `HEAD`, for which two others wait."""
    world = World(settings(4, 9, max_num_tokens=4))
    older = world.submit(range(4), max_tokens=9)
    world.step()
    producer = world.submit([*HEAD, 1])
    waiters = [world.submit([*HEAD[:20], 50 + each]) for each in range(2)]
    while not world.core.statistics().preemptions:
        assert world.step() is not None

    assert world.computed == {older: 9, producer: 12}
    assert world.lives[older].finish is None
    return world, producer, waiters


def assert_right(world: World, *sequences: int) -> None:
    for each in sequences:
        life = world.lives[each]
        assert life.finish == "length"
        assert life.output == expected_output(life.request, world.config)


def assert_stored_once(world: World) -> None:
    hashes = [block.block_hash for event in world.events if isinstance(event, Stored) for block in event.blocks]
    assert len(hashes) == len(set(hashes))


def test_rule_3_3_a_preempted_producer_hands_over() -> None:
    """It never comes back, so exactly one of those who waited for its blocks makes what it had not yet made."""
    world, producer, waiters = preempted_producer()
    world.cancel(producer)

    world.run()

    assert sorted(world.computed[each] for each in waiters) == [1, 20 - 12 + 1]
    assert_right(world, *waiters)
    assert_stored_once(world)


def test_rule_3_3_a_preempted_producer_that_comes_back_and_its_waiters_make_nothing_twice() -> None:
    world, producer, waiters = preempted_producer()

    world.run()

    assert sum(world.computed[each] for each in (producer, *waiters)) == len(HEAD) + 3
    first = world.lives[producer].first
    assert first is not None
    # Rule 7.1: it found its own blocks again when it came back, and yet nothing of its prompt came from a cache.
    assert (first.device_tokens, first.computed_tokens) == (0, len(HEAD) + 1)
    assert_right(world, producer, *waiters)
    assert_stored_once(world)


def test_rule_3_3_a_preempted_waiter_holds_nothing_and_asks_again() -> None:
    """Whoever waits for a producer holds no block: all that is in use is what the running sequences have."""
    world, producer, waiters = preempted_producer()

    assert world.core.statistics().sequences_waiting == 3
    assert world.core.statistics().blocks_used == 3
    for each in (producer, *waiters):
        world.cancel(each)
    world.run()
    assert world.core.statistics().blocks_used == 0


def test_rule_3_3_a_producer_cancelled_while_it_loads_hands_over_when_the_load_is_over() -> None:
    world = World(settings(4, 16, tier_enabled=True), tier_blocks=4)
    world.ask(HEAD)
    world.ask(range(200, 264), retention=at(0))
    producer, *waiters = (world.submit([*HEAD, 50 + each]) for each in range(3))
    while world.lookups:
        world.answer_lookup(0)
    assert world.step() is None
    assert [len(load.blocks) for load in world.loads] == [4]

    world.cancel(producer)
    assert world.step() is None
    world.run()

    # What was loaded for it is there; one of the two makes the other two blocks.
    assert sorted(world.computed[each] for each in waiters) == [1, 9]
    assert producer not in world.computed
    assert world.core.statistics().loads == 1
    assert_right(world, *waiters)


@pytest.mark.parametrize("rest", [range(1, 9), [1]], ids=["it had more to make", "that was its last block"])
def test_rule_3_3_one_that_computes_the_block_anyway_becomes_its_producer(rest: Iterable[int]) -> None:
    """Where a prompt ends with a block, 3.1 has it compute that block itself: it is under way when the producer fails."""
    world = World(settings(4, 32, max_num_tokens=10))
    producer = world.submit([*HEAD, *rest])
    world.step()
    world.step()
    ends_there = world.submit(HEAD, owner=OwnerId(b"2" * 16))  # Of the share of others, and so the first in its step.
    world.start_step()
    world.finish_step(fail=(producer,))
    waiter = world.submit([*HEAD, 50])

    world.run()

    assert world.lives[producer].finish == "error"
    assert_right(world, ends_there, waiter)
    assert world.computed[ends_there] + world.computed[waiter] == 4 + 1
    assert_stored_once(world)


def test_rule_3_3_a_producer_that_gets_no_turn_because_others_decode_is_waited_for_and_comes_through() -> None:
    """Decodes go first. As many as a step has tokens come by loads, which need none: the producer stands still."""
    world = World(settings(4, 40, max_num_tokens=4, tier_enabled=True), tier_blocks=4)
    loaded = [range(10 * each, 10 * each + 5) for each in range(4)]
    for each in loaded:
        world.ask(each)
    world.ask(range(200, 360), retention=at(0))
    producer = world.submit([*HEAD, 1])
    world.answer_tier()
    world.step()
    decoders = [world.submit(each, max_tokens=12) for each in loaded]
    waiter = world.submit([*HEAD, 2])

    world.run()

    steps = {sequence: {step for step, who, _ in world.chunks if who == sequence} for sequence in world.lives}
    still = set.intersection(*(steps[each] for each in decoders))
    assert min(steps[producer]) < min(still)
    assert max(still) < max(steps[producer])
    assert not still & (steps[producer] | steps[waiter])
    assert world.computed[producer] + world.computed[waiter] == len(HEAD) + 2
    assert_right(world, producer, waiter, *decoders)

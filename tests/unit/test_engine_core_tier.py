"""What the core asks of the host tier, and what it does while it waits for an answer (kv-semantics 2.6, 3.3, 5)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from cached.keys import OwnerId
from tests.support.engine_world import World, at, settings

HEAD = range(20)


def test_rule_2_6_a_release_touches_what_the_tier_holds() -> None:
    world = World(settings(4, 8, tier_enabled=True), tier_blocks=8)
    world.ask(range(9))
    assert len(world.tier) == 2
    assert world.touches == []

    world.ask(range(9), retention=at(90, 7.0))

    (touch,) = world.touches
    assert [(each.priority, each.deadline) for each in touch.items] == [(90, world.now + 7.0)] * 2
    assert world.core.statistics().offers == 1


def test_rule_2_6_priority_and_deadline_come_back_with_a_load() -> None:
    world = World(settings(4, 2, tier_enabled=True), tier_blocks=8)
    world.ask(range(5), retention=at(60, 100.0))
    world.ask(range(100, 107), retention=at(0))

    world.ask(range(5))

    assert world.core._pool.indexed_by_priority[60] == 1
    assert world.core.next_deadline() == 1000.0 + 100.0


def test_rule_3_3_a_waiter_of_a_load_waits_for_it_and_holds_nothing() -> None:
    world = World(settings(4, 16, tier_enabled=True), tier_blocks=16)
    world.ask(range(17))
    world.ask(range(100, 164), retention=at(0))
    one, other = world.submit(range(17)), world.submit(range(17))
    while world.lookups:
        world.answer_lookup(0)
    world.step()
    assert len(world.loads) == 1
    used = world.core.statistics().blocks_used

    world.run()

    assert used == 5
    assert (world.computed[one], world.computed[other]) == (1, 1)
    assert world.core.statistics().loads == 1


def test_rule_3_3_a_running_sequence_takes_what_a_shorter_one_computes_before_it() -> None:
    """Found by a random life: a load fails, and a prompt that ends in the very block (3.1) is scheduled first."""
    world = World(settings(4, 12, max_num_tokens=24, tier_enabled=True), tier_blocks=10)
    world.ask(range(9))
    world.ask(range(100, 148), retention=at(0))
    world.answer_tier()
    longer = world.submit(range(10))
    world.answer_lookup(0)
    assert world.step() is None
    shorter = world.submit(range(4), owner=OwnerId(b"2" * 16))  # Of the share of others, and so before the longer one.
    world.answer_load(0, at_most=0)

    world.run()

    assert world.computed[shorter] == 4
    assert world.computed[longer] == 6
    first = world.lives[longer].first
    assert first is not None
    assert (first.device_tokens, first.host_tokens, first.computed_tokens) == (4, 0, 6)


def test_rule_5_1_a_block_below_the_threshold_is_not_offered() -> None:
    for priority, expected in ((34, 0), (35, 2)):
        world = World(settings(4, 8, tier_enabled=True), tier_blocks=8)

        world.ask(range(9), retention=at(priority))

        assert world.core.statistics().blocks_offered == expected


def test_rule_5_2_a_block_that_is_being_copied_is_not_evicted() -> None:
    world = World(settings(4, 3, tier_enabled=True), tier_blocks=8)
    world.submit(range(12))
    while world.lookups:
        world.answer_lookup(0)
    world.step()
    assert len(world.offers) == 1
    world.submit(range(50, 58))
    while world.lookups:
        world.answer_lookup(0)

    assert world.step() is None
    world.answer_offer(0)

    assert world.step() is not None


def test_rule_5_2_on_evict_a_victim_is_copied_before_its_place_is_used() -> None:
    world = World(settings(4, 3, tier_enabled=True, offload_policy="on_evict"), tier_blocks=8)
    world.ask(range(12))
    assert world.tier == {}

    world.ask(range(50, 58))

    assert len(world.tier) >= 2
    first = world.ask(range(12)).first
    assert first is not None
    assert first.device_tokens + first.host_tokens >= 8


def test_rule_5_6_without_onboarding_the_tier_is_left_alone() -> None:
    world = World(settings(4, 2, tier_enabled=True, onboard_blocks=False), tier_blocks=8)
    world.ask(range(5))
    world.ask(range(50, 57))

    assert world.pos(range(5)) == 0
    statistics = world.core.statistics()
    assert (statistics.lookups, statistics.offers, statistics.loads) == (0, 0, 0)


def test_a_load_that_is_lost_is_computed_and_counted() -> None:
    world = World(settings(4, 4, tier_enabled=True), tier_blocks=8)
    world.ask(range(13))
    world.ask(range(50, 66), retention=at(0))
    sequence = world.submit(range(13))
    world.answer_lookup(0)
    world.step()
    world.answer_load(0, at_most=1)

    world.run()

    first = world.lives[sequence].first
    assert first is not None
    assert (first.host_tokens, first.computed_tokens) == (4, 9)


def test_a_cancelled_load_keeps_its_blocks_until_the_last_byte() -> None:
    world = World(settings(4, 4, tier_enabled=True), tier_blocks=8)
    world.ask(range(13))
    world.ask(range(50, 66), retention=at(0))
    sequence = world.submit(range(13))
    world.answer_lookup(0)
    world.step()

    world.cancel(sequence)

    assert world.core.statistics().blocks_used == 4
    world.answer_load(0)
    assert world.core.statistics().blocks_used == 0
    assert not world.core.has_work()


def test_a_tier_that_vanishes_answers_with_nothing_and_work_goes_on() -> None:
    world = World(settings(4, 4, tier_enabled=True), tier_blocks=8)
    sequence = world.submit(range(13))
    lookup = world.lookups.pop()
    world.core.set_tier_ready(False, world.now)
    world.core.looked_up(lookup.ticket, 0, world.now)

    world.run()

    assert world.lives[sequence].finish == "length"
    assert world.core.statistics().offers == 0


def test_a_load_never_stands_on_what_the_step_has_yet_to_write() -> None:
    world = World(settings(4, 6, tier_enabled=True), tier_blocks=16)
    world.ask(range(17))
    world.ask(range(100, 124), retention=at(0))
    first = world.submit([*range(4), 90, 91])
    second = world.submit(range(17))
    world.tier, held = {}, world.tier
    world.answer_lookup(0)
    world.tier = held
    world.answer_lookup(0)

    plan = world.start_step()

    assert plan is not None
    assert [chunk.sequence_id for chunk in plan.chunks] == [first]
    assert world.loads == []
    world.finish_step()
    world.step()
    assert [len(load.blocks) for load in world.loads] == [3]
    world.run()
    assert world.computed[second] == 1


def test_what_was_lost_from_the_device_meanwhile_is_looked_up_again() -> None:
    world = World(settings(4, 6, tier_enabled=True), tier_blocks=16)
    world.ask(range(9))
    waiting = world.submit(range(17))
    assert [len(lookup.hashes) for lookup in world.lookups] == [2]
    ahead = world.submit(range(100, 124), retention=at(0))
    world.answer_lookup(1)
    world.step()
    assert world.lives[ahead].finish == "length"

    world.answer_lookup(0)
    world.step()

    assert [len(lookup.hashes) for lookup in world.lookups] == [4]
    world.run()
    first = world.lives[waiting].first
    assert first is not None
    assert (first.host_tokens, first.computed_tokens) == (8, 9)


def test_offers_under_way_are_bounded_and_what_is_dropped_is_counted() -> None:
    world = World(settings(4, 40, tier_enabled=True, max_num_tokens=200), tier_blocks=100)

    world.submit(range(120))
    while world.lookups:
        world.answer_lookup(0)
    world.step()

    statistics = world.core.statistics()
    assert (statistics.blocks_offering, statistics.offers_dropped) == (20, 10)


def test_a_tier_that_comes_back_is_offered_everything_again() -> None:
    world = World(settings(4, 8, tier_enabled=True), tier_blocks=8)
    world.ask(range(9))
    world.core.set_tier_ready(False, world.now)
    world.now += 1
    world.core.set_tier_ready(True, world.now)

    world.ask(range(9))

    assert world.core.statistics().blocks_offered == 4


def test_what_follows_a_block_that_is_awaited_is_asked_for_meanwhile() -> None:
    """A burst behind one prompt was told all at once that its prefix was there, and only then asked the tier for what each
    goes on with: a step went by in which nobody could begin."""
    world = World(settings(4, 40, max_num_tokens=8, tier_enabled=True), tier_blocks=16)
    world.submit([*HEAD, 90])
    world.answer_lookup(0)
    world.step()
    waiting = [world.submit([*HEAD, *range(tail, tail + 9)]) for tail in (100, 200)]
    assert world.lookups == []

    world.step()

    assert [len(lookup.hashes) for lookup in world.lookups] == [2, 2]
    world.answer_tier()
    plan = world.start_step()
    assert plan is not None
    assert waiting[0] in {chunk.sequence_id for chunk in plan.chunks}
    world.finish_step()
    world.run()
    assert world.core.statistics().lookups == 3


def test_an_answer_that_is_late_is_waited_for_when_the_awaited_block_is_there() -> None:
    """And what the tier has is loaded then."""
    world, _, waiting = behind_a_producer_with_all_in_the_tier()

    world.step()
    world.step()

    assert world.lives[waiting].output == []
    assert [len(lookup.hashes) for lookup in world.lookups] == [2]
    world.run()
    first = world.lives[waiting].first
    assert first is not None
    assert (first.device_tokens, first.host_tokens, first.computed_tokens) == (20, 8, 1)


def test_one_whose_producer_gave_up_asks_again_from_where_it_stands() -> None:
    """Without hearing what it had asked: that stands on blocks which nobody makes now."""
    world, producer, waiting = behind_a_producer_with_all_in_the_tier()

    world.cancel(producer)
    world.step()

    assert [len(lookup.hashes) for lookup in world.lookups] == [2, 3]
    world.answer_lookup(0)
    assert world.step() is None
    world.answer_lookup(0)
    world.step()
    assert [len(load.blocks) for load in world.loads] == [3]
    world.run()
    first = world.lives[waiting].first
    assert first is not None
    assert first.computed_tokens == 1


def test_nobody_waits_for_an_answer_about_what_the_device_has_meanwhile() -> None:
    """One before it, which has heard that the tier has nothing, computes what it has asked for."""
    world = World(settings(4, 16, max_num_tokens=8, tier_enabled=True), tier_blocks=16)
    tail = range(100, 109)
    first = [world.submit([*HEAD, *rest]) for rest in ([90], tail)]
    world.answer_tier()
    world.step()
    waiting = world.submit([*HEAD, *tail])
    world.step()
    (late,) = world.lookups  # Whoever has heard something does not ask again.
    world.lookups.clear()

    world.run()

    assert [world.computed[each] for each in (*first, waiting)] == [21, 9, 1]
    world.core.looked_up(late.ticket, 2, world.now)
    world.core.check_invariants()


@pytest.mark.parametrize(("rest", "is_ready"), [([91], True), (range(100, 109), False)])
def test_nothing_is_asked_that_no_tier_could_answer(rest: Iterable[int], is_ready: bool) -> None:
    """Where the prompt ends behind the awaited block, and where there is no tier any more."""
    world = World(settings(4, 16, max_num_tokens=8, tier_enabled=True), tier_blocks=16)
    world.submit([*HEAD, 90])
    world.answer_lookup(0)
    world.step()
    waiting = world.submit([*HEAD, *rest])
    world.core.set_tier_ready(is_ready, world.now)

    world.step()

    assert world.lookups == []
    world.run()
    assert world.lives[waiting].finish == "length"


def behind_a_producer_with_all_in_the_tier() -> tuple[World, int, int]:
    """One is at 16 of 21 tokens, and one that goes on behind its first 20 is parked and has asked for the rest. The tier has
    all; the producer was told otherwise."""
    world = World(settings(4, 16, max_num_tokens=8, tier_enabled=True), tier_blocks=16)
    world.ask([*HEAD, *range(100, 109)])
    world.ask(range(300, 363), retention=at(0))
    world.answer_tier()
    held, world.tier = world.tier, {}
    producer = world.submit([*HEAD, 90])
    world.answer_lookup(0)
    world.tier = held
    world.step()
    waiting = world.submit([*HEAD, *range(100, 109)])
    world.step()
    assert [len(lookup.hashes) for lookup in world.lookups] == [2]
    return world, producer, waiting

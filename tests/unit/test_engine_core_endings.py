"""How sequences end: what of them is found afterwards, and when their blocks come free (kv-semantics 2.6, 3.6, 5.1)."""

from __future__ import annotations

import pytest

from engine import roster
from engine.events import Stored
from engine.offload import KNOWLEDGE_S
from tests.support.engine_world import World, at, settings

UNLIKE = [7, 7]  # what follows in a prompt that asks how much of it is cached


def finished(world: World, hold: bool = True) -> tuple[int, list[int]]:
    """A request of 4 + 9 tokens that has come to its end by itself; the last token is not written."""
    sequence = world.submit(range(4), max_tokens=9, hold=hold)
    world.run()
    assert world.lives[sequence].finish == "length"
    return sequence, [*range(4), *world.lives[sequence].output]


def used(world: World) -> int:
    return world.core.statistics().blocks_used


def test_rule_3_6_the_last_word_may_come_after_the_end() -> None:
    world = World(settings(4, 16))
    sequence, tokens = finished(world)
    before = used(world)

    world.stop(sequence, 9)

    assert (before, used(world)) == (3, 0)
    assert world.pos([*tokens, *UNLIKE]) == 12


def test_rule_3_6_the_last_word_after_the_end_may_cut_off_tokens() -> None:
    world = World(settings(4, 16))
    sequence, tokens = finished(world)

    world.stop(sequence, 2)

    assert world.pos([*tokens, *UNLIKE]) == 6


def test_rule_3_6_a_confirmation_of_everything_ends_the_wait() -> None:
    world = World(settings(4, 16))
    sequence, tokens = finished(world)

    world.confirm(sequence, 9)
    world.start_step()

    assert used(world) == 0
    assert world.pos([*tokens, *UNLIKE]) == 12


def test_rule_3_6_a_confirmation_of_a_part_waits_for_the_rest() -> None:
    world = World(settings(4, 16))
    sequence, tokens = finished(world)

    world.confirm(sequence, 4)
    world.start_step()
    still_used = used(world)
    world.cancel(sequence)

    assert still_used == 3
    assert world.pos([*tokens, *UNLIKE]) == 8


def test_a_finished_request_counts_once_and_is_no_work() -> None:
    world = World(settings(4, 16))
    sequence, _ = finished(world)

    is_working = world.core.has_work()
    world.stop(sequence, 9)
    statistics = world.core.statistics()

    assert not is_working
    assert (statistics.requests_finished, statistics.requests_cancelled) == (1, 0)


@pytest.mark.parametrize("hold", [True, False])
def test_without_a_confirmation_nothing_that_was_generated_is_found(hold: bool) -> None:
    world = World(settings(4, 16))
    _, tokens = finished(world, hold)
    deadline = world.core.next_deadline()

    if hold:
        assert deadline == world.now + roster.CONFIRMATION_TIMEOUT_S
        world.now = deadline
        world.start_step()

    assert used(world) == 0
    assert world.core.next_deadline() is None
    assert world.pos([*tokens, *UNLIKE]) == (4 if hold else 12)


def test_a_client_that_has_gone_releases_the_blocks_at_once() -> None:
    world = World(settings(4, 16))
    sequence, tokens = finished(world)

    world.cancel(sequence)

    assert used(world) == 0
    assert world.core.statistics().requests_cancelled == 0
    assert world.pos([*tokens, *UNLIKE]) == 4


def test_whoever_needs_the_blocks_gets_them_at_once() -> None:
    world = World(settings(4, 4))
    sequence, _ = finished(world)

    other = world.ask(range(100, 113))
    world.stop(sequence, 9)

    assert other.finish == "length"
    assert world.core.statistics().preemptions == 0


def test_a_decode_that_needs_a_block_gets_it_without_a_preemption() -> None:
    world = World(settings(4, 5))
    other = world.submit(range(100, 108), max_tokens=6)
    world.step()
    sequence = world.submit(range(4), max_tokens=2, hold=True)
    while world.lives[sequence].finish is None:
        world.step()

    world.run()

    assert world.lives[other].finish == "length"
    assert world.core.statistics().preemptions == 0


def test_how_many_wait_for_a_confirmation_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "MAX_UNCONFIRMED", 2)
    world = World(settings(4, 64))
    for start in range(0, 400, 100):
        world.ask(range(start, start + 4), max_tokens=9, hold=True)

    assert used(world) == 2 * 3


def test_a_last_word_in_the_middle_of_a_step_waits_for_its_end() -> None:
    world = World(settings(4, 16))
    sequence, _ = finished(world)
    world.submit(range(100, 110), max_tokens=2)
    world.start_step()
    before = world.core.snapshot()

    world.stop(sequence, 9)
    in_between = world.core.snapshot()
    world.finish_step()

    assert in_between == before
    assert len(in_between) < len(world.core.snapshot())
    world.run()
    assert used(world) == 0


def test_rule_3_6_a_stop_limits_what_is_found_of_any_request() -> None:
    """Of one whose generated blocks are not held back, the tail that was not shared yet."""
    world = World(settings(4, 16))
    sequence = world.submit(range(3), max_tokens=9)
    for _ in range(5):
        world.step()
    tokens = [*range(3), *world.lives[sequence].output]

    world.stop(sequence, 2)

    assert world.pos([*tokens, *UNLIKE]) == 5


def test_a_load_that_is_answered_in_the_middle_of_a_step_counts_after_it() -> None:
    """A step under way may not see the index change: what it published could be rolled back under what was loaded."""
    world = World(settings(4, 8, tier_enabled=True), tier_blocks=16)
    world.ask(range(9))
    world.ask(range(100, 132), retention=at(0))  # everything else is evicted
    world.answer_tier()
    world.submit(range(9))
    while world.lookups:
        world.answer_lookup(0)
    world.step()
    assert len(world.loads) == 1
    world.submit(range(200, 204))
    world.start_step()
    world.events.clear()

    world.answer_load(0)
    in_the_step = [event for event in world.events if isinstance(event, Stored)]
    world.finish_step()

    stored = [each for event in world.events if isinstance(event, Stored) for each in event.block_hashes]
    assert in_the_step == []
    assert len(stored) == 3


def test_copies_of_what_a_failed_sequence_computed_are_withdrawn_from_the_tier() -> None:
    """A reader of its blocks may have ended before it failed, and left them in the tier."""
    world = World(settings(4, 16, max_num_tokens=9, tier_enabled=True), tier_blocks=16)
    producer = world.submit(range(20), max_tokens=4)
    world.answer_tier()
    world.step()
    reader = world.submit(range(9))
    world.answer_tier()
    while world.lives[reader].finish is None:
        world.step()
    world.answer_tier()
    in_tier = set(world.tier)
    world.touches.clear()

    world.start_step()
    world.finish_step(fail=(producer,))

    withdrawn = {item.block_hash for touch in world.touches for item in touch.items if item.on_expiry == "drop"}
    assert in_tier
    assert in_tier <= withdrawn
    assert {item.deadline for touch in world.touches for item in touch.items} == {world.now}
    assert not world.core.snapshot()


def test_rule_2_6_a_copy_hears_of_a_release_however_long_ago_it_was_made() -> None:
    """What the tier holds is only believed for a while; a copy that is still there must not keep an old deadline."""
    world = World(settings(4, 16, tier_enabled=True), tier_blocks=16)
    world.ask(range(9))
    world.answer_tier()
    world.now += KNOWLEDGE_S + 1
    world.touches.clear()

    world.ask(range(9), retention=at(80, 5.0))

    assert [item.priority for touch in world.touches for item in touch.items] == [80, 80]

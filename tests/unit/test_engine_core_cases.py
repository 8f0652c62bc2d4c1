"""The case table of kv-semantics §9, and the examples of §2, one test a row."""

from __future__ import annotations

import pytest

from cached.keys import OwnerId
from cached.retention import Retention, RetentionConfig, TokenRange
from engine.events import Updated
from engine.values import NewRequest, Queued
from tests.support.engine_world import World, at, ranges, settings


def test_case_1_a_prompt_is_served_from_cache_the_second_time() -> None:
    world = World(settings(4, 8))

    assert world.pos(range(9), max_tokens=2) == 0
    assert world.pos(range(9), max_tokens=2) == 8


@pytest.mark.parametrize(("n", "served", "served_in_full"), [(1, 0, 0), (4, 3, 0), (5, 4, 4), (8, 7, 4), (9, 8, 8)])
def test_case_2_at_most_all_tokens_but_one_are_served(n: int, served: int, served_in_full: int) -> None:
    """kv-semantics 3.1."""
    world = World(settings(4, 8))
    whole_blocks = World(settings(4, 8, enable_partial_reuse=False))
    for each in (world, whole_blocks):
        each.ask(range(n))

    assert world.pos(range(n)) == served
    assert whole_blocks.pos(range(n)) == served_in_full


def test_case_3_salts_are_worlds_of_their_own() -> None:
    world = World(settings(4, 16))

    assert [world.pos(range(9), salt=salt) for salt in (None, "a", "a", "b", None)] == [0, 0, 8, 0, 8]


def test_case_4_low_priorities_go_first() -> None:
    world = World(settings(4, 8))
    world.ask(range(12), retention=at(90))
    world.ask(range(100, 112), retention=at(5))

    world.ask(range(200, 212))

    assert world.pos(range(12)) == 11


def test_case_5_a_block_whose_time_has_passed_falls_to_the_default() -> None:
    world = World(settings(4, 8))
    world.ask(range(12), retention=at(80, 10.0))
    world.ask(range(100, 112), retention=at(50))
    world.now += 50

    world.ask(range(200, 212))

    assert world.pos(range(100, 112)) == 11


def test_case_6_only_an_explicit_range_changes_a_matched_block() -> None:
    world = World(settings(4, 8))
    world.ask(range(9), retention=at(50))
    world.events.clear()

    world.ask(range(9))
    assert [event for event in world.events if isinstance(event, Updated)] == []

    world.ask(range(9), retention=at(10))
    updated = [event for event in world.events if isinstance(event, Updated)]
    assert [(event.old_priority, event.new_priority) for event in updated] == [(50, 10), (50, 10)]


@pytest.mark.parametrize("priority", [29, 30, 34, 35, 36])
def test_case_7_the_tier_has_what_reached_the_threshold(priority: int) -> None:
    world = World(settings(4, 2, tier_enabled=True), tier_blocks=8)
    world.ask(range(5), retention=at(priority))
    world.ask(range(100, 107), retention=at(0))

    first = world.ask(range(5)).first

    assert first is not None
    assert first.host_tokens == (4 if priority >= 35 else 0)
    assert first.device_tokens == 0


def test_case_8_dependents_go_first_whatever_the_priorities() -> None:
    """kv-semantics 4.1."""
    world = World(settings(4, 3))
    world.ask(range(12), retention=ranges((0, 4, 10), (4, None, 90)))

    world.ask(range(100, 104))

    assert world.pos(range(12)) == 8


def test_case_10_identical_prompts_in_one_step_are_computed_once() -> None:
    world = World(settings(4, 8))
    one, other = world.submit(range(9)), world.submit(range(9))

    world.step()

    assert (world.computed[one], world.computed[other]) == (9, 1)
    assert [world.lives[each].first.device_tokens for each in (one, other)] == [0, 8]  # type: ignore[union-attr]
    assert [world.lives[each].finish for each in (one, other)] == ["length", "length"]


def test_case_11_a_waiter_takes_over_from_a_cancelled_producer() -> None:
    world = World(settings(4, 8, max_num_tokens=4))
    producer, waiter = world.submit(range(9)), world.submit(range(9))
    world.start_step()
    world.cancel(producer)
    world.finish_step()

    world.run()

    assert world.lives[waiter].finish == "length"
    assert world.lives[producer].output == []


def test_case_11_before_its_first_chunk() -> None:
    world = World(settings(4, 8))
    producer, waiter = world.submit(range(9)), world.submit(range(9))
    world.cancel(producer)

    world.run()

    assert world.computed == {waiter: 9}
    assert world.lives[waiter].finish == "length"


def test_case_12_a_conversation_goes_on_where_it_ended() -> None:
    world = World(settings(8, 8))
    answer = world.ask(range(1000, 1020), max_tokens=5).output

    # The KV of the last sampled token is not written: 24 tokens are there.
    assert world.pos([*range(1000, 1020), *answer, 1, 2, 3]) == 24


def test_case_13_bands_of_priority_are_visible() -> None:
    world = World(settings(4, 16))
    retention = RetentionConfig(
        (TokenRange(0, 8, Retention(100)), TokenRange(8, None, Retention(50, 30.0))), Retention(20, 10.0)
    )

    world.ask(range(16), max_tokens=9, retention=retention)

    assert world.core.statistics().blocks_by_priority == {100: 2, 50: 2, 20: 2}


def test_case_14_a_child_whose_parent_is_not_in_the_tier_is_offered_and_refused_once() -> None:
    world = World(settings(4, 8, tier_enabled=True), tier_blocks=4)

    world.ask(range(8), retention=ranges((0, 4, 20), (4, None, 80)))

    assert world.tier == {}
    assert world.refused == ["orphan"]


def test_case_15_priorities_do_not_take_another_owners_share() -> None:
    world = World(settings(4, 8))
    greedy, modest = OwnerId(b"x" * 16), OwnerId(b"y" * 16)
    world.ask(range(32), owner=greedy, salt="x", retention=at(100))
    world.ask(range(12), owner=modest, salt="y")

    second = world.pos(range(12), owner=modest, salt="y")

    assert second == 11
    assert world.pos(range(32), owner=greedy, salt="x") >= 16


@pytest.mark.parametrize(
    ("size", "n", "listed", "priorities"),
    [
        (64, 256, [(0, 64, 80), (64, 128, 50)], [80, 50, 35, 35]),
        (32, 127, [(0, 63, 80), (63, 127, 30)], [80, 80, 30, 30]),
        (32, 128, [(0, 1, 80), (1, 2, 5)], [80, 35, 35, 35]),
        (64, 256, [(127, 193, 80)], [35, 35, 80, 80]),
        (64, 128, [(1, None, 80)], [35, 80]),
    ],
)
def test_rule_2_3_a_block_takes_the_range_of_its_first_token(
    size: int, n: int, listed: list[tuple[int, int | None, int]], priorities: list[int]
) -> None:
    world = World(settings(size, 8, max_num_tokens=1000))
    sequence = world.submit(range(n), max_tokens=2, retention=ranges(*listed))

    world.step()

    table = world.core._roster.running[sequence].table
    assert [world.core._pool.priority(block) for block in table[: len(priorities)]] == priorities


def test_a_request_is_a_value_that_does_not_show_its_salt() -> None:
    assert "secret" not in repr(NewRequest(1, (1,), 1, cache_salt="secret"))
    assert isinstance(World(settings()).core.submit(NewRequest(1, (1,), 1), 0.0), Queued)

"""What has a part in a step, and what waits: decodes before prefills, whose turn it is, and who sits a step out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cached.keys import OwnerId
from engine.pace import YOUNG_TOKENS
from tests.support.engine_world import World, settings


def test_decodes_come_before_prefills_within_the_budget() -> None:
    world = World(settings(4, 16, max_num_tokens=5))
    decoding = world.submit(range(3), max_tokens=5)
    world.step()
    prefilling = world.submit(range(50, 70))

    plan = world.start_step()

    assert plan is not None
    assert [(chunk.sequence_id, len(chunk.tokens)) for chunk in plan.chunks] == [(decoding, 1), (prefilling, 4)]


def test_owners_take_turns_and_each_is_first_come_first_served() -> None:
    world = World(settings(4, 64, max_batch_size=1))
    one, other = OwnerId(b"1" * 16), OwnerId(b"2" * 16)
    mine = [world.submit([each, 7], owner=one, salt="1") for each in range(4)]
    theirs = [world.submit([each, 8], owner=other, salt="2") for each in range(2)]

    world.run()

    order = [sequence for _, sequence, _ in world.chunks]
    assert order == [mine[0], theirs[0], mine[1], theirs[1], mine[2], mine[3]]


def test_an_owner_with_a_hundred_long_prompts_does_not_keep_another_waiting() -> None:
    world = World(settings(4, 4096, max_batch_size=64, max_num_tokens=64, max_queue=1000), check=False)
    one, other = OwnerId(b"1" * 16), OwnerId(b"2" * 16)
    for number in range(100):
        world.submit([number % 90, *range(79)], 4, owner=one, salt=f"1-{number}")
    for _ in range(40):
        world.step()
    short = world.submit([7, 8, 9], 2, owner=other, salt="2")

    steps = steps_until(world, lambda: world.lives[short].first is not None)

    assert world.core.statistics().sequences_waiting > 20
    assert (
        steps <= 4
    )  # One quarter of a step is shared by those who are not the oldest, the next one waiting among them.


@pytest.mark.parametrize("num_owners", [1, 2])
def test_a_burst_of_one_owner_is_cut_once_a_step_and_the_share_of_others_is_for_others(num_owners: int) -> None:
    """The quarter for those whose turn it is not went to a piece of a prompt that would have been next in any case."""
    world = World(settings(4, 256, max_num_tokens=16))
    for number in range(12):
        owner = OwnerId(bytes([number % num_owners]) * 16)
        world.submit([number, *range(20, 25)], 1, owner=owner, salt=str(number))
    pieces = []
    while plan := world.start_step():
        pieces.append(sum(chunk.sample is None for chunk in plan.chunks))
        world.finish_step()

    assert (max(pieces) == 1) == (num_owners == 1)


def test_another_owner_has_its_share_also_where_only_its_prompt_that_runs_is_left() -> None:
    """Whose turn it is among the others changes from step to step: in one of three it is theirs."""
    theirs_in_a_step = []
    for num_steps_before in range(3):
        world = World(settings(4, 256, max_num_tokens=16))
        one, other = OwnerId(b"1" * 16), OwnerId(b"2" * 16)
        for number in range(num_steps_before):
            world.ask([number], 1)
        oldest = world.submit(range(100), 1, owner=one, salt="1")
        second = world.submit(range(100, 200), 1, owner=one, salt="2")
        while second not in world.computed:
            world.step()
        theirs = world.submit(range(200, 300), 1, owner=other, salt="3")
        while world.computed[oldest] < 88:
            world.step()
        assert theirs in world.computed
        plan = world.start_step()
        assert plan is not None
        theirs_in_a_step.append(sum(len(each.tokens) for each in plan.chunks if each.sequence_id == theirs))

    assert max(theirs_in_a_step) >= 4


def test_an_oldest_that_needs_more_than_its_part_leaves_others_theirs() -> None:
    world = World(settings(4, 256, max_num_tokens=16))
    world.submit(range(30), 1, salt="1")
    world.step()
    short = world.submit(range(4), 1, salt="2")

    world.step()

    assert world.lives[short].finish == "length"


def test_a_crowd_is_looked_at_in_the_order_of_its_turns() -> None:
    """A heap is in order at its beginning only: steps were as large as prompts that came later, and cut the one between."""
    world = World(settings(4, 256, max_num_tokens=1))
    lengths = [9, 8, 7, 6, 5, 4, 3, 2, 6, 4, 8]
    for number, length in enumerate(lengths):
        world.submit(range(10 * number, 10 * number + length), 1)
    for _ in lengths[:2]:
        world.step()

    assert world.core.outlook(world.now).left == [7, *lengths[1:]]


def test_of_the_places_that_become_free_in_a_full_batch_every_other_goes_to_the_owner_that_waits() -> None:
    world = World(settings(4, 4096, max_batch_size=4, max_num_tokens=64, max_queue=1000), check=False)
    one, other = OwnerId(b"1" * 16), OwnerId(b"2" * 16)
    theirs = [world.submit([number, 5], 20 + 5 * number, owner=one, salt=f"1-{number}") for number in range(50)]
    for _ in range(5):
        world.step()
    mine = world.submit([7, 8, 9], 2, owner=other, salt="2")

    steps_until(world, lambda: world.lives[mine].first is not None)

    # When it came it was the rival's turn; the second is its own, whatever else waits.
    assert sum(world.lives[each].finish is not None for each in theirs) <= 2


def test_long_answers_of_one_owner_leave_a_place_for_another_that_has_none() -> None:
    """A tenant with as many long answers as there are places made another's first token wait 154 steps for the end of one
    of them."""
    world = World(settings(4, 4096, max_batch_size=8, max_num_tokens=64, max_queue=1000), check=False)
    one, other = OwnerId(b"1" * 16), OwnerId(b"2" * 16)
    for number in range(20):
        world.submit([number, 5], 200, owner=one, salt=f"1-{number}")
    for _ in range(5):
        world.step()
    mine = world.submit([7, 8, 9], 2, owner=other, salt="2")

    steps = steps_until(world, lambda: world.lives[mine].first is not None)

    assert steps <= 2
    assert world.core.statistics().sequences_waiting > 10


def test_new_answers_sit_out_a_step_unless_nobody_else_can_run() -> None:
    world = World(settings(4, 16))
    older = world.submit(range(40, 45), max_tokens=5)
    world.step()
    new = world.submit(range(5), max_tokens=5)
    world.step()
    world.now += 3
    outlook = world.core.outlook(world.now)
    assert (outlook.num_decodes, outlook.num_new, outlook.new_context, outlook.waited_s) == (2, 1, 6, 3)
    last = world.submit(range(20, 26), max_tokens=2)

    for taking_part in ([older, last], [older, new, last]):
        plan = world.start_step(sits_out=True)
        assert plan is not None
        assert [chunk.sequence_id for chunk in plan.chunks] == taking_part
        world.finish_step()
    world.run()


def test_nobody_sits_out_for_a_prompt_that_has_no_place() -> None:
    """Of a burst larger than the batch, answers stood still while nobody could be admitted."""
    world = World(settings(4, 16, max_batch_size=2))
    begun = [world.submit(range(first, first + 5), max_tokens=5) for first in (20, 40)]
    world.step()
    world.submit(range(60, 65), max_tokens=5)

    plan = world.start_step(budget=2, sits_out=True)
    assert plan is not None
    assert [chunk.sequence_id for chunk in plan.chunks] == begun
    world.finish_step()
    world.run()


def test_a_new_answer_that_need_not_sit_out_takes_no_blocks_of_one_that_has_its_part_in_the_step() -> None:
    """It was admitted first, and comes second: the block that it needs was taken from one whose chunk was in the plan."""
    world = World(settings(4, 12))
    long = world.submit(range(40), max_tokens=3)
    world.start_step(budget=8)
    world.finish_step()
    short = world.submit(range(50, 53), max_tokens=8)
    while not world.lives[long].output:
        world.start_step(budget=12)
        world.finish_step()
    assert len(world.lives[short].output) > 1

    plan = world.start_step(sits_out=True)
    assert plan is not None
    assert [chunk.sequence_id for chunk in plan.chunks] == [short]
    world.finish_step()
    world.run()


def test_the_first_token_of_a_cached_prompt_is_not_sat_out() -> None:
    """One token of it is left to compute, as of an answer that has begun."""
    world = World(settings(4, 16))
    world.ask(range(9))
    begun = world.submit(range(30, 35), max_tokens=5)
    world.step()
    again = world.submit(range(9), max_tokens=1)
    world.start_step(budget=1, sits_out=True)
    world.finish_step()

    assert [len(world.lives[each].output) for each in (begun, again)] == [1, 1]


def test_an_answer_is_young_for_its_first_tokens_and_the_next_steps_are_told_so() -> None:
    world = World(settings(4, 16))
    world.submit(range(9), max_tokens=YOUNG_TOKENS + 2)
    young = []
    while world.step() is not None and (outlook := world.core.outlook(world.now)).num_decodes:
        young.append(outlook.num_young)

    assert young == [1] * (YOUNG_TOKENS - 1) + [0, 0]


def steps_until(world: World, holds: Callable[[], bool]) -> int:
    """How many steps it takes."""
    for count in range(1000):
        if holds():
            return count
        world.step()
    raise AssertionError(f"never in 1000 steps: {world.core.statistics()}")


def test_what_a_waiting_prompt_has_left_does_not_count_the_part_of_a_block_that_will_be_copied() -> None:
    """Of sixteen requests behind a prefix that ends within a block, each was taken for eight tokens longer than it was: a step
    for two of them held two and most of a third."""
    world = World(settings(4, 16))
    world.submit(range(10), max_tokens=1)
    world.run()
    waiting = world.submit([*range(10), 50, 51, 52])

    left = world.core.outlook(world.now).left
    plan = world.start_step()

    assert plan is not None
    assert [(chunk.sequence_id, len(chunk.tokens)) for chunk in plan.chunks] == [(waiting, 3)]
    assert left == [3]

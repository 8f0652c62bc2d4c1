"""Rules of kv-semantics §1–§5 that the case table does not show, each in its smallest setting."""

from __future__ import annotations

import pytest

from cached.keys import OwnerId
from cached.retention import Retention, RetentionConfig, TokenRange
from engine.events import Created, EventRing, Lost, Removed, Stored, Updated
from engine.plan import Sampled, StepResult
from engine.protocol import Sampling
from engine.values import Queued, Refused
from tests.support.engine_world import EOS, World, at, expected_output, ranges, settings


@pytest.mark.parametrize("size", [0, 1, 3, 256])
def test_rule_1_1_other_block_sizes_stop_the_start(size: int) -> None:
    with pytest.raises(ValueError, match="legal values: 2, 4, 8, 16, 32, 64, 128"):
        settings(size)


def test_rule_1_5_a_partial_tail_is_found_under_its_parent_and_has_no_events() -> None:
    world = World(settings(4, 8))
    world.ask(range(6), max_tokens=1)
    stored = [event for event in world.events if isinstance(event, Stored)]

    assert [len(event.blocks) for event in stored] == [1]
    assert world.pos([*range(6), 50, 51, 52]) == 6


def test_rule_1_5_a_tail_that_an_indexed_child_covers_is_freed() -> None:
    world = World(settings(4, 8))
    world.ask(range(8))

    world.ask(range(6))

    assert world.core.statistics().blocks_idle == 2


def test_rule_1_6_a_second_copy_of_a_block_gives_way_to_the_indexed_one() -> None:
    world = World(settings(4, 8))
    one, other = world.submit(range(8), max_tokens=3), world.submit(range(8), max_tokens=3)

    world.step()

    tables = [world.core._roster.running[each].table for each in (one, other)]
    assert tables[0][:2] == tables[1][:2]
    assert world.core._pool.ref_count(tables[0][1]) == 2


def test_rule_2_4_a_plain_hit_keeps_the_duration() -> None:
    world = World(settings(4, 8))
    world.ask(range(5), retention=at(80, 10.0))
    world.now += 5
    world.ask(range(5))

    world.now += 9
    assert world.step() is None
    assert world.core._pool.indexed_by_priority[80] > 0

    world.now += 2
    assert world.step() is None
    assert world.core._pool.indexed_by_priority[80] == 0


def test_rule_2_5_a_block_in_use_never_expires_and_low_priorities_are_not_raised() -> None:
    world = World(settings(4, 8))
    world.submit(range(8), max_tokens=3, retention=ranges((0, 4, 80, 10.0), (4, None, 20, 10.0)))
    world.step()
    world.now += 100
    world.step()
    assert world.core._pool.indexed_by_priority[80] == 1

    world.run()
    world.now += 100
    world.step()

    assert world.core._pool.indexed_by_priority[80] == 0
    assert world.core._pool.indexed_by_priority[20] == 1
    updated = [event for event in world.events if isinstance(event, Updated)]
    assert [(event.old_priority, event.new_priority) for event in updated] == [(80, 35)]


def test_rule_2_5_drop_takes_the_descendants_along() -> None:
    world = World(settings(4, 8))
    drop = RetentionConfig((TokenRange(0, 4, Retention(80, 10.0, "drop")),))
    world.ask(range(12), retention=drop)
    world.events.clear()
    assert world.core.next_deadline() == world.now + 10.0

    world.now += 10
    world.step()

    assert world.core.statistics().blocks_free == 8
    assert sum(len(event.block_hashes) for event in world.events if isinstance(event, Removed)) == 3


def test_rule_3_2_a_chunk_publishes_its_full_blocks_and_nobody_waits_for_the_rest() -> None:
    world = World(settings(4, 16, max_num_tokens=8))
    producer = world.submit(range(50))
    world.step()
    waiter = world.submit([*range(4), 90, 91])

    world.step()

    assert world.lives[producer].first is None
    assert world.lives[waiter].first is not None
    assert world.lives[waiter].first.device_tokens == 4
    assert world.chunks[-2:] == [(2, waiter, 2), (2, producer, 6)]


def test_rule_3_3_a_burst_computes_its_head_once() -> None:
    world = World(settings(4, 64, max_num_tokens=8, max_batch_size=16))
    burst = [world.submit([*range(24), 100 + each, 200]) for each in range(8)]

    world.run()

    assert sum(world.computed.values()) == 24 + 8 * 2
    assert all(world.lives[each].finish == "length" for each in burst)


def test_rule_3_3_exactly_one_waiter_takes_over() -> None:
    world = World(settings(4, 64, max_num_tokens=8))
    burst = [world.submit([*range(24), 100 + each]) for each in range(5)]
    world.step()
    world.cancel(burst[0])

    world.run()

    # What was written before the cancellation is still there.
    assert sum(world.computed.values()) == 24 + 4


def test_rule_3_3_a_failed_producer_hands_over_and_its_readers_compute_again() -> None:
    world = World(settings(4, 64))
    first, second, third = (world.submit([*range(24), 100 + each]) for each in range(3))
    world.start_step()

    world.finish_step(fail=(first,))
    world.run()

    assert world.lives[first].finish == "error"
    assert [world.lives[each].finish for each in (second, third)] == ["length", "length"]
    assert world.lives[second].first is not None
    assert world.lives[second].first.device_tokens == 0
    assert world.lives[third].first is not None
    assert world.lives[third].first.device_tokens == 24


def test_rule_3_5_a_copy_leaves_its_source_as_it_was() -> None:
    world = World(settings(4, 8))
    world.ask(range(8), retention=at(70))

    assert world.pos([0, 1, 2, 3, 4, 5, 90, 91]) == 6
    assert world.pos(range(9)) == 8
    assert world.core._pool.indexed_by_priority[70] == 2


def test_rule_3_5_without_copying_only_an_idle_leaf_is_taken_over() -> None:
    world = World(settings(4, 8, copy_on_partial_reuse=False))
    world.ask(range(8))

    assert world.pos([0, 1, 2, 3, 4, 5, 90, 91]) == 6
    assert world.pos(range(9)) == 6  # The second block is no longer what it was.


def test_rule_3_5_a_partial_match_gives_way_where_its_source_is_needed() -> None:
    world = World(settings(4, 2))
    world.ask(range(8))

    assert world.pos([0, 1, 2, 3, 4, 5, 90, 91]) == 4


def test_rule_3_6_generated_blocks_are_published_as_far_as_they_are_confirmed() -> None:
    world = World(settings(4, 16))
    sequence = world.submit(range(4), max_tokens=9, hold=True)
    for _ in range(8):
        world.step()
    output = world.lives[sequence].output
    world.confirm(sequence, 5)
    world.stop(sequence, 6)

    assert world.pos([*range(4), *output, 1, 2]) == 10


def test_rule_3_6_what_a_stop_string_cut_off_is_never_found() -> None:
    world = World(settings(4, 16))
    sequence = world.submit(range(4), max_tokens=9, hold=True)
    for _ in range(8):
        world.step()
    world.stop(sequence, 1)

    assert world.pos([*range(4), *world.lives[sequence].output, 1, 2]) == 5


def test_rule_3_6_nothing_of_an_aborted_step_is_found() -> None:
    world = World(settings(4, 16))
    sequence = world.submit(range(12))
    world.start_step()
    world.cancel(sequence)

    world.finish_step(aborted=True)

    assert world.core.statistics().blocks_free == 16
    assert world.pos(range(12)) == 0


def test_rule_3_7_a_request_that_waits_for_blocks_holds_none() -> None:
    world = World(settings(4, 4))
    world.submit(range(12), max_tokens=3)
    world.step()
    waiting = world.submit([*range(8), *range(50, 58)])
    world.step()

    assert world.core.statistics().sequences_waiting == 1
    assert max(world.core._pool.ref_count(block) for block in range(4)) == 1
    world.cancel(waiting)
    world.run()
    assert world.core.statistics().blocks_used == 0


def test_rule_4_2_least_recently_released_goes_first_among_equals() -> None:
    world = World(settings(4, 3, enable_partial_reuse=False))
    for start in (0, 10, 20):
        world.ask(range(start, start + 4))
    world.ask(range(0, 4), max_tokens=1)  # Its block is matched by none of it, but computed again and adopted.

    world.ask(range(30, 34))

    assert world.pos([*range(0, 4), 9]) == 4
    assert world.core.statistics().blocks_total == 3


def test_rule_4_3_an_owner_above_its_share_gives_first() -> None:
    world = World(settings(4, 8))
    loud, quiet = OwnerId(b"l" * 16), OwnerId(b"q" * 16)
    world.core.set_weights({loud: 1.0, quiet: 3.0})
    world.ask(range(16), owner=quiet, salt="q", retention=at(0))
    world.ask(range(16), owner=loud, salt="l", retention=at(100))

    world.ask(range(50, 58), owner=quiet, salt="q", retention=at(0))

    assert world.pos(range(16), owner=quiet, salt="q") == 15


def test_the_youngest_is_preempted_and_comes_back_with_the_same_tokens() -> None:
    world = World(settings(4, 6))
    config = world.config
    lives = [world.lives[world.submit(range(each, each + 8), max_tokens=9)] for each in (0, 100)]

    world.run()

    assert world.core.statistics().preemptions > 0
    assert [life.output for life in lives] == [expected_output(life.request, config) for life in lives]


def test_generation_ends_with_length_where_the_pool_ends() -> None:
    world = World(settings(4, 2))

    life = world.ask(range(6), max_tokens=50)

    assert life.finish == "length"
    assert len(life.output) == 3  # The KV of 8 tokens fits; the last sampled token needs none.


def test_generation_ends_with_length_where_the_context_ends() -> None:
    world = World(settings(4, 8, max_context_tokens=10))

    assert len(world.ask(range(6), max_tokens=50).output) == 4


def test_end_of_sequence_is_not_allowed_below_min_tokens() -> None:
    world = World(settings(4, 8, eos_token_ids=tuple(range(EOS + 1))))

    life = world.ask(range(6), max_tokens=50, sampling=Sampling(min_tokens=3))

    assert (life.finish, len(life.output)) == ("stop", 3)


@pytest.mark.parametrize(
    ("prompt", "code", "retryable"),
    [
        (range(33), "context_length_exceeded", False),
        ([], "invalid_value", False),
        ([100_000], "invalid_value", False),
        ([-1], "invalid_value", False),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_and_changes_nothing(prompt: list[int], code: str, retryable: bool) -> None:
    world = World(settings(4, 8))

    _, answer = world.try_submit(prompt)

    assert isinstance(answer, Refused)
    assert (answer.code, answer.retryable) == (code, retryable)
    assert not world.core.has_work()


def test_a_full_queue_refuses_in_a_retryable_way() -> None:
    world = World(settings(4, 8, max_queue=2))
    world.submit([1], owner=OwnerId(b"1" * 16))
    world.submit([2], owner=OwnerId(b"2" * 16))

    _, answer = world.try_submit([3], owner=OwnerId(b"3" * 16))

    assert isinstance(answer, Refused)
    assert (answer.code, answer.retryable) == ("engine_overloaded", True)


def test_an_owner_that_asks_for_the_whole_queue_is_told_that_it_is_its_share_and_others_find_places() -> None:
    world = World(settings(4, 8, max_queue=8))
    greedy, other = OwnerId(b"1" * 16), OwnerId(b"2" * 16)
    answers = [world.try_submit([1], owner=greedy)[1] for _ in range(20)]

    refused = [answer for answer in answers if isinstance(answer, Refused)]
    _, theirs = world.try_submit([2], owner=other)

    assert len(answers) - len(refused) == 4
    assert {(answer.code, answer.retryable) for answer in refused} == {("engine_overloaded", True)}
    assert "your share of the queue" in refused[0].message
    assert isinstance(theirs, Queued)
    world.run()
    assert isinstance(world.try_submit([1], owner=greedy)[1], Queued)


def test_signals_for_unknown_sequences_are_ignored() -> None:
    world = World(settings())

    world.core.cancel(99, 0.0)
    world.core.stop(99, 1, 0.0)
    world.core.confirm(99, 1)
    world.core.looked_up(99, 1, 0.0)
    world.core.loaded(99, 1, 0.0)
    world.core.offered(99, 0.0)

    assert not world.core.has_work()


def test_what_a_failed_sequence_computed_before_is_not_found_either() -> None:
    world = World(settings(4, 16, max_num_tokens=8))
    sequence = world.submit(range(13))
    world.step()
    world.start_step()

    world.finish_step(fail=(sequence,))

    assert world.core.statistics().blocks_free == 16
    assert world.lives[sequence].error == "NaN"


def test_a_chunk_without_a_token_ends_its_sequence_and_no_other() -> None:
    world = World(settings(4, 16))
    one, other = world.submit(range(5)), world.submit(range(50, 55))
    plan = world.start_step()
    assert plan is not None
    world.outstanding = None

    outputs = world.core.complete(plan, StepResult(plan.step_id, (Sampled(other, 7, None),)), world.now)

    assert [(each.sequence_id, each.finish) for each in outputs] == [(one, "error"), (other, "length")]


def test_statistics_count_where_prompts_came_from() -> None:
    world = World(settings(4, 16))
    world.ask(range(10))
    world.ask(range(10))

    statistics = world.core.statistics()

    assert (statistics.tokens_prompt, statistics.tokens_device, statistics.tokens_computed) == (20, 9, 11)
    assert (statistics.blocks_reused_full, statistics.blocks_reused_partial, statistics.blocks_missed) == (2, 1, 3)


def test_a_consumer_that_fell_behind_is_told_so() -> None:
    ring = EventRing(2, "first")
    ring.append([Created((("device", each),)) for each in range(3)])

    assert ring.read(0, 10) == Lost(1)
    seen = ring.read(1, 10)
    assert isinstance(seen, list)
    assert [event.event_id for event in seen] == [1, 2]
    assert ring.read(3, 10) == []


def test_replaying_the_events_gives_the_index() -> None:
    world = World(settings(4, 6))
    for start in (0, 100, 0, 200, 300):
        world.ask(range(start, start + 13), max_tokens=4, retention=at(start % 97))
    index: dict[bytes, int] = {}
    for event in world.events:
        match event:
            case Stored(parent_hash):
                assert parent_hash is None or parent_hash in index
                index.update((block.block_hash, block.priority) for block in event.blocks)
            case Removed(hashes):
                for block_hash in hashes:
                    del index[block_hash]
            case Updated(block_hash, _, old, new):
                assert index[block_hash] == old
                index[block_hash] = new

    pool = world.core._pool
    assert index == {
        pool.tree.hash_of(block): pool.priority(block)
        for block in pool.tree.indexed()
        if pool.tree.hash_of(block) is not None
    }

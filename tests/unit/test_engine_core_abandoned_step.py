"""A step that is given up takes along what it was to write, and nothing of what earlier steps wrote (kv-semantics 5.2)."""

from __future__ import annotations

import pytest

from tests.support.engine_world import World, settings


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_request_cancelled_in_the_middle_of_a_prompt_leaves_its_blocks_to_the_host_tier(is_given_up: bool) -> None:
    world = World(settings(num_blocks=40, tier_enabled=True, max_num_tokens=16), tier_blocks=100)
    asked = world.submit(range(60))
    world.answer_tier()
    world.step()
    world.step()
    world.start_step()

    # What a real loop does when the only client of a step goes away: it asks the runner to give the step up.
    world.cancel(asked)
    world.finish_step(aborted=is_given_up)
    world.answer_tier()

    assert len(world.tier) == (8 if is_given_up else 12)
    world.core.check_invariants()

"""What a plan says of sampling: everything a penalty needs, and nothing that grows where there is none."""

from __future__ import annotations

import pytest

from engine.protocol import Sampling
from tests.support.engine_world import World, settings


@pytest.mark.parametrize("penalty", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_a_penalty_sees_prompt_and_output(penalty: str) -> None:
    world = World(settings())
    asked = world.submit([3, 4, 5], 6, sampling=Sampling(ignore_eos=True, **{penalty: 1.5}))

    for _ in range(6):
        plan = world.start_step()
        assert plan is not None
        sample = plan.chunks[0].sample
        assert sample is not None
        assert (tuple(sample.prompt), list(sample.output)) == ((3, 4, 5), world.lives[asked].output)
        world.finish_step()


def test_without_a_penalty_no_token_makes_a_copy_of_all_before_it() -> None:
    world = World(settings())
    world.submit([3, 4, 5], 6)

    for number in range(6):
        plan = world.start_step()
        assert plan is not None
        sample = plan.chunks[0].sample
        assert sample is not None
        assert (sample.output, sample.output_index) == ((), number)
        world.finish_step()

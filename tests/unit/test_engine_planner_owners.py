"""Many long prompts of one tenant do not make another's short one wait its turn behind each of them."""

from __future__ import annotations

from cached.keys import OwnerId
from tests.support.engine_world import World, settings

CROWD, ALONE = OwnerId(b"A" * 16), OwnerId(b"B" * 16)


def test_a_lone_request_waits_for_owners_and_not_for_their_requests() -> None:
    world = World(
        settings(
            tokens_per_block=16, num_blocks=12_000, max_num_tokens=128, max_batch_size=64, max_context_tokens=10_000
        ),
        check=False,
    )
    for each in range(20):
        world.submit([1000 + each, *([7] * 8000)], owner=CROWD)
    for _ in range(60):
        world.step()
    assert world.core.statistics().sequences_running >= 10

    waits = []
    for each in range(4):
        asked = world.submit([2000 + each, *([7] * 20)], owner=ALONE)
        steps = 0
        while world.lives[asked].first is None:
            world.step()
            steps += 1
        waits.append(steps)

    assert max(waits) <= 3, waits

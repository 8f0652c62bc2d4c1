"""No sequence ever attends over wrong KV, whatever happens (kv-semantics §1–§5), and every one comes to its end."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cached.keys import OwnerId
from cached.retention import Retention, RetentionConfig, TokenRange
from engine.protocol import Sampling
from tests.support.engine_world import World, settings

OWNERS = [OwnerId(bytes([index]) * 16) for index in range(3)]


def drive(seed: int, num_actions: int) -> World:
    """A random life of one engine; everything follows from the seed."""
    rng = random.Random(seed)
    size = rng.choice([2, 4, 4, 8])
    num_blocks = rng.choice([2, 3, 5, 8, 16, 24])
    has_tier = rng.random() < 0.6
    config = settings(
        tokens_per_block=size,
        num_blocks=num_blocks,
        max_num_tokens=rng.choice([1, 3, 8, 20, 64]),
        max_batch_size=rng.choice([1, 2, 4, 8]),
        max_queue=12,
        max_context_tokens=rng.choice([20, 60, 1000]),
        enable_block_reuse=rng.random() < 0.93,
        enable_partial_reuse=rng.random() < 0.8,
        copy_on_partial_reuse=rng.random() < 0.7,
        tier_enabled=has_tier,
        onboard_blocks=rng.random() < 0.9,
        secondary_offload_min_priority=rng.choice([0, 35, 60]),
        offload_policy=rng.choice(["on_release", "on_release", "on_evict"]),
    )
    world = World(config, tier_blocks=rng.choice([0, 4, 40]))
    heads = [[rng.randrange(3) for _ in range(rng.randrange(1, 30))] for _ in range(3)]
    for _ in range(num_actions):
        act(world, rng, heads)
    finish(world)
    return world


def act(world: World, rng: random.Random, heads: list[list[int]]) -> None:
    """One random thing that may happen to an engine."""
    # One that finished by itself may still be told how far its tokens count.
    alive = [
        each
        for each, life in world.lives.items()
        if not life.is_dropped and (life.finish is None or (life.request.hold_generated and rng.random() < 0.5))
    ]
    kind = rng.choices(
        ["submit", "step", "abort", "fail", "cancel", "stop", "confirm", "tier", "time", "tier_state", "forget"],
        [14, 40, 1, 2, 4, 3, 12, 16, 4, 1, 1],
    )[0]
    if kind == "submit":
        submit(world, rng, heads)
    elif kind == "step" and world.outstanding is None:
        world.start_step(rng.choice([None, None, None, 1, 4, 16]), sits_out=rng.random() < 0.2)
    elif kind == "step":
        world.finish_step()
    elif kind == "abort" and world.outstanding is not None:
        world.finish_step(aborted=True)
    elif kind == "fail" and world.outstanding is not None:
        chunk = rng.choice(world.outstanding.chunks)
        world.finish_step(fail=(chunk.sequence_id,))
    elif kind == "cancel" and alive:
        world.cancel(rng.choice(alive))
    elif kind == "stop" and alive:
        chosen = rng.choice(alive)
        world.stop(chosen, rng.randrange(len(world.lives[chosen].output) + 1))
    elif kind == "confirm" and alive:
        chosen = rng.choice(alive)
        world.confirm(chosen, rng.randrange(len(world.lives[chosen].output) + 1))
    elif kind == "tier":
        answer_something(world, rng)
    elif kind == "time":
        world.now += rng.choice([0.1, 1.0, 20.0])
    elif kind == "tier_state" and world.config.tier_enabled:
        world.core.set_tier_ready(rng.random() < 0.7, world.now)
    elif kind == "forget":
        world.forget_in_tier(rng)
    world.now += 0.01


def submit(world: World, rng: random.Random, heads: list[list[int]]) -> None:
    head = rng.choice(heads)
    prompt = head[: rng.randrange(1, len(head) + 1)] + [rng.randrange(3) for _ in range(rng.choice([0, 0, 1, 5, 9]))]
    finished = [life for life in world.lives.values() if life.finish]
    if finished and rng.random() < 0.3:  # The conversation goes on.
        life = rng.choice(finished)
        prompt = [*life.request.prompt, *life.output, *prompt[:3]]
    first = rng.randrange(len(prompt))
    retention = RetentionConfig(
        tuple(
            TokenRange(first, rng.choice([None, first + 1, first + 9]), random_retention(rng))
            for _ in range(rng.choice([0, 1]))
        ),
        random_retention(rng),
    )
    world.try_submit(
        prompt,
        max_tokens=rng.choice([1, 1, 2, 5, 14]),
        salt=rng.choice([None, "a"]),
        owner=rng.choice(OWNERS),
        retention=retention,
        hold=rng.random() < 0.3,
        sampling=Sampling(
            ignore_eos=rng.random() < 0.8,
            min_tokens=rng.choice([0, 0, 3]),
            presence_penalty=rng.choice([0.0, 0.0, 1.0]),
        ),
    )


def random_retention(rng: random.Random) -> Retention:
    return Retention(
        rng.choice([0, 20, 35, 50, 100]), rng.choice([None, None, 0.5, 15.0]), rng.choice(["demote", "demote", "drop"])
    )


def answer_something(world: World, rng: random.Random) -> None:
    if world.lookups and rng.random() < 0.5:
        world.answer_lookup(rng.randrange(len(world.lookups)), lie=rng.choice([0, 0, 0, 1, 3]))
    elif world.loads and rng.random() < 0.6:
        world.answer_load(rng.randrange(len(world.loads)), at_most=rng.choice([0, 1, 100, 100, 100]))
    elif world.offers:
        world.answer_offer(rng.randrange(len(world.offers)), take=rng.random() < 0.8)


def finish(world: World) -> None:
    """Everything ends, and nothing is left behind."""
    if world.outstanding is not None:
        world.finish_step()
    world.run()
    world.now += 100.0  # Nobody waits for confirmations any more.
    world.start_step()
    world.answer_tier()
    for life in world.lives.values():
        assert life.finish is not None or life.is_dropped
        if life.first is not None:
            first = life.first
            assert first.prompt_tokens == first.device_tokens + first.host_tokens + first.computed_tokens
            assert first.computed_tokens >= 1
    statistics = world.core.statistics()
    assert statistics.blocks_used == 0
    assert statistics.tickets_outstanding == 0
    assert statistics.blocks_idle == statistics.blocks_evictable
    assert statistics.blocks_free + statistics.blocks_idle == statistics.blocks_total
    assert len(world.core._roster.producers) == 0
    assert len(world.core._pool.owners) <= len(OWNERS)


@hypothesis_settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.integers(20, 160))
def test_no_sequence_ever_attends_over_wrong_kv(seed: int, num_actions: int) -> None:
    drive(seed, num_actions)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_sequence_ever_attends_over_wrong_kv_in_many_lives() -> None:
    for seed in range(4000):
        drive(seed, 200)

"""What the first token tells of a request (kv-semantics 7.1): its prompt's blocks, each counted once."""

from __future__ import annotations

from engine.core import EngineCore
from engine.protocol import FirstToken
from tests.support.engine_world import World, at, settings


def blocks(first: FirstToken | None) -> tuple[int, int, int]:
    assert first is not None
    return first.blocks_full, first.blocks_partial, first.blocks_missed


def totals(core: EngineCore) -> tuple[int, int, int]:
    shown = core.statistics()
    return shown.blocks_reused_full, shown.blocks_reused_partial, shown.blocks_missed


def test_a_cold_prompt_misses_all_its_blocks_the_unfilled_last_one_too() -> None:
    assert blocks(World(settings(4, 8)).ask(range(9)).first) == (0, 0, 3)


def test_a_prompt_seen_before_is_reused_in_full_blocks_and_one_in_part() -> None:
    world = World(settings(4, 8))
    world.ask(range(12))

    assert blocks(world.ask(range(12)).first) == (2, 1, 0)
    assert blocks(world.ask([*range(6), 90, 91, 92]).first) == (1, 1, 1)


def test_blocks_from_the_host_count_as_reused_in_full() -> None:
    world = World(settings(4, 2, tier_enabled=True), tier_blocks=8)
    world.ask(range(5), retention=at(35))
    world.ask(range(100, 107), retention=at(0))

    first = world.ask(range(5)).first

    assert blocks(first) == (1, 0, 1)
    assert first is not None
    assert first.host_tokens == 4


def test_the_counters_are_the_sum_of_what_requests_were_told() -> None:
    world = World(settings(4, 8))
    told = [blocks(world.ask(prompt).first) for prompt in (range(9), range(9), range(6), range(50, 53))]

    assert totals(world.core) == tuple(map(sum, zip(*told, strict=True)))

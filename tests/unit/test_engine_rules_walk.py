"""The walk (kv-semantics 3.4): device, then host, then a partial match on the device, which ends it."""

from __future__ import annotations

from typing import Any

import pytest

from cached.keys import block_hashes, namespace
from engine.protocol import FirstToken
from tests.support.engine_world import FINGERPRINT, World, at, settings

PROMPT = [*range(100, 113)]  # Three blocks of 4, and the token that has to be computed.


def served(world: World, prompt: list[int], **rest: Any) -> FirstToken:
    first = world.ask(prompt, **rest).first
    assert first is not None
    return first


def host_has(world: World, prompt: list[int], places: range) -> None:
    """These blocks of a prompt are on the host only, whatever the device and the host had of them."""
    world.ask(prompt)
    world.answer_tier()
    hashes = block_hashes(namespace(FINGERPRINT, None), prompt, world.size)
    for place, block_hash in enumerate(hashes):
        if place not in places:
            world.tier.pop(block_hash, None)
    world.ask(range(1000, 1000 + world.config.num_blocks * world.size), retention=at(0))
    assert world.core.statistics().blocks_by_priority.get(35, 0) == 0


def tiered(**changes: Any) -> World:
    return World(settings(4, 16, tier_enabled=True, max_num_tokens=100, **changes), tier_blocks=100)


def test_rule_3_4_the_host_goes_on_where_the_device_ends() -> None:
    world = tiered()
    host_has(world, PROMPT, range(3))
    world.ask(PROMPT[:5], retention=at(34))

    first = served(world, PROMPT)

    assert (first.device_tokens, first.host_tokens, first.computed_tokens) == (4, 8, 1)


def test_rule_3_4_where_the_host_goes_on_no_partial_match_is_taken() -> None:
    """The device has three of the four tokens of the second block, and the host has the block."""
    world = tiered()
    host_has(world, PROMPT, range(3))
    world.ask([*PROMPT[:7], 9, 9, 9], retention=at(34))
    assert len(world.tier) == 3

    first = served(world, PROMPT)

    assert (first.device_tokens, first.host_tokens) == (4, 8)
    assert world.core.statistics().blocks_reused_partial == 0


def test_rule_3_4_where_the_host_does_not_go_on_a_partial_match_is_taken_and_ends_the_walk() -> None:
    """The third block is on the host, but behind a block that only part of is anywhere."""
    world = tiered()
    host_has(world, PROMPT, range(2, 3))
    world.ask([*PROMPT[:7], 9, 9, 9], retention=at(34))

    first = served(world, PROMPT)

    assert (first.device_tokens, first.host_tokens, first.computed_tokens) == (7, 0, 6)


def test_rule_3_4_partial_matches_come_from_the_device_only() -> None:
    world = tiered()
    other = [*PROMPT[:7], 9, 9, 9]
    host_has(world, other, range(2))

    first = served(world, PROMPT)

    assert (first.device_tokens, first.host_tokens, first.computed_tokens) == (0, 4, 9)


@pytest.mark.parametrize(("enable_partial_reuse", "expected"), [(True, 6), (False, 4)])
def test_rule_3_4_partial_matches_can_be_switched_off(enable_partial_reuse: bool, expected: int) -> None:
    world = World(settings(4, 16, enable_partial_reuse=enable_partial_reuse))
    world.ask([*PROMPT[:6], 9, 9, 9])

    assert world.pos(PROMPT) == expected


@pytest.mark.parametrize("other", [90, 200], ids=["it stands before", "it stands behind"])
def test_rule_3_4_the_child_that_shares_most_is_taken(other: int) -> None:
    world = World(settings(4, 32))
    for shared in (1, 3, 2):
        world.ask([*PROMPT[: 4 + shared], *[other + shared] * (5 - shared)])

    assert world.pos(PROMPT) == 4 + 3


def test_rule_3_4_a_child_that_shares_no_token_is_none() -> None:
    world = World(settings(4, 16))
    world.ask([*PROMPT[:4], 9, 9, 9, 9, 9])

    assert world.pos(PROMPT) == 4
    assert world.core.statistics().blocks_reused_partial == 0


@pytest.mark.parametrize("salt", [None, "another"])
def test_rule_3_4_a_child_of_another_namespace_is_never_matched(salt: str | None) -> None:
    world = tiered()
    world.ask([*PROMPT[:7], 9, 9], salt="mine")

    assert world.pos(PROMPT, salt=salt) == 0

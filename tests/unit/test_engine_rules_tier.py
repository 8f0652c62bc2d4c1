"""What the host tier is to a request (kv-semantics 5.4, 5.5, 5.8), and how both tiers are counted (7.1, 7.2)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cached.keys import OwnerId
from cached.metrics import TierCollector
from cached.offers import Decision, Granted, Offer, Refused
from cached.protocol import NEVER
from cached.records import Holder, StoredRow
from cached.store import BlockStore
from engine.main import warm_up
from engine.values import Refused as RequestRefused
from gateway.metrics import GatewayMetrics
from gateway.usage import SequenceUsage, total
from tests.support.engine_world import World, at, expected_output, settings
from tests.support.fake_runner import FakeInfo, FakeRunner

PROMPT = range(100, 113)


def on_host_only(num_blocks: int = 16, **changes: Any) -> World:
    """Three blocks of `PROMPT` are on the host, and the device is full of other things."""
    world = World(settings(4, num_blocks, tier_enabled=True, max_num_tokens=100, **changes), tier_blocks=100)
    world.ask(PROMPT)
    world.ask(range(1000, 1000 + 4 * num_blocks), retention=at(0))
    assert len(world.tier) == 3
    assert world.core.statistics().blocks_by_priority.get(35, 0) == 0
    return world


def test_rule_5_4_a_load_leaves_the_host_copy_and_nothing_is_stored_again() -> None:
    world = on_host_only()
    copies = {name: list(content) for name, content in world.tier.items()}
    before = world.core.statistics()

    first = world.ask(PROMPT).first

    assert first is not None
    assert first.host_tokens == 12
    assert world.tier == copies
    after = world.core.statistics()
    assert (after.offers, after.blocks_offered) == (before.offers, before.blocks_offered)
    assert sum(len(touch.items) for touch in world.touches) >= 3, "its release is told instead"


def test_rule_5_4_a_block_can_be_loaded_from_the_host_any_number_of_times() -> None:
    store = host_store(2)
    keep(store, host_offer(b"r" * 32))

    for _ in range(3):
        lease = store.lease(1, b"r" * 32, 0.0)
        assert lease is not None
        assert store.release(1, lease.lease_id, 0.0)

    assert store.lookup(b"r" * 32, 0.0) == 1
    assert (store.statistics().loaded, store.statistics().stored) == (3, 1)


def test_rule_5_5_a_host_hit_without_a_free_device_block_waits_its_turn() -> None:
    world = on_host_only(num_blocks=4)
    busy = world.submit(range(50, 64), max_tokens=3)
    world.answer_lookup(0)
    world.step()
    assert world.core.statistics().blocks_used == 4

    waiting = world.submit(PROMPT)
    world.answer_lookup(0)
    world.step()

    assert world.lives[waiting].finish is None
    assert world.loads == []
    assert world.core.statistics().sequences_waiting == 1
    world.run()
    assert (world.lives[busy].finish, world.lives[waiting].finish) == ("length", "length")
    first = world.lives[waiting].first
    assert first is not None
    assert (first.host_tokens, first.computed_tokens) == (12, 1)
    assert world.core.statistics().preemptions == 0, "nobody else had to pay for it"


@pytest.mark.parametrize("num_blocks", [4, 8])
def test_rule_5_8_a_prompt_that_exceeds_the_device_is_refused_however_much_of_it_the_host_has(num_blocks: int) -> None:
    world = World(settings(4, num_blocks, tier_enabled=True), tier_blocks=1000)
    capacity = 4 * num_blocks
    world.ask(range(capacity))
    assert len(world.tier) == num_blocks

    _, answer = world.try_submit(range(capacity + 1))

    assert isinstance(answer, RequestRefused)
    assert (answer.code, answer.retryable) == ("context_length_exceeded", False)
    assert f"KV cache {capacity} tokens" in answer.message
    assert world.lookups == []


def test_rule_5_8_generation_ends_where_the_device_ends_and_not_where_the_host_does() -> None:
    with_tier = World(settings(4, 3, tier_enabled=True), tier_blocks=1000)
    without = World(settings(4, 3))

    lives = [world.ask(range(6), max_tokens=100) for world in (with_tier, without)]

    assert [life.finish for life in lives] == ["length", "length"]
    assert [len(life.output) for life in lives] == [4 * 3 - 6 + 1] * 2


def test_rule_7_1_every_prompt_token_is_counted_where_it_came_from() -> None:
    """Of one request: the first block from the device, two from the host; then one with a block in part."""
    world = on_host_only()
    world.ask(PROMPT[:5], retention=at(34))
    before = world.core.statistics()

    first = world.ask(PROMPT).first
    partial = world.ask([*PROMPT[:10], 9, 9, 9]).first

    assert first is not None
    assert partial is not None
    assert (first.prompt_tokens, first.device_tokens, first.host_tokens, first.computed_tokens) == (13, 4, 8, 1)
    assert (partial.prompt_tokens, partial.device_tokens, partial.host_tokens, partial.computed_tokens) == (
        13,
        10,
        0,
        3,
    )
    after = world.core.statistics()
    names = ("tokens_prompt", "tokens_device", "tokens_host", "tokens_computed")
    assert [getattr(after, name) - getattr(before, name) for name in names] == [26, 14, 8, 4]
    blocks = ("blocks_reused_full", "blocks_reused_partial", "blocks_missed")
    # Four blocks each: three whole and one to compute; two whole, one in part and one to compute.
    assert [getattr(after, name) - getattr(before, name) for name in blocks] == [5, 1, 2]


def test_rule_7_1_what_is_computed_again_after_a_preemption_is_no_miss_of_its_request() -> None:
    world = World(settings(4, 6))
    lives = [world.lives[world.submit(range(each, each + 8), max_tokens=9)] for each in (0, 100)]

    world.run()

    statistics = world.core.statistics()
    assert statistics.preemptions > 0
    assert [life.output for life in lives] == [expected_output(life.request, world.config) for life in lives]
    assert (statistics.tokens_prompt, statistics.tokens_computed) == (16, 16)
    assert statistics.tokens_prefilled > 16


def test_rule_7_1_the_warm_up_counts_nowhere() -> None:
    """It runs on the device before the core exists; its blocks are not in the index of the core that comes."""
    runner = FakeRunner(FakeInfo(num_blocks=8))

    rate, step_rates = warm_up(runner, 16)  # type: ignore[arg-type]

    assert rate.per_s is not None
    assert step_rates.is_known
    world = World(settings(runner.info.tokens_per_block, 8))
    statistics = world.core.statistics()
    assert (statistics.tokens_prompt, statistics.tokens_prefilled, statistics.tokens_generated) == (0, 0, 0)
    assert world.pos([1] * 9) == 0


def test_rule_7_1_usage_is_counted_by_tenant_and_never_by_salt() -> None:
    world = World(settings(4, 16))
    metrics = GatewayMetrics()
    for tenant, salt in (("alpha", "salt-of-a"), ("alpha", "salt-of-a"), ("alpha", "salt-of-b"), ("beta", "salt-of-c")):
        first = world.ask(range(9), salt=salt).first
        assert first is not None
        metrics.count_usage(tenant, total([SequenceUsage(0, 9, first, 1)]))

    text = metrics.exposition(None).decode()

    found = dict(re.findall(r'gateway_prompt_tokens_total\{(tenant="\w+",tier="\w+")\} (\S+)', text))
    assert {name: float(value) for name, value in found.items()} == {
        'tenant="alpha",tier="device"': 8,
        'tenant="alpha",tier="host"': 0,
        'tenant="alpha",tier="computed"': 9 + 1 + 9,
        'tenant="beta",tier="device"': 0,
        'tenant="beta",tier="host"': 0,
        'tenant="beta",tier="computed"': 9,
    }
    assert "salt" not in text


def test_rule_7_2_the_tier_says_what_it_holds_and_what_became_of_what_it_was_offered() -> None:
    store = host_store(3)
    root, leaf, other = (bytes([number]) * 32 for number in range(3))
    keep(store, host_offer(root, priority=80), host_offer(leaf, root, priority=20), host_offer(other, deadline=5.0))
    lease = store.lease(1, root, 0.0)
    assert lease is not None

    assert figures(store, "capacity_slots", "used", "idle", "leased") == [3, 3, 2, 1]
    assert samples(store, "used_by_priority") == {"20": 1, "35": 1, "80": 1}

    store.release(1, lease.lease_id, 1.0)
    assert figures(store, "used", "idle", "leased", "stored", "loaded") == [3, 3, 0, 3, 1]
    keep(store, host_offer(b"n" * 32, priority=30), now=2.0)  # The 20 goes, and was never loaded.
    assert keep(store, host_offer(b"x" * 32, priority=10), now=3.0) == [Refused("outranked")]
    assert keep(store, host_offer(b"y" * 32, b"gone" * 8, priority=99), now=3.0) == [Refused("orphan")]
    store.expire(6.0)

    assert samples(store, "evicted_by_priority_total")["20-29"] == 1
    assert sum(samples(store, "evicted_by_priority_total").values()) == 1
    refused = samples(store, "refused_by_reason_total")
    assert {reason: count for reason, count in refused.items() if count} == {"outranked": 1, "orphan": 1}
    assert figures(store, "stored", "loaded", "expired", "dropped_unused", "used") == [4, 1, 1, 1, 3]


def test_rule_7_2_the_device_counts_what_left_before_it_was_ever_matched_and_by_band() -> None:
    world = World(settings(4, 4))
    world.ask(range(8), retention=at(20))
    world.ask([*range(8), 9])
    world.ask(range(100, 108), retention=at(70))

    world.ask(range(200, 216), retention=at(90))

    statistics = world.core.statistics()
    assert {band: count for band, count in statistics.evictions_by_band.items() if count} == {"20-39": 3, "60-79": 2}
    assert statistics.dropped_unused == 3, (
        "the tail of the second request and the two at 70; the two at 20 were matched"
    )


class NoRecords:
    """Forgets everything."""

    def write_stored(self, slots: Sequence[int], rows: Iterable[StoredRow]) -> None: ...

    def write_reserved(self, slots: Sequence[int], holder: Holder) -> None: ...

    def clear(self, slot: int) -> None: ...


def host_store(num_slots: int) -> BlockStore:
    store = BlockStore(num_slots, 4096, NoRecords(), lease_ttl_s=10, reservation_ttl_s=30)
    store.publish(0, num_slots)
    store.open_session(1, Holder(1, 1, bytes(16)))
    return store


def host_offer(name: bytes, parent: bytes | None = None, priority: int = 35, deadline: float = NEVER) -> Offer:
    return Offer(name, parent, 0, priority, deadline, False, OwnerId(b"o" * 16))


def keep(store: BlockStore, *offers: Offer, now: float = 0.0) -> list[Decision]:
    decisions = store.reserve(1, offers, now)
    store.commit(1, [(each.reservation, 0) for each in decisions if isinstance(each, Granted)], now)
    store.check_invariants()
    return decisions


def figures(store: BlockStore, *names: str) -> list[float]:
    """Figures as the metrics show them, counters and gauges alike."""
    found = dict(_lines(store))
    return [
        found.get(f"halocline_tier_host_{name}", found.get(f"halocline_tier_host_{name}_total", -1)) for name in names
    ]


def samples(store: BlockStore, family: str) -> dict[str, float]:
    pattern = re.compile(rf'halocline_tier_host_{family}\{{\w+="([^"]+)"\}}')
    return {match[1]: value for name, value in _lines(store) if (match := pattern.fullmatch(name))}


def _lines(store: BlockStore) -> Iterable[tuple[str, float]]:
    registry = CollectorRegistry()
    registry.register(TierCollector(store.statistics))
    for line in generate_latest(registry).decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            yield name, float(value)


def test_one_that_ran_before_and_waits_for_a_load_of_its_whole_prompt_still_has_a_token_to_compute() -> None:
    """It knew the hash of its last block from its first try and was taken for served in full; with nothing left to compute
    for it, choosing the size of the next step divided by zero."""
    world = World(settings(4, 16, tier_enabled=True), tier_blocks=100)
    world.ask(range(13))
    world.ask(range(100, 160))  # Evicts what the device has of it.
    world.core.set_tier_ready(False, world.now)
    first, _, _ = (world.submit(range(12), max_tokens=4) for _ in range(3))
    world.start_step()
    world.finish_step(fail=(first,))  # The two that lean on its blocks are preempted.
    world.core.set_tier_ready(True, world.now)
    world.submit(range(12), max_tokens=4)
    lefts = []
    for _ in range(6):
        lefts.append(list(world.core.outlook(world.now).left))
        if world.start_step() is not None:
            world.finish_step()
        while world.lookups:
            world.answer_lookup(0)

    assert any(len(left) > 1 for left in lefts)
    assert all(each > 0 for left in lefts for each in left)

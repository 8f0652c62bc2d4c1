"""Steps, real core and tier worker together: what comes back from host memory is what was computed, or is not used."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from engine.client import EngineClient
from engine.protocol import FirstToken, Sampling
from tests.support.async_device import AsyncDevice
from tests.support.fake_cudart import FakeCudart
from tests.support.fake_runner import FakeInfo, FakeRunner, SlowTransfer, StreamedRunner, expected_tokens
from tests.support.fake_tier import FakeTier, FakeTierClient
from tests.support.shell import WAIT_S, Shell, is_quiet

GREEDY = Sampling(temperature=0.0)
SMALL = FakeInfo(num_blocks=12)


def tiered(tier: FakeTier, runner: FakeRunner | None = None) -> Shell:
    return Shell(runner or FakeRunner(SMALL), make_tier_client=lambda: FakeTierClient(tier))


async def run(client: EngineClient, prompt: list[int], max_tokens: int = 3) -> FirstToken:
    """Run one request, check its answer, return where its prompt came from."""
    events = [event async for event in client.submit(prompt, max_tokens, GREEDY)]
    assert [token for event in events for token in event.tokens] == expected_tokens(prompt, max_tokens)
    assert events[0].first is not None
    return events[0].first


async def ready(client: EngineClient) -> None:
    async with asyncio.timeout(WAIT_S):
        while client.tier != "ready":
            await asyncio.sleep(0.01)


def prompt_of(seed: int, length: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(1, 1000) for _ in range(length)]


async def push_out(client: EngineClient, shell: Shell, prompt: list[int]) -> FirstToken:
    """Compute `prompt`, have it stored, and fill the device with other things."""
    cold = await run(client, prompt)
    await shell.until(is_quiet)
    for seed in range(900, 904):
        await run(client, prompt_of(seed, 40))
    await shell.until(is_quiet)
    return cold


async def test_a_prefix_that_left_the_device_is_loaded_from_the_host_and_gives_the_same() -> None:
    prompt = prompt_of(1, 33)
    async with tiered(FakeTier(256, SMALL.block_bytes)) as shell:
        client = await shell.client()
        await ready(client)
        await push_out(client, shell, prompt)

        again = await run(client, prompt)

        assert again.host_tokens + again.device_tokens == 32
        assert again.host_tokens > 0
        await shell.until(is_quiet)
        shell.core.check_invariants()


async def test_another_engine_finds_what_the_first_one_stored() -> None:
    prompt = prompt_of(2, 33)
    tier = FakeTier(64, SMALL.block_bytes)
    async with tiered(tier) as shell:
        client = await shell.client()
        await ready(client)
        await run(client, prompt)
        await shell.until(is_quiet)

    async with tiered(tier) as shell:
        client = await shell.client()
        await ready(client)

        again = await run(client, prompt)

        assert again.host_tokens == 32


@pytest.mark.parametrize("trouble", ["corrupt", "lost lease", "gone", "defect"])
async def test_a_load_that_goes_wrong_is_computed_instead(trouble: str) -> None:
    prompt = prompt_of(3, 33)
    tier = FakeTier(256, SMALL.block_bytes)
    async with tiered(tier) as shell:
        client = await shell.client()
        await ready(client)
        await push_out(client, shell, prompt)
        if trouble == "corrupt":
            for block_hash in tier.stored:
                tier.corrupt(block_hash)
        elif trouble == "lost lease":
            tier.loses_leases = True
        elif trouble == "gone":
            tier.is_there = False
        else:
            tier.fails_with = RuntimeError("injected")

        again = await run(client, prompt)

        assert again.host_tokens == 0
        await shell.until(is_quiet)
        shell.core.check_invariants()


async def test_the_gateway_hears_when_the_tier_goes_and_comes() -> None:
    tier = FakeTier(16, SMALL.block_bytes)
    async with tiered(tier) as shell:
        client = await shell.client()
        await ready(client)

        tier.is_there = False
        async with asyncio.timeout(WAIT_S):
            while client.tier != "absent":
                await asyncio.sleep(0.01)
        tier.is_there = True

        await ready(client)


def slow_copies(runner: FakeRunner) -> FakeRunner:
    runner.transfer = SlowTransfer(runner.kv, runner.info.block_bytes)
    runner.transfer.batch_blocks = 2
    return runner


async def test_copies_that_take_long_never_meet_a_step_that_uses_their_block() -> None:
    """The kind of defect by which other systems answered wrongly under load: stores that read what is still being
    written, loads into what is still being read."""
    tier = FakeTier(4096, SMALL.block_bytes)
    async with tiered(tier, slow_copies(FakeRunner(FakeInfo(num_blocks=24)))) as shell:
        client = await shell.client()
        await ready(client)

        for group in range(15):
            await asyncio.gather(*(run(client, prompt_of((group + at) % 9, 20 + at % 4 * 9), 5) for at in range(8)))

        figures = await shell.until(is_quiet)
        assert figures["core"]["blocks_loaded"] > 0
        assert figures["core"]["blocks_load_failed"] == 0
        assert figures["tier"]["store_blocks"] > 0
        shell.core.check_invariants()


@pytest.mark.parametrize("late", [(), ("stores", "loads")], ids=["at any pace", "copies late"])
@pytest.mark.parametrize("fails_at", [None, (2, 4), ()], ids=["nothing pinned", "some pinned", "all pinned"])
async def test_no_answer_is_wrong_on_a_device_that_copies_beside_its_steps(
    fails_at: tuple[int, ...] | None, late: tuple[str, ...]
) -> None:
    """Stores, loads and steps on streams of their own, each delayed at random, over a pool that everything has to leave soon."""
    pauses = random.Random(5)
    info = FakeInfo(num_blocks=24)
    device = AsyncDevice(
        24, info.block_bytes, frozenset(late), pace=lambda: time.sleep(pauses.choice([0.0, 0.0, 0.001]))
    )
    tier = FakeTier(256, info.block_bytes)
    cudart = None if fails_at is None else FakeCudart(fails_at=fails_at)
    runner = StreamedRunner(FakeRunner(info), device, cudart)
    async with tiered(tier, runner) as shell:  # type: ignore[arg-type]
        client = await shell.client()
        await ready(client)

        for group in range(8):
            await asyncio.gather(*(run(client, prompt_of((group + at) % 9, 20 + at % 4 * 9), 5) for at in range(8)))

        figures = await shell.until(is_quiet)
        assert figures["core"]["blocks_loaded"] > 0
        assert figures["core"]["blocks_load_failed"] == 0
        assert (figures["tier"]["pinned_bytes"] > 0) == (cudart is not None)
        shell.core.check_invariants()
    device.close()
    assert cudart is None or cudart.registered == {}


@pytest.mark.parametrize("seed", range(3))
async def test_no_answer_is_ever_wrong_while_the_tier_misbehaves_at_random(seed: int) -> None:
    dice = random.Random(seed)
    tier = FakeTier(4096, SMALL.block_bytes)
    async with tiered(tier, FakeRunner(FakeInfo(num_blocks=20))) as shell:
        client = await shell.client()
        await ready(client)

        async def trouble() -> None:
            while True:
                await asyncio.sleep(0.003)
                match dice.randrange(5):
                    case 0:
                        tier.is_there = not tier.is_there
                    case 1:
                        tier.loses_leases = not tier.loses_leases
                    case 2 if tier.stored:
                        tier.corrupt(dice.choice(list(tier.stored)))
                    case 3 if dice.random() < 0.05:
                        tier.fails_with = RuntimeError("injected")

        making_trouble = asyncio.create_task(trouble())

        async def one(number: int) -> None:
            prompt = prompt_of(number % 8, 8 + number % 5 * 12)
            if dice.random() < 0.3:
                async with client.submit(prompt, 5, GREEDY) as stream:
                    await anext(stream)
            else:
                await run(client, prompt, 5)

        for group in range(12):
            await asyncio.gather(*(one(10 * group + at) for at in range(10)))
        making_trouble.cancel()
        tier.is_there = True

        await shell.until(is_quiet)
        shell.core.check_invariants()
        assert not tier.leases
        assert not shell.inbox.cancelled

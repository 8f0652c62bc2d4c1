"""The engine's shell with a real cache daemon that is stopped, killed and replaced under it.

The runner is a fake whose answers depend on every token in its KV memory, so a wrong byte from the host changes them.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator

import pytest

from cached.client import TierClient
from cached.protocol import TierHello
from engine.client import EngineClient
from engine.protocol import FirstToken, Sampling
from tests.support.cached_daemon import Daemon, daemon_directory
from tests.support.fake_runner import FakeInfo, FakeRunner, expected_tokens
from tests.support.shell import WAIT_S, Shell, is_quiet

GREEDY = Sampling(temperature=0.0)
INFO = FakeInfo(num_blocks=16)
TIMEOUT_S = 5.0
"""Of a verb; generous, since a daemon that a busy machine keeps waiting is absent for a second, and these tests are not
about that."""
SHORT_TIMEOUT_S = 0.3


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with daemon_directory() as directory:
        made = Daemon(directory, host_cache_size=4 * 2**20)
        made.start()
        yield made
        made.close()


def tiered(daemon: Daemon, timeout_s: float = TIMEOUT_S) -> Shell:
    hello = TierHello(INFO.layout_fingerprint, INFO.block_bytes, INFO.tokens_per_block)
    return Shell(FakeRunner(INFO), make_tier_client=lambda: TierClient(daemon.socket, hello, timeout_s))


def prompt_of(seed: int, length: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(1, 1000) for _ in range(length)]


async def run(client: EngineClient, prompt: list[int], max_tokens: int = 3) -> FirstToken:
    events = [event async for event in client.submit(prompt, max_tokens, GREEDY)]
    assert events[-1].finish == "length"
    assert [token for event in events for token in event.tokens] == expected_tokens(prompt, max_tokens)
    assert events[0].first is not None
    return events[0].first


async def until_tier(client: EngineClient, state: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while client.tier != state:
            await asyncio.sleep(0.01)


async def until_served_from_host(client: EngineClient, shell: Shell, prompt: list[int]) -> None:
    """Run a prompt, push it out, run it again, until the host serves it: it may have to verify its blocks first."""
    async with asyncio.timeout(WAIT_S):
        while True:
            if (await run(client, prompt)).host_tokens:
                return
            await shell.until(is_quiet)
            for seed in range(800, 806):
                await run(client, prompt_of(seed, 40))


async def until_nothing_is_held(daemon: Daemon) -> None:
    """No lease, no reservation, no quarantine: a session that was lost to a late answer is settled by the next one."""
    async with asyncio.timeout(WAIT_S):
        while any(daemon.stats()[name] for name in ("leased", "reserved", "waiting", "quarantined")):
            await asyncio.sleep(0.02)


async def test_a_new_engine_is_served_what_a_former_one_computed(daemon: Daemon) -> None:
    prompt = prompt_of(1, 33)
    async with tiered(daemon) as shell:
        client = await shell.client()
        await until_tier(client, "ready")
        await run(client, prompt)
        await shell.until(is_quiet)

    async with tiered(daemon) as shell:
        client = await shell.client()
        await until_tier(client, "ready")

        again = await run(client, prompt)

        assert again.host_tokens == 32
        await shell.until(is_quiet)
        await until_nothing_is_held(daemon)


async def test_a_daemon_that_hangs_is_absent_requests_go_on_and_it_comes_back(daemon: Daemon) -> None:
    prompt = prompt_of(2, 33)
    async with tiered(daemon, SHORT_TIMEOUT_S) as shell:
        client = await shell.client()
        await until_tier(client, "ready")
        await run(client, prompt)
        await shell.until(is_quiet)
        assert daemon.process is not None

        daemon.process.send_signal(signal.SIGSTOP)
        for seed in range(10, 20):
            await run(client, prompt_of(seed, 40))
        await until_tier(client, "absent")
        assert (await run(client, prompt)).host_tokens == 0
        daemon.process.send_signal(signal.SIGCONT)

        await until_tier(client, "ready")
        await until_served_from_host(client, shell, prompt)
        await shell.until(is_quiet)


@pytest.mark.parametrize("num_restarts", [3, pytest.param(50, marks=pytest.mark.long)])
async def test_a_daemon_killed_and_replaced_under_load_fails_no_request_and_serves_again(
    daemon: Daemon, num_restarts: int
) -> None:
    prompt = prompt_of(3, 33)
    async with tiered(daemon) as shell:
        client = await shell.client()
        await until_tier(client, "ready")
        await run(client, prompt)
        await shell.until(is_quiet)
        working = True

        async def load(seed: int) -> int:
            count = 0
            while working:
                await run(client, prompt_of(seed + count % 6, 40), 4)
                count += 1
            return count

        loads = [asyncio.create_task(load(100 * number)) for number in range(4)]
        for _ in range(num_restarts):
            daemon.kill()
            await asyncio.to_thread(daemon.start)
            await until_tier(client, "ready")
        working = False

        assert all(count > 0 for count in await asyncio.gather(*loads))
        await until_served_from_host(client, shell, prompt)
        await shell.until(is_quiet)
        shell.core.check_invariants()


async def test_an_engine_that_starts_without_a_daemon_serves_and_finds_it_later(daemon: Daemon) -> None:
    daemon.kill()
    async with tiered(daemon) as shell:
        client = await shell.client()
        await run(client, prompt_of(4, 33))
        assert client.tier == "absent"

        await asyncio.to_thread(daemon.start)

        await until_tier(client, "ready")
        await until_served_from_host(client, shell, prompt_of(4, 33))


async def test_five_hundred_requests_half_cancelled_leave_no_lease_no_reservation_and_no_descriptor(
    daemon: Daemon,
) -> None:
    dice = random.Random(5)
    async with tiered(daemon) as shell:
        client = await shell.client()
        await until_tier(client, "ready")
        await run(client, prompt_of(0, 20))
        await shell.until(is_quiet)
        fds_before = len(os.listdir("/proc/self/fd"))

        async def one(number: int) -> None:
            prompt = prompt_of(number % 20, dice.randrange(1, 50))
            async with client.submit(prompt, 6, GREEDY) as stream:
                if number % 2:
                    tokens = [token for event in [each async for each in stream] for token in event.tokens]
                    assert tokens == expected_tokens(prompt, 6)
                else:
                    await asyncio.sleep(dice.random() * 0.05)

        await asyncio.gather(*(one(number) for number in range(500)))

        await shell.until(is_quiet)
        await until_nothing_is_held(daemon)
        async with asyncio.timeout(WAIT_S):  # A session that was lost and is being opened again has others for a while.
            while len(os.listdir("/proc/self/fd")) != fds_before:
                await asyncio.sleep(0.02)
        shell.core.check_invariants()

"""Fairness from `halocline tenant share` to the blocks, and two engines on one daemon, all of it real processes.

Device and host tier have 34 blocks each, so that a flood of 52 is more than both hold.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cached.keys import owner_id
from cached.observer import TierObserver
from cached.protocol import OwnerLine
from cached.retention import Retention, RetentionConfig, TokenRange
from engine.client import EngineClient
from tenants.store import Store, open_store
from tenants.values import EVEN_SHARE, CacheShare
from tests.support.stack import ROOT, Stack

pytestmark = pytest.mark.timeout(240)
BLOCK_BYTES = 737_280
NUM_BLOCKS = 34
NUM_PROMPT_BLOCKS = 13
SIZE = NUM_BLOCKS * BLOCK_BYTES
LASTING = RetentionConfig((TokenRange(0, None, Retention(priority=100)),))
"""As high as the flood's, so that these tests do not depend on which came first."""


@pytest.fixture(scope="module")
def stack(demo_model_dir: Path) -> Iterator[Stack]:
    sizes = {"cached_host_cache_size": SIZE, "engine_device_cache_size": SIZE}
    with Stack.start(demo_model_dir, **sizes) as running:
        running.wait_ready(tier="ready")
        yield running


def ask(stack: Stack, key: str, who: str, **fields: Any) -> dict[str, int]:
    """A prompt of 13 full blocks that begins in its own way; where its tokens came from."""
    text = f"{who}: " + " ".join(f"{number}." for number in range(48))
    usage = stack.chat(text, key, max_tokens=1, **fields)["usage"]
    assert usage["prompt_tokens"] // 16 == NUM_PROMPT_BLOCKS
    found: dict[str, int] = usage["halocline"]
    return found


def cache(stack: Stack, *words: str) -> dict[str, Any]:
    """What an operator is told; a process each time, so waiting is done on `lines` instead."""
    found: dict[str, Any] = json.loads(stack.command("cache", *words, "--json"))
    return found


@contextmanager
def tenants_of(stack: Stack) -> Iterator[Store]:
    with open_store(f"sqlite:///{stack.state_dir}/tenants.db", stack.state_dir / "master.key") as store:
        yield store


@contextmanager
def lines(stack: Stack) -> Iterator[Callable[[str], OwnerLine]]:
    """The daemon's line of a tenant, asked anew at each call; one of zeros while it has none."""
    observer = TierObserver(stack.state_dir / "run" / "cached.sock", 5.0)
    with tenants_of(stack) as store:
        owners = {tenant.name: owner_id(tenant.id) for tenant in store.list_tenants()}

    def line(name: str) -> OwnerLine:
        found = observer.owners()
        assert found is not None
        none = OwnerLine(owners[name], 1.0, 0, None, 0, 0, 0, ())
        return next((each for each in found.owners if each.owner == owners[name]), none)

    try:
        yield line
    finally:
        observer.close()


def test_a_flood_at_the_highest_priority_leaves_a_tenant_its_floor_and_takes_the_rest(stack: Stack) -> None:
    """Two tenants alike but for the floor. Their small weights let the flood have the device, so that what is served again
    comes from the host tier; two tenants flood, since one alone would have to give up its own to those who hold less."""
    with tenants_of(stack) as store:
        keys = {}
        for name in ("quiet", "bare", "loud-1", "loud-2"):
            store.create_tenant(name, time.time())
            keys[name] = store.create_key(name, "", None, time.time())
        store.change_share("bare", lambda _: CacheShare(0.01), time.time())
        store.change_share("quiet", lambda _: CacheShare(0.01, floor_bytes=14 * BLOCK_BYTES), time.time())
    with lines(stack) as line:
        stack.wait_for(lambda: line("quiet").floor == 14)
        for name in ("quiet", "bare"):
            assert ask(stack, keys[name], name)["host_tokens"] == 0
        stack.wait_for(lambda: line("bare").held == NUM_PROMPT_BLOCKS)

        loud = {"token_ranges": [{"start": 0, "priority": 100}]}
        for name in ("loud-1", "loud-2"):
            for number in range(2):
                ask(stack, keys[name], f"{name} {number}", kv_cache_retention_config=loud)
        stack.wait_for(lambda: line("bare").held <= NUM_PROMPT_BLOCKS // 2 + 1)

        kept = ask(stack, keys["quiet"], "quiet")
        assert kept["device_tokens"] + kept["host_tokens"] >= NUM_PROMPT_BLOCKS * 16
        assert kept["host_tokens"] > kept["device_tokens"]
        assert line("quiet").evicted == 0
        left = ask(stack, keys["bare"], "bare")
        assert left["device_tokens"] + left["host_tokens"] <= (NUM_PROMPT_BLOCKS // 2 + 1) * 16
        # What could go for it at its priority lies within another's floor.
        stack.wait_for(lambda: any(count.label == "floors" for count in line("bare").refused))

    told = {row["tenant"]: row for row in cache(stack, "owners")["owners"]}
    assert told["bare"]["refused"]["floors"] > 0
    assert (told["quiet"]["floor"], told["quiet"]["held"], told["quiet"]["evicted"]) == (14, NUM_PROMPT_BLOCKS, 0)
    assert cache(stack, "stats")["refused_by_reason"]["floors"] > 0


def test_floors_beyond_the_tier_are_refused_whole_and_the_operator_is_told_where_they_look(stack: Stack) -> None:
    before = cache(stack, "owners")
    stack.command("tenant", "share", "demo", "--floor", "1GiB")

    stack.wait_for(lambda: stack.readyz()[1].get("shares") == "refused")

    after = cache(stack, "owners")
    assert (after["version"], before["trouble"]) == (before["version"], None)
    assert "so it refuses all shares" in after["trouble"]
    assert "shares_refused" in stack.log("gateway")
    with tenants_of(stack) as store:
        store.change_share("demo", lambda _: EVEN_SHARE, time.time())
    stack.wait_for(lambda: stack.readyz()[1].get("shares") == "in_force")


@contextmanager
def second_engine(stack: Stack) -> Iterator[Path]:
    """Another engine of the same model on the stack's daemon; its socket."""
    socket = stack.state_dir / "run" / "second.sock"
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "halocline.py"), "engine", "--state-dir", str(stack.state_dir)],
        env={**stack.environ, "HALOCLINE_ENGINE_SOCKET": str(socket)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield socket
    finally:
        process.kill()
        process.wait()


async def tokens_from_host(client: EngineClient, prompt: list[int]) -> int:
    async with client.submit(prompt, 1, retention=LASTING) as stream:
        async for event in stream:
            if event.first is not None:
                return event.first.host_tokens
    raise AssertionError("no first token came")


async def blocks_stored(clients: list[EngineClient]) -> int:
    """Copies to the tier that the engines have made, once no more are under way."""
    while True:
        found = [await client.stats() for client in clients]
        if all(each["core"]["blocks_offering"] == 0 and each["core"]["sequences_running"] == 0 for each in found):
            return sum(each["tier"]["store_blocks"] for each in found)
        await asyncio.sleep(0.05)


@pytest.mark.long
def test_two_engines_on_one_daemon_load_what_the_other_stored_and_store_a_block_once(stack: Stack) -> None:
    async def look(clients: list[EngineClient]) -> None:
        for client in clients:
            await client.start()
            assert await client.wait_connected(100.0), client.last_error
            while client.tier != "ready":
                await asyncio.sleep(0.05)
        mine, common = (list(range(start, start + 97)) for start in (1000, 2000))

        assert await tokens_from_host(clients[0], mine) == 0
        before = await blocks_stored(clients)
        assert await tokens_from_host(clients[1], mine) == 96

        assert await asyncio.gather(*(tokens_from_host(client, common) for client in clients)) == [0, 0]
        assert await blocks_stored(clients) == before + 6

    async def both(second: Path) -> None:
        clients = [EngineClient(str(path), "test") for path in (stack.state_dir / "run" / "engine.sock", second)]
        try:
            await look(clients)
        finally:
            for client in clients:
                await client.close()

    with second_engine(stack) as second:
        asyncio.run(both(second))

"""A tenant's default retention and ceilings, from the command's verb in the store to the engine's Submit."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cached.retention import DEFAULT_RETENTION, Retention, RetentionConfig, TokenRange
from gateway.retention import check_rules
from tenants.values import RetentionRules
from tests.support.gateway_stand import Stand, chat_body, standing

HEADER = "x-halocline-clamped"
ASKED = {
    "token_ranges": [
        {"start": 8, "end": None, "priority": 90, "duration": 100},
        {"start": 0, "end": 8, "priority": 20, "duration": None},
    ],
    "decode_priority": 50,
}
CLAMPED = RetentionConfig(
    (TokenRange(0, 8, Retention(20)), TokenRange(8, None, Retention(60, 100.0))), Retention(50, 3600.0)
)
DEFAULT = '{"token_ranges": [{"start": 0, "end": 16, "priority": 80, "duration": 30}]}'


@pytest.fixture
async def stand(demo_model_dir: Path) -> AsyncIterator[Stand]:
    async with standing(demo_model_dir) as made:
        yield made


async def set_rules(stand: Stand, rules: RetentionRules) -> None:
    """As another process would, then as long as a change may take."""
    await asyncio.to_thread(stand.store.change_retention, "alpha", lambda _: check_rules(rules)[0])
    async with asyncio.timeout(1.0):
        while stand.watcher.current.version != stand.store.version():
            await asyncio.sleep(0.02)


async def ask(stand: Stand, path: str, body: dict[str, Any], key: str | None = None) -> tuple[int, str | None]:
    async with stand.http.post(stand.url + path, json=body, headers=stand.headers(key)) as response:
        await response.read()
        return response.status, response.headers.get(HEADER)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_above_the_ceilings_reaches_the_engine_lowered_and_the_answer_says_so(
    stand: Stand, stream: bool
) -> None:
    await set_rules(stand, RetentionRules(max_priority=60, max_duration_s=3600.0))
    rest = {"kv_cache_retention_config": ASKED, "stream": stream}

    for path, body in (
        ("/v1/chat/completions", chat_body(**rest)),
        ("/v1/completions", {"model": "demo", "prompt": ["Hello", "There"], "n": 2, **rest}),
    ):
        status, header = await ask(stand, path, body)

        assert (status, header) == (200, "token_ranges[0].priority=60, decode_duration=3600")

    assert [submit.retention for submit in stand.stub.submits] == [CLAMPED] * 5
    assert [line["clamped"] for line in stand.log_lines() if line["event"] == "request"] == [2, 2]


async def test_other_tenants_and_modest_requests_bear_no_header(stand: Stand) -> None:
    await set_rules(stand, RetentionRules(max_priority=60, max_duration_s=3600.0))
    modest = {"token_ranges": [{"start": 0, "priority": 60, "duration": 3600}]}

    other = await ask(stand, "/v1/chat/completions", chat_body(kv_cache_retention_config=ASKED), key=stand.other_key)
    assert other == (200, None)
    assert await ask(stand, "/v1/chat/completions", chat_body(kv_cache_retention_config=modest)) == (200, None)
    assert await ask(stand, "/v1/chat/completions", chat_body()) == (200, None)

    assert stand.stub.submits[0].retention.ranges[1].retention == Retention(90, 100.0)
    assert stand.stub.submits[2].retention == DEFAULT_RETENTION


async def test_a_request_that_says_nothing_gets_the_default_and_a_change_needs_no_restart(stand: Stand) -> None:
    chat = "/v1/chat/completions"
    await ask(stand, chat, chat_body())
    await set_rules(stand, RetentionRules(default=DEFAULT))
    await ask(stand, chat, chat_body())
    await ask(stand, chat, chat_body(kv_cache_retention_config=None))
    await ask(stand, chat, chat_body(kv_cache_retention_config={}))
    await ask(stand, chat, chat_body(), key=stand.other_key)
    await set_rules(stand, RetentionRules(default=DEFAULT, max_priority=70))
    lowered = await ask(stand, chat, chat_body())
    await set_rules(stand, RetentionRules())
    await ask(stand, chat, chat_body())

    default = RetentionConfig((TokenRange(0, 16, Retention(80, 30.0)),))
    under_ceiling = RetentionConfig((TokenRange(0, 16, Retention(70, 30.0)),))
    none = DEFAULT_RETENTION
    assert [each.retention for each in stand.stub.submits] == [none, default, default, none, none, under_ceiling, none]
    assert lowered == (200, "token_ranges[0].priority=70")


async def test_an_illegal_configuration_is_still_refused_with_range_and_rule(stand: Stand) -> None:
    await set_rules(stand, RetentionRules(default=DEFAULT, max_priority=60))
    bad = {"token_ranges": [{"start": 0, "end": 4, "priority": 101}]}

    status, answer = await stand.chat(kv_cache_retention_config=bad)

    assert status == 400
    assert "token_ranges[0].priority is 101; it must be an integer from 0 to 100" in answer["error"]["message"]
    assert stand.stub.submits == []


async def test_a_default_that_was_damaged_in_the_store_is_left_out_and_logged(stand: Stand) -> None:
    await set_rules(stand, RetentionRules(default=DEFAULT))
    with contextlib.closing(sqlite3.connect(stand.directory / "tenants.db")) as raw, raw:
        raw.execute("UPDATE tenants SET default_retention = '{\"token_ranges\": 7}'")
    await change_something(stand)

    assert await ask(stand, "/v1/chat/completions", chat_body()) == (200, None)

    assert stand.stub.submits[0].retention == DEFAULT_RETENTION
    assert stand.log_lines()[-1]["warning"] == "default_retention_unreadable"


async def change_something(stand: Stand) -> None:
    """Any change at all, so that watchers read the store again."""
    await asyncio.to_thread(stand.store.suspend_tenant, "beta")
    async with asyncio.timeout(1.0):
        while stand.watcher.current.version != stand.store.version():
            await asyncio.sleep(0.02)

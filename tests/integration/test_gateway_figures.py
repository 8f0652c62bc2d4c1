"""What the operator's listener and the log say of requests (kv-semantics 7.1): first tokens, blocks, warm-ups apart."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.support.engine_stub import Script
from tests.support.gateway_stand import Stand, chat_body, standing

CHAT = "/v1/chat/completions"
DONE = f'{{route="{CHAT}",status="200",tenant="alpha"}}'


@pytest.fixture
async def stand(demo_model_dir: Path) -> AsyncIterator[Stand]:
    async with standing(demo_model_dir, Script(device_tokens=16)) as made:
        yield made


async def figures(stand: Stand) -> dict[str, float]:
    """The admin listener's samples by name and labels."""
    connector = aiohttp.UnixConnector(str(stand.directory / "admin.sock"))
    async with aiohttp.ClientSession(connector=connector) as http, http.get("http://admin/metrics") as response:
        lines = (await response.text()).splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


async def warm_up(stand: Stand, said: str = "1", key: str | None = None) -> int:
    headers = {**stand.headers(key), "x-halocline-warm-up": said}
    async with stand.http.post(stand.url + CHAT, json=chat_body(), headers=headers) as response:
        await response.read()
        return response.status


def logged(stand: Stand) -> list[dict[str, object]]:
    return [line for line in stand.log_lines() if line.get("route") == CHAT]


async def test_a_warm_up_is_counted_and_logged_apart(stand: Stand) -> None:
    assert await warm_up(stand) == 200

    shown = await figures(stand)
    assert shown[f"halocline_gateway_warm_up_requests_total{DONE}"] == 1
    assert shown['halocline_gateway_warm_up_prompt_tokens_total{tenant="alpha",tier="device"}'] == 16
    assert shown['halocline_gateway_warm_up_prompt_tokens_total{tenant="alpha",tier="computed"}'] > 0
    assert shown['halocline_gateway_warm_up_completion_tokens_total{tenant="alpha"}'] == 3
    assert logged(stand)[0]["warm_up"] is True


async def test_a_warm_up_is_in_no_figure_of_ordinary_requests(stand: Stand) -> None:
    await warm_up(stand)

    shown = await figures(stand)
    assert not [name for name in shown if name.startswith("halocline_gateway_requests_total") and CHAT in name]
    assert not [name for name in shown if name.startswith("halocline_gateway_request_seconds") and CHAT in name]
    assert not [name for name in shown if name.startswith("halocline_gateway_prompt_tokens_total{")]
    assert not [name for name in shown if name.startswith("halocline_gateway_completion_tokens_total{")]
    assert shown["halocline_gateway_ttft_seconds_count"] == 0


async def test_an_ordinary_request_is_in_no_figure_of_warm_ups(stand: Stand) -> None:
    await stand.chat()
    await warm_up(stand, said="0")
    await warm_up(stand, said="yes")

    shown = await figures(stand)
    assert shown[f"halocline_gateway_requests_total{DONE}"] == 3
    assert shown['halocline_gateway_prompt_tokens_total{tenant="alpha",tier="device"}'] == 48
    assert not [name for name in shown if name.startswith("halocline_gateway_warm_up") and "{" in name]
    assert not [line for line in logged(stand) if "warm_up" in line]


async def test_guesses_at_keys_stay_in_sight_whatever_they_call_themselves(stand: Stand) -> None:
    assert await warm_up(stand, key=stand.key[:-1]) == 401

    shown = await figures(stand)
    assert shown[f'halocline_gateway_requests_total{{route="{CHAT}",status="401",tenant="-"}}'] == 1


async def test_first_tokens_are_timed_whether_the_answer_is_streamed_or_not(stand: Stand) -> None:
    await stand.chat()
    await stand.post("/v1/completions", {"model": "demo", "prompt": ["one", "two"], "n": 2})
    await stand.stream(CHAT, chat_body())

    shown = await figures(stand)
    assert shown["halocline_gateway_ttft_seconds_count"] == 3
    assert [line["stream"] for line in logged(stand) if "first_token_ms" in line] == [False, True]


async def test_a_request_that_never_had_a_token_has_no_first_token(stand: Stand) -> None:
    stand.stub.script = Script(error_after=0)

    assert (await stand.chat())[0] == 502

    assert (await figures(stand))["halocline_gateway_ttft_seconds_count"] == 0


async def test_the_log_has_tokens_by_tier_and_blocks_by_how_they_were_reused(stand: Stand) -> None:
    stand.stub.script = Script(device_tokens=16, host_tokens=8, blocks=(1, 1, 3))

    await stand.chat()

    line = logged(stand)[0]
    assert (line["prompt_tokens"], line["computed_tokens"]) == (31, 7)
    assert (line["blocks_full"], line["blocks_partial"], line["blocks_missed"]) == (1, 1, 3)


async def test_without_an_engine_the_state_of_the_tier_is_unknown(stand: Stand) -> None:
    stand.stub.set_tier("ready")
    await stand.chat()
    stand.stub.crash()
    while stand.server.is_engine_connected:
        await stand.http.get(stand.url + "/healthz")

    async with stand.http.get(stand.url + "/readyz") as response:
        said = json.loads(await response.read())

    assert (response.status, said["engine"], said["tier"]) == (503, "absent", "unknown")

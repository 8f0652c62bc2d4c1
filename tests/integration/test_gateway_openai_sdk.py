"""The unmodified openai SDK, sync and async, whole and streamed, and the errors it raises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from engine.protocol import Rejected
from tests.support.engine_stub import Script
from tests.support.gateway_stand import Stand, standing

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
async def stand(demo_model_dir: Path) -> AsyncIterator[Stand]:
    async with standing(demo_model_dir) as made:
        yield made


@pytest.fixture
async def client(stand: Stand) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key=stand.key, max_retries=0) as made:
        yield made


async def test_a_chat_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="demo", messages=MESSAGES, logprobs=True, top_logprobs=2)
    text, usage, reasons = "", None, []
    stream = await client.chat.completions.create(
        model="demo", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []

    assert whole.choices[0].message.content == text == "The of the"
    assert reasons == ["stop"]
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.halocline["computed_tokens"] == 31
    assert whole._request_id.startswith("req_")
    assert len(whole.choices[0].logprobs.content) == 3


async def test_the_streaming_helper_of_the_sdk(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="demo", messages=MESSAGES) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()

    assert final.choices[0].message.content == "The of the"


async def test_completions_with_every_form_of_prompt(client: openai.AsyncOpenAI) -> None:
    for prompt, num_choices in (("one", 1), (["one", "two"], 2), ([1, 2, 3], 1), ([[1], [2]], 2)):
        whole = await client.completions.create(model="demo", prompt=prompt, logprobs=1)
        assert [choice.text for choice in whole.choices] == ["The of the"] * num_choices
        assert whole.choices[0].logprobs.tokens == ["The", " of", " the"]
    stream = await client.completions.create(model="demo", prompt="x", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "The of the"


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["demo"]
    assert (await client.models.retrieve("demo")).object == "model"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_extra_fields_of_ours_travel_in_extra_body(stand: Stand, client: openai.AsyncOpenAI) -> None:
    extra = {
        "top_k": 5,
        "cache_salt": "mine",
        "kv_cache_retention_config": {"token_ranges": [{"start": 0, "priority": 90}]},
    }
    await client.chat.completions.create(model="demo", messages=MESSAGES, extra_body=extra)

    assert stand.stub.submits[0].sampling.top_k == 5
    assert stand.stub.submits[0].retention.ranges[0].retention.priority == 90


async def test_errors_are_the_sdks_own_classes(stand: Stand, client: openai.AsyncOpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model="demo", messages=MESSAGES, temperature=3)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").chat.completions.create(model="demo", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError):
        await create(model="other", messages=MESSAGES)
    stand.stub.script = Script(reject=Rejected(0, "engine_overloaded", "Full.", None, True))
    with pytest.raises(openai.InternalServerError) as busy:
        await create(model="demo", messages=MESSAGES)
    assert busy.value.status_code == 503


async def test_a_stream_that_breaks_raises_with_its_code(stand: Stand, client: openai.AsyncOpenAI) -> None:
    stand.stub.script = Script(tokens=(504,), repeat=True, step_s=0.001, crash_after=5)
    stream = await client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
    reasons = []

    async def read() -> None:
        async for chunk in stream:
            reasons.extend([choice.finish_reason for choice in chunk.choices])

    with pytest.raises(openai.APIError) as broken:
        await read()

    assert broken.value.code == "engine_unavailable"
    assert set(reasons) == {None}


async def test_the_sdk_comes_again_by_itself_when_told_to(stand: Stand, client: openai.AsyncOpenAI) -> None:
    full = Script(reject=Rejected(0, "engine_overloaded", "Full.", None, True))
    stand.stub.script_for = lambda submit, n: full if n == 0 else Script()

    whole = await client.with_options(max_retries=2).chat.completions.create(model="demo", messages=MESSAGES)

    assert whole.choices[0].finish_reason == "stop"
    assert len(stand.stub.submits) == 2


async def test_the_sync_client_and_a_stream_closed_early(stand: Stand) -> None:
    stand.stub.script = Script(tokens=(504, 282), repeat=True, step_s=0.005)

    def use() -> str:
        with openai.OpenAI(base_url=f"{stand.url}/v1", api_key=stand.key, max_retries=0) as client:
            whole = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=2, seed=1)
            with client.chat.completions.create(model="demo", messages=MESSAGES, stream=True) as stream:
                for _ in zip(range(3), stream, strict=False):
                    pass
            return whole.choices[0].message.content or ""

    assert await asyncio.to_thread(use) == "The of"
    await stand.stub.wait_until(lambda seen: len(seen.cancels) == 1)

"""Streams and disconnects: nothing runs for nobody, and no failure looks like an end."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_stub import Script
from tests.support.gateway_stand import Stand, chat_body, model_text, parse_events, standing

CANCEL_WITHIN_S = 5.0  # Generous, for a busy machine; the measured figure is in bench/gateway_overhead.py's details.
FOREVER = Script(tokens=(504, 282), repeat=True, step_s=0.005)


@pytest.fixture
async def stand(demo_model_dir: Path) -> AsyncIterator[Stand]:
    async with standing(demo_model_dir) as made:
        yield made


def tokens_of(model_dir: Path, text: str) -> tuple[int, ...]:
    return tuple(model_text(model_dir)._codec.encode_plain(text))


def text_of(events: list[Any]) -> str:
    return "".join(
        choice.get("text", choice.get("delta", {}).get("content") or "")
        for event in events
        if isinstance(event, dict)
        for choice in event["choices"]
    )


async def open_request(stand: Stand, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """A request on a connection of its own, so that a test can drop it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {stand.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    return reader, writer


async def wait_for(condition: Any, timeout_s: float = CANCEL_WITHIN_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


class TestText:
    TEXT = "Größe 日本語 👩‍👩‍👧‍👦 naïve 🏳️‍🌈 \u2028 done"

    async def test_streamed_and_whole_answers_are_the_same_and_never_cut_a_character(
        self, stand: Stand, demo_model_dir: Path
    ) -> None:
        tokens = tokens_of(demo_model_dir, self.TEXT)
        expected = model_text(demo_model_dir).decode(tokens)
        for size in (1, 3, 100):
            stand.stub.script = Script(tokens=(*tokens, 2), tokens_per_step=size)
            _, whole = await stand.chat()
            events = await stand.stream("/v1/chat/completions", chat_body())
            plain = await stand.stream("/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 500})

            assert whole["choices"][0]["message"]["content"] == expected
            assert text_of(events) == text_of(plain) == expected
            pieces = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
            assert not any("\ufffd" in piece for piece in pieces)
            assert whole["usage"]["completion_tokens"] == len(tokens) + 1

    async def test_half_a_character_at_the_end_becomes_one_replacement(
        self, stand: Stand, demo_model_dir: Path
    ) -> None:
        tokens = tokens_of(demo_model_dir, "a👍")[:-1]
        stand.stub.script = Script(tokens=tokens, finish="length")

        _, whole = await stand.chat(max_tokens=len(tokens))
        events = await stand.stream("/v1/chat/completions", chat_body(max_tokens=len(tokens)))

        assert whole["choices"][0]["message"]["content"] == text_of(events) == "a\ufffd"
        assert whole["choices"][0]["finish_reason"] == "length"

    async def test_a_stream_has_the_order_that_sdks_expect(self, stand: Stand) -> None:
        events = await stand.stream("/v1/chat/completions", chat_body(stream_options={"include_usage": True}))

        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [event["choices"][0]["finish_reason"] for event in events[:-2]] == [None, None, None, None, "stop"]
        assert events[-3]["choices"][0]["delta"] == {}
        assert all(event["usage"] is None for event in events[:-2])
        assert events[-2]["choices"] == []
        assert events[-2]["usage"]["halocline"]["computed_tokens"] == 31
        assert events[-1] == "[DONE]"
        assert len({(event["id"], event["created"], event["object"]) for event in events[:-1]}) == 1

    async def test_without_include_usage_no_chunk_speaks_of_it(self, stand: Stand) -> None:
        events = await stand.stream("/v1/chat/completions", chat_body())

        assert all("usage" not in event for event in events[:-1])
        assert all(event["choices"] for event in events[:-1])

    async def test_usage_names_the_tiers(self, stand: Stand) -> None:
        stand.stub.script = Script(device_tokens=16, host_tokens=8, blocks=(1, 1, 3))

        _, whole = await stand.chat()
        events = await stand.stream("/v1/chat/completions", chat_body(stream_options={"include_usage": True}))

        usage = whole["usage"]
        assert usage == events[-2]["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 24
        assert usage["halocline"] == {
            "device_tokens": 16,
            "host_tokens": 8,
            "computed_tokens": 7,
            "queue_ms": 1.5,
            "ttft_ms": 12.5,
            "blocks_full": 1,
            "blocks_partial": 1,
            "blocks_missed": 3,
        }

    async def test_choices_are_interleaved_by_index_and_submitted_with_rising_seeds(self, stand: Stand) -> None:
        stand.stub.script_for = lambda submit, n: Script(tokens=(504 + n, 282), step_s=0.01 * (n + 1))
        events = await stand.stream("/v1/chat/completions", chat_body(n=3, seed=11))
        stand.stub.script_for = lambda submit, n: Script(tokens=(504 + n - 3, 282))
        _, whole = await stand.chat(n=3, seed=11)

        assert [submit.sampling.seed for submit in stand.stub.submits] == [11, 12, 13] * 2
        for index in range(3):
            chunks = [event for event in events[:-1] if event["choices"][0]["index"] == index]
            assert text_of(chunks) == whole["choices"][index]["message"]["content"]
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert whole["usage"]["completion_tokens"] == 6
        assert whole["usage"]["prompt_tokens"] == 31

    async def test_log_probabilities_join_to_the_text(self, stand: Stand) -> None:
        _, whole = await stand.chat(logprobs=True, top_logprobs=2)
        events = await stand.stream("/v1/chat/completions", chat_body(logprobs=True, top_logprobs=2))

        content = whole["choices"][0]["logprobs"]["content"]
        assert "".join(token["token"] for token in content) == whole["choices"][0]["message"]["content"]
        assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
        assert [len(token["top_logprobs"]) for token in content] == [2, 2, 2]
        streamed = [
            token for event in events[:-1] for token in (event["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert streamed == content

    async def test_echo_repeats_the_prompt(self, stand: Stand) -> None:
        body = {"model": "demo", "prompt": ["one", "two"], "echo": True, "n": 2}
        _, whole = await stand.post("/v1/completions", body)
        events = await stand.stream("/v1/completions", body)

        assert [choice["text"] for choice in whole["choices"]] == ["oneThe of the"] * 2 + ["twoThe of the"] * 2
        for choice in whole["choices"]:
            mine = [event for event in events[:-1] if event["choices"][0]["index"] == choice["index"]]
            assert text_of(mine) == choice["text"]


class TestStopStrings:
    @pytest.mark.parametrize("size", [1, 2, 7])
    async def test_the_text_ends_before_the_stop_string_and_the_engine_is_told_how_much_counts(
        self, stand: Stand, demo_model_dir: Path, size: int
    ) -> None:
        tokens = tokens_of(demo_model_dir, "one two three four five six seven")
        stand.stub.script = Script(tokens=tokens, tokens_per_step=size, step_s=0.001)

        status, whole = await stand.chat(stop=["ee four", "zzz"])

        assert status == 200
        choice = whole["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("one two thr", "stop")
        assert whole["usage"]["completion_tokens"] == 3
        await stand.stub.wait_until(lambda seen: len(seen.stops) == 1)
        assert stand.stub.seen.stops[0].tokens_kept == 3
        assert all(confirm.tokens_kept <= 3 for confirm in stand.stub.seen.confirms)
        assert stand.stub.submits[0].hold_generated
        assert stand.stub.cancels == []

    async def test_what_was_held_back_is_given_when_no_stop_string_comes(
        self, stand: Stand, demo_model_dir: Path
    ) -> None:
        tokens = tokens_of(demo_model_dir, "one two three")
        stand.stub.script = Script(tokens=tokens, step_s=0.01)

        events = await stand.stream("/v1/chat/completions", chat_body(stop="three four"))

        assert text_of(events) == "one two three"
        await stand.stub.wait_until(lambda seen: len(seen.stops) == 1)
        assert stand.stub.seen.stops[0].tokens_kept == len(tokens)
        assert stand.stub.seen.confirms[-1].tokens_kept < len(tokens)

    async def test_requests_without_stop_strings_confirm_nothing(self, stand: Stand) -> None:
        await stand.chat()

        assert (stand.stub.seen.confirms, stand.stub.seen.stops) == ([], [])
        assert not stand.stub.submits[0].hold_generated


class TestDisconnects:
    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize("n", [1, 3])
    async def test_a_client_that_leaves_cancels_its_generation(self, stand: Stand, stream: bool, n: int) -> None:
        stand.stub.script = FOREVER
        reader, writer = await open_request(stand, "/v1/chat/completions", chat_body(stream=stream, n=n))
        if stream:
            for _ in range(3):
                await reader.readuntil(b"\n\n")
        else:
            await stand.stub.wait_until(lambda seen: len(seen.submits) == n)
        assert len(stand.server.inflight) == 1

        writer.transport.abort()
        await stand.stub.wait_until(lambda seen: len(seen.cancels) == n, CANCEL_WITHIN_S)

        await wait_for(lambda: len(stand.server.inflight) == 0)
        assert stand.stub.num_running == 0
        await wait_for(lambda: any(line.get("status") == 499 for line in stand.log_lines()))
        assert "Traceback" not in stand.log.getvalue()
        assert not [line for line in stand.log_lines() if line["level"] == "error"]

    async def test_a_client_that_leaves_before_the_first_token_cancels_too(self, stand: Stand) -> None:
        stand.stub.script = Script(first_s=3600.0)
        for stream in (True, False):
            _, writer = await open_request(stand, "/v1/chat/completions", chat_body(stream=stream))
            await wait_for(lambda: stand.stub.num_running == 1)
            writer.close()
            await wait_for(lambda: stand.stub.num_running == 0)

        assert len(stand.stub.cancels) == 2

    async def test_a_half_sent_body_holds_nothing(self, stand: Stand) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", stand.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {stand.key}\r\n"
        writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        await asyncio.sleep(0.05)
        writer.close()

        await wait_for(lambda: any(line.get("status") == 499 for line in stand.log_lines()))
        assert stand.stub.submits == []

    async def test_clients_that_leave_at_random_moments_leave_nothing_behind(self, stand: Stand) -> None:
        seed = 20261129
        print(f"seed {seed}")
        chance = random.Random(seed)
        stand.stub.script = Script(tokens=(504, 282), repeat=True, step_s=0.002, tokens_per_step=2)

        async def one(number: int) -> None:
            fields = {"stream": number % 2 == 0, "n": 1 + number % 3, "max_tokens": 30, "stop": ["zzz"] * (number % 2)}
            _, writer = await open_request(stand, "/v1/chat/completions", chat_body(**fields))
            await asyncio.sleep(chance.random() * 0.08)
            if number % 5 == 0:
                writer.transport.abort()
            writer.close()

        num_files = len(os.listdir("/proc/self/fd"))
        for batch in range(10):
            await asyncio.gather(*[one(batch * 20 + number) for number in range(20)])

        await wait_for(lambda: len(stand.server.inflight) == 0 and stand.stub.num_running == 0)
        await wait_for(lambda: len(os.listdir("/proc/self/fd")) <= num_files)
        assert stand.server.engines.client.num_inflight == 0
        assert not [line for line in stand.log_lines() if line["level"] == "error"]
        assert (await stand.chat(max_tokens=2))[0] == 200


class TestFailures:
    @pytest.mark.parametrize("after", [1, 50])
    @pytest.mark.parametrize("kind", ["crash_after", "error_after"])
    async def test_an_engine_that_dies_mid_stream_is_an_error_event_and_no_end(
        self, stand: Stand, kind: str, after: int
    ) -> None:
        stand.stub.script = Script(tokens=(504,), repeat=True, step_s=0.001, **{kind: after})
        async with stand.http.post(
            stand.url + "/v1/chat/completions", json=chat_body(stream=True), headers=stand.headers()
        ) as response:
            assert response.status == 200
            events = parse_events(await response.read())

        assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
        assert events[-1]["error"]["code"] in ("engine_unavailable", "upstream_error")
        assert "[DONE]" not in events
        assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])

    @pytest.mark.parametrize(("kind", "status"), [("crash_after", 503), ("error_after", 502)])
    @pytest.mark.parametrize("stream", [True, False])
    async def test_before_the_first_byte_the_failure_is_a_status(
        self, stand: Stand, kind: str, status: int, stream: bool
    ) -> None:
        stand.stub.script = Script(first_s=0.01, **{kind: 0})
        async with stand.http.post(
            stand.url + "/v1/chat/completions", json=chat_body(stream=stream), headers=stand.headers()
        ) as response:
            body = await response.json()

        assert response.status == status
        assert response.headers["Retry-After"] == "1"
        assert body["error"]["code"] in ("engine_unavailable", "upstream_error")

    async def test_an_engine_that_comes_back_is_found_again(self, stand: Stand) -> None:
        stand.stub.crash()
        await asyncio.sleep(0.05)

        async def restart() -> None:
            await asyncio.sleep(0.3)
            await stand.stub.start()

        (status, _), _ = await asyncio.gather(stand.chat(), restart())

        assert status == 200

    async def test_without_an_engine_requests_are_told_to_come_again(self, demo_model_dir: Path) -> None:
        async with standing(demo_model_dir, with_engine=False) as stand:
            async with stand.http.post(
                stand.url + "/v1/chat/completions", json=chat_body(), headers=stand.headers()
            ) as response:
                body = await response.json()

            assert (response.status, body["error"]["code"]) == (503, "engine_unavailable")
            assert response.headers["Retry-After"] == "1"

    async def test_one_refused_choice_cancels_the_others(self, stand: Stand) -> None:
        refusal = Script(error_after=0, first_s=0.01)
        stand.stub.script_for = lambda submit, n: refusal if n == 1 else FOREVER

        status, _ = await stand.chat(n=3)

        assert status == 502
        await wait_for(lambda: stand.stub.num_running == 0)
        assert len(stand.stub.cancels) == 2

    async def test_an_engine_that_says_nothing_is_given_up(self, demo_model_dir: Path) -> None:
        async with standing(demo_model_dir, Script(hang_after=0), first_token_timeout_s=0.2) as stand:
            status, body = await stand.chat()
            assert (status, body["error"]["code"]) == (504, "upstream_timeout")
            stand.stub.script = Script(hang_after=2, tokens=(504,), repeat=True)
            events = await stand.stream("/v1/chat/completions", chat_body())
            assert events[-1]["error"]["code"] == "upstream_timeout"
            await wait_for(lambda: stand.stub.num_running == 0)


class TestPings:
    async def test_a_quiet_stream_is_kept_alive_between_frames(self, demo_model_dir: Path) -> None:
        script = Script(first_s=0.5, step_s=0.2)
        async with standing(demo_model_dir, script, ping_interval_s=0.05) as stand:
            events = await stand.stream("/v1/chat/completions", chat_body())

        assert events[0] == ": ping"
        assert events.count(": ping") >= 5
        said = [event for event in events if event != ": ping"]
        assert said[-1] == "[DONE]"
        assert text_of(said) == "The of the"

    async def test_a_failure_after_the_first_ping_is_in_band(self, demo_model_dir: Path) -> None:
        script = Script(first_s=0.3, error_after=0)
        async with standing(demo_model_dir, script, ping_interval_s=0.05) as stand:
            events = await stand.stream("/v1/chat/completions", chat_body())

        assert events[0] == ": ping"
        assert events[-1]["error"]["code"] == "upstream_error"

    async def test_events_are_never_compressed_or_cached(self, stand: Stand) -> None:
        headers = {**stand.headers(), "Accept-Encoding": "gzip, deflate, br"}
        async with stand.http.post(
            stand.url + "/v1/chat/completions", json=chat_body(stream=True), headers=headers
        ) as response:
            assert "Content-Encoding" not in response.headers
            assert response.headers["Content-Type"].startswith("text/event-stream")
            assert response.headers["Cache-Control"] == "no-cache"
            assert response.headers["x-request-id"] == response.headers["request-id"]


class TestDeadlines:
    @pytest.mark.parametrize("first_bytes", [b"", b"GET /healthz HT"])
    async def test_headers_that_do_not_come_close_the_connection(
        self, demo_model_dir: Path, first_bytes: bytes
    ) -> None:
        async with standing(demo_model_dir, header_timeout_s=0.2) as stand:
            reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
            writer.write(first_bytes)
            async with asyncio.timeout(5):
                raw = await reader.read()
            writer.close()

        assert raw == b"" if not first_bytes else raw.startswith(b"HTTP/1.1 408 ")

    async def test_a_trickle_of_headers_does_not_move_the_deadline(self, demo_model_dir: Path) -> None:
        async with standing(demo_model_dir, header_timeout_s=0.3) as stand:
            reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
            closed = asyncio.create_task(reader.read())
            async with asyncio.timeout(5):
                while not closed.done():
                    writer.write(b"X: y\r\n")
                    await asyncio.sleep(0.05)
            writer.close()
            assert (await closed).startswith(b"HTTP/1.1 408 ")

    async def test_a_slow_body_is_a_408_and_a_kept_connection_idles_out(self, demo_model_dir: Path) -> None:
        async with standing(demo_model_dir, body_timeout_s=0.2, keepalive_timeout_s=0.4) as stand:
            reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {stand.key}\r\n"
            writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            async with asyncio.timeout(5):
                assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            writer.close()

            reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(5):
                assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()

    async def test_deadlines_do_not_touch_a_long_stream(self, demo_model_dir: Path) -> None:
        script = Script(tokens=(504,), repeat=True, step_s=0.05)
        settings = {"header_timeout_s": 0.2, "body_timeout_s": 0.2, "keepalive_timeout_s": 0.2}
        async with standing(demo_model_dir, script, **settings) as stand:
            events = await stand.stream("/v1/chat/completions", chat_body(max_tokens=20))

        assert events[-1] == "[DONE]"

    async def test_connections_over_the_maximum_are_told_so(self, demo_model_dir: Path) -> None:
        async with standing(demo_model_dir, max_connections=2) as stand:
            held = [await asyncio.open_connection("127.0.0.1", stand.port) for _ in range(2)]
            await asyncio.sleep(0.05)
            reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
            raw = await reader.read()
            assert raw.startswith(b"HTTP/1.1 503 ")
            assert b'"code":"overloaded"' in raw
            for _, each in [*held, (reader, writer)]:
                each.close()
            await asyncio.sleep(0.1)
            assert (await stand.chat())[0] == 200

    async def test_requests_over_the_maximum_are_told_so(self, demo_model_dir: Path) -> None:
        async with standing(demo_model_dir, FOREVER, max_inflight=1) as stand:
            _, writer = await open_request(stand, "/v1/chat/completions", chat_body())
            await wait_for(lambda: stand.stub.num_running == 1)
            status, body = await stand.chat()
            assert (status, body["error"]["code"]) == (503, "overloaded")
            writer.close()
            await wait_for(lambda: len(stand.server.inflight) == 0)


class TestDrain:
    async def test_running_streams_end_new_requests_are_refused(self, demo_model_dir: Path) -> None:
        script = Script(tokens=(504,), repeat=True, step_s=0.02)
        async with standing(demo_model_dir, script, drain_timeout_s=5.0) as stand:
            async with stand.http.get(stand.url + "/healthz"):
                pass  # Leaves a kept connection, on which the drain can be seen.
            streaming = asyncio.create_task(stand.stream("/v1/chat/completions", chat_body(max_tokens=20)))
            await wait_for(lambda: stand.stub.num_running == 1)
            stand.server.inflight.begin_drain()
            async with stand.http.get(stand.url + "/readyz") as response:
                assert response.status == 503
                assert (await response.json())["status"] == "draining"
                assert response.headers["Connection"] == "close"
            status, body = await stand.chat()
            assert (status, body["error"]["code"]) == (503, "draining")
            stopping = asyncio.create_task(stand.server.stop())
            assert (await streaming)[-1] == "[DONE]"
            await stopping

    async def test_what_outlasts_the_drain_gets_an_error_event(self, demo_model_dir: Path) -> None:
        async with standing(demo_model_dir, FOREVER, drain_timeout_s=0.1) as stand:
            streaming = asyncio.create_task(stand.stream("/v1/chat/completions", chat_body(max_tokens=5000)))
            whole = asyncio.create_task(stand.chat(max_tokens=5000))
            await wait_for(lambda: stand.stub.num_running == 2)
            begun = time.monotonic()
            await stand.server.stop()

            assert time.monotonic() - begun < 5
            assert (await streaming)[-1]["error"]["code"] == "draining"
            status, body = await whole
            assert (status, body["error"]["code"]) == (503, "draining")
            assert stand.stub.num_running == 0

"""The metrics endpoint, over its socket, around a running engine."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from engine.errors import EngineConfigError
from engine.metrics import COUNTERS, GAUGES, MetricsEndpoint, check_listen, exposition
from engine.pinning import NOTHING_PINNED
from engine.protocol import Sampling
from engine.tier import TierCounters
from engine.values import CoreStatistics
from tests.support.shell import WAIT_S, Shell


async def fetch(path: Path, request: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), WAIT_S)
    writer.close()
    return answer


async def test_metrics_tell_what_the_engine_did() -> None:
    async with Shell() as shell:
        client = await shell.client()
        async for _ in client.submit([1, 2, 3, 4, 5], 3, Sampling(temperature=0.0)):
            pass
        endpoint = MetricsEndpoint(f"unix:{shell.directory}/metrics.sock", shell.server.statistics)
        await endpoint.start()

        answer = await fetch(shell.directory / "metrics.sock", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        other = await fetch(shell.directory / "metrics.sock", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")

        await endpoint.close()
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"halocline_engine_tokens_generated_total 3.0" in answer
        assert b'halocline_engine_tier_state{state="none"} 1.0' in answer
        assert other.startswith(b"HTTP/1.1 404")


async def test_a_scraper_that_talks_nonsense_is_let_go() -> None:
    async with Shell() as shell:
        endpoint = MetricsEndpoint("127.0.0.1:0", shell.server.statistics)
        await endpoint.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)

        writer.write(b"x" * 100_000)
        try:
            await writer.drain()
            answer = await asyncio.wait_for(reader.read(), WAIT_S)
        except ConnectionResetError:
            answer = b""

        await endpoint.close()
        assert b"halocline" not in answer


async def test_an_address_that_is_none_is_refused_with_what_is_legal() -> None:
    async def nothing() -> dict[str, object]:
        return {}

    with pytest.raises(EngineConfigError, match="HOST:PORT"):
        await MetricsEndpoint("nonsense", nothing).start()


@pytest.mark.parametrize("listen", ["127.0.0.1:9100", "[::1]:0", "localhost:9100", "unix:/run/metrics.sock"])
def test_figures_are_given_on_loopback_and_unix_sockets(listen: str) -> None:
    check_listen(listen)


@pytest.mark.parametrize("listen", ["0.0.0.0:9100", "[::]:9100", "10.0.0.1:9100", "example.org:9100", "9100", ":9100"])
def test_figures_are_not_given_to_a_network(listen: str) -> None:
    with pytest.raises(EngineConfigError, match="metrics_listen"):
        check_listen(listen)


async def test_every_figure_of_the_server_that_a_metric_names_is_there() -> None:
    async with Shell() as shell:
        figures = await shell.server.statistics()

    named = [key for section, key, _ in (*GAUGES.values(), *COUNTERS.values()) if section == "server"]
    assert [key for key in named if key not in figures["server"]] == []


def test_every_metric_names_a_figure_that_exists() -> None:
    core = {field.name for field in dataclasses.fields(CoreStatistics)}
    tier = {field.name for field in dataclasses.fields(TierCounters)} | set(NOTHING_PINNED)

    for section, key, text in [*GAUGES.values(), *COUNTERS.values()]:
        assert text.endswith(".")
        if section in ("core", "tier"):
            assert key in (core if section == "core" else tier), key


def test_figures_that_are_missing_are_left_out() -> None:
    text = exposition({"core": {"blocks_total": 3}}).decode()

    assert "halocline_engine_blocks_total 3.0" in text
    assert "prefill_tokens_per_second" not in text

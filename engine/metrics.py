"""The engine's figures as Prometheus text, and the small HTTP endpoint that gives them out.

It decides names, kinds and help texts; the figures are the step loop's. Nothing here tells tenants apart. The endpoint
knows one path and one method, reads at most one small head per connection, and closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.errors import EngineConfigError

PREFIX: Final = "halocline_engine_"
MAX_HEAD_BYTES: Final = 8192
HEAD_TIMEOUT_S: Final = 5.0
FIGURES_TIMEOUT_S: Final = 5.0
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

GAUGES: Final[Mapping[str, tuple[str, str, str]]] = {
    "blocks_total": ("core", "blocks_total", "Device blocks of the pool."),
    "blocks_used": ("core", "blocks_used", "Device blocks that sequences use."),
    "blocks_idle": ("core", "blocks_idle", "Device blocks kept for reuse."),
    "blocks_free": ("core", "blocks_free", "Empty device blocks."),
    "blocks_evictable": ("core", "blocks_evictable", "Idle device blocks that could be evicted now."),
    "blocks_offering": ("core", "blocks_offering", "Device blocks being copied to the host tier."),
    "sequences_waiting": ("core", "sequences_waiting", "Sequences that wait to be scheduled."),
    "sequences_running": ("core", "sequences_running", "Sequences that are scheduled."),
    "gateways": ("server", "gateways", "Gateways connected."),
    "event_consumers": ("server", "event_consumers", "Consumers of KV events connected."),
    "requests_live": ("server", "live", "Requests inside."),
    "tier_tickets_outstanding": ("core", "tickets_outstanding", "Questions to the host tier without an answer yet."),
    "prefill_tokens_per_second": ("rates", "prefill_tokens_per_s", "Measured rate of prefill."),
    "step_budget_tokens": ("pace", "step_budget", "Tokens that the last step could have, decodes included."),
    "step_fixed_seconds": ("pace", "step_fixed_s", "Learnt cost of a step whatever is in it."),
    "step_seconds_per_decode": ("pace", "step_decode_s", "Learnt cost of one more decode, its context apart."),
    "step_seconds_per_prefill_token": (
        "pace",
        "step_prefill_s",
        "Learnt cost of one more prefilled token, its context apart.",
    ),
    "tier_pinned_bytes": ("tier", "pinned_bytes", "Bytes of the host tier that a device copies from and to by itself."),
    "tier_unpinned_bytes": (
        "tier",
        "unpinned_bytes",
        "Bytes of the host tier that a device needs a buffer for: not pinned yet, or refused by CUDA.",
    ),
    "tier_pin_failures": ("tier", "pin_failures", "Chunks of the host tier that CUDA refused to pin."),
    "load_bytes_per_second": ("rates", "load_bytes_per_s", "Measured rate of loading blocks from the host tier."),
    "decode_pace": (
        "settings",
        "decode_pace",
        "How many times as long as without prefill a step may take beside running streams.",
    ),
    "secondary_offload_min_priority": (
        "settings",
        "secondary_offload_min_priority",
        "Blocks below this priority are not offered to the host tier.",
    ),
}

COUNTERS: Final[Mapping[str, tuple[str, str, str]]] = {
    "steps": ("steps", "steps", "Steps run."),
    "steps_aborted": ("steps", "steps_aborted", "Steps given up because nobody waited for them."),
    "steps_failed": ("steps", "steps_failed", "Steps in which the runner failed."),
    "step_seconds": ("steps", "step_seconds", "Seconds spent in steps."),
    "requests_finished": ("core", "requests_finished", "Requests that ended by themselves."),
    "requests_cancelled": ("core", "requests_cancelled", "Requests whose client left."),
    "requests_rejected": ("server", "rejected", "Requests refused before they began."),
    "tokens_prompt": ("core", "tokens_prompt", "Prompt tokens of requests that got their first token."),
    "tokens_device": ("core", "tokens_device", "Of them, served from device blocks."),
    "tokens_host": ("core", "tokens_host", "Of them, served from host blocks."),
    "tokens_computed": ("core", "tokens_computed", "Of them, computed."),
    "tokens_prefilled": (
        "core",
        "tokens_prefilled",
        "Prompt tokens that went through the model, repetitions included.",
    ),
    "tokens_generated": ("core", "tokens_generated", "Tokens generated."),
    "blocks_reused_full": ("core", "blocks_reused_full", "Blocks of prompts served whole."),
    "blocks_reused_partial": ("core", "blocks_reused_partial", "Blocks of prompts served in part."),
    "blocks_missed": ("core", "blocks_missed", "Blocks of prompts computed."),
    "preemptions": ("core", "preemptions", "Running sequences that gave their blocks up."),
    "blocks_expired": ("core", "expired", "Blocks whose duration passed."),
    "blocks_dropped_unused": ("core", "dropped_unused", "Blocks that left the device before any request matched them."),
    "events": ("server", "events", "KV events since the start."),
    "events_lost": ("server", "events_lost", "Times a consumer of KV events fell behind and was told so."),
    "event_snapshots": ("server", "event_snapshots", "Snapshots taken for consumers of KV events."),
    "tier_lookups": ("tier", "lookups", "Lookups in the host tier."),
    "tier_lookup_misses": ("tier", "lookup_misses", "Lookups that found nothing."),
    "tier_loads": ("tier", "loads", "Loads from the host tier."),
    "tier_load_blocks": ("tier", "load_blocks", "Blocks loaded."),
    "tier_load_bytes": ("tier", "load_bytes", "Bytes loaded."),
    "tier_load_seconds": ("tier", "load_seconds", "Seconds spent loading."),
    "tier_load_misses": ("tier", "load_misses", "Blocks that were to be loaded and could not."),
    "tier_leases_lost": ("tier", "leases_lost", "Leases that did not hold to the end of the copy."),
    "tier_checksum_mismatches": ("tier", "checksum_mismatches", "Host blocks whose bytes were not what was stored."),
    "tier_recomputed_by_choice": ("tier", "recomputed_by_choice", "Hits not loaded because computing was faster."),
    "tier_stores": ("tier", "stores", "Chains offered to the host tier."),
    "tier_store_blocks": ("tier", "store_blocks", "Blocks stored."),
    "tier_store_bytes": ("tier", "store_bytes", "Bytes stored."),
    "tier_store_seconds": ("tier", "store_seconds", "Seconds spent storing."),
    "tier_store_refused": ("tier", "store_refused", "Blocks the host tier did not take."),
    "tier_sessions": ("tier", "sessions", "Times the host tier was connected."),
}


def exposition(figures: Mapping[str, Any]) -> bytes:
    """The figures as text; what they lack is left out."""
    registry = CollectorRegistry()
    registry.register(_Collector(figures))
    return generate_latest(registry)


class _Collector:
    """Adapts one picture of the figures to what prometheus_client asks for."""

    def __init__(self, figures: Mapping[str, Any]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        for name, (section, key, text) in GAUGES.items():
            value = self._value(section, key)
            if value is not None:
                yield GaugeMetricFamily(PREFIX + name, text, value=value)
        for name, (section, key, text) in COUNTERS.items():
            value = self._value(section, key)
            if value is not None:
                yield CounterMetricFamily(PREFIX + name, text, value=value)
        yield self._by_label("evictions", "Blocks evicted from the device.", "band", "evictions_by_band")
        state = self._figures.get("tier", {}).get("state", "none")
        tier = GaugeMetricFamily(
            PREFIX + "tier_state", "State of the host tier; 1 on the one it is in.", labels=["state"]
        )
        for each in ("none", "ready", "absent"):
            tier.add_metric([each], float(each == state))
        yield tier

    def _value(self, section: str, key: str) -> float | None:
        value = self._figures.get(section, {}).get(key)
        return None if value is None else float(value)

    def _by_label(self, name: str, text: str, label: str, key: str) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=[label])
        for each, value in self._figures.get("core", {}).get(key, {}).items():
            family.add_metric([str(each)], float(value))
        return family


def check_listen(listen: str) -> None:
    """Raise EngineConfigError unless this is `unix:/path`, or `HOST:PORT` of a loopback address: figures are not for a
    network, and nobody who asks for them has to say who they are."""
    if listen.startswith("unix:"):
        return
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not port.isdigit() or not 0 <= int(port) < 65536:
        raise EngineConfigError(f"metrics_listen is {listen!r}; give HOST:PORT or unix:/path")
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise EngineConfigError(
            f"metrics_listen is {listen!r}, and {host!r} is no loopback address; give 127.0.0.1:PORT, [::1]:PORT or unix:/path"
        )


class MetricsEndpoint:
    """`GET /metrics` on `HOST:PORT` or `unix:/path`; anything else is 404."""

    def __init__(self, listen: str, figures: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        self._listen = listen
        self._figures = figures
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Listen; raises EngineConfigError when that is impossible."""
        check_listen(self._listen)
        try:
            if self._listen.startswith("unix:"):
                path = Path(self._listen.removeprefix("unix:"))
                path.unlink(missing_ok=True)
                before = os.umask(0o117)
                try:
                    self._server = await asyncio.start_unix_server(self._serve, str(path), limit=MAX_HEAD_BYTES)
                finally:
                    os.umask(before)
            else:
                host, _, port = self._listen.rpartition(":")
                self._server = await asyncio.start_server(
                    self._serve, host.strip("[]"), int(port), limit=MAX_HEAD_BYTES
                )
        except (OSError, ValueError) as error:
            raise EngineConfigError(
                f"metrics_listen is {self._listen!r}: {error}; give HOST:PORT or unix:/path that is free"
            ) from None

    @property
    def port(self) -> int | None:
        """The TCP port in use, for tests that ask for port 0."""
        if self._server is None or self._listen.startswith("unix:"):
            return None
        return int(self._server.sockets[0].getsockname()[1])  # type: ignore[attr-defined]

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            if self._listen.startswith("unix:"):
                Path(self._listen.removeprefix("unix:")).unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_TIMEOUT_S)
            if head.split(b"\r\n", 1)[0].split(b" ")[:2] == [b"GET", b"/metrics"]:
                figures = await asyncio.wait_for(_awaited(self._figures), FIGURES_TIMEOUT_S)
                writer.write(_response("200 OK", exposition(figures)))
            else:
                writer.write(_response("404 Not Found", b"only GET /metrics is here\n"))
            await asyncio.wait_for(writer.drain(), HEAD_TIMEOUT_S)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # A scraper that is slow, gone or no scraper at all: its connection ends, nobody else notices.
        finally:
            with contextlib.suppress(OSError):
                writer.close()


async def _awaited(figures: Callable[[], Awaitable[Mapping[str, Any]]]) -> Mapping[str, Any]:
    return await figures()


def _response(status: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body

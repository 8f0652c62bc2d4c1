"""The gateway's counters and gauges, in a registry of their own; shown on the admin listener only.

Per-tenant figures would be a signal between tenants, so nothing here is ever on the tenants' listener.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from gateway.shares import SHARES_STATES, SharesState
from gateway.values import Usage

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
NO_TENANT = "-"


class GatewayMetrics:
    """One per process; owned by the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "halocline_gateway_requests",
            "Requests answered, by route, status (499: the client left) and tenant.",
            ["route", "status", "tenant"],
            registry=self.registry,
        )
        self.inflight = Gauge("halocline_gateway_inflight", "Generations that are running.", registry=self.registry)
        self.body_bytes = Gauge(
            "halocline_gateway_body_bytes", "Bytes of request bodies that are not tokens yet.", registry=self.registry
        )
        self.connections = Gauge(
            "halocline_gateway_connections", "Open connections by listener.", ["listener"], registry=self.registry
        )
        self.connections_refused = Counter(
            "halocline_gateway_connections_refused", "Connections over max_connections.", registry=self.registry
        )
        self.deadlines = Counter(
            "halocline_gateway_deadlines",
            "Connections closed because a deadline passed, by which one.",
            ["deadline"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "halocline_gateway_prompt_tokens",
            "Prompt tokens by tenant and by where they came from: device, host or computed.",
            ["tenant", "tier"],
            registry=self.registry,
        )
        self.completion_tokens = Counter(
            "halocline_gateway_completion_tokens", "Generated tokens that count.", ["tenant"], registry=self.registry
        )
        self.warm_up_requests = Counter(
            "halocline_gateway_warm_up_requests",
            "Requests that said they are warm-ups, answered; they are in no other counter or histogram of requests.",
            ["route", "status", "tenant"],
            registry=self.registry,
        )
        self.warm_up_prompt_tokens = Counter(
            "halocline_gateway_warm_up_prompt_tokens",
            "Prompt tokens of warm-ups by tenant and by where they came from: device, host or computed.",
            ["tenant", "tier"],
            registry=self.registry,
        )
        self.warm_up_completion_tokens = Counter(
            "halocline_gateway_warm_up_completion_tokens",
            "Generated tokens of warm-ups that count.",
            ["tenant"],
            registry=self.registry,
        )
        self.ttft = Histogram(
            "halocline_gateway_ttft_seconds",
            "From the request's arrival to its first token, whether the answer is streamed or not.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.duration = Histogram(
            "halocline_gateway_request_seconds",
            "From the request's arrival to the end of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.tenants_age = Gauge(
            "halocline_gateway_tenants_age_seconds",
            "Since the tenant store last confirmed that the keys in memory are its newest.",
            registry=self.registry,
        )
        self.shares = Gauge(
            "halocline_gateway_shares",
            "1 for the state in which tenants' shares of the caches are: refused when their floors exceed the host tier.",
            ["state"],
            registry=self.registry,
        )
        self.set_shares("unknown")
        self.engine_connected = Gauge(
            "halocline_gateway_engine_connected", "1 while the engine is connected.", registry=self.registry
        )

    def set_shares(self, state: SharesState) -> None:
        """Say in which state tenants' shares are."""
        for each in SHARES_STATES:
            self.shares.labels(each).set(each == state)

    def count_usage(self, tenant: str, usage: Usage) -> None:
        """Add what one request used."""
        for tier, tokens in _by_tier(usage):
            self.prompt_tokens.labels(tenant, tier).inc(tokens)
        self.completion_tokens.labels(tenant).inc(usage.completion_tokens)

    def count_warm_up(self, route: str, status: str, tenant: str, usage: Usage | None) -> None:
        """Add a warm-up where it is not taken for traffic: hit rates and waits are those of tenants' own requests."""
        self.warm_up_requests.labels(route, status, tenant).inc()
        if usage is None:
            return
        for tier, tokens in _by_tier(usage):
            self.warm_up_prompt_tokens.labels(tenant, tier).inc(tokens)
        self.warm_up_completion_tokens.labels(tenant).inc(usage.completion_tokens)

    def exposition(self, engine_stats: Mapping[str, Any] | None) -> bytes:
        """Everything as Prometheus text; the engine's own numbers follow as gauges `halocline_engine_…`."""
        self.engine_connected.set(0 if engine_stats is None else 1)
        return generate_latest(self.registry) + _engine_lines(engine_stats or {}).encode()


def _by_tier(usage: Usage) -> tuple[tuple[str, int], ...]:
    return ("device", usage.device_tokens), ("host", usage.host_tokens), ("computed", usage.computed_tokens)


def _engine_lines(stats: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for name, value in _numbers(stats, "halocline_engine"):
        lines += [f"# TYPE {name} gauge", f"{name} {float(value)!r}"]
    return "".join(f"{line}\n" for line in lines)


def _numbers(stats: Mapping[str, Any], prefix: str) -> list[tuple[str, float]]:
    """The numbers of a nested object, each under the path to it."""
    found: list[tuple[str, float]] = []
    for key, value in stats.items():
        name = f"{prefix}_{''.join(char if char.isascii() and char.isalnum() else '_' for char in str(key))}"
        if isinstance(value, Mapping):
            found += _numbers(value, name)
        elif isinstance(value, int | float):
            found.append((name, float(value)))
    return found

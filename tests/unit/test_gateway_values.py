"""Small decisions: plans, usage, configuration, log redaction, request metrics."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pydantic
import pytest
import structlog

from engine.protocol import FirstToken, Sampling
from gateway import logs, sse
from gateway.config import GatewayConfig, TcpAddress, UnixAddress, parse_admin, parse_tcp
from gateway.errors import ApiError
from gateway.metrics import GatewayMetrics
from gateway.planning import TokenLimits, plan_sequences
from gateway.usage import SequenceUsage, total
from gateway.values import Options

LIMITS = TokenLimits(max_prompt_tokens=95, max_total_tokens=100)


def options(**fields: Any) -> Options:
    return Options(**{"max_tokens": None, "sampling": Sampling(), **fields})


class TestPlans:
    def test_choices_are_numbered_prompt_by_prompt_with_rising_seeds(self) -> None:
        plans = plan_sequences([[1], [2]], options(n=2, sampling=Sampling(seed=7)), LIMITS, "prompt")

        assert [(plan.index, plan.prompt_index, plan.sampling.seed) for plan in plans] == [
            (0, 0, 7),
            (1, 0, 8),
            (2, 1, 7),
            (3, 1, 8),
        ]

    def test_seeds_stay_in_range_and_absent_ones_absent(self) -> None:
        high = plan_sequences([[1]], options(n=2, sampling=Sampling(seed=2**63 - 1)), LIMITS, "prompt")
        none = plan_sequences([[1]], options(n=2), LIMITS, "prompt")
        negative = plan_sequences([[1]], options(sampling=Sampling(seed=-1)), LIMITS, "prompt")

        assert [plan.sampling.seed for plan in high] == [2**63 - 1, 0]
        assert [plan.sampling.seed for plan in none] == [None, None]
        assert negative[0].sampling.seed == 2**63 - 1

    def test_without_max_tokens_the_answer_may_fill_the_context(self) -> None:
        assert plan_sequences([[1] * 30], options(), LIMITS, "messages")[0].max_tokens == 70

    @pytest.mark.parametrize(("num_tokens", "max_tokens"), [(96, None), (200, 1), (60, 41)])
    def test_what_does_not_fit_is_refused_with_the_limit(self, num_tokens: int, max_tokens: int | None) -> None:
        with pytest.raises(ApiError) as caught:
            plan_sequences([[1] * num_tokens], options(max_tokens=max_tokens), LIMITS, "messages")

        assert caught.value.problem.code == "context_length_exceeded"
        assert "100" in caught.value.problem.message

    def test_an_empty_prompt_is_refused(self) -> None:
        with pytest.raises(ApiError, match="empty"):
            plan_sequences([[]], options(), LIMITS, "prompt")


class TestUsage:
    def test_a_prompt_counts_once_with_the_tiers_of_whoever_computed_it(self) -> None:
        cold = FirstToken(100, 0, 20, 80, 1.0, 50.0, 1, 0, 6)
        warm = FirstToken(100, 96, 0, 4, 3.0, 10.0, 6, 0, 1)

        usage = total([SequenceUsage(0, 100, warm, 5), SequenceUsage(0, 100, cold, 7)])

        assert (usage.prompt_tokens, usage.completion_tokens) == (100, 12)
        assert (usage.device_tokens, usage.host_tokens, usage.computed_tokens) == (0, 20, 80)
        assert (usage.queue_ms, usage.ttft_ms) == (3.0, 50.0)
        assert (usage.blocks_full, usage.blocks_partial, usage.blocks_missed) == (1, 0, 6)

    def test_several_prompts_add_up_and_unstarted_ones_count_as_computed(self) -> None:
        first = FirstToken(10, 8, 0, 2, 0.0, 1.0, 1, 1, 1)

        usage = total([SequenceUsage(0, 10, first, 1), SequenceUsage(1, 5, None, 0), SequenceUsage(2, 10, first, 1)])

        assert (usage.prompt_tokens, usage.device_tokens, usage.computed_tokens) == (25, 16, 9)
        assert (usage.blocks_full, usage.blocks_partial, usage.blocks_missed) == (2, 2, 2)


class TestConfig:
    def test_unknown_keys_and_illegal_values_are_refused(self) -> None:
        for field, value in [
            ("listen", "8080"),
            ("listen", "example.com:80"),
            ("listen", "127.0.0.1:70000"),
            ("admin_listen", "0.0.0.0:9000"),
            ("admin_listen", "unix:relative.sock"),
            ("admin_listen", "unix:/" + "x" * 200),
            ("admin_listen", "127.0.0.1:8080"),
            ("max_n", 0),
            ("header_timeout_s", 0),
            ("model_id", "../etc"),
            ("unknown", 1),
        ]:
            with pytest.raises(pydantic.ValidationError, match=field):
                config(**{field: value})

    def test_addresses_are_hosts_with_ports_or_unix_paths(self) -> None:
        assert parse_tcp("[::1]:80") == TcpAddress("::1", 80)
        assert parse_admin("unix:/run/x.sock") == UnixAddress("/run/x.sock")
        assert parse_admin("localhost:0") == TcpAddress("localhost", 0)
        assert parse_admin("[::1]:9").is_loopback  # type: ignore[union-attr]

    def test_the_configuration_is_frozen(self) -> None:
        with pytest.raises(pydantic.ValidationError):
            config().max_n = 5


def config(**fields: Any) -> GatewayConfig:
    given = {"engine_socket": Path("/e"), "tenants_url": "sqlite:////t.db", "master_key_file": Path("/k")}
    return GatewayConfig(**{**given, **fields})


class TestLogs:
    KEY = "hl_live_abcdefABCDEF_" + "s" * 49

    def test_what_looks_like_a_key_never_reaches_the_log(self) -> None:
        out = io.StringIO()
        logs.configure("debug", out)

        structlog.get_logger().info("odd", text=f"saw {self.KEY}!")
        try:
            raise ValueError(self.KEY)
        except ValueError:
            logging.getLogger("aiohttp.server").exception("failed: %s", self.KEY)

        assert "sss" not in out.getvalue()
        assert "Traceback" not in out.getvalue()

    def test_a_traceback_is_places_without_values(self) -> None:
        try:
            raise ValueError(self.KEY)
        except ValueError as error:
            places = logs.where(error)

        assert "test_gateway_values.py" in places[-1]
        assert self.KEY not in str(places)


def test_metrics_name_tenants_and_tiers_and_the_engines_own_numbers() -> None:
    """kv-semantics 7.1: by tenant."""
    metrics = GatewayMetrics()
    first = FirstToken(100, 60, 20, 20, 1.0, 50.0, 5, 0, 2)
    metrics.count_usage("alpha", total([SequenceUsage(0, 100, first, 7)]))

    text = metrics.exposition({"tier": "ready", "pool": {"blocks used": 3}, "steps": 2.5}).decode()

    assert 'halocline_gateway_prompt_tokens_total{tenant="alpha",tier="host"} 20.0' in text
    assert 'halocline_gateway_completion_tokens_total{tenant="alpha"} 7.0' in text
    assert "halocline_engine_pool_blocks_used 3.0" in text
    assert "halocline_gateway_engine_connected 1.0" in text
    assert "halocline_gateway_engine_connected 0.0" in metrics.exposition(None).decode()


def test_a_frame_is_one_line_of_json() -> None:
    frame = sse.data_frame({"text": "a\nb\r\nc\u2028"})

    assert frame.endswith(b"\n\n")
    assert len(frame.decode().splitlines()) == 2
    assert json.loads(frame[len("data: ") :])["text"] == "a\nb\r\nc\u2028"


def test_the_memory_for_bodies_holds_at_least_one_body() -> None:
    with pytest.raises(ValueError, match="the largest body could never be read"):
        config(max_body_bytes=2048, body_memory_bytes=1024)

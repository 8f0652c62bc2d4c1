"""What the daemon's settings allow, and how the command shows what it says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from cached.cli import EXIT_ABSENT, cache, render
from cached.config import CachedConfig
from cached.counters import band_of
from cached.metrics import COUNTERS, FAMILIES, GAUGES
from cached.protocol import TierStatistics
from tests.support.cached_daemon import Daemon, chain, daemon_directory, store


def make_config(**changes: object) -> CachedConfig:
    return CachedConfig(**{"socket": "/run/c.sock", "arena_dir": "/dev/shm/a", "host_cache_size": "1GiB", **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"host_cache_size": 0},
        {"socket": "/" + "s" * 120},
        {"metrics_listen": "0.0.0.0:9000"},
        {"metrics_listen": "127.0.0.1"},
        {"lease_ttl_s": 0},
        {"lease_ttl_s": 20, "reservation_ttl_s": 10},
        {"max_sessions": 0},
        {"unknown": 1},
    ],
)
def test_illegal_settings_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        make_config(**changes)


@pytest.mark.parametrize("listen", ["127.0.0.1:9000", "[::1]:9000", "localhost:0"])
def test_metrics_are_served_on_loopback(listen: str) -> None:
    assert make_config(metrics_listen=listen).metrics_listen == listen


def test_sizes_are_written_as_people_write_them() -> None:
    assert make_config(host_cache_size="1.5GiB").host_cache_size == 1.5 * 2**30


def test_bands_are_tens_and_a_hundred_alone() -> None:
    assert [band_of(priority) for priority in (0, 9, 35, 99, 100)] == ["0-9", "0-9", "30-39", "90-99", "100"]


def test_every_statistic_is_a_metric() -> None:
    fields = set(TierStatistics.__dataclass_fields__) - {"layout_fingerprint"}

    assert fields == {*GAUGES, *COUNTERS, *FAMILIES}


def run_stats(socket: Path, *arguments: str):
    return CliRunner().invoke(cache, ["stats", *arguments], obj=SimpleNamespace(cached=SimpleNamespace(socket=socket)))


def test_stats_without_a_daemon_say_so_and_exit_with_7(tmp_path: Path) -> None:
    result = run_stats(tmp_path / "none.sock")

    assert result.exit_code == EXIT_ABSENT
    assert f"no cache daemon answers at {tmp_path / 'none.sock'}" in result.output


def test_stats_of_a_daemon_as_text_and_as_json() -> None:
    with daemon_directory() as directory:
        daemon = Daemon(directory)
        daemon.start()
        fresh = run_stats(daemon.socket)
        store(daemon.client(), chain("shown", 3), priority=80)
        text = run_stats(daemon.socket)
        found = json.loads(run_stats(daemon.socket, "--json").stdout)
        daemon.close()

    assert "no engine has come yet" in fresh.output
    assert "3 at 80" in text.output
    assert found["schema"] == "halocline.cache_stats.v1"
    assert (found["used"], found["stored"], found["used_by_priority"]) == (3, 3, {"80": 3})
    assert render(found) == text.output.rstrip("\n")

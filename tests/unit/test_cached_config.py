"""What the daemon's settings allow, and how the command shows what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from cached import render
from cached.cli import EXIT_ABSENT, cache
from cached.config import CachedConfig
from cached.counters import band_of
from cached.keys import owner_id
from cached.metrics import COUNTERS, FAMILIES, GAUGES, LAYOUT_COUNTERS, LAYOUT_GAUGES
from cached.protocol import LayoutLine, OwnerShare, TierStatistics
from tests.support.cached_daemon import SLOT_BYTES, Daemon, chain, daemon_directory, store


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
        {"layouts": ("demo",)},
        {"layouts": ("demo=0.7", "other=0.7")},
        {"layouts": ("demo=0.1",), "host_cache_size": 8192},
        {"common_layouts": 0},
        {"registration_bytes": 5000},
        {"registration_bytes": "128GiB"},
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


def test_the_arena_is_divided_as_the_settings_say() -> None:
    config = make_config(layouts=("demo=0.5", "org/other=0.25"), common_layouts=2, registration_bytes="2GiB")

    assert [(part.name, part.num_bytes) for part in config.parts] == [
        ("demo", 2**29),
        ("org/other", 2**28),
        ("", 2**27),
        ("", 2**27),
    ]
    assert config.registration_bytes == 2**31


def test_bands_are_tens_and_a_hundred_alone() -> None:
    assert [band_of(priority) for priority in (0, 9, 35, 99, 100)] == ["0-9", "0-9", "30-39", "90-99", "100"]


def test_every_statistic_is_a_metric() -> None:
    fields = set(TierStatistics.__dataclass_fields__) - {"layout_fingerprint", "layouts"}
    of_layouts = set(LayoutLine.__dataclass_fields__) - {"name", "fingerprint", "label", "tokens_per_block"}

    assert fields == {*GAUGES, *COUNTERS, *FAMILIES}
    assert of_layouts == {*LAYOUT_GAUGES, *LAYOUT_COUNTERS}


class Context:
    """What `ctx.obj` of the command line brings."""

    def __init__(self, socket: Path, set_shares: tuple[int, int] | None = None) -> None:
        self.cached = SimpleNamespace(socket=socket)
        self.set_shares = set_shares

    def tenant_ids(self) -> dict[str, str]:
        return {"acme": "t-1"}

    def shares(self) -> tuple[int, int] | None:
        return self.set_shares

    def device_tier(self) -> FakeDevice:
        return FakeDevice()


class FakeDevice:
    """An engine that serves ten prompt tokens from each tier and computes twenty between any two looks."""

    def __init__(self) -> None:
        self.looks = 0

    def look(self) -> dict[str, int]:
        self.looks += 1
        tokens = {"tokens_device": 10, "tokens_host": 10, "tokens_computed": 20}
        blocks = {"blocks_total": 8, "blocks_used": 3, "blocks_idle": 4, "blocks_free": 1}
        return blocks | {name: count * self.looks for name, count in tokens.items()}

    def close(self) -> None:
        pass


def run(socket: Path, *arguments: str, set_shares: tuple[int, int] | None = None):
    return CliRunner().invoke(cache, list(arguments), obj=Context(socket, set_shares))


VERBS = [
    ["stats"],
    ["top", "--rounds", "1"],
    ["ls"],
    ["owners"],
    ["drop", "--tenant", "acme", "--yes"],
    ["verify"],
    ["config"],
]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_without_a_daemon_every_verb_says_so_and_exits_with_7(tmp_path: Path, verb: list[str]) -> None:
    result = run(tmp_path / "none.sock", *verb)

    assert result.exit_code == EXIT_ABSENT
    assert f"no cache daemon answers at {tmp_path / 'none.sock'}" in result.output


def test_stats_of_a_daemon_as_text_and_as_json() -> None:
    with daemon_directory() as directory:
        daemon = Daemon(directory)
        daemon.start()
        fresh = run(daemon.socket, "stats")
        store(daemon.client(), chain("shown", 3), priority=80)
        text = run(daemon.socket, "stats")
        found = json.loads(run(daemon.socket, "stats", "--json").stdout)
        daemon.close()

    assert "no engine has come yet" in fresh.output
    assert "3 at 80" in text.output
    assert found["schema"] == "halocline.cache_stats.v1"
    assert (found["used"], found["stored"], found["used_by_priority"]) == (3, 3, {"80": 3})
    assert render.statistics(found) == text.output.rstrip("\n")


@pytest.fixture(scope="module")
def shown() -> Iterator[Path]:
    """A daemon that holds two blocks of acme and one of nobody's."""
    with daemon_directory() as directory:
        daemon = Daemon(directory)
        daemon.start()
        client = daemon.client()
        store(client, chain("acme's", 2), priority=80, owner=owner_id("t-1"))
        store(client, chain("nobody's", 1))
        client.set_owners(3, [OwnerShare(owner_id("t-1"), 2.0, 5 * SLOT_BYTES, 9 * SLOT_BYTES)])
        yield daemon.socket
        daemon.close()


def test_owners_are_shown_by_tenant_with_their_shares(shown: Path) -> None:
    text = run(shown, "owners").output.splitlines()
    found = json.loads(run(shown, "owners", "--json").stdout)

    assert text[1].split()[:6] == ["acme", "2", "1", "5", "9", "2"]
    assert text[2].split()[:2] == ["(none)", "1"]
    assert (found["schema"], found["version"]) == ("halocline.cache_owners.v1", 3)
    assert found["owners"][0]["tenant"] == "acme"


@pytest.mark.parametrize(
    ("set_shares", "says"),
    [
        (None, None),
        ((0, 0), None),
        ((3, 5 * SLOT_BYTES), None),
        ((4, 2**20), "has shares of version 4"),
        ((4, 2**20 + 1), "1048577 bytes together and the host tier has 1048576, so it refuses all shares"),
        ((2, 0), "keeps shares of version 3, newer than the tenant store's 2"),
    ],
)
def test_owners_says_why_the_shares_that_were_set_are_not_in_force(
    shown: Path, set_shares: tuple[int, int] | None, says: str | None
) -> None:
    text = run(shown, "owners", set_shares=set_shares)
    found = json.loads(run(shown, "owners", "--json", set_shares=set_shares).stdout)

    assert "shares: version 3 in force, floors of 5 of 128 blocks" in text.stdout
    assert found["floors_total"] == 5
    if says is None:
        assert (found["trouble"], text.stderr) == (None, "")
    else:
        assert says in found["trouble"]
        assert found["trouble"] in text.stderr


def test_blocks_are_listed_by_namespace(shown: Path) -> None:
    text = run(shown, "ls", "--namespace-fingerprint", "0011aabb").output.splitlines()
    found = json.loads(run(shown, "ls", "--json").stdout)
    none = json.loads(run(shown, "ls", "--namespace-fingerprint", "00000000", "--json").stdout)
    wrong = run(shown, "ls", "--namespace-fingerprint", "xyz")

    assert len(text) == 4
    assert [block["tenant"] for block in found["blocks"]] == ["acme", "acme", None]
    assert found["blocks"][1]["parent_hash"] == found["blocks"][0]["block_hash"]
    assert none["blocks"] == []
    assert wrong.exit_code == 6


def test_top_looks_as_often_as_asked(shown: Path) -> None:
    live = run(shown, "top", "--rounds", "1", "--interval", "0.1")
    found = [
        json.loads(line)
        for line in run(shown, "top", "--rounds", "2", "--interval", "0.1", "--json").stdout.splitlines()
    ]

    assert "3 of 128 blocks used" in live.output
    assert "acme" in live.output
    assert re.search(r"80-89 +2 +66.7 %\s+30-39 +1 +33.3 %", live.output)
    assert [look["used"] for look in found] == [3, 3]
    assert "7 of 8 blocks used, 3 by requests" in live.output
    assert "25.0 % device, 25.0 % host, 50.0 % computed" in " ".join(live.output.split())
    assert found[0]["device"] == {
        **{"total": 8, "used": 3, "idle": 4, "free": 1},
        **{"tokens_device": 10, "tokens_host": 10, "tokens_computed": 20},
    }
    assert found[0]["hit_rate"] is None


def test_the_settings_in_force_are_shown(shown: Path) -> None:
    found = json.loads(run(shown, "config", "--json").stdout)["settings"]

    assert found["socket"] == str(shown)
    assert found["lease_ttl_s"] == "10.0"
    assert "lease_ttl_s" in run(shown, "config").output


def test_verify_tells_what_it_found(shown: Path) -> None:
    found = json.loads(run(shown, "verify", "--json").stdout)

    assert (found["asked"], found["verified"], found["corrupt"], found["left"]) == (3, 3, 0, 0)


def test_a_drop_takes_the_blocks_of_one_tenant_and_asks_first(shown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = run(shown, "drop", "--tenant", "nobody", "--yes")
    mistyped = run(shown, "drop", "--tenant", "acne", "--yes")
    unasked = run(shown, "drop", "--tenant", "acme")
    monkeypatch.setattr("cached.cli._can_ask", lambda: True)
    kept = CliRunner().invoke(cache, ["drop", "--tenant", "acme"], obj=Context(shown), input="n\n")
    gone = json.loads(run(shown, "drop", "--tenant", "acme", "--yes", "--json").stdout)

    assert (unknown.exit_code, mistyped.exit_code) == (3, 3)
    assert "did you mean 'acme'?" in mistyped.stderr
    assert (unasked.exit_code, "add --yes" in unasked.stderr) == (2, True)
    assert kept.exit_code == 2
    assert gone["num_blocks"] == 2

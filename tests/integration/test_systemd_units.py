"""The unit files, read: no boot needed."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = sorted((ROOT / "systemd").glob("*.service"))


def read_unit(file: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read(file, encoding="utf-8")
    return parser


@pytest.mark.parametrize("file", SERVICES, ids=lambda f: f.name)
def test_a_service_is_notify_has_its_own_user_and_its_own_directories(file: Path) -> None:
    service = read_unit(file)["Service"]
    name = file.stem

    assert service["Type"] == "notify"
    assert service["User"] == service["Group"] == name
    assert service["RuntimeDirectory"] == name
    assert service["StateDirectory"]
    assert service["LimitCORE"] == "0"
    assert f"halocline {name.removeprefix('halocline-')} " in service["ExecStart"]


def test_every_user_of_a_unit_is_created() -> None:
    lines = (ROOT / "systemd" / "halocline.sysusers.conf").read_text().splitlines()
    created = {line.split()[1] for line in lines if line.startswith("u ")}

    assert created == {read_unit(file)["Service"]["User"] for file in SERVICES}


def test_the_target_wants_every_service() -> None:
    wanted = read_unit(ROOT / "systemd" / "halocline.target")["Unit"]["Wants"].split()

    assert sorted(wanted) == [file.name for file in SERVICES]


@pytest.mark.parametrize("file", SERVICES, ids=lambda f: f.name)
def test_a_comment_says_of_lines_that_depend_on_the_machine_why_to_change_them(file: Path) -> None:
    assert "# Change this line" in file.read_text()


def test_the_installed_configuration_is_legal() -> None:
    from command.settings import Flags, load_settings

    settings = load_settings(Flags(config=str(ROOT / "systemd" / "config.toml")), environ={"HOME": "/root"})

    assert settings.engine.cached_socket == settings.cached.socket
    assert settings.gateway.engine_socket == settings.engine.socket
    assert tomllib.loads((ROOT / "systemd" / "config.toml").read_text())["state_dir"] == str(settings.paths.state)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_nothing_unknown_in_the_units(tmp_path: Path) -> None:
    for file in (ROOT / "systemd").iterdir():
        if file.suffix in (".service", ".target"):
            text = file.read_text().replace("/usr/lib/halocline/bin/halocline", "/bin/true")
            (tmp_path / file.name).write_text(
                text.replace("Documentation=file:", "Documentation=man:halocline(1) file:")
            )

    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, sorted(tmp_path.glob("*")))],
        capture_output=True,
        text=True,
        check=False,
    )

    assert [line for line in found.stderr.splitlines() if "halocline" in line] == []

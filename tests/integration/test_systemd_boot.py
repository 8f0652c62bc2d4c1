"""The units, booted for real under a systemd of their own: ready, a request answered, killed, started again, stopped."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack import ENGINE_STATE
from tests.support.systemd_sandbox import (
    SystemdSandbox,
    closed_ancestors,
    hidden_places,
    missing_for_sandbox,
    python_places,
)

ROOT = Path(__file__).parents[2]
SERVICES = ("halocline-cached", "halocline-engine", "halocline-gateway")
PORT = 18473
INSTALLED = "/usr/lib/halocline/bin/halocline"
COMMAND = f"{sys.executable} {ROOT / 'halocline.py'}"
MODEL_INSIDE = Path("/var/lib/halocline-engine/models/demo")
PROMPT = " ".join(f"Rule {i}: the visitor of room {i} may open door {i}." for i in range(20))

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def sandbox(demo_model_dir: Path) -> Iterator[SystemdSandbox]:
    missing = missing_for_sandbox()
    if missing is not None:
        pytest.skip(f"no systemd can be booted here: {missing}")
    files = Path(tempfile.mkdtemp(prefix="hl-boot-", dir="/tmp"))
    try:
        _install(files, demo_model_dir)
        places = [ROOT, Path(sys.prefix), *python_places()]
        with SystemdSandbox(files, hidden_places(places[:2])) as running:
            for closed in closed_ancestors(places):
                running.run(["chmod", "o+x", str(closed)])
            running.run(["systemd-sysusers"])
            running.run(["systemctl", "start", "--no-block", "halocline.target"])
            yield running
    finally:
        shutil.rmtree(files)


def _install(files: Path, model: Path) -> None:
    """What systemd/README.md says, with the checkout's interpreter in place of an installed one, and another port."""
    units = files / "etc" / "systemd" / "system"
    units.mkdir(parents=True)
    for file in (ROOT / "systemd").iterdir():
        if file.suffix in (".service", ".target"):
            shutil.copy(file, units)
    for service in SERVICES:
        start = next(x for x in (units / f"{service}.service").read_text().splitlines() if x.startswith("ExecStart="))
        drop_in = units / f"{service}.service.d"
        drop_in.mkdir()
        (drop_in / "checkout.conf").write_text(f"[Service]\nExecStart=\n{start.replace(INSTALLED, COMMAND)}\n")
    sysusers = files / "usr" / "lib" / "sysusers.d"
    sysusers.mkdir(parents=True)
    shutil.copy(ROOT / "systemd" / "halocline.sysusers.conf", sysusers / "halocline.conf")
    etc = files / "etc" / "halocline"
    etc.mkdir(parents=True)
    config = (ROOT / "systemd" / "config.toml").read_text()
    config = config.replace("127.0.0.1:8080", f"127.0.0.1:{PORT}").replace('"2GiB"', '"256MiB"')
    (etc / "config.toml").write_text(config)
    (etc / "master.key").write_bytes(os.urandom(32))
    (etc / "master.key").chmod(0o600)
    inside = files / MODEL_INSIDE.relative_to("/")
    inside.mkdir(parents=True)
    for file in model.iterdir():
        shutil.copyfile(file, inside / file.name)
    for directory in [files, *(d for d in files.rglob("*") if d.is_dir())]:
        directory.chmod(0o755)
    # Kernels that earlier tests have compiled: an engine would compile the same ones for ten seconds.
    if (ENGINE_STATE / "kernels").exists():
        shutil.copytree(ENGINE_STATE / "kernels", files / "var/lib/halocline-engine/kernels")


def wait_until(sandbox: SystemdSandbox, unit: str, name: str, value: str) -> None:
    deadline = time.monotonic() + 120
    while (found := sandbox.property_of(unit, name)) != value:
        if time.monotonic() > deadline or (name == "ActiveState" and found == "failed"):
            pytest.fail(f"{unit}: {name} is {found}, not {value}\n{sandbox.journal(unit)}")
        time.sleep(0.2)


def ask(key: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=100)
    body = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "temperature": 0}
    with contextlib.closing(connection):
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body),
            {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def readyz() -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=10)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/readyz")
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except OSError:
            return 0, {}


def wait_ready_with_tier(sandbox: SystemdSandbox) -> None:
    deadline = time.monotonic() + 120
    while readyz() != (200, {**readyz()[1], "tier": "ready"}):
        if time.monotonic() > deadline:
            pytest.fail(f"{readyz()}\n" + "\n".join(sandbox.journal(service) for service in SERVICES))
        time.sleep(0.2)


def halocline(sandbox: SystemdSandbox, *words: str) -> str:
    """The command as root, with the master key that the unit hands to the gateway."""
    key = "HALOCLINE_MASTER_KEY_FILE=/etc/halocline/master.key"
    return sandbox.run(["env", key, *COMMAND.split(), *words]).stdout.strip()


@pytest.fixture(scope="module")
def key(sandbox: SystemdSandbox) -> str:
    for service in SERVICES:
        wait_until(sandbox, service, "ActiveState", "active")
    halocline(sandbox, "tenant", "create", "acme")
    return halocline(sandbox, "key", "create", "acme")


def test_each_service_is_ready_as_its_own_user_with_its_own_directories(sandbox: SystemdSandbox, key: str) -> None:
    for service in SERVICES:
        main = sandbox.property_of(service, "MainPID")
        assert sandbox.property_of(service, "SubState") == "running"
        assert sandbox.run(["ps", "-o", "user:32=", "-p", main]).stdout.strip() == service
        assert sandbox.run(["stat", "-c", "%U %a", f"/run/{service}"]).stdout.split() == [service, "750"]
    assert sandbox.property_of("halocline.target", "ActiveState") == "active"
    assert sandbox.run(["stat", "-c", "%U %a", "/var/lib/halocline"]).stdout.split() == ["halocline-gateway", "700"]


def test_a_request_is_answered_and_the_engine_that_is_killed_comes_back_to_its_blocks(
    sandbox: SystemdSandbox, key: str
) -> None:
    wait_ready_with_tier(sandbox)
    first, second = ask(key), ask(key)
    time.sleep(1.0)  # Blocks are stored in the background, after the answer.

    sandbox.run(["systemctl", "kill", "-s", "KILL", "halocline-engine"])
    wait_until(sandbox, "halocline-engine", "NRestarts", "1")
    wait_until(sandbox, "halocline-engine", "ActiveState", "active")
    wait_ready_with_tier(sandbox)
    third = ask(key)

    assert [status for status, _ in (first, second, third)] == [200, 200, 200]
    assert first[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second[1]["usage"]["halocline"]["device_tokens"] > 0
    assert third[1]["usage"]["halocline"]["host_tokens"] > 0
    assert len({answer["choices"][0]["message"]["content"] for _, answer in (first, second, third)}) == 1


def test_a_stopped_target_stops_all_three_in_order_and_leaves_no_socket(sandbox: SystemdSandbox, key: str) -> None:
    sandbox.run(["systemctl", "stop", "halocline.target"])

    for service in SERVICES:
        wait_until(sandbox, service, "ActiveState", "inactive")
        assert sandbox.property_of(service, "Result") == "success", sandbox.journal(service)
    left = sandbox.run(["find", "/run", "-name", "*.sock", "-path", "*halocline*"], check=False)
    assert left.stdout == ""

"""The supervisor of `halocline up`, over children that do nothing but behave: order, restarts, locks, what is left behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 40


class FakeUp:
    """A running supervisor and its state directory."""

    def __init__(self, state: Path, listen: str = "127.0.0.1:0") -> None:
        self.state = state
        self.stderr_file = state / "stderr"
        self.stdout_file = state / "stdout"
        with self.stdout_file.open("wb") as out, self.stderr_file.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fake_processes", "up", str(state), listen],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait_ready(self) -> str:
        wait_for(lambda: "print(" in self.stdout_file.read_text(), self.said)
        return self.stdout_file.read_text()

    def said(self) -> str:
        return self.stderr_file.read_text() + self.stdout_file.read_text()

    def events(self) -> list[str]:
        file = self.state / "events"
        return file.read_text().splitlines() if file.exists() else []

    def pid_of(self, name: str) -> int:
        return [int(e.split()[2]) for e in self.events() if e.startswith(f"{name} starts ")][-1]

    def starts_of(self, name: str) -> int:
        return sum(e.startswith(f"{name} starts ") for e in self.events())

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)


def wait_for(is_so: Callable[[], bool], story: Callable[[], str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        if time.monotonic() > deadline:
            pytest.fail(story())
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def state() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="hl-up-", dir="/tmp"))
    (path / "config.json").write_text("{}")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def start(state: Path) -> Iterator[Callable[..., FakeUp]]:
    running: list[FakeUp] = []

    def begin(listen: str = "127.0.0.1:0") -> FakeUp:
        running.append(FakeUp(state, listen))
        return running[-1]

    yield begin
    for up in running:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait()


def test_ready_is_one_line_followed_by_commands_that_name_the_port_and_the_key(
    state: Path, start: Callable[..., FakeUp]
) -> None:
    said = start().wait_ready()

    first, *rest = said.splitlines()
    match = re.fullmatch(r"ready (http://127\.0\.0\.1:(\d+))", first)
    assert match
    assert int(match[2]) > 0
    assert [line.split()[0] for line in rest if line] == [
        "curl",
        "from",
        "client",
        "print(client.chat.completions.create(model='demo',",
    ]
    assert said.count(match[1]) == 3
    assert str(state / "demo.key") in said


def test_a_running_up_notes_which_model_it_serves_and_removes_the_note(
    state: Path, start: Callable[..., FakeUp]
) -> None:
    up = start()
    up.wait_ready()

    [note] = state.rglob("model.path")

    assert Path(note.read_text().strip()) == state
    assert up.end() == 0
    assert not note.exists()


def test_an_interrupt_of_the_whole_group_stops_gateway_then_engine_then_cached_and_leaves_nothing(
    state: Path, start: Callable[..., FakeUp]
) -> None:
    up = start()
    up.wait_ready()
    pids = [up.pid_of(name) for name in ("gateway", "engine", "cached")]

    os.killpg(up.process.pid, signal.SIGINT)
    code = up.process.wait(DEADLINE_S)

    assert code == 0
    assert [e for e in up.events() if "starts" not in e] == [
        "gateway stops", "gateway ends", "engine stops", "engine ends", "cached stops", "cached ends",
    ]  # fmt: skip
    assert not any(is_alive(pid) for pid in pids)
    assert list((state / "run").iterdir()) == []


@pytest.mark.parametrize("name", ["cached", "engine", "gateway"])
def test_a_child_that_is_killed_is_started_again_and_the_others_go_on(name: str, start: Callable[..., FakeUp]) -> None:
    up = start()
    up.wait_ready()

    os.kill(up.pid_of(name), signal.SIGKILL)

    wait_for(lambda: up.starts_of(name) == 2, up.said)
    assert {n: up.starts_of(n) for n in ("cached", "engine", "gateway")} == {
        n: 2 if n == name else 1 for n in ("cached", "engine", "gateway")
    }
    assert "signal 9" in up.said()
    assert up.end() == 0


def test_children_die_with_a_supervisor_that_is_killed_and_the_next_up_works(start: Callable[..., FakeUp]) -> None:
    up = start()
    up.wait_ready()
    pids = [up.pid_of(name) for name in ("gateway", "engine", "cached")]

    up.end(signal.SIGKILL)

    wait_for(lambda: not any(is_alive(pid) for pid in pids), up.said)
    again = start()
    again.wait_ready()
    assert again.end() == 0


def test_a_second_signal_kills_at_once_what_does_not_stop(state: Path, start: Callable[..., FakeUp]) -> None:
    (state / "behave-engine").write_text("stubborn")
    up = start()
    up.wait_ready()
    pids = [up.pid_of(name) for name in ("gateway", "engine", "cached")]
    up.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "engine stops" in up.events(), up.said)

    code = up.end(signal.SIGINT)

    assert code == 0
    assert not any(is_alive(pid) for pid in pids)


def test_a_child_that_says_its_settings_are_wrong_ends_the_start_with_its_words(
    state: Path, start: Callable[..., FakeUp]
) -> None:
    (state / "behave-engine").write_text("refuse")
    up = start()

    code = up.process.wait(DEADLINE_S)

    assert code == 1
    assert "engine ended with code 6" in up.said()
    assert "because it was told to refuse" in up.said()
    assert up.starts_of("engine") == 1


def test_a_child_that_never_gets_ready_is_not_started_for_ever(state: Path, start: Callable[..., FakeUp]) -> None:
    (state / "behave-cached").write_text("die")
    up = start()

    code = up.process.wait(DEADLINE_S)

    assert code == 1
    assert "cached ended 3 times before it was ready, last with code 1" in up.said()
    assert up.starts_of("cached") == 3


def test_two_ups_on_one_state_directory_are_refused_with_the_first_ones_process_id(
    start: Callable[..., FakeUp],
) -> None:
    first = start()
    first.wait_ready()

    second = start()
    code = second.process.wait(DEADLINE_S)

    assert code == 5
    assert f"process {first.process.pid}" in second.said()
    assert first.end() == 0


def test_a_port_in_use_is_named_at_once_and_nothing_is_started(state: Path, start: Callable[..., FakeUp]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]

        up = start(f"127.0.0.1:{port}")
        code = up.process.wait(DEADLINE_S)

    assert code == 5
    assert f"127.0.0.1:{port}" in up.said()
    assert "--listen" in up.said()
    assert up.events() == []


def test_warnings_of_children_come_to_stderr_with_their_name_and_everything_to_their_log(
    state: Path, start: Callable[..., FakeUp]
) -> None:
    up = start()
    up.wait_ready()

    up.end()

    assert "engine | warning: a warning of engine" in up.stderr_file.read_text()
    assert '"a warning of engine"' in (state / "logs" / "engine.log").read_text()

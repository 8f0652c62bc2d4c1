"""Several processes at one store, and a person at a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tenants.keys import parse_key
from tenants.snapshot import DENIED, Accepted
from tenants.store import Store, open_store
from tenants.watch import SnapshotWatcher

REPOSITORY = Path(__file__).parents[2]

COMMAND_LINE = """
import sys
from pathlib import Path
from types import SimpleNamespace
import click
from gateway.retention import check_rules
from tenants.cli import key, tenant
from tenants.config import TenantsConfig
state = sys.argv.pop(1)
config = TenantsConfig(url=f"sqlite:///{state}/tenants.db", master_key_file=Path(state) / "master.key")
context = SimpleNamespace(tenants=config, check_retention=check_rules)
click.Group("halocline", commands={"tenant": tenant, "key": key})(obj=context)
"""


def command(state: Path, *words: str) -> list[str]:
    return [sys.executable, "-c", COMMAND_LINE, str(state), *words]


def run(state: Path, *words: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(state, *words),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
        **options,
    )


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def open_state(state: Path) -> Store:
    return open_store(f"sqlite:///{state}/tenants.db", state / "master.key")


def wait_until(condition) -> None:
    """Returns when `condition` holds; the test's own timeout ends a wait for what never comes."""
    while not condition():
        threading.Event().wait(0.01)


def test_a_key_revoked_by_another_process_stops_here_without_a_restart(state):
    with open_state(state) as store:
        store.create_tenant("acme", 1.0)
        text = store.create_key("acme", "", None, 1.0)
        with SnapshotWatcher(store) as watcher:
            assert isinstance(watcher.current.authenticate(text, 2.0), Accepted)

            assert run(state, "key", "revoke", parse_key(text).public_id).returncode == 0

            wait_until(lambda: watcher.current.authenticate(text, 2.0) is DENIED)


def test_a_key_made_by_another_process_works_here(state):
    with open_state(state) as store, SnapshotWatcher(store) as watcher:
        assert run(state, "tenant", "create", "acme").returncode == 0
        made = run(state, "key", "create", "acme")
        text = made.stdout.removesuffix("\n")

        wait_until(lambda: isinstance(watcher.current.authenticate(text, 2.0), Accepted))


def test_retention_set_by_another_process_is_known_here_without_a_restart(state):
    with open_state(state) as store:
        store.create_tenant("acme", 1.0)
        text = store.create_key("acme", "", None, 1.0)
        with SnapshotWatcher(store) as watcher:
            for words in (["--max-priority", "60"], ["--max-duration", "300"], ["--clear"]):
                assert run(state, "tenant", "retention", "acme", *words).returncode == 0
                expected = store.get_tenant("acme").retention

                wait_until(lambda: watcher.current.authenticate(text, 2.0).identity.retention == expected)  # noqa: B023


def test_processes_that_race_for_the_first_use_agree_on_one_master_key_and_one_store(state):
    """All start on nothing at once; each makes a tenant, and all must be readable with the key that is left."""
    names = [f"tenant-{number}" for number in range(6)]
    with ThreadPoolExecutor(len(names)) as pool:
        results = list(pool.map(lambda name: run(state, "tenant", "create", name), names))

    assert [result.returncode for result in results] == [0] * len(names), [result.stderr for result in results]
    with open_state(state) as store:
        assert [tenant.name for tenant in store.list_tenants()] == names
        store.check_invariants()
    assert sorted(file.name for file in state.iterdir()) == ["master.key", "tenants.db"]


def test_many_writers_at_once_lose_nothing(state):
    with open_state(state) as store:
        store.create_tenant("acme", 1.0)
        version = store.version()

        def write(number: int) -> list[str]:
            with open_state(state) as mine:
                return [mine.create_key("acme", f"{number}-{turn}", None, 1.0) for turn in range(10)]

        with ThreadPoolExecutor(4) as pool:
            texts = [text for made in pool.map(write, range(4)) for text in made]

        assert store.version() == version + 40
        snapshot = store.snapshot()
        assert all(isinstance(snapshot.authenticate(text, 2.0), Accepted) for text in texts)


def test_a_process_killed_in_the_middle_of_a_change_leaves_the_store_as_it_was(state):
    with open_state(state) as store:
        store.create_tenant("acme", 1.0)
        version = store.version()
    script = f"""
import os, signal
from pathlib import Path
from tenants.store import open_store
state = Path({str(state)!r})
store = open_store(f"sqlite:///{{state}}/tenants.db", state / "master.key")
with store._changing() as connection:
    connection.exec_driver_sql("DELETE FROM tenants")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert (
        subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, timeout=60, check=False).returncode
        == -signal.SIGKILL
    )

    with open_state(state) as store:
        assert (store.version(), store.get_tenant("acme").state) == (version, "active")
        store.check_invariants()


def test_a_key_that_could_not_be_written_is_revoked(state):
    run(state, "tenant", "create", "acme")

    with open("/dev/full", "w") as full:
        made = subprocess.run(
            command(state, "key", "create", "acme"),
            cwd=REPOSITORY,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )

    assert made.returncode == 1
    assert "it was revoked" in made.stderr
    assert "Traceback" not in made.stderr
    with open_state(state) as store:
        assert [key.state for key in store.list_keys()] == ["revoked"]


def test_a_list_that_could_not_be_written_fails(state):
    run(state, "tenant", "create", "acme")

    with open("/dev/full", "w") as full:
        listed = subprocess.run(
            command(state, "tenant", "list"),
            cwd=REPOSITORY,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )

    assert (listed.returncode, listed.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize(("mask", "is_warned"), [("022", True), ("077", False)])
def test_a_key_sent_to_a_file_that_others_can_read_is_warned_about(state, tmp_path, mask, is_warned):
    run(state, "tenant", "create", "acme")
    target = tmp_path / "acme.key"

    line = subprocess.list2cmdline(command(state, "key", "create", "acme")[3:])
    made = subprocess.run(
        ["sh", "-c", f'umask {mask}; "$0" -c "$1" {line} > {target}', sys.executable, COMMAND_LINE],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert made.returncode == 0, made.stderr
    assert parse_key(target.read_text().removesuffix("\n")) is not None
    assert ("other users can read that file" in made.stderr) == is_warned


class Terminal:
    """A command with a terminal at all three ends."""

    def __init__(self, state: Path, *words: str, columns: int = 80, **environment: str) -> None:
        self._master, slave = pty.openpty()
        self._seen = ""
        self._process = subprocess.Popen(
            command(state, *words), cwd=REPOSITORY, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=_take_terminal, env={**os.environ, "TERM": "xterm", "COLUMNS": str(columns), **environment},
        )  # fmt: skip
        os.close(slave)

    def wait_for(self, text: str) -> None:
        while text not in self._seen:
            assert self._read(), f"the command ended without saying {text!r}: {self._seen}"

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def finish(self) -> tuple[int, str]:
        while self._read():
            pass
        os.close(self._master)
        return self._process.wait(60), self._seen.replace("\r\n", "\n")

    def _read(self) -> bool:
        assert select.select([self._master], [], [], 60)[0], f"the command hangs after: {self._seen}"
        with contextlib.suppress(OSError):
            data = os.read(self._master, 65536)
            self._seen += data.decode()
            return bool(data)
        return False


def _take_terminal() -> None:
    import fcntl
    import termios

    # A run in the background (`make test &`) ignores SIGINT, and hands that down; a terminal's commands do not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def acme(state: Path) -> Path:
    with open_state(state) as store:
        store.create_tenant("acme", 1.0)
        store.create_key("acme", "[red]not markup", None, 1.0)
    return state


def test_deletion_at_a_terminal_asks_for_the_name_and_goes_on_when_it_is_typed(acme):
    terminal = Terminal(acme, "tenant", "delete", "acme")
    terminal.wait_for("Type the tenant's name")
    terminal.type(b"acme\n")

    assert terminal.finish()[0] == 0
    assert run(acme, "tenant", "show", "acme").returncode == 3


@pytest.mark.parametrize(
    "typed", [b"y\n", b"yes\n", b"\n", b"acm\n", b"\x04"], ids=["y", "yes", "nothing", "nearly", "end"]
)
def test_deletion_at_a_terminal_is_refused_for_anything_but_the_name(acme, typed):
    terminal = Terminal(acme, "tenant", "delete", "acme")
    terminal.wait_for("Type the tenant's name")
    terminal.type(typed)

    assert terminal.finish()[0] == 2
    assert run(acme, "tenant", "show", "acme").returncode == 0


def test_deletion_interrupted_at_the_question_changes_nothing(acme):
    terminal = Terminal(acme, "tenant", "delete", "acme")
    terminal.wait_for("Type the tenant's name")
    terminal.type(b"\x03")

    exit_code, seen = terminal.finish()

    assert exit_code == 130
    assert "Traceback" not in seen
    assert run(acme, "tenant", "show", "acme").returncode == 0


def test_a_list_on_a_terminal_is_a_table_whose_ids_stay_whole(acme):
    exit_code, seen = Terminal(acme, "key", "list").finish()

    with open_state(acme) as store:
        public_id = store.list_keys()[0].public_id
    assert exit_code == 0
    assert "public id" in seen
    assert public_id in seen
    assert "[red]not" in seen


def test_a_table_has_no_colour_when_none_is_wanted(acme):
    assert "\x1b[3" not in Terminal(acme, "tenant", "list", NO_COLOR="1").finish()[1]


def test_a_terminal_shows_one_tenant_as_a_sheet(acme):
    lines = Terminal(acme, "tenant", "show", "acme").finish()[1].splitlines()

    names = ["name", "state", "active keys", "salt epoch", "created", "id"]
    rules = ["max priority", "max duration s", "default retention"]
    share = ["cache weight", "cache floor", "cache ceiling"]
    assert [line.split("  ")[0] for line in lines] == names + rules + share
    assert lines[-2].split() == ["cache", "floor", "0", "B"]


def test_everything_a_command_makes_is_private(state):
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        state = Path(directory) / "state"
        run(state, "tenant", "create", "acme", umask=0)

        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        assert {stat.S_IMODE(file.stat().st_mode) for file in state.iterdir()} == {0o600}

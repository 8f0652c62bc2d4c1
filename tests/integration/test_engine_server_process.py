"""One engine process with the demo model, from its start to its end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.client import EngineClient
from engine.protocol import Sampling

ROOT = Path(__file__).resolve().parents[2]
START_S = 100.0
STOP_S = 20.0
SECRET_SALT = "a-salt-that-no-log-may-show"
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198] * 4

PROGRAM = """
import sys
from engine.main import run
from engine.config import EngineConfig
sys.exit(run(EngineConfig.model_validate_json(sys.argv[1])))
"""


class Process:
    """The engine as a service manager sees it."""

    def __init__(self, directory: Path, model_dir: Path) -> None:
        self.socket = directory / "engine.sock"
        self.log = directory / "log"
        self.record = directory / "requests.log"
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notified.bind(str(directory / "notify"))
        config = (
            f'{{"socket": "{self.socket}", "model_dir": "{model_dir}", "state_dir": "{directory}",'
            f' "record": "{self.record}",'
            ' "host_cache_size": 0, "device_cache_size": "64MiB", "log_level": "debug"}'
        )
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, config],
                stderr=log,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env={**os.environ, "NOTIFY_SOCKET": str(directory / "notify")},
            )

    def wait_notified(self, what: str, timeout_s: float) -> None:
        self._notified.settimeout(timeout_s)
        while what not in self._notified.recv(4096).decode():
            assert self.popen.poll() is None, self.log.read_text()

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.communicate()
        self._notified.close()


@pytest.fixture
def process(demo_model_dir: Path) -> Iterator[Process]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="halocline-engine-") as directory:
        started = Process(Path(directory), demo_model_dir)
        yield started
        started.end()


async def answer(client: EngineClient, max_tokens: int) -> tuple[list[int], int]:
    """The tokens of the prompt's continuation, and how many of its tokens came from the device."""
    events = [event async for event in client.submit(PROMPT, max_tokens, Sampling(temperature=0.0), SECRET_SALT)]
    assert events[0].first is not None
    return [token for event in events for token in event.tokens], events[0].first.device_tokens


def tokens_in(log: str) -> set[int]:
    """Numbers of lists in the log, whichever way they are written; a timestamp, a size or a count is in no list."""
    lists = re.findall(r"[\[(]\s*(\d+(?:\s*,\s*\d+)+)\s*,?\s*[\])]", log)
    return {int(number) for each in lists for number in each.split(",")}


def test_a_prompt_in_a_log_would_be_found_and_a_time_is_not_taken_for_one() -> None:
    assert tokens_in("plan=StepPlan(tokens=(1, 4093, 198), table=(4,))") == {1, 4093, 198}
    assert tokens_in('{"prompt": [2,198]}') == {2, 198}
    assert tokens_in('{"timestamp": "2031-01-01T00:00:01.409312Z", "blocks": 4093}') == set()


async def test_an_engine_says_ready_serves_the_model_and_stops_orderly(process: Process) -> None:
    await asyncio.to_thread(process.wait_notified, "READY=1", START_S)
    client = EngineClient(str(process.socket), "test")
    await client.start()
    assert await client.wait_connected(5.0), "READY was said before the socket was served"

    cold, cold_served = await answer(client, 6)
    warm, warm_served = await answer(client, 6)
    settings = (await client.stats())["settings"]
    running = client.submit(PROMPT, 4000, Sampling(temperature=0.0, ignore_eos=True), SECRET_SALT)
    await anext(running)
    process.popen.send_signal(signal.SIGTERM)
    last = [event async for event in running][-1]
    out, _ = await asyncio.to_thread(process.popen.communicate, timeout=STOP_S)
    process.wait_notified("STOPPING=1", 1.0)

    assert cold == warm
    assert (cold_served, warm_served) == (0, len(PROMPT) - 1)
    assert settings["record"] == str(process.record), "`tune --last` reads what this engine writes"
    assert last.finish == "error"
    assert process.popen.returncode == 0
    assert not process.socket.exists()
    log = process.log.read_text()
    assert "Traceback" not in log
    assert SECRET_SALT not in log
    assert not tokens_in(log) & set(PROMPT)
    assert out == b""
    await client.close()


def test_a_setting_that_does_not_fit_ends_the_start_with_what_to_change(tmp_path: Path) -> None:
    config = f'{{"socket": "/tmp/x.sock", "model_dir": "{tmp_path}", "state_dir": "{tmp_path}"}}'

    ended = subprocess.run([sys.executable, "-c", PROGRAM, config], capture_output=True, cwd=ROOT, timeout=START_S)

    assert ended.returncode == 2  # What a supervisor takes for final.
    assert b"Traceback" not in ended.stderr
    assert str(tmp_path).encode() in ended.stderr

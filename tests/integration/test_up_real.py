"""`halocline up` with the real model: what a newcomer does, and what a crash does."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from command.paths import derive_paths
from tests.support.stack import NAMES, Stack

TOKENS_PER_BLOCK = 16
pytestmark = pytest.mark.timeout(240)
PROMPT = " ".join(f"Rule {i}: the visitor of room {i} may open door {i}." for i in range(30))


@pytest.fixture(scope="module")
def stack(demo_model_dir: Path) -> Iterator[Stack]:
    with Stack.start(demo_model_dir) as running:
        yield running


def arena_of(stack: Stack) -> Path:
    return derive_paths(stack.state_dir, {}, os.getuid()).arena


def test_the_commands_printed_after_ready_work_when_pasted(stack: Stack) -> None:
    lines = stack.ready_text.splitlines()
    curl = next(line for line in lines if line.startswith("curl "))
    python = "\n".join(lines[lines.index(next(line for line in lines if line.startswith("from "))) :])

    if shutil.which("curl"):
        by_curl = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True)
        assert '"object":"chat.completion"' in by_curl.stdout.replace(" ", "")
    by_python = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, check=False)

    assert by_python.returncode == 0, by_python.stderr
    assert by_python.stdout.strip()


def test_the_second_request_is_cached_another_tenants_is_not_and_a_killed_engine_is_survived_by_the_host_tier(
    stack: Stack,
) -> None:
    stack.wait_ready(tier="ready")
    cold = stack.chat(PROMPT)
    warm = stack.chat(PROMPT)
    other = stack.chat(PROMPT, key=stack.new_tenant("acme"))
    stack.wait_for(lambda: stack.host_blocks() >= cold["usage"]["prompt_tokens"] // TOKENS_PER_BLOCK)

    old = stack.kill("engine")
    stack.wait_replaced("engine", old)
    stack.wait_ready(tier="ready")
    after = stack.chat(PROMPT)

    prompt_tokens = cold["usage"]["prompt_tokens"]
    # What every chat of this tenant begins with (the template's own system prompt) is there from the tests before.
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] < 3 * TOKENS_PER_BLOCK
    assert warm["usage"]["halocline"]["device_tokens"] >= 0.95 * prompt_tokens
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert after["usage"]["halocline"]["host_tokens"] >= 0.9 * prompt_tokens
    assert {r["choices"][0]["message"]["content"] for r in (cold, warm, other, after)} == {
        cold["choices"][0]["message"]["content"]
    }


def test_the_doctor_finds_nothing_wrong_with_a_running_stack(stack: Stack) -> None:
    stack.command("doctor")


def test_ctrl_c_leaves_no_process_socket_or_shared_memory_and_a_killed_supervisor_none_that_is_in_the_way(
    stack: Stack,
) -> None:
    key, pids = stack.key, stack.pids.values()
    assert arena_of(stack).is_dir()
    assert stack.signal_group(signal.SIGINT) == 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert list((stack.state_dir / "run").iterdir()) == []
    assert not arena_of(stack).exists()

    stack.up()
    assert stack.key == key
    children = list(stack.pids.values())
    stack.down(signal.SIGKILL)
    stack.wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))

    stack.up()
    assert set(stack.pids) == set(NAMES)
    stack.chat("Still there?")
    assert stack.down() == 0
    assert not arena_of(stack).exists()

"""`halocline engine events` as a process beside a running engine: lines, exit codes, Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from engine.client import EngineClient
from engine.protocol import Sampling
from tests.support.fake_runner import FakeInfo, FakeRunner
from tests.support.shell import WAIT_S, Shell

COMMAND = Path(__file__).parents[2] / "halocline.py"


async def start(directory: Path, *words: str) -> asyncio.subprocess.Process:
    state = directory / "state"
    state.mkdir(exist_ok=True)
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(COMMAND),
        "engine",
        "events",
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("HALOCLINE_")},
            "HALOCLINE_STATE_DIR": str(state),
            "HALOCLINE_CONFIG": "",
            "HALOCLINE_ENGINE_SOCKET": str(directory / "engine.sock"),
        },
    )


async def run(directory: Path, *words: str) -> tuple[int | None, str, str]:
    process = await start(directory, *words)
    out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
    return process.returncode, out.decode(), err.decode()


async def ask(client: EngineClient, number: int) -> None:
    prompt = [1 + (number * 131 + at) % 900 for at in range(20)]
    async for _ in client.submit(prompt, 3, Sampling(temperature=0.0)):
        pass


async def test_without_following_it_tells_what_is_kept_and_ends() -> None:
    async with Shell(FakeRunner(FakeInfo(num_blocks=12)), event_buffer_max_size=6) as shell:
        client = await shell.client()
        for number in range(5):
            await ask(client, number)
        end = (await shell.server.statistics())["server"]["events"]

        code, out, err = await run(shell.directory, "--json")
        _, some, _ = await run(shell.directory, "--json", "--from", str(end - 2))
        _, people, _ = await run(shell.directory)

        told: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
        assert (code, err) == (0, "")
        assert {each["schema"] for each in told} == {"halocline.kv_event.v1"}
        assert told[0]["kind"] == "lost"
        assert (told[0]["first_event_id"], told[0]["next_event_id"]) == (0, end - 6)
        assert [each["event_id"] for each in told[1:]] == list(range(end - 6, end))
        assert [json.loads(line)["event_id"] for line in some.splitlines()] == [end - 2, end - 1]
        assert len(people.splitlines()) == len(told)
        assert f"events 0 to {end - 7} are not kept any more" in people
        stored = next(each for each in told if each["kind"] == "stored")
        assert {*stored} == {"schema", "kind", "event_id", "incarnation", "hash_algo", "parent_hash", "blocks",
                             "namespace_fingerprint", "owner"}  # fmt: skip
        assert {*stored["blocks"][0]} == {"block_hash", "tier", "priority"}


async def test_a_snapshot_is_the_index() -> None:
    async with Shell(FakeRunner(FakeInfo(num_blocks=12)), event_buffer_max_size=6) as shell:
        client = await shell.client()
        for number in range(5):
            await ask(client, number)

        code, out, _ = await run(shell.directory, "--snapshot", "--json")
        _, people, _ = await run(shell.directory, "--snapshot")

        (page,) = [json.loads(line) for line in out.splitlines()]
        assert code == 0
        assert page["kind"] == "snapshot"
        assert [each["block_hash"] for each in page["blocks"]] == [
            each.block_hash.hex() for each in shell.core.snapshot()
        ]
        assert len(people.splitlines()) == len(page["blocks"])


async def test_followed_it_goes_on_and_ends_cleanly_on_ctrl_c() -> None:
    async with Shell(FakeRunner(FakeInfo(num_blocks=12)), event_buffer_max_size=100) as shell:
        client = await shell.client()
        process = await start(shell.directory, "--follow", "--json")
        assert process.stdout is not None
        first = json.loads(await asyncio.wait_for(process.stdout.readline(), WAIT_S))
        await ask(client, 1)
        second = json.loads(await asyncio.wait_for(process.stdout.readline(), WAIT_S))

        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), WAIT_S)

        assert (first["kind"], second["kind"]) == ("created", "stored")
        assert (process.returncode, err) == (0, b"")


async def test_an_engine_that_ends_while_followed_is_told_with_exit_code_7() -> None:
    async with Shell(event_buffer_max_size=100) as shell:
        process = await start(shell.directory, "--follow")
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readline(), WAIT_S)

        await shell.server.close("stopping")
        _, err = await asyncio.wait_for(process.communicate(), WAIT_S)

        assert process.returncode == 7
        assert b"closed the connection" in err


async def test_no_engine_is_exit_code_7_and_says_how_to_start_one(tmp_path: Path) -> None:
    code, out, err = await run(tmp_path)

    assert (code, out) == (7, "")
    assert "halocline up" in err


async def test_an_engine_that_keeps_no_events_says_how_to_have_some() -> None:
    async with Shell(event_buffer_max_size=0) as shell:
        code, out, err = await run(shell.directory, "--follow")

        assert (code, out) == (6, "")
        assert "event_buffer_max_size is 0" in err


async def test_a_snapshot_and_a_number_to_begin_at_exclude_each_other(tmp_path: Path) -> None:
    code, _, err = await run(tmp_path, "--snapshot", "--from", "3")

    assert code == 2
    assert "exclude each other" in err

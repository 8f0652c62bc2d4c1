"""The gateway as a process of its own: readiness, signals, and starts that cannot be."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tenants.store import open_store
from tests.support.engine_stub import EngineStub, Script
from tests.support.gateway_stand import chat_body, parse_events

RUN = """
import json, sys
from gateway.config import GatewayConfig
from gateway.main import run
sys.exit(run(GatewayConfig(**json.loads(sys.argv[1]))))
"""


class Process:
    """A gateway process, its log, and what it told the service manager."""

    def __init__(self, directory: Path, process: asyncio.subprocess.Process, manager: socket.socket) -> None:
        self.directory = directory
        self.process = process
        self.lines: list[dict[str, object]] = []
        self._manager = manager
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(json.loads(line) if line.startswith(b"{") else {"event": line.decode()})

    async def event(self, name: str, timeout_s: float = 30.0) -> dict[str, object]:
        async with asyncio.timeout(timeout_s):
            while True:
                for line in self.lines:
                    if line["event"] == name:
                        return line
                await asyncio.sleep(0.02)

    def told(self) -> str:
        self._manager.setblocking(False)
        messages = []
        try:
            while True:
                messages.append(self._manager.recv(4096).decode())
        except BlockingIOError:
            return "\n".join(messages)


@pytest.fixture
async def directory() -> AsyncIterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="hl-", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


async def start(directory: Path, **settings: object) -> Process:
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(directory / "notify.sock"))
    config = {
        "listen": "127.0.0.1:0",
        "admin_listen": f"unix:{directory}/admin.sock",
        "engine_socket": f"{directory}/engine.sock",
        "tenants_url": f"sqlite:///{directory}/tenants.db",
        "master_key_file": f"{directory}/master.key",
        **settings,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        RUN,
        json.dumps(config),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "NOTIFY_SOCKET": str(directory / "notify.sock")},
        cwd=Path(__file__).parents[2],
    )
    return Process(directory, process, manager)


async def test_a_process_says_ready_serves_drains_and_leaves_nothing(directory: Path, demo_model_dir: Path) -> None:
    with open_store(f"sqlite:///{directory}/tenants.db", directory / "master.key") as store:
        store.create_tenant("alpha", time.time())
        key = store.create_key("alpha", "test", None, time.time())
    async with EngineStub(directory / "engine.sock", Script(tokens=(504,), repeat=True, step_s=0.02)) as stub:
        # The tokenizer is read from where the engine says its model is.
        stub.welcome = type(stub.welcome)(
            **{name: getattr(stub.welcome, name) for name in stub.welcome.__slots__}
            | {"model_dir": str(demo_model_dir)}
        )
        gateway = await start(directory, drain_timeout_s=5)
        port = (await gateway.event("listening"))["port"]
        assert (await gateway.event("ready"))["engine"] == "connected"
        assert "READY=1" in gateway.told()

        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
            body = chat_body(stream=True, max_tokens=20)
            async with http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as response:
                assert response.status == 200
                gateway.process.send_signal(signal.SIGTERM)
                assert parse_events(await response.read())[-1] == "[DONE]"

        assert await asyncio.wait_for(gateway.process.wait(), 10) == 0
        assert "STOPPING=1" in gateway.told()
    assert not (directory / "admin.sock").exists()
    assert key not in str(gateway.lines)


async def test_a_process_with_nothing_to_do_stops_at_once(directory: Path, demo_model_dir: Path) -> None:
    gateway = await start(directory, model_dir=str(demo_model_dir))
    await gateway.event("listening")
    # Nobody said that it was ready: there is no engine.
    assert "READY=1" not in gateway.told()

    gateway.process.send_signal(signal.SIGINT)

    assert await asyncio.wait_for(gateway.process.wait(), 10) == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model_dir": "/nonexistent"}, "tokenizer.json"),
        ({"listen": "192.0.2.1:1"}, "listen"),
        ({"admin_listen": "unix:/nonexistent/admin.sock"}, "admin_listen"),
    ],
)
async def test_an_impossible_start_says_why_and_exits_1(directory: Path, settings: dict[str, str], says: str) -> None:
    gateway = await start(directory, **settings)

    assert await asyncio.wait_for(gateway.process.wait(), 30) == 1
    assert says in str((await gateway.event("start_failed"))["reason"])


async def test_a_dead_gateways_admin_socket_is_replaced_and_a_live_ones_is_not(
    directory: Path, demo_model_dir: Path
) -> None:
    path = directory / "admin.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    first = await start(directory, model_dir=str(demo_model_dir))
    await first.event("listening")
    (directory / "notify.sock").unlink()

    second = await start(directory, model_dir=str(demo_model_dir))

    assert await asyncio.wait_for(second.process.wait(), 30) == 1
    assert "another process" in str((await second.event("start_failed"))["reason"])
    assert path.exists()
    first.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(first.process.wait(), 10) == 0

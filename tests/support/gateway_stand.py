"""A gateway on a free port with an engine stub behind it and real tenants: what gateway tests stand on."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from gateway import logs
from gateway.app import GatewayServer
from gateway.config import GatewayConfig
from gateway.freshness import Freshness
from gateway.tokenizer import ModelText
from tenants.store import Store, open_store
from tenants.watch import SnapshotWatcher
from tests.support.engine_stub import EngineStub, Script


@cache
def model_text(model_dir: Path) -> ModelText:
    """Loaded once for all tests of a process; it is never changed."""
    return ModelText(model_dir)


@dataclass(slots=True)
class Stand:
    """Everything a test looks at. `key` belongs to tenant `alpha`, `other_key` to `beta`."""

    server: GatewayServer
    stub: EngineStub
    store: Store
    watcher: SnapshotWatcher
    key: str
    other_key: str
    directory: Path
    log: io.StringIO
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    @property
    def port(self) -> int:
        return self.server.port

    def headers(self, key: str | None = None) -> dict[str, str]:
        return {"Authorization": f"Bearer {key or self.key}"}

    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.getvalue().splitlines() if line.startswith("{")]

    async def post(self, path: str, body: Any, key: str | None = None) -> tuple[int, dict[str, Any]]:
        """A request with a JSON body (or with raw bytes); status and the answer's JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {**self.headers(key), "Content-Type": "application/json"}
        async with self.http.post(self.url + path, data=data, headers=headers) as response:
            return response.status, await response.json()

    async def chat(self, key: str | None = None, **fields: Any) -> tuple[int, dict[str, Any]]:
        return await self.post("/v1/chat/completions", chat_body(**fields), key)

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a streamed answer: parsed JSON, comments and `[DONE]` as text."""
        async with self.http.post(self.url + path, json={**body, "stream": True}, headers=self.headers()) as response:
            assert response.status == 200, await response.text()
            raw = await response.read()
        return parse_events(raw)


def chat_body(**fields: Any) -> dict[str, Any]:
    """A chat completion's body; give what matters."""
    return {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], **fields}


def parse_events(raw: bytes) -> list[Any]:
    """Server-sent events as a list: parsed JSON, or text for comments and the end marker."""
    assert raw.endswith(b"\n\n"), "a stream ends with a whole frame"
    events: list[Any] = []
    for frame in raw.decode().split("\n\n")[:-1]:
        data = frame.removeprefix("data: ")
        events.append(json.loads(data) if data.startswith("{") else data)
    return events


@asynccontextmanager
async def standing(
    model_dir: Path,
    script: Script | None = None,
    *,
    ping_interval_s: float = 10.0,
    with_engine: bool = True,
    **settings: Any,
) -> AsyncIterator[Stand]:
    """Start it all; `settings` are the gateway's."""
    directory = Path(tempfile.mkdtemp(prefix="hl-", dir="/tmp"))
    log = io.StringIO()
    logs.configure("debug", log)
    stub = EngineStub(directory / "engine.sock", script)
    store = open_store(f"sqlite:///{directory}/tenants.db", directory / "master.key")
    now = time.time()
    keys = []
    for name in ("alpha", "beta"):
        store.create_tenant(name, now)
        keys.append(store.create_key(name, "test", None, now))
    watcher = SnapshotWatcher(store).start()
    config = GatewayConfig(
        **{
            "listen": "127.0.0.1:0",
            "admin_listen": f"unix:{directory}/admin.sock",
            "engine_socket": directory / "engine.sock",
            "tenants_url": f"sqlite:///{directory}/tenants.db",
            "master_key_file": directory / "master.key",
            "model_dir": model_dir,
            "drain_timeout_s": 0.5,
            **settings,
        }
    )
    server = GatewayServer(
        config,
        lambda text, at: watcher.current.authenticate(text, at),
        structlog.get_logger(),
        ping_interval_s=ping_interval_s,
        load_text=model_text,
        tenants_age_s=lambda: watcher.age_s,
        refresh_tenants=Freshness(watcher).wait,
        shares=lambda: watcher.current.shares,
    )
    try:
        if with_engine:
            await stub.start()
        async with server, aiohttp.ClientSession() as http:
            if with_engine:
                assert await server.wait_engine(5.0)
            yield Stand(server, stub, store, watcher, keys[0], keys[1], directory, log, http)
    finally:
        await stub.stop()
        watcher.stop()
        store.close()
        shutil.rmtree(directory, ignore_errors=True)

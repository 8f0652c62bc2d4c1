"""How long does the gateway itself take for a small request? Through HTTP against the same engine stub asked directly.

One request at a time with a 200-byte body, one generated token, alternating with the same prompt submitted straight
over the stub's socket, in rounds. The client is a bare socket, so that no HTTP client's own cost is counted; gateway,
stub and client are processes of their own. `cancel_ms` in the details is how long after a disconnect the engine had
its Cancel. Expected: parse, template and encoding 0.4 ms, HTTP 0.3 ms, the extra hop 0.1 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from bench.report import finish, median
from engine.client import EngineClient
from tenants.store import open_store

BAR_MS = 2.0
ROUNDS = 7
REQUESTS_PER_ROUND = 150
ROOT = Path(__file__).resolve().parents[1]

STUB = """
import asyncio, dataclasses, json, sys, time, uvloop
from tests.support.engine_stub import WELCOME, EngineStub, Script
async def main(path, model_dir):
    stub = EngineStub(path, Script(), dataclasses.replace(WELCOME, model_dir=model_dir))
    endless = Script(tokens=(504,), repeat=True, step_s=0.01)
    stub.script_for = lambda submit, n: endless if submit.max_tokens > 1000 else Script(tokens=(504,))
    await stub.start()
    print("up", flush=True)
    seen = 0
    while True:
        await stub.wait_until(lambda s: len(s.cancels) > seen, 3600)
        seen += 1
        print(json.dumps({"cancelled_at": time.monotonic()}), flush=True)
uvloop.run(main(*sys.argv[1:]))
"""
GATEWAY = """
import json, sys
from gateway.config import GatewayConfig
from gateway.main import run
sys.exit(run(GatewayConfig(**json.loads(sys.argv[1]))))
"""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", type=Path, default=os.environ.get("HALOCLINE_TEST_MODEL"), help="model directory")
    model_dir = arguments.parse_args().model or _default_model()
    directory = Path(tempfile.mkdtemp(prefix="hl-", dir="/tmp"))
    processes: list[subprocess.Popen[str]] = []
    try:
        through, direct, cancel_ms = uvloop.run(_measure(directory, Path(model_dir), processes))
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(15)
        shutil.rmtree(directory, ignore_errors=True)
    added = [with_gateway - without for with_gateway, without in zip(through, direct, strict=True)]
    value = median(added)
    finish(
        "gateway_overhead_ms",
        value=value,
        baseline=median(direct),
        ratio=median(through) / median(direct),
        bar=f"added p50 <= {BAR_MS} ms at concurrency 1",
        holds=value <= BAR_MS,
        spread=[min(added), max(added)],
        config={"rounds": ROUNDS, "requests_per_round": REQUESTS_PER_ROUND, "body_bytes": len(_body())},
        details={
            "through_p50_ms": [round(each, 3) for each in through],
            "direct_p50_ms": [round(each, 3) for each in direct],
            "cancel_ms": round(cancel_ms, 3),
        },
    )


async def _measure(
    directory: Path, model_dir: Path, processes: list[subprocess.Popen[str]]
) -> tuple[list[float], list[float], float]:
    """p50 per round through the gateway and directly, in milliseconds; the median time from disconnect to Cancel."""
    with open_store(f"sqlite:///{directory}/tenants.db", directory / "master.key") as store:
        store.create_tenant("bench", time.time())
        key = store.create_key("bench", "bench", None, time.time())
    stub = _spawn(processes, STUB, str(directory / "engine.sock"), str(model_dir), stdout=subprocess.PIPE)
    assert stub.stdout is not None, "it was asked for"
    await asyncio.to_thread(stub.stdout.readline)
    port = await _start_gateway(processes, directory)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    client = EngineClient(str(directory / "engine.sock"), "bench")
    await client.start()
    assert await client.wait_connected(10), "the stub is up"
    through, direct = [], []
    for _ in range(ROUNDS + 1):  # The first is the warm-up.
        through.append(
            statistics.median([await _ask(reader, writer, head, _body()) for _ in range(REQUESTS_PER_ROUND)])
        )
        direct.append(statistics.median([await _submit(client) for _ in range(REQUESTS_PER_ROUND)]))
    writer.close()
    await client.close()
    cancels = [await _leave(stub, port, head) for _ in range(20)]
    return through[1:], direct[1:], statistics.median(cancels)


def _body(**fields: object) -> bytes:
    """A request of 200 bytes."""
    body = {"model": "demo", "messages": [{"role": "user", "content": ""}], "max_tokens": 1, **fields}
    room = 200 - len(json.dumps(body))
    body["messages"] = [{"role": "user", "content": ("What is a halocline, and where in the sea is it? " * 5)[:room]}]
    return json.dumps(body).encode()


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str, body: bytes) -> float:
    begun = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.readuntil(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200"), answer
    length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    await reader.readexactly(length)
    return (time.perf_counter() - begun) * 1000


async def _submit(client: EngineClient) -> float:
    begun = time.perf_counter()
    async with client.submit(list(range(100, 164)), 1) as stream:
        async for _ in stream:
            pass
    return (time.perf_counter() - begun) * 1000


async def _leave(stub: subprocess.Popen[str], port: int, head: str) -> float:
    """Drop a running stream; milliseconds until the engine had been told."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = _body(max_tokens=5000, stream=True)
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    for _ in range(3):
        await reader.readuntil(b"\n\n")
    left_at = time.monotonic()
    writer.transport.abort()
    assert stub.stdout is not None, "it was asked for"
    line = await asyncio.to_thread(stub.stdout.readline)
    return (json.loads(line)["cancelled_at"] - left_at) * 1000


async def _start_gateway(processes: list[subprocess.Popen[str]], directory: Path) -> int:
    config = {
        "listen": "127.0.0.1:0",
        "admin_listen": f"unix:{directory}/admin.sock",
        "engine_socket": f"{directory}/engine.sock",
        "tenants_url": f"sqlite:///{directory}/tenants.db",
        "master_key_file": f"{directory}/master.key",
    }
    log = directory / "gateway.log"
    with log.open("w") as target:
        _spawn(processes, GATEWAY, json.dumps(config), stderr=target)
    for _ in range(600):
        lines = [
            json.loads(line) for line in log.read_text().splitlines() if line.startswith("{") and line.endswith("}")
        ]
        if any(line["event"] == "ready" for line in lines):
            return next(int(line["port"]) for line in lines if line["event"] == "listening")
        await asyncio.sleep(0.1)
    raise RuntimeError(f"the gateway did not come up:\n{log.read_text()}")


def _spawn(
    processes: list[subprocess.Popen[str]], code: str, *arguments: str, **streams: object
) -> subprocess.Popen[str]:
    process = subprocess.Popen(  # type: ignore[call-overload]
        [sys.executable, "-c", code, *arguments], cwd=ROOT, text=True, **streams
    )
    processes.append(process)
    return process


def _default_model() -> Path:
    from command.paths import default_state_dir

    return default_state_dir(os.environ, Path.home()) / "models" / "demo"


if __name__ == "__main__":
    main()

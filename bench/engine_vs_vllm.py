"""Is the embedded engine as quick as vLLM's CPU build on the same machine, model and precision?

Both servers are up at once and take every figure in turn, so that whatever else the machine does meets both. Whoever is
not measured is stopped (SIGSTOP): vLLM's idle engine wakes 1,300 times a second. vLLM is started from an environment of its
own (`--vllm-python`), tuned as its documentation says for this many cores. One JSON line per figure; the last line sums up.

Prediction: prefill is bound by products (2 FLOP a parameter outside the embeddings and token), a decode step by reading
every weight once; `floor` measures both rates on this machine in each round, and figures say what share was reached.
A weight is four bytes there, as vLLM reads it; what is reached of the floor of those that Halocline holds
(`engine/narrow_weights.py`) stands beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.report import finish, median
from bench.serving import FIRST_UNIQUE_ID, Prompts
from tests.support.stack import Stack

PREFIX, USER, DECODE = 1000, 20, 64
REST_S = 30.0
MIB = 2**20
INT8 = "decode_1_int8_tokens_per_s"


@dataclass(slots=True)
class Server:
    """One of the two, as a client sees it."""

    name: str
    port: int
    key: str
    ready_s: float
    pids: Callable[[], list[int]]
    figures: dict[str, list[float]] = field(default_factory=dict)

    def note(self, figure: str, value: float) -> None:
        self.figures.setdefault(figure, []).append(value)


def main() -> None:
    arguments = _arguments()
    # Whoever ends this early ends both servers.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    floors: list[dict[str, float]] = []
    # Once before: a machine compiles the kernels of a version at its first start and keeps them, as vLLM's wheel has its own.
    with _ours(arguments.model, arguments.pool_bytes):
        pass
    with (
        _ours(arguments.model, arguments.pool_bytes) as ours,
        _vllm(arguments) as theirs,
        _rounded(arguments) as rounded,
    ):
        # At rest. Ours has taken its pool's pages by then; theirs are taken as taken, which favours it.
        memory = {one.name: _memory(one.pids()) - arguments.pool_bytes for one in (ours, theirs)}
        for seed, server in enumerate((ours, theirs)):
            _wait_for_rest((ours, theirs))
            _measure(server, Prompts(arguments.model, seed=100 + seed), base=40_000 + 3000 * seed)
            server.figures.clear()
        servers = (ours, theirs) if rounded is None else (ours, theirs, rounded)
        if rounded is not None:
            _decode_alone(rounded, Prompts(arguments.model, seed=102))
        for turn in range(arguments.rounds):
            _wait_for_rest(servers)
            with _stopped(servers):
                floors.append(_floor(arguments.model))
            print(json.dumps({"figure": "floor", **floors[-1]}), flush=True)
            for server in (ours, theirs) if turn % 2 == 0 else (theirs, ours):
                _wait_for_rest(servers)
                with _stopped(one for one in servers if one is not server):
                    # The same prompts for both, new ones in each round.
                    _measure(server, Prompts(arguments.model, seed=turn), base=FIRST_UNIQUE_ID + 500 * turn)
            if rounded is not None:
                _wait_for_rest(servers)
                with _stopped((ours, theirs)):
                    ours.note(INT8, _decode_alone(rounded, Prompts(arguments.model, seed=turn)))
        theirs.figures[INT8] = theirs.figures["decode_1_tokens_per_s"]
        for server in (ours, theirs):
            server.note("memory_without_kv_bytes", memory[server.name])
            server.note("memory_after_bytes", _memory(server.pids()))
            server.note("ready_s", server.ready_s)
    _report(arguments, ours, theirs, floors)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="model directory in Hugging Face layout, float32")
    parser.add_argument(
        "--vllm-python", type=Path, required=True, help="python of an environment that has vLLM for CPU"
    )
    parser.add_argument("--vllm-block", type=int, default=32, help="vLLM's block size; its CPU default is 128")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each figure on each server")
    parser.add_argument("--int8", action="store_true", help="also decode one stream with int8 weights of ours")
    parser.add_argument("--pool-bytes", type=int, default=2048 * MIB, help="KV pool of each server")
    return parser.parse_args()


# ── what is measured ───────────────────────────────────────────────────────────────────────────────────────────────


def _measure(server: Server, prompts: Prompts, base: int) -> None:
    """Every figure once. Prompts that must be cold begin with a token that nobody sent."""

    def fresh(count: int, place: int) -> list[int]:
        return [base + place, *prompts.fresh(count)[1:]]

    # On a virtual machine the first prompt after a minute at rest takes up to a fifth longer. One that does not count is for that.
    _stream(server, fresh(PREFIX, 5), 2)
    first, _, _ = _stream(server, fresh(PREFIX, 0), 2)
    server.note("ttft_cold_s", first)
    for streams in (1, 4, 16):
        rate = _rate(server, [fresh(60, 10 + 20 * streams + i) for i in range(streams)])
        server.note(f"decode_{streams}_tokens_per_s", rate)

    system = fresh(PREFIX, 1)
    firsts, rate = _burst(server, [[*system, *prompts.fresh(USER)[1:]] for _ in range(16)])
    server.note("burst_cold_mean_ttft_s", statistics.mean(firsts))
    firsts, rate = _burst(server, [[*system, *prompts.fresh(USER)[1:]] for _ in range(16)])
    server.note("burst_cached_mean_ttft_s", statistics.mean(firsts))
    server.note("decode_16_shared_tokens_per_s", rate)


def _stream(server: Server, prompt: list[int], max_tokens: int) -> tuple[float, list[float], int]:
    """Seconds to the first token, the times of all chunks since the start, and how many tokens came.

    What comes is looked into when all has come: on a machine of two cores a client that parses meanwhile takes from the
    servers what it measures, and most from the quicker one.
    """
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    with contextlib.closing(connection):
        began = time.perf_counter()
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps(body),
            {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{server.name} answered {answer.status}: {answer.read(2000)!r}")
        lines = [(time.perf_counter() - began, line) for line in answer if line.startswith(b"data: ")]
    times, count = [], 0
    for at, line in lines:
        if line.strip() == b"data: [DONE]":
            break
        chunk = json.loads(line.removeprefix(b"data: "))
        if chunk.get("error"):
            raise RuntimeError(f"{server.name}: {chunk['error']}")
        if chunk["choices"] and (chunk["choices"][0]["text"] or chunk["choices"][0]["finish_reason"]):
            times.append(at)
        if chunk.get("usage"):
            count = chunk["usage"]["completion_tokens"]
    if count != max_tokens:
        raise RuntimeError(f"{server.name} sent {count} tokens of {max_tokens}, and {len(times)} chunks")
    return times[0], times, count


def _together(server: Server, prompts: list[list[int]], max_tokens: int) -> list[tuple[float, list[float], int]]:
    gate = threading.Barrier(len(prompts))

    def one(prompt: list[int]) -> tuple[float, list[float], int]:
        gate.wait()
        return _stream(server, prompt, max_tokens)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


def _rate(server: Server, prompts: list[list[int]]) -> float:
    """Tokens a second of all streams together, from the last first token to the first end."""
    return _steady_rate(_together(server, prompts, DECODE))


def _decode_alone(server: Server, prompts: Prompts) -> float:
    return _rate(server, [prompts.fresh(60)])


def _burst(server: Server, prompts: list[list[int]]) -> tuple[list[float], float]:
    found = _together(server, prompts, DECODE)
    return [first for first, _, _ in found], _steady_rate(found)


def _steady_rate(found: list[tuple[float, list[float], int]]) -> float:
    begin = max(first for first, _, _ in found)
    end = min(times[-1] for _, times, _ in found)
    inside = sum(sum(begin < moment <= end for moment in times) for _, times, _ in found)
    return inside / (end - begin)


def _floor(model: Path) -> dict[str, float]:
    """What this machine can do at best with this model, measured in a process of its own, so that torch is not loaded
    into the one that measures."""
    script = (
        "import engine.environment, torch, numpy, time, json, sys\n"
        "from transformers import AutoConfig\n"
        "from bench.engine_vs_vllm import held_bytes\n"
        "c = AutoConfig.from_pretrained(sys.argv[1])\n"
        "d = getattr(c, 'head_dim', None) or c.hidden_size // c.num_attention_heads\n"
        "per = c.hidden_size * d * (2 * c.num_attention_heads + 2 * c.num_key_value_heads)"
        " + 3 * c.hidden_size * c.intermediate_size\n"
        "layers, head = per * c.num_hidden_layers, c.hidden_size * c.vocab_size\n"
        "a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)\n"
        # numpy asks for huge pages, with which memory is read half again as fast as with small ones.
        "big = torch.from_numpy(numpy.ones(2**27, numpy.float32))\n"
        "packed = torch.ops.mkldnn._reorder_linear_weight(b, 2048)\n"
        "def best(f):\n"
        "    f(); found = []\n"
        "    for _ in range(7):\n"
        "        t = time.perf_counter(); f(); found.append(time.perf_counter() - t)\n"
        "    return min(found)\n"
        "product = lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, 'none', [], None)\n"
        "flops = 2 * 2048**3 / min(best(lambda: a @ b), best(product))\n"
        "rate = big.nbytes / best(lambda: big.sum())\n"
        "print(json.dumps({'flop_per_s': flops, 'bytes_per_s': rate,"
        " 'prefill_tokens_per_s': flops / (2 * layers), 'decode_1_tokens_per_s': rate / (4 * (layers + head)),"
        " 'decode_1_as_held_tokens_per_s': rate / held_bytes(sys.argv[1])}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(model)], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def held_bytes(model: Path | str) -> int:
    """What Halocline reads of weights in one decode: those of its products, in as few bytes as hold them exactly."""
    from safetensors import safe_open

    from engine.narrow_weights import fewest_bytes

    sizes: dict[str, int] = {}
    widths: dict[str, int] = {}
    for path in Path(model).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name.endswith(("proj.weight", "lm_head.weight", "embed_tokens.weight")):
                    weight = file.get_tensor(name).float()
                    # Layers of one input are one product.
                    product = re.sub(r"(gate|up)_proj", "gate_up", re.sub(r"[qkv]_proj", "qkv", name))
                    sizes[product] = sizes.get(product, 0) + weight.numel()
                    widths[product] = max(widths.get(product, 0), fewest_bytes(weight.numpy()))
    if "lm_head.weight" in sizes:
        sizes.pop("model.embed_tokens.weight", None)  # Rows of it are looked up, and it is multiplied with nothing.
    return sum(size * widths[product] for product, size in sizes.items())


# ── the two servers ────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _ours(model: Path, pool_bytes: int, quantization: str = "none") -> Iterator[Server]:
    began = time.perf_counter()
    settings = {"engine_device_cache_size": pool_bytes, "engine_quantization": quantization}
    with Stack.start(model, cached_host_cache_size=64 * MIB, **settings) as stack:
        ready_s = time.perf_counter() - began
        port = urllib.parse.urlsplit(stack.base_url).port
        assert port is not None
        yield Server("halocline", port, stack.key, ready_s, lambda: [stack.pid, *_descendants(stack.pid)])


@contextlib.contextmanager
def _rounded(arguments: argparse.Namespace) -> Iterator[Server | None]:
    if not arguments.int8:
        yield None
        return
    with _ours(arguments.model, pool_bytes=64 * MIB, quantization="int8") as server:
        yield server


@contextlib.contextmanager
def _vllm(arguments: argparse.Namespace) -> Iterator[Server]:
    port = _free_port()
    environment = {
        **os.environ,
        **{"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
        **{"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"},
        "VLLM_CPU_KVCACHE_SPACE": str(arguments.pool_bytes // 2**30),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{len(os.sched_getaffinity(0)) - 1}",
        "LD_PRELOAD": ":".join(str(path) for path in _preloads(arguments.vllm_python)),
    }
    command = [
        *(str(arguments.vllm_python), "-m", "vllm.entrypoints.cli.main", "serve", str(arguments.model)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo", "--dtype", "float32"),
        *("--block-size", str(arguments.vllm_block), "--max-model-len", "8192", "--enforce-eager"),
    ]
    began = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
        )
        try:
            while not _answers(f"http://127.0.0.1:{port}/health"):
                if process.poll() is not None or time.perf_counter() - began > 600:
                    said.seek(0)
                    raise RuntimeError("vLLM did not get ready:\n" + said.read().decode(errors="replace")[-4000:])
                time.sleep(0.25)
            ready_s = time.perf_counter() - began
            yield Server("vllm", port, "none", ready_s, lambda: [process.pid, *_descendants(process.pid)])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _preloads(python: Path) -> list[Path]:
    """What vLLM's documentation preloads for speed: its OpenMP runtime, and tcmalloc where there is one."""
    wanted = (Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"), python.parent.parent / "lib" / "libiomp5.so")
    return [path for path in wanted if path.exists()]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _wait_for_rest(servers: tuple[Server, ...]) -> None:
    """Until no server works: vLLM's worker keeps one core busy for a second behind its last request, and would take it
    from whoever is measured next."""
    pids = [pid for server in servers for pid in server.pids()]
    until = time.perf_counter() + REST_S
    before = _cpu_s(pids)
    while time.perf_counter() < until:
        time.sleep(0.5)
        after = _cpu_s(pids)
        if after - before < 0.05:
            return
        before = after
    raise RuntimeError(f"the servers are still busy {REST_S} s after their last request")


@contextlib.contextmanager
def _stopped(servers: Iterable[Server]) -> Iterator[None]:
    pids = [pid for server in servers for pid in server.pids()]
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in reversed(pids):  # Children first: whoever watches them finds them alive.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _cpu_s(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _memory(pids: list[int]) -> int:
    """Bytes resident, what is shared counted once between its users."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(row.split()[1]) * 1024 for row in rows if row.startswith("Pss:"))
    return total


# ── what is said ───────────────────────────────────────────────────────────────────────────────────────────────────

# Figure, bar on ours ÷ theirs, and whether more is better.
BARS: list[tuple[str, float, bool]] = [
    ("ttft_cold_s", 1.05, False),
    ("decode_1_tokens_per_s", 0.95, True),
    (INT8, 1.5, True),  # Theirs is their float32.
    ("decode_4_tokens_per_s", 1.0, True),
    ("decode_16_tokens_per_s", 1.1, True),
    ("decode_16_shared_tokens_per_s", 1.4, True),
    ("burst_cold_mean_ttft_s", 0.65, False),
    ("burst_cached_mean_ttft_s", 0.5, False),
    ("ready_s", 0.4, False),
    ("memory_without_kv_bytes", 0.6, False),
]


def _report(arguments: argparse.Namespace, ours: Server, theirs: Server, floors: list[dict[str, float]]) -> None:
    rows: list[dict[str, Any]] = []
    for figure, bar, more_is_better in BARS:
        if figure == INT8 and not arguments.int8:
            continue
        mine, other = median(ours.figures[figure]), median(theirs.figures[figure])
        if arguments.vllm_block == 128 and figure == "burst_cold_mean_ttft_s":
            bar = 0.45
        ratio = mine / other
        row = {
            "figure": figure,
            "value": round(mine, 4),
            "vllm": round(other, 4),
            "ratio": round(ratio, 3),
            "bar": f"{'>=' if more_is_better else '<='} {bar}",
            "holds": ratio >= bar if more_is_better else ratio <= bar,
            "all": {one.name: [round(value, 4) for value in one.figures[figure]] for one in (ours, theirs)},
        }
        if figure == "ttft_cold_s":
            row["share_of_floor"] = _share(
                [PREFIX / one for one in ours.figures[figure]], floors, "prefill_tokens_per_s"
            )
        elif figure == "decode_1_tokens_per_s":
            row["share_of_floor"] = _share(ours.figures[figure], floors, figure)
            row["share_of_floor_as_held"] = _share(ours.figures[figure], floors, "decode_1_as_held_tokens_per_s")
        print(json.dumps(row), flush=True)
        rows.append(row)
    worst = min(rows, key=lambda row: row["holds"])
    finish(
        f"engine_vs_vllm_block{arguments.vllm_block}",
        value=sum(row["holds"] for row in rows),
        baseline=len(rows),
        ratio=worst["ratio"],
        bar="every figure meets its own",
        holds=all(row["holds"] for row in rows),
        spread=[0, len(rows)],
        config={"rounds": arguments.rounds, "vllm_block": arguments.vllm_block, "pool_bytes": arguments.pool_bytes},
        details={
            "figures": rows,
            "floor_by_round": floors,
            "memory_after_bytes": {one.name: one.figures["memory_after_bytes"] for one in (ours, theirs)},
        },
    )


def _share(rates: list[float], floors: list[dict[str, float]], name: str) -> float:
    """The median share of what the machine had in the same round: its memory may be twice as fast a minute later."""
    return round(median([rate / floor[name] for rate, floor in zip(rates, floors, strict=True)]), 3)


if __name__ == "__main__":
    main()

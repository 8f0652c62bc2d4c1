"""A whole Halocline of real processes on a state directory of its own, for tests from end to end.

    with Stack.start(demo_model_dir, engine_max_num_tokens=64) as stack:
        client = openai.OpenAI(base_url=stack.base_url, api_key=stack.key)
        stack.kill("engine")
        stack.wait_replaced("engine", old_pid)

It is `halocline up` itself, so a test sees what a person would. Keyword arguments are settings, `<section>_<key>`. Everything
started is ended by process id when the block is left, whatever happened in it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
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
from typing import Any

ROOT = Path(__file__).parents[2]
# Compiled kernels and digests of weights are the same for every stack: computed once per checkout.
ENGINE_STATE = ROOT / ".pytest_cache" / "engine-state"
NAMES = ("cached", "engine", "gateway")
DEADLINE_S = 110.0
SMALL = {"cached_host_cache_size": "256MiB", "engine_device_cache_size": "256MiB"}


class Stack:
    """A running stack; see the module's docstring. Made by `start`."""

    def __init__(self, state_dir: Path, model_dir: Path, settings: dict[str, object]) -> None:
        self.state_dir = state_dir
        self.environ = _environment(
            {"engine_state_dir": ENGINE_STATE, "engine_model_dir": model_dir, **SMALL, **settings}
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.base_url = ""
        self.ready_text = ""

    @classmethod
    @contextlib.contextmanager
    def start(cls, model_dir: Path, **settings: object) -> Iterator[Stack]:
        """Starts one, waits until it answers, and at the end leaves nothing of it."""
        ENGINE_STATE.mkdir(parents=True, exist_ok=True)
        state_dir = Path(tempfile.mkdtemp(prefix="hl-stack-", dir="/tmp"))
        stack = cls(state_dir, model_dir, settings)
        try:
            stack.up()
            yield stack
        finally:
            stack.down()
            shutil.rmtree(state_dir, ignore_errors=True)

    # ── life ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def up(self) -> None:
        """Starts `halocline up` and waits for its `ready`."""
        out, err = self.state_dir / "up.stdout", self.state_dir / "up.stderr"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, str(ROOT / "halocline.py"), "up", "--state-dir", str(self.state_dir)),
                    *("--listen", "127.0.0.1:0"),
                ],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        process = self._process
        self.wait_for(lambda: "\nprint(" in out.read_text() or process.poll() is not None)
        self.ready_text = out.read_text()
        found = re.match(r"ready (http://\S+)\n", self.ready_text)
        if found is None:
            raise RuntimeError(f"`halocline up` did not get ready:\n{self.said()}")
        self.base_url = f"{found[1]}/v1"

    def down(self, number: int = signal.SIGTERM) -> int | None:
        """Stops it in order and returns its exit code; kills what is left after the time that an orderly stop may take."""
        if self._process is None:
            return None
        pids = [pid for name in NAMES if (pid := self.find(name)) is not None]
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        try:
            return self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            for pid in pids:
                _end(pid)
            self._process = None

    @property
    def pid(self) -> int:
        """The supervisor's process id."""
        if self._process is None:
            raise RuntimeError("the stack is not running")
        return self._process.pid

    def signal_group(self, number: int) -> int:
        """A signal to the supervisor's process group, as a terminal sends Ctrl-C; returns the exit code."""
        if self._process is None:
            raise RuntimeError("the stack is not running")
        os.killpg(self._process.pid, number)
        code = self._process.wait(60)
        self._process = None
        return code

    # ── its processes ──────────────────────────────────────────────────────────────────────────────────────────────

    def find(self, name: str) -> int | None:
        """The process id of `cached`, `engine` or `gateway`, or None between two lives."""
        if self._process is None:
            return None
        try:
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        except FileNotFoundError:
            return None
        for child in map(int, children):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                if name.encode() in words and b"--state-dir" in words:
                    return child
        return None

    def pid_of(self, name: str) -> int:
        """Like `find`, waiting for one."""
        self.wait_for(lambda: self.find(name) is not None)
        found = self.find(name)
        if found is None:
            raise RuntimeError(f"{name} came and went:\n{self.said()}")
        return found

    @property
    def pids(self) -> dict[str, int]:
        return {name: self.pid_of(name) for name in NAMES}

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Sends a signal to one process and returns its id."""
        pid = self.pid_of(name)
        os.kill(pid, number)
        return pid

    def wait_replaced(self, name: str, old_pid: int) -> int:
        """Waits until another process is in the place of `old_pid`, and the gateway says that all is well."""
        self.wait_for(lambda: self.find(name) not in (None, old_pid))
        self.wait_ready()
        return self.pid_of(name)

    def wait_ready(self, tier: str | None = None) -> None:
        """Waits until /readyz answers 200, and, when `tier` is given, says it of the host tier."""

        def is_so() -> bool:
            status, answer = self.readyz()
            return status == 200 and (tier is None or answer.get("tier") == tier)

        self.wait_for(is_so)

    # ── asking ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def key(self) -> str:
        """The demo tenant's API key."""
        return (self.state_dir / "demo.key").read_text().strip()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the tenants' listener."""
        host, _, port = self.base_url.removeprefix("http://").removesuffix("/v1").rpartition(":")
        return host, int(port)

    def readyz(self) -> tuple[int, dict[str, Any]]:
        """Status and body of /readyz; status 0 when nobody answers."""
        connection = http.client.HTTPConnection(*self.address, timeout=10)
        try:
            connection.request("GET", "/readyz")
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, ValueError, http.client.HTTPException):
            return 0, {}
        finally:
            connection.close()

    def chat(self, content: str, key: str | None = None, **fields: Any) -> dict[str, Any]:
        """One greedy chat completion, not streamed; raises RuntimeError for anything but 200."""
        body = {"model": "demo", "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}
        connection = http.client.HTTPConnection(*self.address, timeout=DEADLINE_S)
        headers = {"Authorization": f"Bearer {key or self.key}", "Content-Type": "application/json"}
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps({**body, **fields}), headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {text.decode(errors='replace')}")
        found: dict[str, Any] = json.loads(text)
        return found

    def metrics(self) -> str:
        """What the gateway's admin listener says on /metrics."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10)
            connection.connect(str(self.state_dir / "run" / "admin.sock"))
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: admin\r\nConnection: close\r\n\r\n")
            data = b""
            while more := connection.recv(65536):
                data += more
        return data.partition(b"\r\n\r\n")[2].decode()

    def command(self, *words: str) -> str:
        """Runs `halocline WORDS` on this stack's state directory; its stdout. A failure raises with what it said."""
        done = subprocess.run(
            [sys.executable, str(ROOT / "halocline.py"), *words, "--state-dir", str(self.state_dir)],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"halocline {' '.join(words)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def host_blocks(self) -> int:
        """Blocks that the host tier holds and would serve; 0 while nothing was stored."""
        return int(json.loads(self.command("cache", "stats", "--json")).get("used", 0))

    def new_tenant(self, name: str) -> str:
        """Another tenant; its API key."""
        self.command("tenant", "create", name)
        return self.command("key", "create", name).strip()

    def log(self, name: str) -> str:
        """The whole log of one process."""
        file = self.state_dir / "logs" / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def said(self) -> str:
        """What a person would want to see after a failure."""
        parts = [(self.state_dir / name).read_text(errors="replace") for name in ("up.stderr", "up.stdout")]
        return "\n".join([*parts, *(f"--- {name}\n{self.log(name)[-2000:]}" for name in NAMES)])

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Waits for something that will be so; raises with everybody's last words when it does not come."""
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited in vain for {DEADLINE_S:.0f} s:\n{self.said()}")
            time.sleep(0.05)


def _environment(settings: dict[str, object]) -> dict[str, str]:
    """This process's environment without settings of its user's, and with those of the test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HALOCLINE_")}
    # A configuration file of the machine's must not reach into a test.
    kept["HALOCLINE_CONFIG"] = os.devnull
    return {**kept, **{f"HALOCLINE_{key}".upper(): str(value) for key, value in settings.items()}}


def _end(pid: int) -> None:
    """Kills a process that should be gone. Its number was ours a moment ago, and it is our supervisor's orphan."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes() if Path(f"/proc/{pid}/cmdline").exists() else b""
        if b"halocline.py" in words:
            os.kill(pid, signal.SIGKILL)

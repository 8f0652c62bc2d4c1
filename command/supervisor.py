"""Runs cached, engine and gateway as children of one process: starts, restarts, and stops them in order.

The life of an `up`: lock the state directory, try the port, start cached and engine, see to the demo key, start the
gateway, ask for one token, print `ready`; then start again what dies, until a signal; then stop gateway, engine and
cached in this order, so that each can finish what it owes to the one before it, and clear away sockets and the arena.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from command.children import Child, LogFile
from command.directories import Lock, prepare_directories
from command.errors import CommandError, Exit
from command.log_lines import warning_of
from command.ready import Address, Answered, NotYet, Wrong, claim_address, parse_address, probe, ready_text
from command.restarts import GiveUp, History, StartAgain, after_death, describe_code
from command.settings import Settings, check_arena

# In this order, and until when after the signal each may take; what one leaves over the next one has. Together under the
# ten seconds that Ctrl-C may take. The gateway drains for a second less than it is given.
STOP_ORDER = (("gateway", 5.5), ("engine", 8.0), ("cached", 9.3))
GATEWAY_DRAIN_S = 4.5
PROBE_PAUSE_S = 0.1
WRONG_ANSWERS_BEFORE_GIVING_UP = 20
LONGEST_STATUS_SILENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class UpRequest:
    """What `halocline up` was told: settings, and the flags that its children are given again."""

    settings: Settings
    command: tuple[str, ...]  # argv of `halocline`, to which a sub-command is appended
    child_flags: dict[str, tuple[str, ...]] = field(default_factory=dict)


def run_up(request: UpRequest) -> int:
    """Blocks until a signal or a failure; returns the exit code."""
    settings = request.settings
    _check_model(settings)
    if int(settings.engine.host_cache_size) > 0:
        check_arena(settings)
    prepare_directories(settings.paths)
    lock = Lock(settings.paths.up_lock)
    if not lock.try_acquire():
        raise CommandError(
            f"another `halocline up` (process {lock.holder()}) runs on {settings.paths.state}: stop it first, "
            f"or use another --state-dir",
            Exit.CONFLICT,
        )
    origin = settings.layered.origins["gateway", "listen"]
    address = claim_address(parse_address(settings.gateway.listen, origin))
    return asyncio.run(_Supervisor(request, address).run())


def _check_model(settings: Settings) -> None:
    model = Path(str(settings.engine.model_dir))
    if (model / "config.json").exists():
        return
    origin = settings.layered.origins["engine", "model_dir"]
    raise CommandError(
        f"engine.model_dir = '{model}' ({origin}) holds no model (no config.json): run `halocline fetch-model` "
        f"for the demo model, or name a directory in Hugging Face layout with --model DIR",
        Exit.NOT_FOUND,
    )


class _Supervisor:
    def __init__(self, request: UpRequest, address: Address) -> None:
        self._request = request
        self._settings = request.settings
        self._address = address
        self._children: dict[str, Child] = {}
        self._logs: dict[str, LogFile] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._failure: str | None = None
        self._all_ready = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        try:
            serving = asyncio.create_task(self._serve())
            stopping = asyncio.create_task(self._stop.wait())
            both: set[asyncio.Future[Any]] = {serving, stopping}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if serving.done() and not self._stop.is_set():
                serving.result()
                await self._stop.wait()
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
        finally:
            await self._shut_down()
        if self._failure is not None:
            raise CommandError(self._failure)
        return Exit.OK

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    # ── start ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _serve(self) -> None:
        self._settings.paths.gateway_address.write_text(f"{self._address}\n", encoding="ascii")
        self._settings.paths.served_model.write_text(f"{self._settings.engine.model_dir}\n", encoding="utf-8")
        if int(self._settings.engine.host_cache_size) > 0:
            self._keep("cached")
        self._keep("engine")
        key = await self._demo_key()
        self._keep("gateway")
        await self._wait_answered(key)
        self._all_ready = True
        model = str(self._settings.gateway.model_id)
        print(ready_text(self._address, self._settings.paths.demo_key, model), flush=True)  # noqa: T201

    def _keep(self, name: str) -> None:
        keeper = asyncio.create_task(self._keep_running(name), name=name)
        keeper.add_done_callback(self._on_keeper_done)
        self._keepers.append(keeper)

    def _on_keeper_done(self, keeper: asyncio.Task[None]) -> None:
        """A keeper ends by itself only when all stops; any other end would leave its process unwatched."""
        error = None if keeper.cancelled() else keeper.exception()
        if error is not None:
            self._failure = f"cannot run {keeper.get_name()}: {error}"
            self._stop.set()

    async def _keep_running(self, name: str) -> None:
        history = History()
        while not self._stop.is_set():
            child = self._start(name)
            code = await child.ended
            if self._stop.is_set():
                return
            match after_death(history, code, child.lived_s, child.ready.is_set() or self._all_ready):
                case GiveUp(reason):
                    self._failure = f"{name} {reason}.{self._last_words(child)}"
                    self._stop.set()
                case StartAgain(pause_s, history):
                    _say(name, f"ended with {describe_code(code)}; starting another in {pause_s:g} s")
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._stop.wait(), pause_s)

    def _start(self, name: str) -> Child:
        if name not in self._logs:
            self._logs[name] = LogFile(self._settings.paths.logs / f"{name}.log")
        environ = dict(os.environ)
        environ.pop("LISTEN_FDS", None)
        # The arena goes when `up` stops in order; after a crash of cached the next one finds its blocks in it.
        if self._is_default("cached", "keep_arena"):
            environ["HALOCLINE_CACHED_KEEP_ARENA"] = "false"
        if self._is_default("gateway", "drain_timeout_s"):
            environ["HALOCLINE_GATEWAY_DRAIN_TIMEOUT_S"] = str(GATEWAY_DRAIN_S)
        argv = [*self._request.command, name, "--state-dir", str(self._settings.paths.state)]
        if self._settings.config_file is not None:
            argv += ["--config", str(self._settings.config_file)]
        argv += self._request.child_flags.get(name, ())
        if name == "gateway":
            argv += ["--listen", str(self._address)]
        notify = self._settings.paths.run / f"notify-{name}.sock"
        child = Child(name, argv, environ, self._logs[name], notify, self._on_line)
        self._children[name] = child
        return child

    def _is_default(self, section: str, key: str) -> bool:
        return self._settings.layered.origins[section, key].startswith("default")

    def _on_line(self, name: str, line: bytes) -> None:
        warning = warning_of(line)
        if warning is not None:
            _say(name, warning)

    def _last_words(self, child: Child) -> str:
        log = self._settings.paths.logs / f"{child.name}.log"
        said = [line for line in child.last_lines if line.strip()][-8:]
        return "".join(f"\n  {line[:400]}" for line in said) + f"\n  (all of it in {log})"

    async def _demo_key(self) -> str:
        """The key in DIR/demo.key, by a short-lived child: the supervisor stays free of SQL and secrets' machinery."""
        argv = [*self._request.command, "demo-key", "--state-dir", str(self._settings.paths.state)]
        if self._settings.config_file is not None:
            argv += ["--config", str(self._settings.config_file)]
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            process_group=0,
        )
        try:
            _, said = await process.communicate()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        if process.returncode != 0:
            raise CommandError(f"cannot set up the demo tenant: {said.decode('utf-8', 'replace').strip()}")
        return self._settings.paths.demo_key.read_text(encoding="ascii").strip()

    async def _wait_answered(self, key: str) -> None:
        told, told_at, wrong = "", time.monotonic(), 0
        model = str(self._settings.gateway.model_id)
        while True:
            # All of them, also cached, which no answer depends on: a cached that cannot start is found out here.
            all_ready = all(child.ready.is_set() for child in self._children.values())
            outcome = await probe(self._address, key, model) if all_ready else NotYet("not all are ready")
            match outcome:
                case Answered():
                    return
                case Wrong(reason):
                    wrong += 1
                    if wrong >= WRONG_ANSWERS_BEFORE_GIVING_UP:
                        raise CommandError(f"the gateway runs, but a first request fails: {reason}")
                case NotYet():
                    wrong = 0
            waiting = [child for child in self._children.values() if not child.ready.is_set()]
            status = "; ".join(f"{child.name}: {child.status.removeprefix(f'{child.name}: ')}" for child in waiting)
            if status and status != told and time.monotonic() - told_at > LONGEST_STATUS_SILENCE_S:
                told, told_at = status, time.monotonic()
                _say("up", status)
            await asyncio.sleep(PROBE_PAUSE_S)

    # ── stop ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _shut_down(self) -> None:
        self._stop.set()
        began = time.monotonic()
        for name, ends_s in STOP_ORDER:
            child = self._children.get(name)
            if child is None or child.ended.done():
                continue
            child.signal(signal.SIGTERM)
            if not await self._wait_ended(child, began + ends_s - time.monotonic()):
                if not self._hurry.is_set():
                    _say(name, f"has not stopped {ends_s:g} s after the signal and is killed")
                child.kill_group()
                await child.ended
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for log in self._logs.values():
            log.close()
        self._clear_away()

    async def _wait_ended(self, child: Child, grace_s: float) -> bool:
        hurry = asyncio.create_task(self._hurry.wait())
        either: set[asyncio.Future[Any]] = {child.ended, hurry}
        try:
            await asyncio.wait(either, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurry.cancel()
        return child.ended.done()

    def _clear_away(self) -> None:
        """Sockets and, where it is of our naming, the arena: a killed child leaves both behind."""
        paths = self._settings.paths
        for name in ("gateway", "engine", "cached", "admin", "notify-gateway", "notify-engine", "notify-cached"):
            paths.socket(name).unlink(missing_ok=True)
        paths.gateway_address.unlink(missing_ok=True)
        paths.served_model.unlink(missing_ok=True)
        arena = Path(str(self._settings.cached.arena_dir))
        if arena == paths.arena and self._is_default("cached", "keep_arena"):
            shutil.rmtree(arena, ignore_errors=True)
        if paths.run != paths.state / "run":
            with contextlib.suppress(OSError):
                paths.run.rmdir()


def _say(name: str, text: str) -> None:
    print(f"{name} | {text}", file=sys.stderr, flush=True)  # noqa: T201


def this_command(script: str) -> tuple[str, ...]:
    """How a child runs the same `halocline` as this process."""
    return (sys.executable, os.path.abspath(script))

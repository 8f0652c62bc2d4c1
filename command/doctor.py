"""Checks the machine and the running processes, and says of everything that is wrong what to do about it.

Each check is a function that yields findings; none of them changes anything, and none waits longer than a second.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import socket
import stat
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import click

from command.directories import directory_problem
from command.errors import CommandError, Exit
from command.group import CommandContext
from command.machine import Machine, filesystem_type, free_bytes, probe_machine
from command.output import print_table
from command.ready import parse_address
from command.settings import Settings, show_bytes

ANSWER_WITHIN_S = 1.0
LEAST_FREE_DISK_BYTES = 2**30
LEAST_OPEN_FILES = 1024
# What the engine needs beside its pool: torch, a small model's weights and the work of a step.
ENGINE_BYTES = 3 * 2**29
OLDEST_PYTHON = (3, 11)

State = Literal["ok", "info", "wrong"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `advice` says what to do and is empty when there is nothing to do."""

    check: str
    state: State
    found: str
    advice: str = ""


def run_doctor(context: CommandContext, as_json: bool) -> int:
    """Prints the report; 1 when something is wrong."""
    findings = list(examine(context))
    wrong = sum(finding.state == "wrong" for finding in findings)
    if as_json:
        report = {"schema": "halocline.doctor.v1", "wrong": wrong, "findings": [asdict(f) for f in findings]}
        click.echo(json.dumps(report, indent=2))
    else:
        print_table(
            ("check", "state", "found", "what to do"), [(f.check, f.state, f.found, f.advice) for f in findings]
        )
    return Exit.FAILED if wrong else Exit.OK


def examine(context: CommandContext) -> Iterator[Finding]:
    """All findings; what depends on the settings is left out when these cannot be loaded."""
    machine = probe_machine()
    yield from check_python()
    yield from check_packages()
    try:
        settings = context.settings
    except CommandError as error:
        yield Finding("settings", "wrong", str(error), "correct the setting and run this again")
        return
    origin = str(settings.config_file) if settings.config_file else "no configuration file"
    yield Finding("settings", "ok", origin)
    yield from check_directories(settings)
    yield from check_disk(settings)
    yield from check_shared_memory(settings, machine)
    yield from check_memory(settings, machine)
    yield from check_open_files(settings, machine)
    yield from check_model(settings)
    yield from check_master_key(settings)
    yield from check_tenants(settings)
    yield from check_shares(settings, context.shares)
    yield from check_processes(settings)


def check_python() -> Iterator[Finding]:
    """The interpreter."""
    found = ".".join(map(str, sys.version_info[:3]))
    if tuple(sys.version_info) < OLDEST_PYTHON:
        yield Finding("python", "wrong", found, "install Python 3.11 or newer and remove .venv, then `make up`")
    else:
        yield Finding("python", "ok", f"{found} at {sys.executable}")


def check_packages() -> Iterator[Finding]:
    """Every requirement that pyproject.toml, or the installed distribution, names."""
    missing = [name for name in _requirements() if not _installed(name)]
    if missing:
        yield Finding(
            "packages", "wrong", f"missing: {', '.join(missing)}", "`make up` or `pip install -c constraints.txt -e .`"
        )
    else:
        yield Finding("packages", "ok", "all installed")


def _requirements() -> list[str]:
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    if pyproject.exists():
        lines = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        lines = [line for line in importlib.metadata.requires("halocline") or [] if "extra ==" not in line]
    return [re.split(r"[\s<>=!~;\[]", line, maxsplit=1)[0] for line in lines]


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def check_directories(settings: Settings) -> Iterator[Finding]:
    """Owner and mode of the state and socket directories."""
    for name, directory in (("state directory", settings.paths.state), ("socket directory", settings.paths.run)):
        if not directory.exists():
            yield Finding(name, "info", f"{directory} does not exist yet", "`halocline up` creates it")
            continue
        problem = directory_problem(directory)
        if problem is None:
            yield Finding(name, "ok", str(directory))
        elif os.getuid() == 0 and "belongs to user" in problem:
            yield Finding(name, "ok", f"{directory}, owned by user {directory.stat().st_uid}")
        else:
            yield Finding(name, "wrong", problem, "see left")


def check_disk(settings: Settings) -> Iterator[Finding]:
    """Room for the store and the logs."""
    free = free_bytes(settings.paths.state)
    if free < LEAST_FREE_DISK_BYTES:
        yield Finding("disk", "wrong", f"{show_bytes(free)} free", f"make room on the disk of {settings.paths.state}")
    else:
        yield Finding("disk", "ok", f"{show_bytes(free)} free")


def check_shared_memory(settings: Settings, machine: Machine) -> Iterator[Finding]:
    """Whether the arena fits on its tmpfs, beside what lies there already."""
    arena, size = Path(settings.cached.arena_dir), int(settings.cached.host_cache_size)
    kind = filesystem_type(arena)
    if kind != "tmpfs":
        yield Finding(
            "shared memory",
            "wrong",
            f"{arena} lies on {kind or 'an unknown file system'}",
            "set cached.arena_dir to a directory on tmpfs, such as one in /dev/shm",
        )
        return
    held = sum(file.stat().st_blocks * 512 for file in arena.glob("*")) if arena.is_dir() else 0
    free = free_bytes(arena) + held
    if size > free:
        yield Finding(
            "shared memory",
            "wrong",
            f"{show_bytes(free)} for an arena of {show_bytes(size)}",
            "set cached.host_cache_size lower, remove files from that tmpfs, or `mount -o remount,size=…` it",
        )
    else:
        yield Finding("shared memory", "ok", f"{show_bytes(free)} for an arena of {show_bytes(size)}")


def check_memory(settings: Settings, machine: Machine) -> Iterator[Finding]:
    """Whether arena, pool and engine fit into memory together."""
    pool = int(settings.engine.device_cache_size or 2**30)
    wanted = int(settings.cached.host_cache_size) + pool + ENGINE_BYTES
    found = f"{show_bytes(machine.memory)}; arena, pool and a small model take about {show_bytes(wanted)}"
    if machine.memory and wanted > machine.memory:
        yield Finding("memory", "wrong", found, "set cached.host_cache_size or engine.device_cache_size lower")
    else:
        yield Finding("memory", "ok", found)


def check_open_files(settings: Settings, machine: Machine) -> Iterator[Finding]:
    """The limit of open files against the connections that the gateway may be asked to hold."""
    wanted = max(LEAST_OPEN_FILES, int(settings.gateway.max_connections) + 128)
    if machine.open_files < wanted:
        yield Finding(
            "open files",
            "info",
            f"limit {machine.open_files}, gateway.max_connections = {settings.gateway.max_connections}",
            f"`ulimit -n {wanted}` before the start, if that many clients come",
        )
    else:
        yield Finding("open files", "ok", f"limit {machine.open_files}")


def check_model(settings: Settings) -> Iterator[Finding]:
    """Whether there is a model to serve: the one that a running `up` serves, else the one that is set."""
    noted = settings.paths.served_model
    model = Path(noted.read_text(encoding="utf-8").rstrip("\n") if noted.exists() else settings.engine.model_dir)
    if not (model / "config.json").exists():
        yield Finding(
            "model", "wrong", f"no config.json in {model}", "`halocline fetch-model`, or set engine.model_dir"
        )
    else:
        yield Finding("model", "ok", str(model))


def check_master_key(settings: Settings) -> Iterator[Finding]:
    """The mode of the master key; its content is not read."""
    file = Path(settings.tenants.master_key_file)
    try:
        found = file.stat()
    except FileNotFoundError:
        yield Finding("master key", "info", f"{file} does not exist yet", "the first command that needs it creates it")
        return
    except PermissionError:
        yield Finding("master key", "wrong", f"{file} cannot be reached", "run this as the user of the gateway")
        return
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077 and not os.environ.get("CREDENTIALS_DIRECTORY"):
        yield Finding("master key", "wrong", f"{file} has mode {mode:04o}", f"chmod 600 {file}")
    else:
        yield Finding("master key", "ok", f"{file}, mode {mode:04o}")


def check_tenants(settings: Settings) -> Iterator[Finding]:
    """Whether the tenant store opens with its key. A store that is not there yet is not created."""
    url = settings.tenants.url
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).exists():
        yield Finding(
            "tenant store", "info", "does not exist yet", "`halocline up` or `halocline tenant create` makes it"
        )
        return
    from tenants.store import open_store

    try:
        with open_store(url, settings.tenants.master_key_file) as store:
            tenants = store.list_tenants()
            store.snapshot()
    except Exception as error:  # Whatever stops it is the finding.
        yield Finding(
            "tenant store", "wrong", f"cannot be opened: {error}", "restore the store and its master key together"
        )
        return
    yield Finding("tenant store", "ok", f"{len(tenants)} tenants")


def check_shares(settings: Settings, shares: Callable[[], tuple[int, int] | None]) -> Iterator[Finding]:
    """Whether the shares that tenants were given fit into the host tier as it is set, and are those that it has in force."""
    from cached.observer import TierObserver
    from cached.shares import trouble_of

    url = settings.tenants.url
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).exists():
        return
    found = shares()
    if found is None or found[0] == 0:
        return
    version, floors_bytes = found
    size = int(settings.cached.host_cache_size)
    if floors_bytes > size:
        yield Finding(
            "shares",
            "wrong",
            f"floors of {show_bytes(floors_bytes)} together in a host tier of {show_bytes(size)}: it refuses all shares",
            "lower a floor with `halocline tenant share`, or raise cached.host_cache_size and restart cached",
        )
        return
    observer = TierObserver(settings.cached.socket, ANSWER_WITHIN_S)
    try:
        tier: Mapping[str, Any] | None = observer.stats()
    finally:
        observer.close()
    if tier is None or not tier["capacity_slots"]:
        yield Finding(
            "shares", "ok", f"version {version}, floors of {show_bytes(floors_bytes)}; no tier in use has them yet"
        )
        return
    trouble = trouble_of(version, floors_bytes, tier["shares_version"], tier["capacity_bytes"])
    if trouble is None:
        yield Finding("shares", "ok", f"version {version} in force, floors of {show_bytes(floors_bytes)}")
    else:
        yield Finding("shares", "wrong", trouble, "see left")


def check_processes(settings: Settings) -> Iterator[Finding]:
    """Who answers on the sockets."""
    sockets = {"cached": Path(settings.cached.socket), "engine": Path(settings.engine.socket)}
    running = {name: _accepts(path) for name, path in sockets.items()}
    for name, path in sockets.items():
        match running[name]:
            case "yes":
                yield Finding(name, "ok", f"accepts on {path}")
            case "denied":
                yield Finding(
                    name, "wrong", f"{path} may not be opened", f"run this as the user of {name} or in its group"
                )
            case "stale":
                yield Finding(
                    name, "wrong", f"{path} is there, nobody accepts on it", f"start {name}, or remove the socket"
                )
            case _:
                yield Finding(name, "info", "is not running", "`halocline up`, or `systemctl start halocline.target`")
    yield from _check_gateway(settings)


def _accepts(path: Path) -> str:
    if not path.exists():
        return "no"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
        tried.settimeout(ANSWER_WITHIN_S)
        try:
            tried.connect(str(path))
        except PermissionError:
            return "denied"
        except OSError:
            return "stale"
    return "yes"


def _check_gateway(settings: Settings) -> Iterator[Finding]:
    noted = settings.paths.gateway_address
    listen = noted.read_text(encoding="ascii").strip() if noted.exists() else settings.gateway.listen
    address = parse_address(listen, settings.layered.origins["gateway", "listen"])
    try:
        status, answer = _get(address.connect_host, address.port, "/readyz")
    except OSError:
        yield Finding(
            "gateway", "info", f"nobody answers on {listen}", "`halocline up`, or `systemctl start halocline.target`"
        )
        return
    except ValueError:
        yield Finding(
            "gateway", "wrong", f"another server answers on {listen}", "choose another port with gateway.listen"
        )
        return
    if status == 200:
        yield Finding("gateway", "ok", f"answers on {listen}")
        yield Finding("readiness", "ok", answer)
        if '"absent"' in answer:
            yield Finding(
                "host tier", "wrong", "the engine works without it", "see DIR/logs/cached.log, or start cached"
            )
    else:
        yield Finding("readiness", "wrong", f"{listen} answers {status}: {answer}", "see DIR/logs/engine.log")


def _get(host: str, port: int, path: str) -> tuple[int, str]:
    with socket.create_connection((host, port), ANSWER_WITHIN_S) as connection:
        connection.settimeout(ANSWER_WITHIN_S)
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        data = b""
        while len(data) < 65536 and (more := connection.recv(65536)):
            data += more
    head, _, body = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/"):
        raise ValueError("not HTTP")
    return int(head.split(b" ", 2)[1]), " ".join(body.decode("utf-8", "replace").split())[:300]

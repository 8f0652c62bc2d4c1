"""Loads the settings of all four packages, once, for one command: flags, environment, file, derived values.

What is legal is said by each package's own model; how layers lie over each other is `command/layers.py`. Here the
file is read, and what follows from the state directory and the machine is filled in. No other module reads a setting
from the environment.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel

from command.errors import CommandError, Exit, SettingsError
from command.layers import (
    Layer,
    Layered,
    Value,
    check,
    layer_of_document,
    layer_of_environment,
    overlay,
)
from command.machine import Machine, filesystem_type, probe_machine
from command.paths import MAX_SOCKET_PATH_BYTES, Paths, default_config_file, default_state_dir, derive_paths

if TYPE_CHECKING:
    from cached.config import CachedConfig
    from engine.config import EngineConfig
    from gateway.config import GatewayConfig
    from tenants.config import TenantsConfig

GIB = 2**30
MIB = 2**20
HOST_CACHE_SIZE = 2 * GIB


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line said; None and empty mean not said."""

    state_dir: str | None = None
    config: str | None = None
    values: tuple[tuple[str, str, Any, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a command may need to know, checked."""

    paths: Paths
    state_dir_origin: str
    config_file: Path | None
    layered: Layered

    @property
    def gateway(self) -> GatewayConfig:
        return cast("GatewayConfig", self.layered.models["gateway"])

    @property
    def engine(self) -> EngineConfig:
        return cast("EngineConfig", self.layered.models["engine"])

    @property
    def cached(self) -> CachedConfig:
        return cast("CachedConfig", self.layered.models["cached"])

    @property
    def tenants(self) -> TenantsConfig:
        return cast("TenantsConfig", self.layered.models["tenants"])

    def rows(self) -> list[tuple[str, Any, str]]:
        """Key, value and origin of every setting."""
        return [("state_dir", str(self.paths.state), self.state_dir_origin), *self.layered.rows()]


def package_sections() -> dict[str, type[BaseModel]]:
    """The model of each table of the configuration file."""
    from cached.config import CachedConfig
    from engine.config import EngineConfig
    from gateway.config import GatewayConfig
    from tenants.config import TenantsConfig

    return {"gateway": GatewayConfig, "engine": EngineConfig, "cached": CachedConfig, "tenants": TenantsConfig}


def load_settings(
    flags: Flags,
    environ: Mapping[str, str] | None = None,
    machine: Machine | None = None,
    sections: Mapping[str, type[BaseModel]] | None = None,
) -> Settings:
    """All settings, or SettingsError about the first that is unknown or illegal."""
    environ = os.environ if environ is None else environ
    machine = machine or probe_machine()
    sections = sections or package_sections()
    home = Path(environ.get("HOME") or "~").expanduser()
    file, document = _read_file(flags, environ, home, machine.uid)
    from_file, file_state_dir = layer_of_document(document, str(file), sections)
    state, origin = _state_dir(flags, environ, home, file_state_dir)
    paths = derive_paths(state, environ, machine.uid)
    from_flags: Layer = {(s, k): Value(v, origin) for s, k, v, origin in flags.values}
    said = overlay([from_flags, layer_of_environment(environ, sections), _master_key(environ), from_file])
    layer = _with_derived(said, paths, machine, sections)
    _check_sockets(layer)
    return Settings(paths, origin, file, check(layer, sections))


def _read_file(flags: Flags, environ: Mapping[str, str], home: Path, uid: int) -> tuple[Path | None, Mapping[str, Any]]:
    named, origin = flags.config, "--config"
    if named is None and environ.get("HALOCLINE_CONFIG"):
        named, origin = environ["HALOCLINE_CONFIG"], "environment HALOCLINE_CONFIG"
    file = Path(named).expanduser().absolute() if named is not None else default_config_file(environ, home, uid)
    try:
        return file, tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if named is None:
            return None, {}
        raise SettingsError(f"there is no configuration file {file} ({origin})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file} is not TOML: {error}") from None
    except OSError as error:
        raise CommandError(f"cannot read the configuration file {file}: {error.strerror}", Exit.PERMISSION) from None


def _state_dir(flags: Flags, environ: Mapping[str, str], home: Path, from_file: Value | None) -> tuple[Path, str]:
    if flags.state_dir is not None:
        return Path(flags.state_dir).expanduser().absolute(), "--state-dir"
    if environ.get("HALOCLINE_STATE_DIR"):
        return Path(environ["HALOCLINE_STATE_DIR"]).expanduser().absolute(), "environment HALOCLINE_STATE_DIR"
    if from_file is not None:
        return Path(from_file.raw), from_file.origin
    return default_state_dir(environ, home), "default"


def _master_key(environ: Mapping[str, str]) -> Layer:
    """HALOCLINE_MASTER_KEY_FILE, or the credential that systemd hands in: for the store and the gateway alike."""
    file, origin = environ.get("HALOCLINE_MASTER_KEY_FILE"), "environment HALOCLINE_MASTER_KEY_FILE"
    if not file and environ.get("CREDENTIALS_DIRECTORY"):
        # A directory that may not be entered counts as holding one: who reads the key then says what is wrong.
        credential = Path(environ["CREDENTIALS_DIRECTORY"]) / "master.key"
        if os.path.lexists(credential) or not os.access(credential.parent, os.X_OK):
            file, origin = str(credential), "systemd credential master.key"
    if not file:
        return {}
    value = Value(str(Path(file).expanduser().absolute()), origin)
    return {("tenants", "master_key_file"): value, ("gateway", "master_key_file"): value}


def _with_derived(said: Layer, paths: Paths, machine: Machine, sections: Mapping[str, type[BaseModel]]) -> Layer:
    """`said` and, below it, what follows from the state directory, the machine and other settings, in this order."""
    layer = dict(said)

    def derive(section: str, key: str, raw: Any, origin: str) -> None:
        if key in sections[section].model_fields:
            layer.setdefault((section, key), Value(raw, origin))

    def follow(section: str, key: str, other_section: str, other_key: str) -> None:
        other = layer.get((other_section, other_key))
        if other is not None:
            derive(section, key, other.raw, f"{other_section}.{other_key} ({other.origin})")

    size, why = default_host_cache_size(machine)
    derive("cached", "socket", str(paths.socket("cached")), "default, from state_dir")
    derive("cached", "arena_dir", str(paths.arena), "default, from state_dir")
    derive("cached", "host_cache_size", size, why)
    derive("tenants", "url", paths.tenants_url, "default, from state_dir")
    derive("tenants", "master_key_file", str(paths.master_key), "default, from state_dir")
    derive("engine", "socket", str(paths.socket("engine")), "default, from state_dir")
    derive("engine", "model_dir", str(paths.demo_model), "default, from state_dir")
    derive("engine", "state_dir", str(paths.state), "default, from state_dir")
    follow("engine", "cached_socket", "cached", "socket")
    follow("engine", "host_cache_size", "cached", "host_cache_size")
    derive("gateway", "admin_listen", f"unix:{paths.socket('admin')}", "default, from state_dir")
    follow("gateway", "engine_socket", "engine", "socket")
    follow("gateway", "tenants_url", "tenants", "url")
    follow("gateway", "master_key_file", "tenants", "master_key_file")
    follow("gateway", "model_id", "engine", "model_id")
    return layer


def default_host_cache_size(machine: Machine) -> tuple[int, str]:
    """2 GiB, or less where /dev/shm or memory is small: half of the one, a quarter of the other.

    Total sizes, not free ones, so that every process of an installation arrives at the same figure.
    """
    size, why = HOST_CACHE_SIZE, "default"
    if machine.shared_memory and machine.shared_memory // 2 < size:
        size, why = machine.shared_memory // 2, f"default, half of /dev/shm's {show_bytes(machine.shared_memory)}"
    if machine.memory and machine.memory // 4 < size:
        size, why = machine.memory // 4, f"default, a quarter of {show_bytes(machine.memory)} of memory"
    return size - size % MIB, why


def check_arena(settings: Settings) -> None:
    """Raises SettingsError unless the arena fits where it is to lie: checked where a daemon is about to start."""
    arena = Path(str(settings.cached.arena_dir))
    origin = settings.layered.origins["cached", "arena_dir"]
    kind = filesystem_type(arena)
    if kind != "tmpfs":
        raise SettingsError(
            f"cached.arena_dir = '{arena}' ({origin}) lies on {kind or 'an unknown file system'}: legal is a directory "
            f"on tmpfs, such as one in /dev/shm; on anything else every block would be written to a disk"
        )
    size = int(settings.cached.host_cache_size)
    told = os.statvfs(next(p for p in (arena, *arena.parents) if p.exists()))
    total = told.f_blocks * told.f_frsize
    if size > total:
        raise SettingsError(
            f"cached.host_cache_size = {show_bytes(size)} ({settings.layered.origins['cached', 'host_cache_size']}) is "
            f"more than the {show_bytes(total)} of the tmpfs at {arena}: set it lower, or enlarge that tmpfs"
        )


def _check_sockets(layer: Layer) -> None:
    for (section, key), value in layer.items():
        is_socket = key in ("socket", "engine_socket", "cached_socket") or (
            isinstance(value.raw, str) and key.endswith("listen") and value.raw.startswith("unix:")
        )
        path = str(value.raw).removeprefix("unix:")
        if is_socket and len(path.encode()) > MAX_SOCKET_PATH_BYTES:
            raise SettingsError(
                f"{section}.{key} = {path!r} ({value.origin}) has {len(path.encode())} bytes: legal are at most "
                f"{MAX_SOCKET_PATH_BYTES}, the kernel's limit for a unix socket"
            )


def show_bytes(size: int) -> str:
    """A size as people say it."""
    for unit, bytes_per_unit in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if size >= bytes_per_unit:
            return f"{size / bytes_per_unit:.1f} {unit}".replace(".0 ", " ")
    return f"{size} bytes"

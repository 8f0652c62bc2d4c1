"""What is derived when nothing is said, and where the settings are looked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from command.errors import SettingsError
from command.machine import Machine
from command.paths import MAX_SOCKET_PATH_BYTES, default_config_file, default_state_dir, derive_paths
from command.settings import Flags, Settings, default_host_cache_size, load_settings, show_bytes

GIB = 2**30


def machine(memory: int = 64 * GIB, shared_memory: int = 32 * GIB, uid: int = 1000) -> Machine:
    return Machine(memory, shared_memory, shared_memory, 65536, uid)


def load(tmp_path: Path, toml: str = "", flags: Flags = Flags(), **environ: str) -> Settings:  # noqa: B008
    file = tmp_path / "config.toml"
    file.write_text(toml)
    return load_settings(flags, {"HOME": str(tmp_path), "HALOCLINE_CONFIG": str(file), **environ}, machine())


def test_the_state_dir_comes_from_flag_then_environment_then_file_then_xdg(tmp_path: Path) -> None:
    toml = 'state_dir = "/from/file"'

    by_flag = load(tmp_path, toml, Flags(state_dir="/from/flag"), HALOCLINE_STATE_DIR="/from/env")
    by_environment = load(tmp_path, toml, HALOCLINE_STATE_DIR="/from/env")
    by_file = load(tmp_path, toml)
    by_default = load(tmp_path, XDG_STATE_HOME="/xdg")

    states = [str(s.paths.state) for s in (by_flag, by_environment, by_file, by_default)]
    assert states == ["/from/flag", "/from/env", "/from/file", "/xdg/halocline"]


def test_sockets_follow_the_state_dir_and_both_ends_agree(tmp_path: Path) -> None:
    settings = load(tmp_path, HALOCLINE_STATE_DIR="/s")

    assert str(settings.engine.socket) == str(settings.gateway.engine_socket) == "/s/run/engine.sock"
    assert str(settings.cached.socket) == str(settings.engine.cached_socket) == "/s/run/cached.sock"
    assert settings.gateway.tenants_url == settings.tenants.url == "sqlite:////s/tenants.db"


def test_what_is_said_of_one_end_holds_for_the_other(tmp_path: Path) -> None:
    settings = load(tmp_path, '[engine]\nsocket = "/e.sock"\nmodel_id = "qwen"\n[cached]\nhost_cache_size = "3GiB"\n')

    assert str(settings.gateway.engine_socket) == "/e.sock"
    assert settings.gateway.model_id == "qwen"
    assert int(settings.engine.host_cache_size) == 3 * GIB


def test_a_long_state_dir_puts_the_sockets_into_a_short_directory_of_the_same_user(tmp_path: Path) -> None:
    state = Path("/" + "long/" * 30)

    with_runtime_dir = derive_paths(state, {"XDG_RUNTIME_DIR": "/run/user/1000"}, 1000)
    without = derive_paths(state, {}, 1000)

    assert str(with_runtime_dir.run).startswith("/run/user/1000/halocline-")
    assert str(without.run).startswith("/tmp/halocline-1000-")
    assert len(str(without.socket("notify-gateway"))) <= MAX_SOCKET_PATH_BYTES
    assert derive_paths(state, {}, 1000) == without


def test_a_socket_path_that_the_kernel_cannot_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"engine.socket = .* bytes"):
        load(tmp_path, HALOCLINE_ENGINE_SOCKET="/" + "x" * 120)


def test_the_host_cache_is_two_gib_unless_the_machine_is_small() -> None:
    assert default_host_cache_size(machine()) == (2 * GIB, "default")
    size, why = default_host_cache_size(machine(shared_memory=64 * 2**20))
    assert (size, "half of /dev/shm's 64 MiB" in why) == (32 * 2**20, True)
    size, why = default_host_cache_size(machine(memory=4 * GIB))
    assert (size, "a quarter of 4 GiB" in why) == (GIB, True)


def test_the_master_key_may_be_named_or_handed_over_by_systemd(tmp_path: Path) -> None:
    (tmp_path / "master.key").write_bytes(os.urandom(32))

    named = load(tmp_path, HALOCLINE_MASTER_KEY_FILE="/k", CREDENTIALS_DIRECTORY=str(tmp_path))
    credential = load(tmp_path, CREDENTIALS_DIRECTORY=str(tmp_path))
    neither = load(tmp_path, HALOCLINE_STATE_DIR="/s")

    for settings, file in ((named, "/k"), (credential, str(tmp_path / "master.key")), (neither, "/s/master.key")):
        assert str(settings.tenants.master_key_file) == str(settings.gateway.master_key_file) == file


def test_a_named_configuration_file_has_to_be_there_and_to_be_toml(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="there is no configuration file /nowhere"):
        load_settings(Flags(config="/nowhere"), {"HOME": str(tmp_path)}, machine())
    with pytest.raises(SettingsError, match="is not TOML"):
        load(tmp_path, "[engine\n")


def test_defaults_of_places_follow_xdg_and_ignore_relative_values() -> None:
    home = Path("/h")

    assert default_state_dir({"XDG_STATE_HOME": "relative"}, home) == Path("/h/.local/state/halocline")
    assert default_config_file({}, home, 1000) == Path("/h/.config/halocline/config.toml")
    assert default_config_file({"XDG_CONFIG_HOME": "/c"}, home, 1000) == Path("/c/halocline/config.toml")
    assert default_config_file({}, home, 0) == Path("/etc/halocline/config.toml")


@pytest.mark.parametrize(("size", "text"), [(5, "5 bytes"), (1536, "1.5 KiB"), (2 * GIB, "2 GiB")])
def test_sizes_read_as_people_say_them(size: int, text: str) -> None:
    assert show_bytes(size) == text

"""The command line: help, flags anywhere, exit codes, and files with the right modes."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import halocline
from command.demo_key import ensure_demo_key
from command.directories import Lock, make_private
from command.errors import MEANINGS, CommandError, Exit, SettingsError
from command.group import CommandContext
from command.ready import Address, claim_address, parse_address, ready_text
from command.settings import Flags, load_settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith("HALOCLINE_") or n.startswith("XDG_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def short_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="hl-cli-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def all_commands() -> list[list[str]]:
    def walk(command: click.Command, words: list[str], ctx: click.Context) -> Iterator[list[str]]:
        yield words
        if isinstance(command, click.Group):
            for name in command.list_commands(ctx):
                child = command.get_command(ctx, name)
                if child is not None and not child.hidden:
                    yield from walk(child, [*words, name], click.Context(child, parent=ctx))

    return list(walk(halocline.cli, [], click.Context(halocline.cli, obj=CommandContext())))


@pytest.mark.parametrize("words", all_commands(), ids=" ".join)
def test_every_command_has_help_that_documents_the_state_dir(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = halocline.run([*words, "--help"])

    text = capsys.readouterr().out
    assert code == 0
    assert "--state-dir" in text
    assert len(text.splitlines()) > 5


def test_the_commands_of_the_tree_are_these() -> None:
    found = {" ".join(words) for words in all_commands()}

    assert {
        "up", "gateway", "engine", "cached", "fetch-model", "doctor", "config show", "cache stats",
        "tenant create", "tenant list", "tenant show", "tenant suspend", "tenant resume", "tenant delete",
        "key create", "key list", "key revoke",
    } <= found  # fmt: skip


@pytest.mark.parametrize(
    "argv",
    [
        ["--state-dir", "{dir}", "config", "show", "--json"],
        ["config", "--state-dir", "{dir}", "show", "--json"],
        ["config", "show", "--json", "--state-dir", "{dir}"],
    ],
)
def test_the_state_dir_may_stand_anywhere(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = halocline.run([word.format(dir=tmp_path / "s") for word in argv])

    shown = json.loads(capsys.readouterr().out)
    assert code == 0
    assert shown["settings"]["state_dir"] == {"value": str(tmp_path / "s"), "origin": "--state-dir"}


def test_the_state_dir_works_for_commands_of_other_packages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert halocline.run(["tenant", "create", "acme", "--state-dir", str(tmp_path / "s")]) == 0
    capsys.readouterr()

    code = halocline.run(["--state-dir", str(tmp_path / "s"), "key", "create", "acme"])

    out = capsys.readouterr().out
    assert code == 0
    assert out.startswith("hl_live_")
    assert len(out.split()) == 1
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700


def test_a_mistyped_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code = halocline.run(["docter"])

    assert code == Exit.USAGE
    assert "Did you mean doctor" in capsys.readouterr().err


def test_a_mistyped_command_of_another_package_too(capsys: pytest.CaptureFixture[str]) -> None:
    code = halocline.run(["tenant", "creat", "x"])

    assert code == Exit.USAGE
    assert "create" in capsys.readouterr().err


def test_a_wrong_setting_ends_every_command_with_its_own_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HALOCLINE_ENGINE_TOKENS_PER_BLOCK", "17")

    codes = [halocline.run(argv) for argv in (["up"], ["config", "show"], ["tenant", "list"], ["cached"])]

    assert codes == [Exit.INVALID] * 4
    assert "engine.tokens_per_block = '17' (environment HALOCLINE_ENGINE_TOKENS_PER_BLOCK)" in capsys.readouterr().err


def test_up_without_a_model_says_how_to_get_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = halocline.run(["up", "--state-dir", str(tmp_path / "s")])

    assert code == Exit.NOT_FOUND
    assert "halocline fetch-model" in capsys.readouterr().err


def test_an_arena_that_is_not_on_tmpfs_or_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALOCLINE_CACHED_HOST_CACHE_SIZE", "100000GiB")
    assert halocline.run(["cached", "--state-dir", str(tmp_path / "s")]) == Exit.INVALID
    assert "cached.host_cache_size" in capsys.readouterr().err

    monkeypatch.setenv("HALOCLINE_CACHED_ARENA_DIR", "/proc/arena")
    assert halocline.run(["cached", "--state-dir", str(tmp_path / "s")]) == Exit.INVALID
    assert "tmpfs" in capsys.readouterr().err


def test_the_version_is_the_one_of_the_project(capsys: pytest.CaptureFixture[str]) -> None:
    import tomllib

    halocline.run(["--version"])

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] in capsys.readouterr().out


def test_exit_codes_are_in_the_help_and_in_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    halocline.run(["--help"])
    shown = capsys.readouterr().out
    page = (ROOT / "docs" / "cli.md").read_text()

    assert [code for code, meaning in MEANINGS.items() if meaning not in shown] == []
    assert [code for code, meaning in MEANINGS.items() if f"| {code.value} | {meaning} |" not in page] == []


def test_the_demo_key_is_private_kept_while_it_works_and_replaced_when_it_does_not(tmp_path: Path) -> None:
    from tenants.keys import parse_key
    from tenants.store import open_store

    settings = load_settings(Flags(state_dir=str(tmp_path / "s")), environ={"HOME": str(tmp_path)})
    make_private(settings.paths.state)
    first = ensure_demo_key(settings).read_text()
    kept = ensure_demo_key(settings).read_text()
    parsed = parse_key(first.strip())
    assert parsed is not None
    with open_store(settings.tenants.url, settings.tenants.master_key_file) as store:
        store.revoke_key(parsed.public_id, 1.0)

    replaced = ensure_demo_key(settings).read_text()

    assert kept == first
    assert replaced != first
    assert stat.S_IMODE(settings.paths.demo_key.stat().st_mode) == 0o600


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)

    with pytest.raises(CommandError, match="others may write to"):
        make_private(shared)


def test_a_lock_is_held_once_and_names_its_holder(tmp_path: Path) -> None:
    first, second = Lock(tmp_path / "l"), Lock(tmp_path / "l")

    assert first.try_acquire()
    assert not second.try_acquire()
    assert second.holder() == str(os.getpid())
    first.release()
    assert second.try_acquire()
    second.release()


@pytest.mark.parametrize("text", ["8080", "host:", ":80", "h:99999", "h:x", ""])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="HOST:PORT"):
        parse_address(text, "--listen")


def test_a_free_port_is_found_and_wildcards_are_printed_as_loopback() -> None:
    assert claim_address(Address("127.0.0.1", 0)).port > 0
    assert Address("0.0.0.0", 80).url == "http://127.0.0.1:80"
    assert Address("::1", 80).url == "http://[::1]:80"


def test_the_ready_text_survives_a_state_dir_with_blanks_and_quotes() -> None:
    text = ready_text(Address("127.0.0.1", 1), Path("/a b/it's/demo.key"), "demo")

    compile("\n".join(text.splitlines()[4:]), "pasted", "exec")
    assert """$(cat '/a b/it'"'"'s/demo.key')""" in text

"""What `halocline doctor` looks at."""

from __future__ import annotations

from pathlib import Path

from command.doctor import Finding, check_model, check_shares
from command.machine import Machine
from command.settings import Flags, Settings, load_settings
from tests.support.cached_daemon import Daemon, daemon_directory

GIB = 2**30


def settings_in(state: Path, **more: str) -> Settings:
    environ = {"HOME": str(state), "HALOCLINE_STATE_DIR": str(state / "s"), **more}
    return load_settings(Flags(), environ, Machine(64 * GIB, 32 * GIB, 32 * GIB, 65536, 1000))


def test_the_model_that_a_running_up_was_given_by_flag_is_the_one_that_is_looked_at(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    model = tmp_path / "a model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    settings.paths.served_model.parent.mkdir(parents=True)
    settings.paths.served_model.write_text(f"{model}\n", encoding="utf-8")

    [finding] = check_model(settings)

    assert (finding.state, finding.found) == ("ok", str(model))


def test_without_a_running_up_the_model_that_is_set_is_looked_at(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)

    [finding] = check_model(settings)

    assert finding.state == "wrong"
    assert str(settings.engine.model_dir) in finding.found


def findings_of_shares(tmp_path: Path, set_shares: tuple[int, int] | None) -> list[Finding]:
    settings = settings_in(tmp_path)
    store = Path(settings.tenants.url.removeprefix("sqlite:///"))
    store.parent.mkdir(parents=True)
    store.touch()
    return list(check_shares(settings, lambda: set_shares))


def test_floors_that_do_not_fit_into_the_tier_are_wrong_before_any_daemon_refuses_them(tmp_path: Path) -> None:
    [finding] = findings_of_shares(tmp_path, (7, 10**15))

    assert (finding.check, finding.state) == ("shares", "wrong")
    assert "halocline tenant share" in finding.advice


def test_shares_that_fit_are_well_without_a_daemon_and_none_are_nothing_to_tell(tmp_path: Path) -> None:
    assert findings_of_shares(tmp_path / "a", (0, 0)) == findings_of_shares(tmp_path / "b", None) == []

    [finding] = findings_of_shares(tmp_path / "c", (7, GIB))

    assert (finding.state, "1 GiB" in finding.found) == ("ok", True)


def test_shares_that_a_running_daemon_does_not_have_in_force_are_wrong(tmp_path: Path) -> None:
    with daemon_directory() as directory:
        daemon = Daemon(directory)
        daemon.start()
        client = daemon.client()
        assert client.set_owners(3, []) == "taken"
        settings = settings_in(tmp_path, HALOCLINE_CACHED_SOCKET=str(daemon.socket))
        store = Path(settings.tenants.url.removeprefix("sqlite:///"))
        store.parent.mkdir(parents=True)
        store.touch()

        [well] = check_shares(settings, lambda: (3, 0))
        [late] = check_shares(settings, lambda: (4, 0))
        daemon.close()

    assert (well.state, late.state) == ("ok", "wrong")
    assert "has shares of version 4 and the host tier has 3" in late.found

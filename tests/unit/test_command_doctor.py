"""What `halocline doctor` looks at."""

from __future__ import annotations

from pathlib import Path

from command.doctor import check_model
from command.machine import Machine
from command.settings import Flags, Settings, load_settings

GIB = 2**30


def settings_in(state: Path) -> Settings:
    environ = {"HOME": str(state), "HALOCLINE_STATE_DIR": str(state / "s")}
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

"""Settings laid over each other: which wins, what is refused, and how it is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ByteSize, ConfigDict, Field

from command.errors import SettingsError
from command.layers import Layered, Value, check, layer_of_document, layer_of_environment, overlay


class Oven(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    heat: int = Field(default=180, ge=50, le=300, description="Degrees of the oven.")
    size: ByteSize = ByteSize(1024)
    racks: tuple[str, ...] = ()
    timer_s: float | None = 60.0
    door_secret: str = ""
    url: str = ""


SECTIONS = {"oven": Oven}


def layered(environ: dict[str, str] | None = None, document: dict[str, Any] | None = None) -> Layered:
    from_file, _ = layer_of_document(document or {}, "kitchen.toml", SECTIONS)
    return check(overlay([layer_of_environment(environ or {}, SECTIONS), from_file]), SECTIONS)


def value_of(found: Layered, key: str) -> Any:
    return next(value for name, value, _ in found.rows() if name == f"oven.{key}")


def origin_of(found: Layered, key: str) -> str:
    return found.origins["oven", key]


def test_the_environment_wins_over_the_file_and_the_file_over_the_default() -> None:
    found = layered({"HALOCLINE_OVEN_HEAT": "200"}, {"oven": {"heat": 210, "size": "2KiB"}})

    assert (value_of(found, "heat"), origin_of(found, "heat")) == (200, "environment HALOCLINE_OVEN_HEAT")
    assert (value_of(found, "size"), origin_of(found, "size")) == (2048, "kitchen.toml: [oven]")
    assert (value_of(found, "timer_s"), origin_of(found, "timer_s")) == (60.0, "default")


def test_a_flag_wins_over_everything() -> None:
    flags = {("oven", "heat"): Value("90", "--heat")}
    environment = layer_of_environment({"HALOCLINE_OVEN_HEAT": "200"}, SECTIONS)

    found = check(overlay([flags, environment]), SECTIONS)

    assert (value_of(found, "heat"), origin_of(found, "heat")) == (90, "--heat")


def test_an_unknown_variable_is_refused_with_the_nearest_legal_one() -> None:
    with pytest.raises(SettingsError) as refused:
        layered({"HALOCLINE_OVEN_HAET": "200"})

    for part in ("HALOCLINE_OVEN_HAET", "'200'", "did you mean HALOCLINE_OVEN_HEAT", "legal are"):
        assert part in str(refused.value)


def test_variables_of_the_command_itself_and_of_tests_are_not_unknown() -> None:
    layered({"HALOCLINE_STATE_DIR": "/x", "HALOCLINE_CONFIG": "/y", "HALOCLINE_TEST_MODEL": "/z", "HOME": "/h"})


@pytest.mark.parametrize(
    ("document", "parts"),
    [
        ({"oven": {"haet": 200}}, ["oven.haet", "200", "kitchen.toml", "did you mean heat", "legal in [oven]"]),
        ({"ovne": {"heat": 200}}, ["'ovne'", "did you mean oven", "[oven]"]),
        ({"oven": 3}, ["oven = 3", "a table [oven]"]),
        ({"state_dir": "relative"}, ["state_dir = 'relative'", "absolute path"]),
        ({"oven": {"heat": 301}}, ["oven.heat = 301", "kitchen.toml", "less than or equal to 300", "Degrees of the oven."]),
        ({"oven": {"heat": "hot"}}, ["oven.heat = 'hot'", "legal is a valid integer"]),
        ({"oven": {"size": "many"}}, ["oven.size = 'many'"]),
    ],
)  # fmt: skip
def test_what_is_not_legal_is_refused_with_key_value_origin_and_what_is(
    document: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(SettingsError) as refused:
        layered(document=document)

    assert [part for part in parts if part not in str(refused.value)] == []


def test_none_unsets_a_setting_that_may_be_unset_and_commas_divide_a_list() -> None:
    found = layered({"HALOCLINE_OVEN_TIMER_S": "none", "HALOCLINE_OVEN_RACKS": "top, bottom"})

    assert value_of(found, "timer_s") is None
    assert value_of(found, "racks") == ("top", "bottom")


def test_secrets_and_passwords_in_urls_are_not_shown() -> None:
    found = layered({"HALOCLINE_OVEN_DOOR_SECRET": "tell", "HALOCLINE_OVEN_URL": "postgresql://me:pw@db/x"})

    assert value_of(found, "door_secret") == "…"
    assert value_of(found, "url") == "postgresql://…@db/x"


def test_every_package_section_has_a_secret_free_default_origin_for_each_key(tmp_path: Path) -> None:
    from command.settings import Flags, load_settings

    rows = load_settings(Flags(state_dir=str(tmp_path)), environ={"HOME": str(tmp_path)}).rows()

    assert {name.split(".")[0] for name, _, _ in rows} == {"state_dir", "gateway", "engine", "cached", "tenants"}
    assert all(origin for _, _, origin in rows)

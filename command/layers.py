"""Lays settings over each other (flags > environment > file > defaults), checks them, and remembers where each came from.

Pure: texts and mappings come in, a checked `Layered` goes out. The processes' own models say what is legal; this
module says so in one sentence with the key, the value and its origin. Reading files is `command/settings.py`'s.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from command.errors import SettingsError

ENV_PREFIX = "HALOCLINE_"
# Settings of the command itself, and what tests read; none of them is a section's key.
PLAIN_VARIABLES = ("HALOCLINE_STATE_DIR", "HALOCLINE_CONFIG", "HALOCLINE_MASTER_KEY_FILE")
TEST_PREFIX = "HALOCLINE_TEST_"
SECRET_WORDS = ("password", "secret")

Sections = Mapping[str, type[BaseModel]]


@dataclass(frozen=True, slots=True)
class Value:
    """A raw value and the words that say where it came from."""

    raw: Any
    origin: str


Layer = dict[tuple[str, str], Value]


def layer_of_environment(environ: Mapping[str, str], sections: Sections) -> Layer:
    """`HALOCLINE_<SECTION>_<KEY>` of `environ`; any other HALOCLINE_ variable is refused."""
    layer: Layer = {}
    known = {f"{ENV_PREFIX}{s}_{k}".upper(): (s, k) for s, model in sections.items() for k in model.model_fields}
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or name in PLAIN_VARIABLES or name.startswith(TEST_PREFIX):
            continue
        if name not in known:
            raise SettingsError(
                f"unknown environment variable {name}={environ[name]!r}{_did_you_mean(name, [*known, *PLAIN_VARIABLES])}; "
                f"legal are HALOCLINE_STATE_DIR, HALOCLINE_CONFIG, HALOCLINE_MASTER_KEY_FILE and "
                f"HALOCLINE_<SECTION>_<KEY> (`halocline config show` lists sections and keys)"
            )
        layer[known[name]] = Value(environ[name], f"environment {name}")
    return layer


def layer_of_document(document: Mapping[str, Any], file: str, sections: Sections) -> tuple[Layer, Value | None]:
    """The tables of a parsed TOML file, and its top-level `state_dir`; an unknown table or key is refused."""
    layer: Layer = {}
    state_dir = None
    for name, table in document.items():
        if name == "state_dir":
            state_dir = Value(table, f"{file}: state_dir")
            if not isinstance(table, str) or not table.startswith("/"):
                raise SettingsError(f"state_dir = {table!r} ({file}): legal is an absolute path in quotes")
            continue
        if name not in sections:
            raise SettingsError(
                f"unknown key {name!r} = {_shown(table)} ({file}){_did_you_mean(name, ['state_dir', *sections])}; "
                f"legal are state_dir and the tables {', '.join(f'[{s}]' for s in sections)}"
            )
        if not isinstance(table, Mapping):
            raise SettingsError(f"{name} = {_shown(table)} ({file}): legal is a table [{name}]")
        for key, raw in table.items():
            origin = f"{file}: [{name}]"
            if key not in sections[name].model_fields:
                legal = sorted(sections[name].model_fields)
                raise SettingsError(
                    f"unknown key {name}.{key} = {_shown(raw)} ({origin}){_did_you_mean(key, legal)}; "
                    f"legal in [{name}] are {', '.join(legal)}"
                )
            layer[name, key] = Value(raw, origin)
    return layer, state_dir


def overlay(layers: Iterable[Layer]) -> Layer:
    """One layer of all of them; the first that names a key wins."""
    merged: Layer = {}
    for layer in layers:
        for place, value in layer.items():
            merged.setdefault(place, value)
    return merged


@dataclass(frozen=True, slots=True)
class Layered:
    """The checked model of each section and the origin of every key."""

    models: Mapping[str, BaseModel]
    origins: Mapping[tuple[str, str], str]

    def rows(self) -> list[tuple[str, Any, str]]:
        """`section.key`, value and origin of every setting, in the models' order; secrets are not shown."""
        return [
            (f"{section}.{key}", _unsecret(key, value), self.origins[section, key])
            for section, model in self.models.items()
            for key, value in ((k, getattr(model, k)) for k in type(model).model_fields)
        ]


def check(layer: Layer, sections: Sections) -> Layered:
    """Builds every section's model, or raises SettingsError naming the first value that is not legal."""
    models: dict[str, BaseModel] = {}
    origins: dict[tuple[str, str], str] = {}
    for section, model in sections.items():
        values = {key: value for (s, key), value in layer.items() if s == section}
        raws = {key: _read_word(value.raw, model.model_fields[key]) for key, value in values.items()}
        try:
            models[section] = model(**raws)
        except ValidationError as error:
            raise SettingsError(_sentence(section, model, error, values)) from None
        for key in model.model_fields:
            origins[section, key] = values[key].origin if key in values else "default"
    return Layered(models, origins)


def _sentence(section: str, model: type[BaseModel], error: ValidationError, values: Mapping[str, Value]) -> str:
    problem = error.errors(include_url=False)[0]
    if not problem["loc"]:
        said = {k: v for k, v in values.items() if v.origin.startswith(("--", "environment")) or ": [" in v.origin}
        where = ", ".join(f"{section}.{k} = {_shown(v.raw)} ({v.origin})" for k, v in said.items())
        return f"[{section}]: {_plain(problem['msg'])}" + (f"; set are {where}" if where else "")
    key = str(problem["loc"][0])
    if problem["type"] == "missing":
        return f"{section}.{key} has no value and no default; set it in [{section}] or as {env_name(section, key)}"
    value = values.get(key)
    shown, origin = (_unsecret(key, value.raw), value.origin) if value else (problem["input"], "default")
    meaning = model.model_fields[key].description if key in model.model_fields else None
    return f"{section}.{key} = {_shown(shown)} ({origin}): {_plain(problem['msg'])}" + (
        f". It means: {meaning}" if meaning else ""
    )


def env_name(section: str, key: str) -> str:
    """The environment variable of a setting."""
    return f"{ENV_PREFIX}{section}_{key}".upper()


def _plain(message: str) -> str:
    """Pydantic's sentence, as one about what is legal."""
    message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return message.replace("Input should be", "legal is") if message.startswith("Input should be") else message


def _read_word(raw: Any, field: FieldInfo) -> Any:
    """A text as the environment and flags give it, in the form its setting wants.

    `none` is no value where a setting may be unset (TOML has no word for it either), commas divide a list.
    """
    if not isinstance(raw, str):
        return raw
    if raw.strip().lower() == "none" and _takes_none(field.annotation):
        return None
    if typing.get_origin(field.annotation) in (tuple, list):
        return tuple(part.strip() for part in raw.split(",") if part.strip())
    return raw


def _takes_none(annotation: Any) -> bool:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return is_union and type(None) in typing.get_args(annotation)


def _unsecret(key: str, value: Any) -> Any:
    """Values of settings named after secrets are hidden, and so are passwords inside database URLs."""
    if value and any(word in key for word in SECRET_WORDS):
        return "…"
    if isinstance(value, str) and key.endswith("url") and "@" in value and "://" in value:
        scheme, rest = value.split("://", 1)
        return f"{scheme}://…@{rest.rsplit('@', 1)[1]}"
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _did_you_mean(word: str, legal: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(legal), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""

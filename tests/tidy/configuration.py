"""Writes the tables of docs/configuration.md from the processes' own models, so that they cannot differ.

python -m tests.tidy.configuration      rewrites what stands between the marks of docs/configuration.md
"""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from command.layers import env_name
from command.settings import package_sections, show_bytes
from tests.tidy.layers import ROOT

PAGE = ROOT / "docs" / "configuration.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"

# Filled in by command/settings.py when nothing is said.
DERIVED = {
    ("gateway", "admin_listen"): "unix:DIR/run/admin.sock",
    ("gateway", "engine_socket"): "engine.socket",
    ("gateway", "tenants_url"): "tenants.url",
    ("gateway", "master_key_file"): "tenants.master_key_file",
    ("gateway", "model_id"): "engine.model_id",
    ("engine", "socket"): "DIR/run/engine.sock",
    ("engine", "model_dir"): "DIR/models/demo",
    ("engine", "state_dir"): "DIR",
    ("engine", "cached_socket"): "cached.socket",
    ("engine", "host_cache_size"): "cached.host_cache_size",
    ("cached", "socket"): "DIR/run/cached.sock",
    ("cached", "arena_dir"): "/dev/shm/halocline-UID-…",
    ("cached", "host_cache_size"): "2 GiB, or less on a small machine",
    ("tenants", "url"): "sqlite:///DIR/tenants.db",
    ("tenants", "master_key_file"): "DIR/master.key",
}
# For settings whose models say it in comments.
MEANINGS = {
    ("engine", "log_level"): "Least severe level to log.",
}


def tables() -> str:
    """All sections' tables."""
    return "\n".join(_table(section, model) for section, model in package_sections().items())


def _table(section: str, model: type[BaseModel]) -> str:
    rows = [f"## [{section}]\n", "| key | default | legal | what it means |", "|---|---|---|---|"]
    for key, field in model.model_fields.items():
        meaning = field.description or MEANINGS.get((section, key), "")
        rows.append(f"| `{key}` | {_default(section, key, field)} | {_legal(field)} | {_cell(meaning)} |")
    example = next(iter(model.model_fields))
    return "\n".join(rows) + f"\n\nAs a variable: `{env_name(section, example)}` and so on.\n"


def _default(section: str, key: str, field: FieldInfo) -> str:
    if (section, key) in DERIVED:
        return DERIVED[section, key]
    value = field.get_default()
    if value is PydanticUndefined:
        return "(has to be said)"
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if _is_size(field.annotation) and value:
        return show_bytes(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_size(annotation: Any) -> bool:
    return annotation is ByteSize or ByteSize in typing.get_args(annotation)


def _legal(field: FieldInfo) -> str:
    """The kind of value, with its bounds where the model states them."""
    annotation, bounds = field.annotation, []
    signs = {"ge": "≥ ", "gt": "> ", "le": "≤ ", "lt": "< "}
    for constraint in field.metadata:
        for name, sign in signs.items():
            bound = getattr(constraint, name, None)
            if bound is not None:
                bounds.append(f"{sign}{bound:g}" if isinstance(bound, float) else f"{sign}{bound}")
    return _cell(", ".join([_kind(annotation), *bounds]))


def _kind(annotation: Any) -> str:
    if typing.get_origin(annotation) is Literal:
        return ", ".join(map(str, typing.get_args(annotation)))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(_kind(part) for part in typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        return "list of words"
    names = {
        int: "whole number",
        float: "number",
        bool: "true, false",
        str: "text",
        ByteSize: "size",
        type(None): "none",
    }
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)).lower())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def page() -> str:
    """The page as it should be: its own text around the tables."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

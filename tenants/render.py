"""How tenants and keys look: a table on a terminal, tab-separated values in a pipe, JSON when asked for.

Chooses only the form; what is shown is the caller's. No form has a field for anything secret, except that of a key
just made, which is written by `new_key`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import IO, Any

from tenants.values import ApiKey, Tenant

TENANT_SCHEMA = "halocline.tenant.v1"
TENANT_LIST_SCHEMA = "halocline.tenant-list.v1"
KEY_SCHEMA = "halocline.key.v1"
KEY_LIST_SCHEMA = "halocline.key-list.v1"

Value = str | int | float | Mapping[str, Any] | None
Fields = Mapping[str, Value]


def tenant_fields(tenant: Tenant, keys: Sequence[ApiKey], now: float) -> Fields:
    """What is shown of a tenant, in the order of the columns."""
    return {
        "name": tenant.name,
        "state": tenant.state,
        "active_keys": sum(key.state_at(now) == "active" for key in keys),
        "salt_epoch": tenant.salt_epoch,
        "created_at": iso_time(tenant.created_at),
        "id": tenant.id,
        "max_priority": tenant.retention.max_priority,
        "max_duration_s": tenant.retention.max_duration_s,
        "default_retention": _opaque_json(tenant.retention.default),
        "cache_weight": tenant.share.weight,
        "cache_floor_bytes": tenant.share.floor_bytes,
        "cache_ceiling_bytes": tenant.share.ceiling_bytes,
    }


def key_fields(key: ApiKey, tenant_name: str, now: float) -> Fields:
    """What is shown of a key, in the order of the columns."""
    return {
        "public_id": key.public_id,
        "tenant": tenant_name,
        "label": key.label,
        "state": key.state_at(now),
        "created_at": iso_time(key.created_at),
        "expires_at": None if key.expires_at is None else iso_time(key.expires_at),
        "revoked_at": None if key.revoked_at is None else iso_time(key.revoked_at),
    }


def one(out: IO[str], fields: Fields, schema: str, as_json: bool) -> None:
    """Show one thing: its fields under each other on a terminal, one line of values in a pipe."""
    if as_json:
        _write_json(out, {"schema": schema, **fields})
    elif out.isatty():
        _write_sheet(out, fields)
    else:
        out.write(_tab_separated(fields))


def many(out: IO[str], rows: Sequence[Fields], schema: str, list_schema: str, list_name: str, as_json: bool) -> None:
    """Show a list: in JSON each element is what `one` writes for it."""
    if as_json:
        _write_json(out, {"schema": list_schema, list_name: [{"schema": schema, **fields} for fields in rows]})
    elif out.isatty():
        _write_table(out, rows)
    else:
        out.write("".join(map(_tab_separated, rows)))


def new_key(out: IO[str], text: str, fields: Fields, as_json: bool) -> None:
    """Show a key for the only time: alone on its line, so that the output can be the file that holds it."""
    if as_json:
        _write_json(out, {"schema": KEY_SCHEMA, **fields, "key": text})
    else:
        out.write(f"{text}\n")


def iso_time(unix_s: float) -> str:
    """A time as everyone can read and parse it, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _write_json(out: IO[str], value: Any) -> None:
    out.write(json.dumps(value, ensure_ascii=False) + "\n")


def _tab_separated(fields: Fields) -> str:
    # No value holds a tab or a line break: names and labels are checked when they are made.
    return "\t".join(_text(value) for value in fields.values()) + "\n"


def _write_sheet(out: IO[str], fields: Fields) -> None:
    width = max(map(len, fields))
    out.writelines(f"{_title(name):<{width}}  {_sheet_text(name, value)}\n" for name, value in fields.items())


def _write_table(out: IO[str], rows: Sequence[Fields]) -> None:
    # Imported here: it costs more than a whole run of the command in a pipe.
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    columns = [name for name in rows[0] if name not in _TOO_WIDE_FOR_TABLES]
    for name in columns:
        # A cut name or id would be useless for the next command; what does not fit is folded.
        table.add_column(_title(name), overflow="fold", no_wrap=name not in ("tenant", "label", "name"))
    for fields in rows:
        # Text, because a label may look like rich's markup.
        table.add_row(*(Text(_cell(name, fields[name])) for name in columns))
    Console(file=out).print(table)


_TOO_WIDE_FOR_TABLES = (
    *("id", "max_priority", "max_duration_s", "default_retention"),
    *("cache_weight", "cache_floor_bytes", "cache_ceiling_bytes"),
)


def _opaque_json(text: str | None) -> Mapping[str, Any] | None:
    """A text that was an object of JSON when it was stored; if somebody has changed it since, that is what is shown."""
    try:
        value = None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return {"unreadable": text}
    return value if value is None or isinstance(value, dict) else {"unreadable": text}


def _cell(name: str, value: Value) -> str:
    text = _text(value, absent="-")
    # The day alone, so that three times and an id fit into 80 columns; pipes and JSON get the second.
    return text[:10] if name.endswith("_at") else text


def _sheet_text(name: str, value: Value) -> str:
    return show_size(value) if name.endswith("_bytes") and isinstance(value, int) else _text(value, absent="-")


def show_size(count: int) -> str:
    """Bytes for people, in the largest unit that leaves at least 1."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def _title(name: str) -> str:
    return name.removesuffix("_at").removesuffix("_bytes").replace("_", " ")


def _text(value: Value, absent: str = "") -> str:
    if value is None or value == "":
        return absent
    if isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:g}" if isinstance(value, float) and value.is_integer() and abs(value) < 1e6 else str(value)

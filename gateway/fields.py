"""Reads one field of a request's body at a time: right type, right range, or an error that names field, value and range.

Knows nothing of which fields an API has; that is its parser's business. A bool is never a number, and null is always
the same as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.errors import ApiError, bad_request

Body = Mapping[str, Any]

_SHOWN_CHARS: Final = 64
MAX_EXACT_FLOAT: Final = 2**53


def shown(value: object) -> str:
    """A value as an error message may show it: short, and only what is harmless to repeat to its sender."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN_CHARS else f"{value[:_SHOWN_CHARS]!r}…"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) > 2**64:
        return "a very large number"
    if isinstance(value, int | float):
        return repr(value)
    return "an array" if isinstance(value, list) else "an object"


def wrong(name: str, value: object, legal: str) -> ApiError:
    """The error for a value that is not legal."""
    return bad_request(f"{name} is {shown(value)}; it must be {legal}.", name)


def text(body: Body, name: str) -> str:
    """A string that has to be there."""
    value = body.get(name)
    if value is None:
        raise bad_request(f"{name} is required.", name, "missing_required_parameter")
    if not isinstance(value, str):
        raise wrong(name, value, "a string")
    return value


def optional_text(body: Body, name: str, max_chars: int) -> str | None:
    """A string of 1 … `max_chars` characters, or None."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not 1 <= len(value) <= max_chars:
        raise wrong(name, value, f"a string of 1 to {max_chars} characters")
    return value


def flag(body: Body, name: str, default: bool = False) -> bool:
    """true or false."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


def integer(body: Body, name: str, low: int, high: int) -> int | None:
    """A whole number from `low` to `high`; 3.0 counts as 3, since JSON knows no difference."""
    value = body.get(name)
    if value is None:
        return None
    # Beyond 2**53 a float has lost digits, and one that was an integer out of range may have been rounded into it.
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT_FLOAT:
        value = int(value)
    if not is_int(value) or not low <= value <= high:
        raise wrong(name, body[name], f"an integer from {low} to {high}")
    return int(value)


def number(body: Body, name: str, low: float, high: float, default: float) -> float:
    """A finite number from `low` to `high`."""
    value = body.get(name)
    if value is None:
        return default
    legal = f"a number from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(name, value, legal)
    # NaN and the infinities are in no range.
    if not low <= value <= high:
        raise wrong(name, value, legal)
    return float(value)


def mapping(body: Body, name: str) -> Body | None:
    """An object, or None."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise wrong(name, value, "an object")
    return value


def is_int(value: object) -> bool:
    """Whether a JSON value is a whole number (true and false are not)."""
    return isinstance(value, int) and not isinstance(value, bool)

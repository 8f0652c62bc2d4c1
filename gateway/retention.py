"""Decides the retention of a request: its own wish, else its tenant's default, and neither above the tenant's ceilings.

The tenant store keeps a default as JSON it does not understand and the cache knows the rules but no tenants; the two
meet here, when rules are set (`check_rules`, for the command line) and when a request comes (`decide`). Nothing is ever
refused for a ceiling: what is above it is lowered and named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from cached.errors import RetentionError
from cached.retention import (
    DEFAULT_RETENTION,
    ListedRetention,
    RetentionConfig,
    check_ceilings,
    clamp,
    dump_retention,
    load_retention,
)
from tenants.errors import InvalidValue
from tenants.values import RetentionRules

MAX_SHOWN: Final = 32
"""How many lowered values the header names; proxies give all headers together 4 KiB by default."""

_NOTHING_ASKED: Final = ListedRetention(DEFAULT_RETENTION, ())


@dataclass(frozen=True, slots=True)
class Decided:
    """What the engine is told, what had to be lowered for that, and whether the tenant's default could not be read."""

    config: RetentionConfig
    clamped: tuple[str, ...] = ()
    is_default_unreadable: bool = False


def decide(asked: ListedRetention | None, rules: RetentionRules) -> Decided:
    """The retention of a request that asks for `asked`; None: it says nothing, so the default speaks for it.

    A default that cannot be read (only somebody else than the command line can have written it) counts as none: what is
    cached for how long is no reason to answer nobody.
    """
    wanted = asked if asked is not None or rules.default is None else _default(rules.default)
    listed = wanted or _NOTHING_ASKED
    config, clamped = clamp(listed.config, rules.max_priority, rules.max_duration_s, listed.places)
    is_unreadable = asked is None and rules.default is not None and wanted is None
    return Decided(config, tuple(map(str, clamped)), is_unreadable)


def clamped_header(clamped: tuple[str, ...]) -> str:
    """The value of `x-halocline-clamped`."""
    rest = len(clamped) - MAX_SHOWN
    return ", ".join(clamped[:MAX_SHOWN]) + (f", and {rest} more" if rest > 0 else "")


def check_rules(rules: RetentionRules) -> tuple[RetentionRules, tuple[str, ...]]:
    """`rules` with their default in one spelling, and what of it their ceilings lower; raises InvalidValue.

    A default above a ceiling is legal: ceilings may be lifted again, and the default is then what it was.
    """
    try:
        check_ceilings(rules.max_priority, rules.max_duration_s)
        if rules.default is None:
            return rules, ()
        spelled = dump_retention(load_retention(rules.default).config)
    except RetentionError as error:
        raise InvalidValue(f"{error}; nothing was changed") from error
    checked = replace(rules, default=spelled)
    return checked, decide(None, checked).clamped


@lru_cache(maxsize=1024)
def _default(text: str) -> ListedRetention | None:
    """A default as parsed; remembered, because every request of its tenant asks for it."""
    try:
        return load_retention(text)
    except RetentionError:
        return None

"""How long a block is worth keeping: priorities 0–100 with durations, by token range (kv-semantics §2).

Decides nothing about eviction; it turns what a request asks for into one `Retention` per block, refuses what is
malformed with the range and the rule in the message, and lowers what is above a tenant's ceilings. Whose request it is
and where its ceilings come from is for others to know. Names are TensorRT-LLM's `KvCacheRetentionConfig`, durations are
seconds.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from cached.errors import RetentionError

DEFAULT_PRIORITY = 35
MIN_PRIORITY = 0
MAX_PRIORITY = 100
MAX_RANGES = 64

_LARGEST_FLOAT = sys.float_info.max
_SHOWN_CHARS = 64
NAME = "kv_cache_retention_config"

OnExpiry = Literal["demote", "drop"]


@dataclass(frozen=True, slots=True)
class Retention:
    """What one block carries: priority, seconds from becoming idle to expiry (None: for ever), what expiry does."""

    priority: int = DEFAULT_PRIORITY
    duration_s: float | None = None
    on_expiry: OnExpiry = "demote"


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Half-open range of prompt tokens `[start, end)`; `end` None reaches to the end of the prompt."""

    start: int
    end: int | None
    retention: Retention


@dataclass(frozen=True, slots=True)
class RetentionConfig:
    """A request's wishes: ranges sorted by start, and what blocks made while decoding get."""

    ranges: tuple[TokenRange, ...] = ()
    decode: Retention = Retention()

    def for_prompt_block(self, first_token: int) -> Retention | None:
        """The retention of the prompt block whose first token is at `first_token`; None without a range (2.3)."""
        for token_range in self.ranges:
            if token_range.start > first_token:
                return None
            if token_range.end is None or first_token < token_range.end:
                return token_range.retention
        return None


DEFAULT_RETENTION = RetentionConfig()


@dataclass(frozen=True, slots=True)
class ListedRetention:
    """A configuration, and the place that each of its sorted ranges has in the list that it came from."""

    config: RetentionConfig
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Clamped:
    """One value that was above a ceiling: its field as the request names it, and what it became."""

    field: str
    value: float

    def __str__(self) -> str:
        return f"{self.field}={shown_number(self.value)}"


def demoted_priority(priority: int) -> int:
    """The priority of a block whose duration has passed (kv-semantics 2.5): never raised, at most the default."""
    return min(priority, DEFAULT_PRIORITY)


def clamp(
    config: RetentionConfig,
    max_priority: int | None,
    max_duration_s: float | None,
    places: Sequence[int] | None = None,
) -> tuple[RetentionConfig, tuple[Clamped, ...]]:
    """`config` with nothing above the ceilings (None: no ceiling), and what had to be lowered for that.

    A duration counts only where the priority, once clamped, is above the default: at and below it expiry changes
    nothing (2.5), so there is nothing to limit. There, no duration means for ever and is above every ceiling.
    `places` are the ranges' numbers in the list that the client sent; without them they are numbered as sorted.
    """
    if max_priority is None and max_duration_s is None:
        return config, ()
    clamped: list[Clamped] = []
    ranges = list(config.ranges)
    # In the order of the list, because that is how the client will read the answer.
    for place, index in sorted(zip(places or range(len(ranges)), range(len(ranges)), strict=True)):
        asked = ranges[index].retention
        kept = _clamp_one(asked, max_priority, max_duration_s, f"token_ranges[{place}].", clamped)
        ranges[index] = replace(ranges[index], retention=kept)
    decode = _clamp_one(config.decode, max_priority, max_duration_s, "decode_", clamped)
    return RetentionConfig(tuple(ranges), decode), tuple(clamped)


def _clamp_one(
    asked: Retention, max_priority: int | None, max_duration_s: float | None, prefix: str, clamped: list[Clamped]
) -> Retention:
    priority, duration_s = asked.priority, asked.duration_s
    if max_priority is not None and priority > max_priority:
        priority = max_priority
        clamped.append(Clamped(f"{prefix}priority", priority))
    is_above = max_duration_s is not None and (duration_s is None or duration_s > max_duration_s)
    if is_above and priority > DEFAULT_PRIORITY:
        assert max_duration_s is not None
        duration_s = max_duration_s
        clamped.append(Clamped(f"{prefix}duration", duration_s))
    return replace(asked, priority=priority, duration_s=duration_s)


def check_ceilings(max_priority: int | None, max_duration_s: float | None) -> None:
    """Raise RetentionError, naming value and rule, for ceilings that no tenant can have.

    A priority ceiling below the default would not hold: what nobody marks has the default (2.3).
    """
    if max_priority is not None and not (_is_int(max_priority) and DEFAULT_PRIORITY <= max_priority <= MAX_PRIORITY):
        raise RetentionError(
            f"max_priority is {_shown(max_priority)}; it must be an integer from {DEFAULT_PRIORITY} to {MAX_PRIORITY} "
            f"(blocks that nobody marks have {DEFAULT_PRIORITY})",
            "max_priority",
        )
    _duration(max_duration_s, "max_duration")


def load_retention(text: str) -> ListedRetention:
    """A `kv_cache_retention_config` written as JSON, checked; raises RetentionError."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = f": {error.msg} at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise RetentionError(f"{NAME} is not JSON{why}", NAME) from None
    return parse_listed(raw)


def dump_retention(config: RetentionConfig) -> str:
    """`config` as JSON in one spelling; `load_retention` gives it back, ranges numbered as they are sorted."""
    ranges: list[dict[str, Any]] = [
        {
            "start": each.start,
            "end": each.end,
            "priority": each.retention.priority,
            "duration": _json_number(each.retention.duration_s),
        }
        for each in config.ranges
    ]
    raw: dict[str, Any] = {"token_ranges": ranges, "decode_priority": config.decode.priority}
    raw["decode_duration"] = _json_number(config.decode.duration_s)
    return json.dumps(raw)


def shown_number(value: float) -> str:
    """A number without a needless fraction: 300, 0.5."""
    return repr(_json_number(value))


def _json_number(value: float | None) -> float | int | None:
    return int(value) if isinstance(value, float) and value.is_integer() and value < 2**53 else value


def parse_retention(raw: object) -> RetentionConfig:
    """A request's `kv_cache_retention_config`, checked (kv-semantics 2.2).

    Raises RetentionError naming the range by its place in the list and the rule it breaks.
    """
    return parse_listed(raw).config


def parse_listed(raw: object) -> ListedRetention:
    """As `parse_retention`, for whoever has to name the ranges to their sender afterwards."""
    name = NAME
    if not isinstance(raw, Mapping):
        raise RetentionError(f"{name} must be an object with token_ranges", name)
    _known_keys(raw, {"token_ranges", "decode_priority", "decode_duration"}, name)
    listed = raw.get("token_ranges")
    listed = [] if listed is None else listed
    if not isinstance(listed, list):
        raise RetentionError(f"{name}.token_ranges must be a list", f"{name}.token_ranges")
    if len(listed) > MAX_RANGES:
        raise RetentionError(
            f"{name}.token_ranges has {len(listed)} ranges; at most {MAX_RANGES} are allowed", f"{name}.token_ranges"
        )
    numbered = [(index, _parse_range(item, index, name)) for index, item in enumerate(listed)]
    numbered.sort(key=lambda pair: pair[1].start)
    _check_disjoint(numbered, name)
    decode = Retention(
        _priority(raw.get("decode_priority", DEFAULT_PRIORITY), f"{name}.decode_priority"),
        _duration(raw.get("decode_duration"), f"{name}.decode_duration"),
    )
    config = RetentionConfig(tuple(token_range for _, token_range in numbered), decode)
    return ListedRetention(config, tuple(index for index, _ in numbered))


def _parse_range(item: object, index: int, name: str) -> TokenRange:
    where = f"{name}.token_ranges[{index}]"
    if not isinstance(item, Mapping):
        raise RetentionError(f"{where} must be an object with start, end, priority and duration", where)
    _known_keys(item, {"start", "end", "priority", "duration"}, where)
    for key in ("start", "priority"):
        if key not in item:
            raise RetentionError(f"{where} lacks {key}", f"{where}.{key}")
    start = item["start"]
    if not _is_int(start) or not 0 <= start < 2**31:
        raise RetentionError(f"{where}.start is {_shown(start)}; it must be an integer ≥ 0", f"{where}.start")
    end = item.get("end")
    if end is not None and (not _is_int(end) or not start < end < 2**31):
        raise RetentionError(
            f"{where}.end is {_shown(end)}; it must be null or an integer greater than start ({start})", f"{where}.end"
        )
    retention = Retention(
        _priority(item["priority"], f"{where}.priority"), _duration(item.get("duration"), f"{where}.duration")
    )
    return TokenRange(start, end, retention)


def _check_disjoint(numbered: list[tuple[int, TokenRange]], name: str) -> None:
    for (left_index, left), (right_index, right) in itertools.pairwise(numbered):
        where = f"{name}.token_ranges[{left_index}]"
        if left.end is None:
            raise RetentionError(
                f"{where} is open-ended but {name}.token_ranges[{right_index}] starts after it; "
                "only the last range may be open-ended",
                where,
            )
        if right.start < left.end:
            raise RetentionError(
                f"{where} [{left.start}, {left.end}) overlaps {name}.token_ranges[{right_index}], "
                f"which starts at {right.start}; ranges may touch but not overlap",
                where,
            )


def _known_keys(raw: Mapping[object, object], known: set[str], where: str) -> None:
    for key in raw:
        if key not in known:
            raise RetentionError(
                f"{where} has an unknown field {str(key)[:64]!r}; known: {', '.join(sorted(known))}", where
            )


def _priority(value: object, where: str) -> int:
    if not _is_int(value) or not MIN_PRIORITY <= value <= MAX_PRIORITY:  # type: ignore[operator]
        raise RetentionError(f"{where} is {_shown(value)}; it must be an integer from 0 to 100", where)
    return value  # type: ignore[return-value]


def _duration(value: object, where: str) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared first: a whole number may be too large for a float at all.
    if not is_number or not 0 < value <= _LARGEST_FLOAT:  # type: ignore[operator]
        raise RetentionError(f"{where} is {_shown(value)}; it must be null or seconds greater than 0", where)
    return float(value)  # type: ignore[arg-type]


def _shown(value: object) -> str:
    """A value for a message: short, whatever was sent."""
    if isinstance(value, int) and not -(2**64) < value < 2**64:
        return "a very large number"
    if isinstance(value, list | Mapping):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

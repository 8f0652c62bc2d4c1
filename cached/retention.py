"""How long a block is worth keeping: priorities 0–100 with durations, by token range (kv-semantics §2).

Decides nothing about eviction; it turns what a request asks for into one `Retention` per block, and refuses what is
malformed with the range and the rule in the message. Names are TensorRT-LLM's `KvCacheRetentionConfig`, durations are
seconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cached.errors import RetentionError

DEFAULT_PRIORITY = 35
MIN_PRIORITY = 0
MAX_PRIORITY = 100
MAX_RANGES = 64

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


def demoted_priority(priority: int) -> int:
    """The priority of a block whose duration has passed (kv-semantics 2.5): never raised, at most the default."""
    return min(priority, DEFAULT_PRIORITY)


def parse_retention(raw: object) -> RetentionConfig:
    """A request's `kv_cache_retention_config`, checked (kv-semantics 2.2).

    Raises RetentionError naming the range by its place in the list and the rule it breaks.
    """
    name = "kv_cache_retention_config"
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
    return RetentionConfig(tuple(token_range for _, token_range in numbered), decode)


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
        raise RetentionError(f"{where}.start is {start!r}; it must be an integer ≥ 0", f"{where}.start")
    end = item.get("end")
    if end is not None and (not _is_int(end) or not start < end < 2**31):
        raise RetentionError(
            f"{where}.end is {end!r}; it must be null or an integer greater than start ({start})", f"{where}.end"
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
        raise RetentionError(f"{where} is {value!r}; it must be an integer from 0 to 100", where)
    return value  # type: ignore[return-value]


def _duration(value: object, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise RetentionError(f"{where} is {value!r}; it must be null or seconds greater than 0", where)
    return float(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

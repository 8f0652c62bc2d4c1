"""Statistics of several parts added up: numbers by field, labelled counts by label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from cached.protocol import Count, TierStatistics

_LABELLED = ("used_by_priority", "evicted_by_priority", "refused_by_reason")
_NEWEST = ("shares_version",)


def total_of(found: Sequence[TierStatistics]) -> TierStatistics:
    """The sum; of versions the newest. What does not add up is left empty."""
    total: dict[str, Any] = {}
    for field in fields(TierStatistics):
        values = [getattr(each, field.name) for each in found]
        if field.name in _LABELLED:
            total[field.name] = _added(values)
        elif field.name in _NEWEST:
            total[field.name] = max(values, default=0)
        elif isinstance(field.default, int):
            total[field.name] = sum(values)
    return TierStatistics(**total)


def _added(families: Sequence[tuple[Count, ...]]) -> tuple[Count, ...]:
    """Labels in the order of the family that has most of them; numbers in their order."""
    sums: dict[str, int] = {}
    for family in sorted(families, key=len, reverse=True):
        for count in family:
            sums[count.label] = sums.get(count.label, 0) + count.value
    if all(label.isdigit() for label in sums):
        return tuple(Count(label, sums[label]) for label in sorted(sums, key=int))
    return tuple(Count(label, value) for label, value in sums.items())

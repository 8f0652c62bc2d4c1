"""What the tier has done since the daemon started: plain counts, and how they are labelled when somebody asks."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from cached.protocol import MAX_OWNERS, REFUSAL_REASONS, Count, Counted, RefusalReason
from cached.retention import MAX_PRIORITY

BAND_WIDTH = 10


def band_of(priority: int) -> str:
    """The band of priorities under which an eviction is counted: tens, and 100 alone."""
    low = priority // BAND_WIDTH * BAND_WIDTH
    return str(low) if low == MAX_PRIORITY else f"{low}-{low + BAND_WIDTH - 1}"


def _per_priority() -> list[int]:
    return [0] * (MAX_PRIORITY + 1)


def _per_reason() -> dict[RefusalReason, int]:
    return dict.fromkeys((reason for reason in REFUSAL_REASONS if reason != "absent"), 0)


@dataclass(slots=True)
class StoreCounters(Counted):
    """What one store has done, and `used`, which also goes down: visible blocks by priority."""

    used: list[int] = field(default_factory=_per_priority)
    evicted: list[int] = field(default_factory=_per_priority)
    refused: dict[RefusalReason, int] = field(default_factory=_per_reason)
    refused_by_owner: dict[bytes, dict[RefusalReason, int]] = field(default_factory=dict)
    evicted_by_owner: dict[bytes, int] = field(default_factory=dict)

    def count_refusal(self, owner: bytes, reason: RefusalReason) -> None:
        """One block of `owner` was refused. Beyond `MAX_OWNERS` owners only the sum is kept."""
        self.refused[reason] += 1
        mine = self.refused_by_owner.get(owner)
        if mine is None:
            if len(self.refused_by_owner) >= MAX_OWNERS:
                return
            mine = self.refused_by_owner[owner] = {}
        mine[reason] = mine.get(reason, 0) + 1

    def count_eviction(self, owner: bytes, priority: int) -> None:
        """One block of `owner` gave way."""
        self.evicted[priority] += 1
        mine = self.evicted_by_owner.get(owner, 0)
        if mine or len(self.evicted_by_owner) < MAX_OWNERS:
            self.evicted_by_owner[owner] = mine + 1

    def as_fields(self) -> dict[str, Any]:
        """The counters under the names of `protocol.TierStatistics`."""
        plain = {each.name: getattr(self, each.name) for each in fields(Counted)}
        evicted: dict[str, int] = {band_of(priority): 0 for priority in range(0, MAX_PRIORITY + 1, BAND_WIDTH)}
        for priority, count in enumerate(self.evicted):
            evicted[band_of(priority)] += count
        return {
            **plain,
            "used_by_priority": tuple(Count(str(level), count) for level, count in enumerate(self.used) if count),
            "evicted_by_priority": tuple(Count(label, count) for label, count in evicted.items()),
            "refused_by_reason": tuple(Count(reason, count) for reason, count in self.refused.items()),
        }

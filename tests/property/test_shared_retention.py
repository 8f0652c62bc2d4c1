"""Clamping against its definition, and JSON there and back, for any configuration that is legal."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from cached.retention import (
    DEFAULT_PRIORITY,
    Retention,
    RetentionConfig,
    TokenRange,
    clamp,
    dump_retention,
    load_retention,
)

durations = st.none() | st.floats(0, 1e12, exclude_min=True) | st.integers(1, 10**6).map(float)
priorities = st.integers(0, 100)
retentions = st.builds(Retention, priorities, durations)


@st.composite
def configs(draw: st.DrawFn) -> RetentionConfig:
    bounds = sorted(draw(st.sets(st.integers(0, 500), max_size=17)))
    # Every other gap is left out now and then, and the last range may be open.
    ranges = [
        TokenRange(start, end, draw(retentions)) for start, end in itertools.pairwise(bounds) if draw(st.booleans())
    ]
    if bounds and draw(st.booleans()):
        ranges.append(TokenRange(bounds[-1], None, draw(retentions)))
    return RetentionConfig(tuple(ranges), draw(retentions))


def above(retention: Retention, max_priority: int | None, max_duration_s: float | None) -> set[str]:
    """Which of a retention's values are above a ceiling, as the rules say it in words."""
    found = set()
    if max_priority is not None and retention.priority > max_priority:
        found.add("priority")
    kept_priority = retention.priority if max_priority is None else min(retention.priority, max_priority)
    stays_s = float("inf") if retention.duration_s is None else retention.duration_s
    if max_duration_s is not None and kept_priority > DEFAULT_PRIORITY and stays_s > max_duration_s:
        found.add("duration")
    return found


@given(configs(), st.none() | st.integers(35, 100), st.none() | st.floats(1e-3, 1e9), st.randoms())
def test_clamping_lowers_what_is_above_a_ceiling_and_nothing_else(config, max_priority, max_duration_s, random) -> None:
    places = list(range(len(config.ranges)))
    random.shuffle(places)

    kept, clamped = clamp(config, max_priority, max_duration_s, places)

    values = {each.field: each.value for each in clamped}
    assert len(values) == len(clamped)
    pairs = [
        (before.retention, after.retention, f"token_ranges[{place}].")
        for place, before, after in zip(places, config.ranges, kept.ranges, strict=True)
    ]
    for before, after, prefix in [*pairs, (config.decode, kept.decode, "decode_")]:
        lowered = above(before, max_priority, max_duration_s)
        assert after.priority == (max_priority if "priority" in lowered else before.priority)
        assert after.duration_s == (max_duration_s if "duration" in lowered else before.duration_s)
        assert {field for field in values if field.startswith(prefix)} == {prefix + name for name in lowered}
        assert above(after, max_priority, max_duration_s) == set()
    assert [(each.start, each.end) for each in kept.ranges] == [(each.start, each.end) for each in config.ranges]
    # Once is enough, and what is named is what was kept.
    assert clamp(kept, max_priority, max_duration_s) == (kept, ())
    assert set(values.values()) <= {max_priority, max_duration_s}


@given(configs())
def test_a_configuration_survives_json(config) -> None:
    listed = load_retention(dump_retention(config))

    assert listed.config == config
    assert listed.places == tuple(range(len(config.ranges)))

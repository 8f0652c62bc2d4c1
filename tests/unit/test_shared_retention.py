"""Retention ranges: the mapping examples of kv-semantics §2, and what is refused."""

from __future__ import annotations

import pytest

from cached.errors import RetentionError
from cached.retention import (
    DEFAULT_RETENTION,
    Retention,
    check_ceilings,
    clamp,
    demoted_priority,
    dump_retention,
    load_retention,
    parse_listed,
    parse_retention,
)


def priorities(tokens_per_block: int, num_tokens: int, *ranges: tuple[int, int | None, int]) -> list[int | None]:
    listed = [{"start": start, "end": end, "priority": priority} for start, end, priority in ranges]
    config = parse_retention({"token_ranges": listed})
    found = [config.for_prompt_block(first) for first in range(0, num_tokens, tokens_per_block)]
    return [None if each is None else each.priority for each in found]


@pytest.mark.parametrize(
    ("tokens_per_block", "num_tokens", "ranges", "expected"),
    [
        (64, 256, [(0, 64, 80), (64, 128, 50)], [80, 50, None, None]),
        (32, 127, [(0, 63, 80), (63, 127, 30)], [80, 80, 30, 30]),
        (32, 128, [(0, 1, 80), (1, 2, 5)], [80, None, None, None]),
        (64, 256, [(127, 193, 80)], [None, None, 80, 80]),
        (64, 128, [(1, None, 80)], [None, 80]),
        (64, 128, [(64, None, 10), (0, 64, 80)], [80, 10]),
    ],
)
def test_a_block_takes_the_range_that_covers_its_first_token(
    tokens_per_block: int, num_tokens: int, ranges: list, expected: list
) -> None:
    """kv-semantics 2.3 and the mapping examples after 2.7; the order of listing is free (2.2)."""
    assert priorities(tokens_per_block, num_tokens, *ranges) == expected


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ([], "must be an object"),
        ({"token_ranges": {}}, "token_ranges must be a list"),
        ({"token_ranges": [{"start": 0, "priority": 1}] * 65}, "at most 64"),
        ({"token_ranges": [7]}, r"token_ranges\[0\] must be an object"),
        ({"token_ranges": [{"start": 0}]}, "lacks priority"),
        ({"token_ranges": [{"start": -1, "priority": 1}]}, r"token_ranges\[0\]\.start is -1"),
        ({"token_ranges": [{"start": True, "priority": 1}]}, "start is True"),
        ({"token_ranges": [{"start": 5, "end": 5, "priority": 1}]}, "greater than start"),
        ({"token_ranges": [{"start": 0, "priority": 101}]}, "from 0 to 100"),
        ({"token_ranges": [{"start": 0, "priority": 1.5}]}, "from 0 to 100"),
        ({"token_ranges": [{"start": 0, "priority": 1, "duration": 0}]}, "greater than 0"),
        ({"token_ranges": [{"start": 0, "priority": 1, "duration": float("nan")}]}, "greater than 0"),
        ({"token_ranges": [{"start": 0, "priority": 1, "colour": 1}]}, "unknown field 'colour'"),
        (
            {"token_ranges": [{"start": 4, "end": 8, "priority": 1}, {"start": 0, "end": 5, "priority": 1}]},
            r"token_ranges\[1\] \[0, 5\) overlaps .*token_ranges\[0\]",
        ),
        (
            {"token_ranges": [{"start": 0, "priority": 1}, {"start": 9, "end": 10, "priority": 1}]},
            "only the last range may be open-ended",
        ),
        ({"token_ranges": [{"start": 0, "priority": 1, "duration": 10**400}]}, "a very large number; it must be null"),
        ({"token_ranges": [{"start": 0, "priority": "x" * 9999}]}, r"priority is 'x{63}…; it must be"),
        ({"decode_priority": -1}, "decode_priority is -1"),
        ({"decode_duration": -3}, "decode_duration is -3"),
    ],
)
def test_a_violation_names_the_range_and_the_rule(raw: object, says: str) -> None:
    """kv-semantics 2.2."""
    with pytest.raises(RetentionError, match=says):
        parse_retention(raw)


def test_ranges_may_touch_and_decode_values_have_defaults() -> None:
    config = parse_retention({"token_ranges": [{"start": 0, "end": 4, "priority": 1}, {"start": 4, "priority": 2}]})

    assert [each.retention.priority for each in config.ranges] == [1, 2]
    assert config.decode == Retention(35, None)


def test_expiry_lowers_to_the_default_and_never_raises() -> None:
    """kv-semantics 2.5."""
    assert [demoted_priority(priority) for priority in (0, 34, 35, 36, 100)] == [0, 34, 35, 35, 35]


def test_a_clamped_value_is_named_as_its_sender_listed_it() -> None:
    """The order of listing is free (2.2), so the numbers are those of the list and not of the sorted ranges."""
    listed = parse_listed(
        {
            "token_ranges": [
                {"start": 64, "end": 128, "priority": 90, "duration": 30},
                {"start": 0, "end": 64, "priority": 70, "duration": 900},
            ],
            "decode_priority": 61,
            "decode_duration": 10.5,
        }
    )

    config, clamped = clamp(listed.config, 60, 10.25, listed.places)

    assert [str(each) for each in clamped] == [
        "token_ranges[0].priority=60",
        "token_ranges[0].duration=10.25",
        "token_ranges[1].priority=60",
        "token_ranges[1].duration=10.25",
        "decode_priority=60",
        "decode_duration=10.25",
    ]
    assert [(each.start, each.retention) for each in config.ranges] == [
        (0, Retention(60, 10.25)),
        (64, Retention(60, 10.25)),
    ]
    assert config.decode == Retention(60, 10.25)


@pytest.mark.parametrize(
    ("priority", "duration", "kept"),
    [
        (36, None, 60.0),  # For ever is above every ceiling.
        (36, 61, 60.0),
        (36, 60, 60.0),
        (36, 1, 1.0),
        (35, None, None),  # At the default and below expiry changes nothing, so nothing is limited.
        (35, 9999, 9999.0),
        (0, None, None),
    ],
)
def test_a_duration_is_limited_only_where_it_keeps_something_longer(
    priority: int, duration: float | None, kept: float | None
) -> None:
    config = parse_retention({"token_ranges": [{"start": 0, "priority": priority, "duration": duration}]})

    assert clamp(config, None, 60.0)[0].ranges[0].retention == Retention(priority, kept)


def test_a_priority_clamped_to_the_default_needs_no_duration() -> None:
    config = parse_retention({"token_ranges": [{"start": 0, "priority": 100}]})

    clamped_config, clamped = clamp(config, 35, 60.0)

    assert clamped_config.ranges[0].retention == Retention(35, None)
    assert [str(each) for each in clamped] == ["token_ranges[0].priority=35"]


def test_who_asks_for_nothing_is_never_clamped() -> None:
    assert clamp(DEFAULT_RETENTION, 35, 1.0) == (DEFAULT_RETENTION, ())


@pytest.mark.parametrize(
    ("max_priority", "max_duration_s", "says"),
    [
        (34, None, "max_priority is 34; it must be an integer from 35 to 100"),
        (101, None, "max_priority is 101"),
        (None, 0, "max_duration is 0; it must be null or seconds greater than 0"),
        (None, float("inf"), "max_duration is inf"),
    ],
)
def test_a_ceiling_that_would_not_hold_is_refused(max_priority, max_duration_s, says: str) -> None:
    with pytest.raises(RetentionError, match=says):
        check_ceilings(max_priority, max_duration_s)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON: .* at line 1"),
        ("[" * 100_000, "is not JSON"),
        ("9" * 5_000, "is not JSON"),
        ("[1]", "must be an object"),
        ('{"decode_priority": NaN}', "decode_priority is nan; it must be an integer from 0 to 100"),
        ('{"decode_duration": Infinity}', "greater than 0"),
    ],
)
def test_a_configuration_in_a_file_is_checked_by_the_same_rules(text: str, says: str) -> None:
    with pytest.raises(RetentionError, match=says):
        load_retention(text)


def test_a_dumped_configuration_is_written_in_one_spelling() -> None:
    config = parse_retention(
        {
            "token_ranges": [
                {"start": 9, "priority": 2, "duration": 0.5},
                {"start": 0, "end": 9, "priority": 80, "duration": 300.0},
            ]
        }
    )

    assert dump_retention(config) == (
        '{"token_ranges": [{"start": 0, "end": 9, "priority": 80, "duration": 300}, '
        '{"start": 9, "end": null, "priority": 2, "duration": 0.5}], "decode_priority": 35, "decode_duration": null}'
    )

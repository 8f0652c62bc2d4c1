"""Retention ranges: the mapping examples of kv-semantics §2, and what is refused."""

from __future__ import annotations

import pytest

from cached.errors import RetentionError
from cached.retention import Retention, demoted_priority, parse_retention


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

"""The count of a JSON text's values, in any pieces, against a count of the parsed text."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.json_size import ValueCounter

texts = st.text(st.sampled_from('ab\\",[]{}: é😀\n'), max_size=6)
documents = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


def expected(value: Any) -> int:
    """One for the whole, and for each list or object one more than the commas between its members."""
    if not isinstance(value, list | dict):
        return 0
    members = list(value.values()) if isinstance(value, dict) else value
    return 1 + max(len(members) - 1, 0) + sum(map(expected, members))


@given(documents, st.booleans(), st.lists(st.integers(0, 60), max_size=6))
@example(["\\"], False, [2, 3, 4])
@example(['\\"'], False, [2, 3, 4, 5])
def test_any_cut_of_a_text_gives_the_count_of_its_values(document: Any, ascii_only: bool, cuts: list[int]) -> None:
    raw = json.dumps(document, ensure_ascii=ascii_only).encode()
    whole, cut, bytewise = ValueCounter(), ValueCounter(), ValueCounter()
    bounds = [0, *sorted(min(each, len(raw)) for each in cuts), len(raw)]

    whole.feed(raw)
    for start, end in zip(bounds, bounds[1:], strict=False):  # noqa: RUF007 - empty pieces are part of it.
        cut.feed(raw[start:end])
    for index in range(len(raw)):
        bytewise.feed(raw[index : index + 1])

    assert whole.num_values == cut.num_values == bytewise.num_values == 1 + expected(document)

"""How an arena is divided between layouts, and which part a layout gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cached.keys import fingerprint
from cached.parts import (
    LayoutShare,
    NoPart,
    PartPlan,
    PartState,
    choose_part,
    fault_of_shares,
    plan_parts,
    read_share,
)
from cached.protocol import Layout

OLD, NEW, THIRD = Layout(b"old", 4096, 16), Layout(b"new", 8192, 16), Layout(b"third", 4096, 32)


def part(
    name: str = "", layout: Layout | None = None, *, in_use: bool = False, vacant: bool = False, left_s: float = 60.0
) -> PartState:
    """A part that holds blocks nobody has come back for yet, unless it is told otherwise."""
    return PartState(name, layout, in_use, vacant, left_s)


@pytest.mark.parametrize("text", ["demo", "=0.5", "demo=", "demo=0", "demo=1.5", "demo=x", "demo=nan", " =0.5"])
def test_a_share_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"demo=0\.5"):
        read_share(text)


def test_a_name_may_hold_what_models_names_hold() -> None:
    assert read_share("org/Model-7B=v2=0.25") == LayoutShare("org/Model-7B=v2", 0.25)


def test_more_than_there_is_and_the_same_name_twice_are_faults() -> None:
    assert fault_of_shares([LayoutShare("a", 0.7), LayoutShare("b", 0.3)]) is None
    assert "add up to 1.1" in str(fault_of_shares([LayoutShare("a", 0.7), LayoutShare("b", 0.4)]))
    assert "named twice" in str(fault_of_shares([LayoutShare("a", 0.1), LayoutShare("a", 0.1)]))


def test_without_names_the_only_layout_takes_all() -> None:
    assert plan_parts(2**20, (), 1) == (PartPlan("", 2**20),)


def test_the_rest_is_cut_into_equal_common_parts() -> None:
    assert plan_parts(2**20, [LayoutShare("a", 0.5)], 2) == (
        PartPlan("a", 2**19),
        PartPlan("", 2**18),
        PartPlan("", 2**18),
    )
    assert plan_parts(2**20, [LayoutShare("a", 0.5), LayoutShare("b", 0.5)], 1)[2:] == ()


@given(
    st.integers(4096, 2**45),
    st.lists(st.floats(0.001, 1.0), max_size=5),
    st.integers(1, 5),
)
def test_parts_never_add_up_to_more_than_the_arena(total: int, weights: list[float], num_common: int) -> None:
    scale = max(1.0, sum(weights))
    parts = plan_parts(total, [LayoutShare(str(n), w / scale) for n, w in enumerate(weights)], num_common)

    assert sum(part.num_bytes for part in parts) <= total
    assert all(part.num_bytes % 4096 == 0 for part in parts)


def test_a_layout_gets_the_part_that_bears_its_label_or_its_fingerprint() -> None:
    parts = [part("demo"), part(fingerprint(b"new")[:6]), part()]

    assert choose_part(parts, OLD, "demo") == 0
    assert choose_part(parts, NEW, "whatever") == 1
    assert choose_part(parts, THIRD, "third") == 2


def test_two_layouts_of_one_model_are_told_apart_by_a_fingerprint() -> None:
    parts = [part("demo"), part(fingerprint(b"new"))]

    assert choose_part(parts, OLD, "demo") == 0
    assert choose_part(parts, NEW, "demo") == 1


def test_a_beginning_of_less_than_four_digits_names_nobody() -> None:
    parts = [part(fingerprint(b"new")[:3]), part()]

    assert choose_part(parts, NEW, "") == 1


def test_a_named_part_waits_for_its_layout_whoever_else_comes() -> None:
    found = choose_part([part("demo"), part("", OLD, in_use=True)], NEW, "other")

    assert isinstance(found, NoPart)
    assert found.reason == "layout_in_use"
    assert fingerprint(b"old") in found.message


def test_where_all_is_given_away_a_stranger_is_told_what_to_add() -> None:
    found = choose_part([part("demo")], NEW, "other")

    assert isinstance(found, NoPart)
    assert found.reason == "no_share"
    assert f"{fingerprint(b'new')} (other)" in found.message


def test_a_layout_comes_back_to_its_own_part() -> None:
    parts = [part(), part("", NEW, in_use=True), part("", OLD)]

    assert choose_part(parts, NEW, "") == 1
    assert choose_part(parts, OLD, "") == 2


def test_a_newcomer_takes_an_empty_part_then_the_one_left_longest() -> None:
    empty, vacant = part(), part("", THIRD, vacant=True)
    gone, longer_gone = part("", OLD, left_s=-5.0), part("", THIRD, left_s=-50.0)

    assert choose_part([gone, empty], NEW, "") == 1
    assert choose_part([gone, vacant], NEW, "") == 1
    assert choose_part([gone, longer_gone], NEW, "") == 1


def test_blocks_wait_for_their_engines_as_long_as_they_may() -> None:
    found = choose_part([part("", OLD, left_s=42.0), part("", THIRD, in_use=True)], NEW, "")

    assert isinstance(found, NoPart)
    assert found.reason == "layout_lingers"
    assert "42 s" in found.message


def test_new_weights_under_the_same_label_take_over_when_the_old_ones_are_done() -> None:
    assert isinstance(choose_part([part("demo", OLD, in_use=True)], NEW, "demo"), NoPart)
    assert choose_part([part("demo", OLD, left_s=0.0)], NEW, "demo") == 0

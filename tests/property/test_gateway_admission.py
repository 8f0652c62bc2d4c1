"""Places shared among tenants: the threshold of Choudhury and Hahne, against a list of who took what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import Places, Verdict, judge

TENANTS = ["a", "b", "c", "d"]
ALPHAS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 1000.0])

steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.sampled_from(TENANTS), st.integers(0, 20), st.integers(0, 40)),
        st.tuples(st.just("give"), st.integers(0, 100), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(steps, ALPHAS)
def test_places_are_as_a_list_of_holdings_says_and_refusals_change_nothing(steps: list, alpha: float) -> None:
    places = Places(alpha)
    holdings: list[tuple[str, int]] = []
    for verb, who, count, capacity in steps:
        if verb == "give" and holdings:
            tenant, held = holdings.pop(who % len(holdings))
            places.give_back(tenant, held)
        elif verb == "take":
            before = sum(held for _, held in holdings)
            own = sum(held for tenant, held in holdings if tenant == who)
            verdict = places.take(who, count, capacity)
            assert (verdict is Verdict.FULL) == (count > max(capacity - before, 0))
            if verdict is Verdict.ADMITTED:
                holdings.append((who, count))
                # One after another: before each place, what the tenant has is less than alpha times what is free.
                for number in range(count if own else 0):
                    assert own + number < alpha * (capacity - before - number)
            if verdict is Verdict.OVER_SHARE:
                assert own > 0
        places.check_invariants()
        assert places.num_taken == sum(held for _, held in holdings)
        for tenant in TENANTS:
            assert places.held_by(tenant) == sum(held for owner, held in holdings if owner == tenant)


@given(st.integers(2, 1024), st.integers(1, 6), ALPHAS)
def test_greedy_tenants_end_with_equal_shares_and_room_for_one_more(capacity: int, greedy: int, alpha: float) -> None:
    """n of them reach alpha ÷ (1 + n·alpha) of the places each, give or take the one that a whole number costs."""
    places = Places(alpha)
    names = [f"greedy-{number}" for number in range(greedy)]
    verdicts = [Verdict.ADMITTED]
    while Verdict.ADMITTED in verdicts:
        verdicts = [places.take(name, 1, capacity) for name in names]
        places.check_invariants()

    share = alpha * capacity / (1 + greedy * alpha)
    for name in names:
        assert places.held_by(name) <= share + 1
    if capacity - greedy * (share + 1) >= 1:
        assert places.take("late", 1, capacity) is Verdict.ADMITTED


def test_a_request_for_many_is_served_on_an_idle_server_and_refused_as_its_own_fault_on_a_busy_one() -> None:
    assert judge(held=0, free=16, wanted=16, alpha=1.0) is Verdict.ADMITTED
    assert judge(held=1, free=1000, wanted=600, alpha=1.0) is Verdict.OVER_SHARE
    assert judge(held=0, free=15, wanted=16, alpha=1.0) is Verdict.FULL
    assert judge(held=9, free=0, wanted=1, alpha=1.0) is Verdict.FULL

"""Whatever steps took, the budget is within its bounds, rises with the pace, and lets prompts go on."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from engine.pace import LEAST_PREFILL, Outlook, StepRates, StepWork, step_budget

works = st.builds(
    StepWork,
    num_decodes=st.integers(0, 10**4),
    decode_context=st.integers(0, 10**9),
    num_prefill=st.integers(0, 10**5),
    prefill_context=st.integers(0, 10**12),
    prefill_read=st.integers(0, 10**7),
)
outlooks = st.builds(
    Outlook,
    num_decodes=st.integers(0, 300),
    decode_context=st.integers(0, 10**7),
    prefill_start=st.integers(0, 10**6),
    left=st.lists(st.integers(0, 10**6), max_size=40),
    num_young=st.integers(0, 300),
)


@given(
    steps=st.lists(st.tuples(works, st.floats(allow_nan=True, allow_infinity=True)), max_size=60),
    outlook=outlooks,
    paces=st.tuples(st.floats(1, 1e6), st.floats(1, 1e6)),
    most=st.integers(1, 10**5),
)
def test_the_budget_is_bounded_rises_with_the_pace_and_starves_nobody(
    steps: list[tuple[StepWork, float]], outlook: Outlook, paces: tuple[float, float], most: int
) -> None:
    rates = StepRates()
    for work, seconds in steps:
        rates.note(work, seconds)

    slow, fast = (step_budget(rates, outlook, pace, most) for pace in sorted(paces))

    assert 1 <= slow <= fast <= most
    least = outlook.num_decodes if outlook.num_decodes and rates.is_unsure else outlook.num_decodes + LEAST_PREFILL
    assert slow >= min(most, least)
    assert all(0 < each < math.inf for each in (rates.fixed_s, rates.decode_s(0), rates.prefill_s(0)))

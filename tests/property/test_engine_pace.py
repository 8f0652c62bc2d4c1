"""Whatever steps took, the budget is within its bounds, rises with the pace, and lets prompts go on."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from engine.pace import LEAST_PREFILL, Outlook, StepRates, StepWork, step_size

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
    waited_s=st.floats(0, 1e4),
)


crowds = st.tuples(st.integers(0, 20), st.integers(1, 20)).flatmap(
    lambda counts: st.builds(
        Outlook,
        num_decodes=st.just(sum(counts)),
        decode_context=st.integers(10**4, 10**5),
        prefill_start=st.integers(0, 4000),
        left=st.lists(st.integers(1, 60), max_size=40),
        num_young=st.just(sum(counts)),
        num_new=st.just(counts[1]),
        new_context=st.integers(0, 10**4),
        waited_s=st.floats(0, 1),
    )
)


@given(
    steps=st.lists(st.tuples(works, st.floats(allow_nan=True, allow_infinity=True)), max_size=60),
    outlook=outlooks | crowds,
    paces=st.tuples(st.floats(1, 1e6), st.floats(1, 1e6)),
    most=st.integers(1, 10**5),
)
def test_the_budget_is_bounded_rises_with_the_pace_and_starves_nobody(
    steps: list[tuple[StepWork, float]], outlook: Outlook, paces: tuple[float, float], most: int
) -> None:
    rates = StepRates()
    for work, seconds in steps:
        rates.note(work, seconds)

    slow, fast = (step_size(rates, outlook, pace, most) for pace in sorted(paces))

    num_others = outlook.num_decodes - outlook.num_new
    of_prompts = [size.num_tokens - (num_others if size.sits_out else outlook.num_decodes) for size in (slow, fast)]
    assert of_prompts[0] <= of_prompts[1]
    for size in (slow, fast):
        assert 1 <= size.num_tokens <= most
        least = outlook.num_decodes if outlook.num_decodes and rates.is_unsure else outlook.num_decodes + LEAST_PREFILL
        assert size.num_tokens >= min(most, LEAST_PREFILL if size.sits_out else least)
        assert not size.sits_out or 0 < outlook.num_new <= outlook.num_young == outlook.num_decodes
    assert all(0 < each < math.inf for each in (rates.fixed_s, rates.decode_s(0), rates.prefill_s(0)))

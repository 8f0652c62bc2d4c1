"""The budget of a step follows what steps cost."""

from __future__ import annotations

import random

import pytest

from engine.pace import StepRates, step_budget

FIXED, PER_TOKEN = 0.0215, 0.0012


def _learnt(noise: float = 0.0, scale: float = 1.0, rates: StepRates | None = None) -> StepRates:
    rates, numbers = rates or StepRates(), random.Random(1)
    for step in range(200):
        tokens = 1 if step % 2 else numbers.choice((16, 64, 128))
        seconds = scale * (FIXED + PER_TOKEN * tokens) * (1 + numbers.uniform(-noise, noise))
        rates.note(tokens, 1 if tokens == 1 else 0, seconds)
    return rates


def test_a_step_beside_streams_takes_as_many_times_a_step_of_decodes_as_was_set() -> None:
    budget = step_budget(_learnt(), num_decodes=1, decode_pace=3.0, most=256, least_prefill=16)

    taken = (FIXED + PER_TOKEN * budget) / (FIXED + PER_TOKEN)
    assert 2.9 < taken <= 3.0
    assert budget / taken > 0.6 * 128 * (FIXED + PER_TOKEN) / (FIXED + PER_TOKEN * 128), "60 % of the rate alone"


def test_a_larger_pace_gives_a_larger_step() -> None:
    rates = _learnt(noise=0.1)

    budgets = [step_budget(rates, 1, pace, 1024, 1) for pace in (1.5, 2.0, 3.0, 6.0)]

    assert budgets == sorted(set(budgets))


def test_nobody_decodes_so_the_whole_step_is_for_prefill() -> None:
    assert step_budget(_learnt(), 0, 3.0, 256, 16) == 256


def test_nothing_is_known_so_the_setting_holds() -> None:
    rates = StepRates()
    for _ in range(100):
        rates.note(1, 1, 0.02)

    assert step_budget(rates, 4, 3.0, 128, 16) == 128


def test_a_prefill_never_stands_still() -> None:
    assert step_budget(_learnt(), 20, 1.0, 128, 16) == 36
    assert step_budget(_learnt(), 120, 1.0, 128, 16) == 128


@pytest.mark.parametrize("scale", [0.25, 4.0])
def test_a_machine_that_changes_is_followed(scale: float) -> None:
    rates = _learnt()
    before = step_budget(rates, 1, 3.0, 4096, 1)

    _learnt(scale=scale, rates=rates)

    # All costs scaled alike: the budget is as it was, from figures that are all new.
    assert step_budget(rates, 1, 3.0, 4096, 1) == pytest.approx(before, rel=0.25)
    line = rates.line()
    assert line is not None
    assert line[1] == pytest.approx(scale * PER_TOKEN, rel=0.15)

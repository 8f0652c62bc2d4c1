"""Load or recompute."""

from __future__ import annotations

from engine.rates import PROBE_EVERY, LoadChoice, Onboard, Rate, Recompute


def choice_with(load_bytes_per_s: float) -> LoadChoice:
    choice = LoadChoice(block_bytes=1000, tokens_per_block=16)
    choice.load_bytes.observe(load_bytes_per_s, 1.0)
    return choice


def test_without_measurements_a_load_is_tried() -> None:
    assert LoadChoice(1000, 16).choose(4, None) == Onboard()
    assert LoadChoice(1000, 16).choose(4, 100.0) == Onboard()
    assert choice_with(1.0).choose(4, None) == Onboard()


def test_the_faster_way_is_taken() -> None:
    """kv-semantics 5.7."""
    assert choice_with(1e6).choose(4, 100.0) == Onboard()
    assert choice_with(1e3).choose(4, 100.0) == Recompute(load_s=4.0, compute_s=0.64)


def test_a_way_that_is_never_taken_is_probed_now_and_then() -> None:
    choice = choice_with(1e3)

    taken = [choice.choose(4, 100.0) == Onboard() for _ in range(2 * PROBE_EVERY)]

    assert sum(taken) == 2


def test_a_rate_follows_what_it_sees_and_ignores_what_teaches_nothing() -> None:
    rate = Rate()
    rate.observe(0, 1.0)
    rate.observe(5, 0.0)
    assert rate.per_s is None

    rate.observe(100, 1.0)
    for _ in range(50):
        rate.observe(10, 1.0)

    assert rate.per_s is not None
    assert 10 <= rate.per_s < 11

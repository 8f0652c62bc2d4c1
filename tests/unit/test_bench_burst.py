"""The figure of `bench/burst.py` that is easily taken too kindly."""

from __future__ import annotations

from bench.burst import NUM_REQUESTS, p95


def test_p95_of_a_burst_is_its_slowest_first_token() -> None:
    assert p95([float(n) for n in range(NUM_REQUESTS)]) == NUM_REQUESTS - 1


def test_p95_leaves_out_what_one_in_twenty_may_exceed() -> None:
    assert p95(list(range(100, 0, -1))) == 95
    assert p95(list(range(1, 21))) == 19
    assert p95([7.0]) == 7.0

"""What `bench/burst.py` makes of its bursts: the figures that are easily taken too kindly."""

from __future__ import annotations

from typing import Any

import pytest

from bench import burst
from bench.burst import NUM_REQUESTS, p95


def test_p95_of_a_burst_is_its_slowest_first_token() -> None:
    assert p95([float(n) for n in range(NUM_REQUESTS)]) == NUM_REQUESTS - 1


def test_p95_leaves_out_what_one_in_twenty_may_exceed() -> None:
    assert p95(list(range(100, 0, -1))) == 95
    assert p95(list(range(1, 21))) == 19
    assert p95([7.0]) == 7.0


def test_the_baseline_is_the_median_of_two_rounds_and_one_late_request_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds_asked: dict[bool, int] = {}
    finished: dict[str, Any] = {}

    def bursts(model: object, prompts: object, rounds: int, enable_block_reuse: bool) -> list[list[dict[str, Any]]]:
        rounds_asked[enable_block_reuse] = rounds
        slow = 1.0 if enable_block_reuse else 8.0
        return [
            [{"ttft_s": slow * (1 + n), "computed_tokens": 80}] * (NUM_REQUESTS - 1)
            + [{"ttft_s": 3 * slow * (1 + n), "computed_tokens": 80}]
            for n in range(rounds)
        ]

    monkeypatch.setattr(burst, "model_argument", lambda text: None)
    monkeypatch.setattr(burst, "Prompts", lambda model: None)
    monkeypatch.setattr(burst, "_bursts", bursts)
    monkeypatch.setattr(burst, "finish", lambda figure, **said: finished.update(said))

    burst.main()

    assert rounds_asked == {True: 3, False: 2}
    mean = (NUM_REQUESTS + 2) / NUM_REQUESTS
    assert finished["baseline"] == pytest.approx(8 * 1.5 * mean)
    assert finished["ratio"] == pytest.approx(8 * 1.5 / 2)
    assert finished["spread"] == [pytest.approx(8 / 3), pytest.approx(16)]
    assert finished["details"]["p95_over_min"] == [3.0, 3.0, 3.0]
    assert not finished["holds"]

"""What follows the death of a child, and which of its lines a person sees."""

from __future__ import annotations

import json

import pytest

from command.log_lines import LONGEST_SHOWN, warning_of
from command.restarts import LONGEST_PAUSE_S, GiveUp, History, StartAgain, after_death


@pytest.mark.parametrize("code", [2, 4, 5, 6])
def test_a_code_that_says_wrong_settings_is_final_before_it_was_ready(code: int) -> None:
    assert isinstance(after_death(History(), code, 1.0, was_ready=False), GiveUp)


def test_a_child_that_was_ready_once_is_always_started_again() -> None:
    history = History()

    for _ in range(50):
        decision = after_death(history, 6, 0.1, was_ready=not history.has_been_ready)
        assert isinstance(decision, StartAgain)
        history = decision.history

    assert decision.pause_s == LONGEST_PAUSE_S


def test_the_pause_doubles_and_a_steady_life_resets_it() -> None:
    first = after_death(History(), -9, 1.0, was_ready=True)
    assert isinstance(first, StartAgain)
    second = after_death(first.history, -9, 1.0, was_ready=True)
    assert isinstance(second, StartAgain)

    after_steady = after_death(second.history, -9, 3600.0, was_ready=True)

    assert isinstance(after_steady, StartAgain)
    assert second.pause_s == 2 * first.pause_s
    assert after_steady.pause_s == first.pause_s


def test_a_child_that_never_gets_ready_has_three_tries() -> None:
    history = History()
    for _ in range(2):
        decision = after_death(history, 1, 0.5, was_ready=False)
        assert isinstance(decision, StartAgain)
        history = decision.history

    assert after_death(history, -11, 0.5, was_ready=False) == GiveUp(
        "ended 3 times before it was ready, last with signal 11"
    )


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (json.dumps({"level": "info", "event": "fine"}), None),
        (json.dumps({"level": "warning", "event": "tier absent", "tier": "x"}), "warning: tier absent tier=x"),
        (json.dumps({"level": "ERROR", "event": "bad", "exception": "Traceback\n  …\nValueError: no"}), "ERROR: bad ValueError: no"),
        ("WARNING: something plain", "WARNING: something plain"),
        ("engine: reading 10 %", None),
        ('{"level": "warning", broken', None),
        ("ERROR with \x1b[31mcolour", "ERROR with  [31mcolour"),
    ],
)  # fmt: skip
def test_only_warnings_and_worse_are_shown_in_one_clean_line(line: str, shown: str | None) -> None:
    assert warning_of(line.encode()) == shown


def test_a_long_warning_is_cut() -> None:
    shown = warning_of(b"ERROR " + b"x" * 5000)

    assert shown is not None
    assert len(shown) == LONGEST_SHOWN

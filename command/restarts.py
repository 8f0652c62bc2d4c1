"""Decides what follows the death of a supervised process: another one after a pause, or the end of everything.

Pure; the supervisor starts and kills. A process that has been ready is always started again: what it was doing is
lost, what the others hold is not. One that has never been ready is given few tries, because a wrong setting or a
missing file does not mend itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from command.errors import Exit

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
STEADY_AFTER_S = 30.0
TRIES_BEFORE_READY = 3
# These say that trying again gives the same answer.
FINAL_CODES = frozenset({Exit.USAGE, Exit.PERMISSION, Exit.CONFLICT, Exit.INVALID})


@dataclass(frozen=True, slots=True)
class History:
    """What is known of one process's lives so far."""

    deaths_in_a_row: int = 0
    has_been_ready: bool = False


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Start another after `pause_s`."""

    pause_s: float
    history: History


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop everything; `reason` completes the sentence 'engine …'."""

    reason: str


def after_death(history: History, exit_code: int, lived_s: float, was_ready: bool) -> StartAgain | GiveUp:
    """The decision after a process with `history` ended. A negative code is a signal, as in `subprocess`."""
    ever_ready = history.has_been_ready or was_ready
    deaths = 1 if was_ready and lived_s >= STEADY_AFTER_S else history.deaths_in_a_row + 1
    if not ever_ready:
        if exit_code in FINAL_CODES:
            return GiveUp(f"ended with code {exit_code}")
        if deaths >= TRIES_BEFORE_READY:
            return GiveUp(f"ended {deaths} times before it was ready, last with {describe_code(exit_code)}")
    pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(deaths - 1, 16))
    return StartAgain(pause_s, replace(history, deaths_in_a_row=deaths, has_been_ready=ever_ready))


def describe_code(exit_code: int) -> str:
    """An exit code as people say it."""
    return f"signal {-exit_code}" if exit_code < 0 else f"code {exit_code}"

"""Finds stop strings in text that arrives in pieces, and holds back what may still become one.

The result does not depend on where the pieces are cut: characters are looked at one by one. The stop string that is
complete first ends the text; of several that are complete at the same character, the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """One Knuth-Morris-Pratt automaton per stop string, so that a character costs O(stops) whatever the text is."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """The text that is now certain to be kept; once `matched`, nothing more is."""
        if self.matched or not text:
            return ""
        if not self._held and self._first_chars.isdisjoint(text):
            return text
        pending = self._held + text
        for offset, char in enumerate(text, start=len(self._held)):
            longest = self._advance(char)
            if longest:
                self.matched = True
                self._held = ""
                return pending[: offset + 1 - longest]
        kept = len(pending) - max(self._states)
        self._held = pending[kept:]
        return pending[:kept]

    def flush(self) -> str:
        """The end of the text has come: what was held back is kept."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int:
        """Feed one character to every automaton; the length of the longest stop string it completes, or 0."""
        longest = 0
        for index, stop in enumerate(self._stops):
            state = self._states[index]
            failure = self._failures[index]
            while state and stop[state] != char:
                state = failure[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                longest = max(longest, state)
                state = failure[state - 1]
            self._states[index] = state
        return longest


def _failure_table(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    state = 0
    for index in range(1, len(stop)):
        while state and stop[index] != stop[state]:
            state = table[state - 1]
        if stop[index] == stop[state]:
            state += 1
        table[index] = state
    return table

"""Stop strings: whatever the cuts, the result is the naive one over the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.stops import StopMatcher

ALPHABET = st.sampled_from("ab\n€")
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4, unique=True)
PIECES = st.lists(st.text(ALPHABET, max_size=6), max_size=10)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """The first stop string to be complete cuts; of several complete at once the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(PIECES, STOPS)
def test_pieces_give_what_the_whole_text_gives(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)

    kept = "".join([matcher.feed(piece) for piece in pieces]) + matcher.flush()

    assert (kept, matcher.matched) == naive("".join(pieces), stops)


@given(PIECES, STOPS)
def test_no_more_is_held_back_than_could_become_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen, kept = "", ""

    for piece in pieces:
        seen += piece
        kept += matcher.feed(piece)
        if matcher.matched:
            break
        held = seen[len(kept) :]
        assert held == max(
            (stop[:size] for stop in stops for size in range(len(stop)) if seen.endswith(stop[:size])),
            key=len,
            default="",
        )


def test_a_long_text_of_near_misses_is_linear_in_its_length() -> None:
    stops = ["a" * 1000 + "b" + str(index) for index in range(16)]
    matcher = StopMatcher(stops)

    kept = matcher.feed("a" * 5000) + matcher.flush()

    assert kept == "a" * 5000

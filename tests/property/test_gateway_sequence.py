"""One choice's text and counts, against the whole sequence looked at afterwards."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import TokenEvent, TokenLogprob
from gateway.detokenize import ByteDecoder
from gateway.sequence import SequenceText
from gateway.values import TokenText
from tests.property.test_gateway_stops import naive

# Token 0 is special. The rest covers whole characters, halves of one, and runs that straddle stop strings.
TOKENS = [b"", b"a", b"b", b"ab", b"ba\n", b"\n", "é".encode()[:1], "é".encode()[1:], "aéb".encode()]
SKIPPED = frozenset({0})

sequences = st.lists(st.integers(0, len(TOKENS) - 1), max_size=24)
stop_lists = st.lists(st.text(st.sampled_from("ab\né"), min_size=1, max_size=4), max_size=3, unique=True)


def describe(token: int, logprob: float) -> TokenText:
    return TokenText(TOKENS[token].decode("utf-8", "replace"), TOKENS[token], logprob)


def fed(tokens: list[int], stops: list[str], sizes: list[int], *, min_tokens: int = 0):
    """Feed the tokens in events of the given sizes; all progresses, and the sequence."""
    sequence = SequenceText(0, ByteDecoder(TOKENS), describe, stops=stops, min_tokens=min_tokens, skipped=SKIPPED)
    progresses = []
    position, turn = 0, 0
    while True:
        size = sizes[turn % len(sizes)]
        part = tuple(tokens[position : position + size])
        position, turn = position + size, turn + 1
        last = position >= len(tokens)
        logprobs = tuple([TokenLogprob(-1.0, ()) for _ in part])
        progresses.append(sequence.feed(TokenEvent(1, part, logprobs, None, "length" if last else None)))
        if progresses[-1].delta.finish is not None:
            return progresses, sequence


@given(sequences, stop_lists, st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_text_and_finish_are_those_of_the_whole_text(tokens: list[int], stops: list[str], sizes: list[int]) -> None:
    whole = b"".join([TOKENS[token] for token in tokens]).decode("utf-8", "replace")
    expected, has_stopped = naive(whole, stops) if stops else (whole, False)

    progresses, _ = fed(tokens, stops, sizes)

    assert "".join([progress.delta.text for progress in progresses]) == expected
    assert progresses[-1].delta.finish == ("stop" if has_stopped else "length")


@given(sequences, stop_lists, st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_the_tokens_that_count_cover_the_kept_text_and_no_more(
    tokens: list[int], stops: list[str], sizes: list[int]
) -> None:
    progresses, sequence = fed(tokens, stops, sizes)
    text = "".join([progress.delta.text for progress in progresses])
    kept = sequence.tokens_kept

    covered = b"".join([TOKENS[token] for token in tokens[:kept]]).decode("utf-8", "replace")
    if progresses[-1].delta.finish == "length":
        assert kept == len(tokens)
    else:
        assert covered.startswith(text)
        if kept:
            shorter = b"".join([TOKENS[token] for token in tokens[: kept - 1]])
            # Without the last token some of the kept text would be missing (half a character counts as missing).
            assert len(shorter.decode("utf-8", "ignore")) < len(text)


@given(sequences, stop_lists, st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_confirmations_rise_and_never_exceed_what_is_kept_at_the_end(
    tokens: list[int], stops: list[str], sizes: list[int]
) -> None:
    progresses, sequence = fed(tokens, stops, sizes)

    confirmed = [progress.confirm for progress in progresses if progress.confirm is not None]

    assert confirmed == sorted(set(confirmed))
    assert all(count <= sequence.tokens_kept for count in confirmed)
    assert [progress.stop for progress in progresses if progress.stop is not None] == (
        [sequence.tokens_kept] if stops else []
    )


@given(sequences, stop_lists, st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_log_probabilities_are_those_of_the_kept_tokens_in_order(
    tokens: list[int], stops: list[str], sizes: list[int]
) -> None:
    progresses, sequence = fed(tokens, stops, sizes)

    scored = [token.chosen.data for progress in progresses for token in progress.delta.scored]

    assert scored == [TOKENS[token] for token in tokens[: sequence.tokens_kept] if token not in SKIPPED]


def test_a_stop_string_within_min_tokens_does_not_stop() -> None:
    progresses, sequence = fed([1, 2, 1, 2, 1], ["a"], [1], min_tokens=3)

    assert "".join([progress.delta.text for progress in progresses]) == "abab"
    assert progresses[-1].stop == sequence.tokens_kept == 4

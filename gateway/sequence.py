"""One sequence as the client sees it: tokens in, text and counts out, with the stop strings taken care of.

Decides which tokens count. A token counts when some of its text is kept, so a stop string's own tokens do not unless
they begin before it; text that has been handed out is never taken back, so its tokens can be confirmed to the engine
at once (kv-semantics 3.6). Sends nothing itself.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from engine.protocol import FirstToken, TokenEvent
from gateway.detokenize import TextDecoder
from gateway.stops import StopMatcher
from gateway.values import Delta, Finish, ScoredToken, TokenText


@dataclass(frozen=True, slots=True)
class Progress:
    """What one event led to: news for the client, and what the engine is to be told."""

    delta: Delta
    confirm: int | None = None
    stop: int | None = None


class SequenceText:
    """The text of one choice as it grows; `describe` turns a token into text and bytes for log-probabilities."""

    def __init__(
        self,
        index: int,
        decoder: TextDecoder,
        describe: Callable[[int, float], TokenText],
        *,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        skipped: Collection[int] = (),
    ) -> None:
        self.index = index
        self.first: FirstToken | None = None
        self.tokens_kept = 0
        self._decoder = decoder
        self._describe = describe
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self._skipped = skipped
        self._starts = array("Q")
        self._decoded_chars = 0
        self._released_chars = 0
        self._unreleased: list[tuple[int, ScoredToken]] = []

    def feed(self, event: TokenEvent) -> Progress:
        """Take one event in. After a progress with `stop`, or a delta with `finish`, the sequence is over."""
        if event.first is not None:
            self.first = event.first
        pieces = []
        for position, token in enumerate(event.tokens):
            if event.logprobs:
                self._score(event, position)
            pieces.append(self._take(token))
            if self._has_stopped:
                return self._stopped("".join(pieces))
        if event.finish is None:
            return self._grown("".join(pieces))
        pieces.append(self._rest())
        if self._has_stopped:
            return self._stopped("".join(pieces))
        return self._finished("".join(pieces), "stop" if event.finish == "stop" else "length")

    @property
    def _has_stopped(self) -> bool:
        return self._matcher is not None and self._matcher.matched

    def _take(self, token: int) -> str:
        """Decode one token; the text that is now certain."""
        self._starts.append(self._decoded_chars)
        text = "" if token in self._skipped else self._decoder.feed(token)
        self._decoded_chars += len(text)
        if self._matcher is None or len(self._starts) <= self._min_tokens:
            return self._release(text)
        return self._release(self._matcher.feed(text))

    def _rest(self) -> str:
        """The engine has finished: an incomplete character, and what might have become a stop string."""
        text = self._decoder.flush()
        if self._matcher is None:
            return self._release(text)
        kept = self._matcher.feed(text)
        return self._release(kept if self._matcher.matched else kept + self._matcher.flush())

    def _release(self, text: str) -> str:
        self._released_chars += len(text)
        return text

    def _grown(self, text: str) -> Progress:
        if self._matcher is None:
            self.tokens_kept = len(self._starts)
            return Progress(self._delta(text, None))
        kept = bisect_left(self._starts, self._released_chars)
        confirm = kept if kept > self.tokens_kept else None
        self.tokens_kept = kept
        return Progress(self._delta(text, None), confirm=confirm)

    def _stopped(self, text: str) -> Progress:
        self.tokens_kept = bisect_left(self._starts, self._released_chars)
        return Progress(self._delta(text, "stop"), stop=self.tokens_kept)

    def _finished(self, text: str, finish: Finish) -> Progress:
        self.tokens_kept = len(self._starts)
        stop = self.tokens_kept if self._matcher is not None else None
        return Progress(self._delta(text, finish), stop=stop)

    def _delta(self, text: str, finish: Finish | None) -> Delta:
        scored: list[ScoredToken] = []
        if self._unreleased:
            scored = [token for position, token in self._unreleased if position < self.tokens_kept]
            del self._unreleased[: len(scored)]
        return Delta(self.index, text, tuple(scored), finish, self.tokens_kept)

    def _score(self, event: TokenEvent, position: int) -> None:
        token, scores = event.tokens[position], event.logprobs[position]
        if token in self._skipped:  # It has no text, and the tokens of an answer join to its text.
            return
        chosen = self._describe(token, scores.logprob)
        top = tuple([self._describe(each.token, each.logprob) for each in scores.top])
        self._unreleased.append((len(self._starts), ScoredToken(chosen, top, self._decoded_chars)))

"""Tokens to text, one token at a time, never half a character.

Joined, the pieces are exactly what decoding all tokens at once gives: for byte-level vocabularies because both decode
the same bytes, with U+FFFD in the same places; for the others as far as the tokenizer's own decoder is stable.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

_REPLACEMENT: Final = "\ufffd"
_MAX_PENDING_TOKENS: Final = 16
"""Longer than any character in any byte fallback: a window that still ends in U+FFFD then is broken for good."""


class TextDecoder(Protocol):
    """The text of one sequence, as it grows."""

    def feed(self, token: int) -> str:
        """The text that this token completes, which may be none."""

    def flush(self) -> str:
        """The end: what an incomplete character becomes."""


class ByteDecoder:
    """For byte-level vocabularies: every token is a run of bytes, and text is those bytes as UTF-8. O(1) per token."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return self._utf8.decode(self._token_bytes[token]) if token < len(self._token_bytes) else ""

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For other vocabularies: decodes a short window of tokens, and takes what is new against the window without it.

    The window keeps the tokens of the last piece, so that decoders which treat the first token differently (a leading
    space that is dropped) treat it the same both times.
    """

    def __init__(self, decode: Callable[[list[int]], str], skipped: Collection[int]) -> None:
        self._decode = decode
        self._skipped = skipped
        self._shown: list[int] = []
        self._pending: list[int] = []

    def feed(self, token: int) -> str:
        if token in self._skipped:
            return ""
        self._pending.append(token)
        text = self._text()
        if text.endswith(_REPLACEMENT) and len(self._pending) < _MAX_PENDING_TOKENS:
            return ""
        if text:
            self._shown, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        text = self._text() if self._pending else ""
        self._pending = []
        return text

    def _text(self) -> str:
        before = self._decode(self._shown) if self._shown else ""
        return self._decode(self._shown + self._pending)[len(before) :]


def byte_table(vocabulary: dict[str, int], added: dict[int, str], skipped: Collection[int]) -> list[bytes]:
    """The bytes of every token of a byte-level vocabulary, by id; of `skipped` ones none."""
    size = max([*vocabulary.values(), *added, -1]) + 1
    table = [b""] * size
    byte_of = _byte_of_char()
    for text, token in (*vocabulary.items(), *((text, token) for token, text in added.items())):
        try:
            table[token] = bytes([byte_of[char] for char in text])
        except KeyError:  # Not in the byte alphabet: an added token, which stands for itself.
            table[token] = text.encode("utf-8", "replace")
    for token in skipped:
        table[token] = b""
    return table


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    chars.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return chars

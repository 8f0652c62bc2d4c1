"""Server-sent events as bytes: data frames, the end marker, the comment that keeps a quiet stream alive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import orjson

DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"
_OTHER_LINE_ENDS: Final = tuple([(chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029)])


def data_frame(body: Any) -> bytes:
    """One event. JSON escapes line feeds; the three characters that some clients take for line ends are escaped here."""
    text = orjson.dumps(body)
    if not text.isascii():
        for raw, escaped in _OTHER_LINE_ENDS:
            text = text.replace(raw, escaped)
    return b"data: " + text + b"\n\n"


def data_frames(bodies: Iterable[Any]) -> bytes:
    """Several events in one write."""
    return b"".join([data_frame(body) for body in bodies])

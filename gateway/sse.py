"""Server-sent events as bytes: data frames, the end marker, the comment that keeps a quiet stream alive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import orjson

DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"


def data_frame(body: Any) -> bytes:
    """One event; JSON has no raw line breaks, so one line always holds it."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def data_frames(bodies: Iterable[Any]) -> bytes:
    """Several events in one write."""
    return b"".join([data_frame(body) for body in bodies])

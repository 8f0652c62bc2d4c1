"""What the process writes to its log: JSON lines from an allow-list, and a second net that redacts keys.

Nothing of a body, a header, a key or a salt is ever passed to a logger; the redaction is for what nobody thought of.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import MutableMapping
from typing import Any, Final, TextIO

import structlog

_KEY: Final = re.compile(r"hl_[a-z]+_[0-9A-Za-z]{12}_[0-9A-Za-z]+")
_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure(level: str, stream: TextIO | None = None) -> None:
    """Set up both our log and the standard library's, which our dependencies use."""
    target = stream or sys.stderr
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _redact,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(target),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        _RedactingFormatter('{"level": "%(levelname)s", "logger": "%(name)s", "event": "%(message)s"}')
    )
    logging.basicConfig(level=max(_LEVELS[level], logging.WARNING), handlers=[handler], force=True)


def where(error: BaseException) -> list[str]:
    """The frames of a traceback, innermost last, without values and without the error's own text: either may quote a
    request."""
    return [
        f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)[-12:]
    ]


def _redact(_logger: object, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = _KEY.sub("hl_…", value)
    return event


class _RedactingFormatter(logging.Formatter):
    """Messages of libraries, without what looks like one of our keys and without tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        record.exc_info = None
        record.exc_text = None
        record.stack_info = None
        return _KEY.sub("hl_…", super().format(record))

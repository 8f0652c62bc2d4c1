"""How the engine logs: one line of JSON per event on stderr, with fields from a list, and no other.

It decides which fields may appear, so that a prompt, a token, a salt or a namespace cannot reach a log by mistake: a
field that is not listed is dropped. What is worth a line is decided where it happens.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Final

import structlog

ALLOWED_FIELDS: Final = frozenset(
    {
        "bytes",
        "client",
        "connections",
        "device",
        "device_blocks",
        "dtype",
        "error",
        "event",
        "exception",
        "exc_info",
        "failure",
        "host_blocks",
        "incarnation",
        "level",
        "model_id",
        "num_blocks",
        "peer_uid",
        "quantization",
        "reason",
        "requests_dropped",
        "sequences",
        "slot_offset",
        "socket",
        "state",
        "step_id",
        "tier",
        "timeout_s",
        "timestamp",
        "version",
        "wall_s",
    }
)
MAX_VALUE_CHARS: Final = 300


def configure(level: str) -> None:
    """Set up structlog for this process."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            only_allowed_fields,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def only_allowed_fields(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Drop what is not listed, and cut what is long."""
    return {
        name: value[:MAX_VALUE_CHARS] if isinstance(value, str) else value
        for name, value in event.items()
        if name in ALLOWED_FIELDS
    }

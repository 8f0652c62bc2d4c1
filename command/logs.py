"""Sets up the logging of a process: JSON lines on stderr, without secrets, from structlog and the standard library.

What is logged is each package's choice (an allow-list, docs/architecture.md); the redaction here is the second net, for
what slips through it.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

import structlog

_SECRETS = re.compile(
    r"(hl_(?:live|test)_[A-Za-z0-9]+_)[A-Za-z0-9_-]+|((?:Bearer|Basic)\s+)[^\s\"',]+|((?:x-api-key|api[-_]key)[\"']?\s*[:=]\s*[\"']?)[^\s\"',]+",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """`text` with what looks like a credential cut out; the public part of a key stays."""
    return _SECRETS.sub(lambda m: (m[1] or m[2] or m[3]) + "…", text)


def configure_logging(level: str) -> None:
    """One handler for everything; called once, by the command that becomes the process."""
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        # Tracebacks without locals: a local may hold a prompt or a key.
        structlog.processors.format_exc_info,
        _redact_event,
    ]
    renderer = structlog.processors.JSONRenderer(ensure_ascii=False)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    logging.captureWarnings(True)


def _redact_event(_logger: Any, _name: str, event: dict[str, Any]) -> dict[str, Any]:
    return {key: redact(value) if isinstance(value, str) else value for key, value in event.items()}

"""Decides which of a child's log lines a person at the terminal should see, and how they read there.

Pure: a line in, a short text or None out. The whole line is in the log file; here only warnings and worse are shown.
"""

from __future__ import annotations

import json
import re

LONGEST_SHOWN = 240
_LEVELS = {"warning", "warn", "error", "critical", "fatal"}
_PLAIN = re.compile(r"\b(WARNING|WARN|ERROR|CRITICAL|FATAL)\b", re.ASCII)
_HIDDEN_KEYS = {"event", "level", "timestamp", "logger", "message", "msg", "exception", "stack", "exc_info"}


def warning_of(line: bytes) -> str | None:
    """The text to show for a log line, or None when it is not a warning."""
    text = line.decode("utf-8", "replace").strip()
    if text.startswith("{"):
        return _of_json(text)
    return _shorten(text) if _PLAIN.search(text[:200]) else None


def _of_json(text: str) -> str | None:
    try:
        record = json.loads(text)
    except ValueError:
        return None
    if not isinstance(record, dict) or str(record.get("level", "")).lower() not in _LEVELS:
        return None
    event = str(record.get("event") or record.get("message") or record.get("msg") or "")
    details = " ".join(f"{key}={value}" for key, value in record.items() if key not in _HIDDEN_KEYS)
    exception = str(record.get("exception") or "").strip().rpartition("\n")[2]
    return _shorten(f"{record['level']}: " + " ".join(part for part in (event, details, exception) if part))


def _shorten(text: str) -> str:
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 1] + "…"

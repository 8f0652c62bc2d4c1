"""What a recorded request is, whatever wrote it down, and how one line of each format becomes one.

Pure: lines in, values out. Files, compression and tokenizers are `trace_files.py`'s; what is done with the requests is
the simulator's.

Not every trace knows tokens. What it does know is said in *symbols*, 32-bit numbers that stand for tokens wherever the
prefix tree compares them: equal symbols in equal places are equal tokens, and nothing else is claimed.

| trace | knows | symbols of a block of B tokens |
|---|---|---|
| text | every token | B: the tokens themselves |
| our own log | a keyed hash of 8 bytes for each 8 tokens | B ÷ 4: the halves of its hashes |
| mooncake | one id for each 512 tokens | 2: the id, and which part of the 512 |
"""

from __future__ import annotations

import base64
import binascii
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.errors import TraceError

TraceFormat = Literal["mooncake", "text", "request-log"]

MOONCAKE_TOKENS = 512
LOG_GRAIN_TOKENS = 8
LOG_HASH_BYTES = 8
LOG_VERSION = 1
MAX_SYMBOL = 2**32 - 1
LEGAL_FORMATS = (
    'mooncake JSONL ({"timestamp": ms, "input_length": n, "hash_ids": [...]}), '
    'text JSONL ({"input": text} or {"prompt": text} or {"messages": [...]}), '
    'or a request log of `record` ({"halocline_request_log": 1, ...})'
)
_TEXT_FIELDS = ("input", "prompt", "text", "messages")
_SIZES: dict[TraceFormat, tuple[int, ...]] = {
    "text": (2, 4, 8, 16, 32, 64, 128),
    "request-log": (8, 16, 32, 64, 128),
    "mooncake": (2, 4, 8, 16, 32, 64, 128, 256, 512),
}


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One prompt. `known` is what the trace knows of it: tokens, hashes of 8 tokens, or ids of 512 tokens, of whole
    ones only; `num_tokens` is its full length."""

    at_s: float
    num_tokens: int
    known: Sequence[int]
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class TracedText:
    """One prompt as text, to be tokenized."""

    at_s: float | None
    text: str


@dataclass(frozen=True, slots=True)
class LogHeader:
    """The first line of a request log, and of every engine's life after it. `key_id` names the key of its hashes."""

    key_id: str


def legal_sizes(trace_format: TraceFormat) -> tuple[int, ...]:
    """The values of tokens_per_block at which a trace of this format can be replayed."""
    return _SIZES[trace_format]


def check_size(trace_format: TraceFormat, tokens_per_block: int) -> None:
    """Raises TraceError when a trace of this format cannot be replayed at this size."""
    legal = legal_sizes(trace_format)
    if tokens_per_block not in legal:
        raise TraceError(
            f"tokens_per_block {tokens_per_block} cannot be replayed from a {trace_format} trace; "
            f"legal are {', '.join(map(str, legal))}"
        )


def default_size(trace_format: TraceFormat) -> int:
    """The engine's default, or the trace's own block where it has one."""
    return MOONCAKE_TOKENS if trace_format == "mooncake" else 16


def symbols_per_block(trace_format: TraceFormat, tokens_per_block: int) -> int:
    """How many symbols stand for one block's tokens."""
    match trace_format:
        case "text":
            return tokens_per_block
        case "request-log":
            return 2 * tokens_per_block // LOG_GRAIN_TOKENS
        case "mooncake":
            return 2


def symbols(trace_format: TraceFormat, request: TracedRequest, tokens_per_block: int) -> tuple[int, ...]:
    """The prompt as the core is given it: its full blocks, and a symbol or more for what is left of it.

    What is left has to be there, since a prompt is never served whole (kv-semantics 3.1), and it takes a block.
    """
    if trace_format == "text":
        return tuple(request.known)
    num_full, num_left = divmod(request.num_tokens, tokens_per_block)
    if trace_format == "mooncake":
        parts = MOONCAKE_TOKENS // tokens_per_block
        found = [each for at in range(num_full) for each in (request.known[at // parts], at % parts)]
    else:
        hashes = request.known[: num_full * tokens_per_block // LOG_GRAIN_TOKENS]
        found = [half for each in hashes for half in (each >> 32, each & MAX_SYMBOL)]
    if num_left:
        found.append(0)
    return tuple(found)


# Formats. -----------------------------------------------------------------------------------------------------------


def detect_format(line: bytes, where: str) -> TraceFormat:
    """The format of a trace, from its first line. Raises TraceError that names what was seen and what is legal."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        seen = f"{line[:60]!r}, which is not JSON"
    else:
        if isinstance(row, dict):
            if "halocline_request_log" in row:
                return "request-log"
            if "hash_ids" in row:
                return "mooncake"
            if any(name in row for name in _TEXT_FIELDS):
                return "text"
            seen = "an object with " + (", ".join(map(repr, list(row)[:8])) or "nothing in it")
        else:
            seen = f"a JSON {type(row).__name__}"
    raise TraceError(f"{where} is no trace of a known format: its first line is {seen}. Known are {LEGAL_FORMATS}.")


def parse_mooncake(line: bytes) -> TracedRequest:
    """One line of a mooncake trace. Raises TraceError."""
    row = _object(line)
    ids, length = row.get("hash_ids"), row.get("input_length")
    if not isinstance(length, int) or length < 1:
        raise TraceError(f"input_length is {length!r}; it must be a number of tokens ≥ 1")
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each <= MAX_SYMBOL for each in ids):
        raise TraceError("hash_ids must be a list of integers from 0 to 2³²−1")
    if len(ids) < -(-length // MOONCAKE_TOKENS):
        raise TraceError(f"hash_ids has {len(ids)} ids, too few for {length} tokens at {MOONCAKE_TOKENS} each")
    return TracedRequest(_seconds(row.get("timestamp", 0), 1e-3), length, array("I", ids))


def parse_text(line: bytes) -> TracedText:
    """One line of a text trace. Raises TraceError."""
    row = _object(line)
    name = next((each for each in _TEXT_FIELDS if each in row), None)
    if name is None:
        raise TraceError(f"none of {', '.join(_TEXT_FIELDS)} is in this line")
    text = _messages_text(row[name]) if name == "messages" else row[name]
    if not isinstance(text, str):
        raise TraceError(f"{name} must be a string, not {type(text).__name__}")
    at = row.get("timestamp")
    return TracedText(None if at is None else _seconds(at, _unit_of(at)), text)


def parse_log(line: bytes) -> TracedRequest | LogHeader:
    """One line of our own request log. Raises TraceError."""
    row = _object(line)
    if "halocline_request_log" in row:
        if row["halocline_request_log"] != LOG_VERSION:
            raise TraceError(f"this is a request log of version {row['halocline_request_log']!r}, not {LOG_VERSION}")
        return LogHeader(str(row.get("key_id", "")))
    length, packed = row.get("tokens"), row.get("hashes")
    if not isinstance(length, int) or length < 1:
        raise TraceError(f"tokens is {length!r}; it must be a number of tokens ≥ 1")
    if not isinstance(packed, str):
        raise TraceError("hashes must be a string in base64")
    try:
        raw = base64.b64decode(packed, validate=True)
    except binascii.Error as error:
        raise TraceError(f"hashes is not base64: {error}") from None
    if len(raw) != length // LOG_GRAIN_TOKENS * LOG_HASH_BYTES:
        raise TraceError(f"hashes has {len(raw)} bytes; {length} tokens have {LOG_HASH_BYTES} for each 8 of them")
    hashes = [int.from_bytes(raw[at : at + LOG_HASH_BYTES], "big") for at in range(0, len(raw), LOG_HASH_BYTES)]
    return TracedRequest(_seconds(row.get("at", 0), 1.0), length, hashes, str(row.get("namespace", "")))


def begins_log(line: bytes) -> bool:
    """Whether this line of a request log is one with which an engine's life begins."""
    return line.startswith(b'{"halocline_request_log":')


def _object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise TraceError(f"a JSON {type(row).__name__}, not an object")
    return row


def _messages_text(listed: object) -> str:
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise TraceError("messages must be a list of objects with role and content")
    return "\n".join(f"{each.get('role', '')}: {each.get('content', '')}" for each in listed)


def _seconds(value: object, unit: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
        raise TraceError(f"the time is {value!r}; it must be a number ≥ 0")
    return value * unit


def _unit_of(value: object) -> float:
    """Traces of text say seconds, milliseconds or microseconds since 1970 without saying which."""
    if not isinstance(value, int | float) or value < 1e11:
        return 1.0
    return 1e-3 if value < 1e14 else 1e-6

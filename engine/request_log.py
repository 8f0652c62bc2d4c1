"""What the engine's own request log says of a prompt: when it came, how long it is, and what it shares with others.

For each 8 tokens it has 8 bytes of keyed BLAKE2b, chained from the namespace on: equal hashes are equal prefixes of one
namespace, and without the key nothing can be said of the tokens behind one, not even by trying texts. No text, no token,
no salt. The hashes only ever count reuse in a replay; nothing is served by them, which is why 8 bytes are enough.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence

from cached.keys import Namespace, fingerprint, token_bytes
from engine.traces import LOG_GRAIN_TOKENS, LOG_HASH_BYTES, LOG_VERSION

KEY_BYTES = 32
_PERSON = b"halocline/log/1"


def prompt_hashes(key: bytes, namespace: Namespace, tokens: Sequence[int]) -> bytes:
    """8 bytes for each whole 8 tokens, one after the other."""
    packed = token_bytes(tokens)
    row = 4 * LOG_GRAIN_TOKENS
    found = bytearray()
    before: bytes = namespace
    for at in range(0, len(packed) - row + 1, row):
        digest = hashlib.blake2b(before + packed[at : at + row], digest_size=LOG_HASH_BYTES, key=key, person=_PERSON)
        before = digest.digest()
        found += before
    return bytes(found)


def request_line(key: bytes, at_s: float, namespace: Namespace, tokens: Sequence[int], max_tokens: int) -> bytes:
    """The line of one request. `at_s` is in seconds since 1970."""
    row = {
        "at": round(at_s, 6),
        "tokens": len(tokens),
        "max_tokens": max_tokens,
        "namespace": fingerprint(namespace),
        "hashes": base64.b64encode(prompt_hashes(key, namespace, tokens)).decode(),
    }
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def header_line(key: bytes) -> bytes:
    """The line with which each life of an engine begins: the version, and which key its hashes are under."""
    row = {"halocline_request_log": LOG_VERSION, "tokens_per_hash": LOG_GRAIN_TOKENS, "key_id": fingerprint(key)}
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"

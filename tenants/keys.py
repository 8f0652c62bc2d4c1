"""The text of an API key: how it is composed, how it is taken apart, and what is kept of its secret.

`hl_live_<12 base62 public id>_<43 base62 secret><6 base62 crc32>`. The prefix and the underscores let a scanner and a
double-click find the whole key; the checksum, over everything before it, tells a typing error or an invented key
without a look into the store. It is no protection: that is the secret's 256 bits, of which only a keyed digest is
ever stored. Whether a key is known and still good is the snapshot's to say.
"""

from __future__ import annotations

import hmac
import re
import zlib
from dataclasses import dataclass, field
from typing import Final, Literal

KeyKind = Literal["live"]
"""Kinds have prefixes of their own, so that a key of one kind can never be taken for one of another."""

PUBLIC_ID_CHARS: Final = 12
SECRET_CHARS: Final = 43
CHECKSUM_CHARS: Final = 6
KEY_RANDOM_BYTES: Final = 48
KEY_CHARS: Final = len("hl_live_") + PUBLIC_ID_CHARS + 1 + SECRET_CHARS + CHECKSUM_CHARS

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_PUBLIC_ID = re.compile(r"[0-9A-Za-z]{12}")
_KEY = re.compile(r"hl_live_([0-9A-Za-z]{12})_([0-9A-Za-z]{43})([0-9A-Za-z]{6})")
_BEGINS_LIKE_A_KEY = re.compile(r"hl_live_([0-9A-Za-z]{12})(_.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key just made; `text` is shown once and then forgotten."""

    text: str = field(repr=False)
    public_id: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """A text that has the form of a key; nothing says yet that there is such a key."""

    public_id: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class NamedKey:
    """Which key an operator meant, and whether the secret came along where it should not have."""

    public_id: str
    carried_secret: bool


def generate_key(random_bytes: bytes, kind: KeyKind = "live") -> NewKey:
    """The key that `KEY_RANDOM_BYTES` random bytes make: 16 for the public id, 32 for the secret."""
    if len(random_bytes) != KEY_RANDOM_BYTES:
        raise ValueError(f"a key is made of {KEY_RANDOM_BYTES} random bytes, not {len(random_bytes)}")
    public_id = base62(int.from_bytes(random_bytes[:16], "big"), PUBLIC_ID_CHARS)
    secret = base62(int.from_bytes(random_bytes[16:], "big"), SECRET_CHARS)
    body = f"hl_{kind}_{public_id}_{secret}"
    return NewKey(text=body + _checksum(body), public_id=public_id, secret=secret)


def parse_key(text: str) -> ParsedKey | None:
    """The parts of a well-formed key; None when prefix, alphabet, length or checksum is wrong."""
    # The length first: a megabyte of header is turned away without being read.
    if len(text) != KEY_CHARS:
        return None
    match = _KEY.fullmatch(text)
    if match is None:
        return None
    public_id, secret, checksum = match.groups()
    # The checksum is no secret (anyone can compute it), so an ordinary comparison does.
    if _checksum(text[:-CHECKSUM_CHARS]) != checksum:
        return None
    return ParsedKey(public_id, secret)


def secret_digest(pepper: bytes, secret: str) -> bytes:
    """What the store keeps of a secret. A slow hash would protect nothing: the secret has 256 bits."""
    return hmac.digest(pepper, secret.encode("ascii"), "sha256")


def name_key(text: str) -> NamedKey | None:
    """The key meant by a public id, or by the beginning or the whole of a key's text, however damaged its end is."""
    if is_public_id(text):
        return NamedKey(text, carried_secret=False)
    match = _BEGINS_LIKE_A_KEY.fullmatch(text)
    if match is None:
        return None
    return NamedKey(match.group(1), carried_secret=len(match.group(2) or "") > 1)


def is_public_id(text: str) -> bool:
    """Whether `text` could be the public id of a key."""
    return _PUBLIC_ID.fullmatch(text) is not None


def base62(number: int, width: int) -> str:
    """The last `width` digits of `number`, most significant first."""
    digits = []
    for _ in range(width):
        number, digit = divmod(number, 62)
        digits.append(_DIGITS[digit])
    return "".join(reversed(digits))


def _checksum(body: str) -> str:
    return base62(zlib.crc32(body.encode("ascii")), CHECKSUM_CHARS)

"""The text of an API key: composed, taken apart, and recognised when it went astray."""

from __future__ import annotations

import hashlib
import hmac
import re
import zlib
from pathlib import Path

import pytest

from tenants.keys import KEY_CHARS, KEY_RANDOM_BYTES, NamedKey, generate_key, name_key, parse_key, secret_digest

ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def make_key(fill: int = 7):
    return generate_key(bytes((fill + i) % 256 for i in range(KEY_RANDOM_BYTES)))


def test_a_key_has_the_documented_form():
    key = make_key()

    assert re.fullmatch(r"hl_live_[0-9A-Za-z]{12}_[0-9A-Za-z]{43}[0-9A-Za-z]{6}", key.text)
    assert len(key.text) == KEY_CHARS == 70


def test_the_checksum_is_the_crc32_of_all_before_it_in_base62():
    text = make_key().text

    number = 0
    for char in text[-6:]:
        number = number * 62 + ALPHABET.index(char)

    assert number == zlib.crc32(text[:-6].encode())


def test_the_secret_holds_all_256_random_bits():
    lowest = generate_key(bytes(KEY_RANDOM_BYTES)).secret
    highest = generate_key(b"\xff" * KEY_RANDOM_BYTES).secret

    def number_of(secret: str) -> int:
        number = 0
        for char in secret:
            number = number * 62 + ALPHABET.index(char)
        return number

    assert (number_of(lowest), number_of(highest)) == (0, 2**256 - 1)


@pytest.mark.parametrize("length", [0, KEY_RANDOM_BYTES - 1, KEY_RANDOM_BYTES + 1])
def test_a_key_is_made_of_exactly_48_random_bytes(length):
    with pytest.raises(ValueError, match="48 random bytes"):
        generate_key(bytes(length))


def test_the_digest_is_hmac_sha256_of_the_secret_under_the_pepper():
    secret = make_key().secret

    assert secret_digest(b"p" * 32, secret) == hmac.new(b"p" * 32, secret.encode(), hashlib.sha256).digest()


def test_a_digest_is_not_a_key():
    digest = secret_digest(b"p" * 32, make_key().secret)

    assert parse_key(digest.hex()) is None
    assert parse_key(digest.decode("latin-1")) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hl_live_",
        "Bearer " + make_key().text,
        make_key().text + "\n",
        " " + make_key().text,
        make_key().text[:-1],
        make_key().text.replace("hl_live_", "hl_test_"),
        make_key().text.replace("hl_live_", "HL_LIVE_"),
        "hl_live_" + "\ud800" * 62,
        "hl_live_" + "\0" * 62,
        "hl_live_" + "٣" * 62,
        "x" * 1_000_000,
    ],
    ids=lambda text: ascii(text[:20]),
)
def test_whatever_is_not_a_key_is_refused_without_an_error(text):
    assert parse_key(text) is None


def test_no_repr_shows_a_secret():
    key = make_key()

    assert key.secret not in repr(key)
    assert key.secret not in repr(parse_key(key.text))


def test_a_public_id_names_its_key():
    assert name_key("3fQm0Zr81LxC") == NamedKey("3fQm0Zr81LxC", carried_secret=False)
    assert name_key("hl_live_3fQm0Zr81LxC") == NamedKey("3fQm0Zr81LxC", carried_secret=False)
    assert name_key("hl_live_3fQm0Zr81LxC_") == NamedKey("3fQm0Zr81LxC", carried_secret=False)


def test_a_whole_or_damaged_key_names_its_key_and_is_known_to_carry_a_secret():
    key = make_key()

    assert name_key(key.text) == NamedKey(key.public_id, carried_secret=True)
    assert name_key(key.text[:-3]) == NamedKey(key.public_id, carried_secret=True)


@pytest.mark.parametrize("text", ["", "short", "3fQm0Zr81LxC0", "3fQm0Zr81Lx-", make_key().secret])
def test_what_names_no_key_is_told_apart(text):
    assert name_key(text) is None


def test_the_expression_for_secret_scanners_in_the_readme_finds_a_key_anywhere():
    readme = (Path(__file__).parents[2] / "tenants" / "README.md").read_text()
    expression = re.search(r"`(hl_live_\[[^`]+)`", readme).group(1)

    found = re.search(expression, f'export KEY="{make_key().text}";').group(0)

    assert parse_key(found) is not None

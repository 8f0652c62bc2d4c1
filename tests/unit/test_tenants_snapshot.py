"""Authentication from memory."""

from __future__ import annotations

import zlib

import pytest

from tenants.keys import KEY_RANDOM_BYTES, base62, generate_key, secret_digest
from tenants.snapshot import DENIED, Accepted, KeyRecord, Suspended, TenantSnapshot
from tenants.values import Identity, TenantId

PEPPER = b"p" * 32


def make_key(fill: int = 1):
    return generate_key(bytes([fill]) * KEY_RANDOM_BYTES)


def make_identity(public_id: str) -> Identity:
    return Identity(TenantId("tn_1"), "acme", public_id, b"s" * 32, 1)


def make_snapshot(key, *, digest=None, expires_at=None, is_suspended=False) -> TenantSnapshot:
    digest = secret_digest(PEPPER, key.secret) if digest is None else digest
    record = KeyRecord(make_identity(key.public_id), digest, expires_at, is_suspended)
    return TenantSnapshot(version=1, pepper=PEPPER, keys={key.public_id: record})


def test_a_good_key_tells_whose_it_is():
    key = make_key()

    assert make_snapshot(key).authenticate(key.text, now=100.0) == Accepted(make_identity(key.public_id))


def test_an_unknown_key_is_denied():
    assert make_snapshot(make_key(1)).authenticate(make_key(2).text, now=100.0) is DENIED


def test_a_known_id_with_another_secret_is_denied():
    known, other = make_key(1), make_key(2)

    body = f"hl_live_{known.public_id}_{other.secret}"
    forged = body + base62(zlib.crc32(body.encode()), 6)

    assert make_snapshot(known).authenticate(forged, now=100.0) is DENIED


@pytest.mark.parametrize("text", ["", "hl_live_", "nonsense", "\ud800", make_key().text[:-1]])
def test_a_malformed_key_is_denied_the_same_way(text):
    assert make_snapshot(make_key()).authenticate(text, now=100.0) is DENIED


def test_a_stored_digest_is_no_key():
    key = make_key()
    digest = secret_digest(PEPPER, key.secret)

    for text in (digest.hex(), digest.decode("latin-1"), f"hl_live_{key.public_id}_{digest.hex()}"):
        assert make_snapshot(key).authenticate(text, now=100.0) is DENIED


def test_an_unknown_id_is_denied_even_if_its_digest_were_the_dummy(monkeypatch):
    key = make_key()
    empty = TenantSnapshot(version=1, pepper=PEPPER, keys={})
    monkeypatch.setattr("tenants.snapshot._DUMMY_DIGEST", secret_digest(PEPPER, key.secret))

    assert empty.authenticate(key.text, now=100.0) is DENIED


def test_an_unknown_id_takes_the_same_comparison_as_a_known_one(monkeypatch):
    compared = []
    monkeypatch.setattr(
        "tenants.snapshot.hmac.compare_digest", lambda one, other: compared.append((len(one), len(other))) or False
    )
    snapshot = make_snapshot(make_key(1))

    snapshot.authenticate(make_key(1).text, now=100.0)
    snapshot.authenticate(make_key(2).text, now=100.0)

    assert compared == [(32, 32), (32, 32)]


def test_a_key_works_up_to_its_end_and_not_at_it():
    key = make_key()
    snapshot = make_snapshot(key, expires_at=100.0)

    assert isinstance(snapshot.authenticate(key.text, now=99.999), Accepted)
    assert snapshot.authenticate(key.text, now=100.0) is DENIED


def test_a_good_key_of_a_suspended_tenant_is_told_so():
    key = make_key()

    assert make_snapshot(key, is_suspended=True).authenticate(key.text, now=1.0) == Suspended(
        make_identity(key.public_id)
    )


def test_a_bad_key_of_a_suspended_tenant_learns_nothing():
    key = make_key()

    assert make_snapshot(key, is_suspended=True, digest=bytes(32)).authenticate(key.text, now=1.0) is DENIED
    assert make_snapshot(key, is_suspended=True, expires_at=1.0).authenticate(key.text, now=1.0) is DENIED


def test_no_repr_shows_a_secret():
    key = make_key()
    snapshot = make_snapshot(key)
    shown = repr(snapshot) + repr(snapshot.authenticate(key.text, now=1.0)) + repr(snapshot.keys[key.public_id])

    for secret in (PEPPER, b"s" * 32, secret_digest(PEPPER, key.secret)):
        assert repr(secret) not in shown

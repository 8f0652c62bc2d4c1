"""The salt's derivation: what the recorded vectors say, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest

from tenants.errors import InvalidValue
from tenants.salts import SALT_CHARS, derive_salt
from tests.unit.test_tenants_salt_vectors import VECTORS


@pytest.mark.parametrize("vector", json.loads(VECTORS.read_text())["vectors"], ids=lambda vector: vector["salt"][:8])
def test_a_salt_is_that_of_its_vector(vector):
    secret = bytes.fromhex(vector["salt_secret_hex"])

    assert derive_salt(secret, vector["tenant_id"], vector["epoch"], vector["subject"]) == vector["salt"]


def test_every_vector_has_a_salt_of_its_own_in_the_legal_alphabet():
    salts = [vector["salt"] for vector in json.loads(VECTORS.read_text())["vectors"]]

    assert len(set(salts)) == len(salts)
    assert {len(salt) for salt in salts} == {SALT_CHARS}
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{43}", salt) for salt in salts)


def test_an_empty_subject_is_refused_because_it_would_name_the_undivided_cache():
    with pytest.raises(InvalidValue, match="empty"):
        derive_salt(bytes(32), "tn_1", 1, "")


def test_half_of_a_surrogate_pair_is_refused_as_a_subject():
    with pytest.raises(InvalidValue, match="Unicode"):
        derive_salt(bytes(32), "tn_1", 1, "a\ud800")


@pytest.mark.parametrize(("secret", "epoch"), [(b"", 1), (bytes(31), 1), (bytes(33), 1), (bytes(32), -1)])
def test_a_secret_of_another_size_or_a_negative_epoch_is_refused(secret, epoch):
    with pytest.raises(ValueError, match="salt"):
        derive_salt(secret, "tn_1", epoch, None)

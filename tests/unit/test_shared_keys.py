"""Names of blocks: pinned vectors, and the same ones in every interpreter."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cached import keys

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "block_hashes.json"


def test_vectors_equal_the_golden_file() -> None:
    """kv-semantics 1.2, 1.3 and 5.9: namespaces, chains and owners, from an independent script."""
    golden = json.loads(GOLDEN.read_text())

    for case in golden["chains"]:
        root = keys.namespace(bytes.fromhex(case["layout_fingerprint"]), case["cache_salt"])
        hashes = keys.block_hashes(root, case["tokens"], case["tokens_per_block"])
        assert root.hex() == case["namespace"]
        assert [each.hex() for each in hashes] == case["block_hashes"]
    for tenant, owner in golden["owners"].items():
        assert keys.owner_id(tenant).hex() == owner
    assert keys.self_test_vector().hex() == golden["self_test_vector"]


def test_three_fresh_interpreters_agree_on_the_self_test_vector() -> None:
    """Keys built on Python's hash() or on address-dependent values differ between processes and never hit."""
    script = "from cached.keys import self_test_vector; print(self_test_vector().hex())"

    answers = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "77", "random")
    }

    assert answers == {json.loads(GOLDEN.read_text())["self_test_vector"]}


def test_a_chain_is_plain_sha256_over_parent_and_little_endian_tokens() -> None:
    """kv-semantics 1.3."""
    root = keys.namespace(b"layout", "salt")
    first, second = keys.block_hashes(root, [1, 2, 3, 4, 5], 2)

    assert first == hashlib.sha256(root + b"\1\0\0\0\2\0\0\0").digest()
    assert second == hashlib.sha256(first + b"\3\0\0\0\4\0\0\0").digest()
    assert keys.block_hash(first, [3, 4]) == second


def test_no_salt_an_a_and_a_b_are_three_namespaces() -> None:
    """kv-semantics 1.2."""
    names = {keys.namespace(b"layout", salt) for salt in (None, "a", "b")} | {keys.namespace(b"other", "a")}

    assert len(names) == 4


def test_an_empty_salt_is_refused() -> None:
    """kv-semantics 1.2."""
    with pytest.raises(ValueError, match="cache_salt is empty"):
        keys.namespace(b"layout", "")


def test_a_hash_is_never_shortened() -> None:
    """kv-semantics 1.3."""
    root = keys.namespace(b"layout", None)

    assert {len(each) for each in keys.block_hashes(root, range(64), 16)} == {keys.HASH_BYTES}

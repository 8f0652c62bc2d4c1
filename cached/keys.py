"""Names of blocks: namespaces, chained block hashes and owner ids (kv-semantics 1.2, 1.3, 5.9).

Nothing here is ever truncated: a block hash is the whole SHA-256. The only short form is `fingerprint`, which is for
people and logs and never for a comparison that decides what is served.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""32 bytes: SHA-256 of the parent's hash (or the namespace) and this block's tokens."""

Namespace = NewType("Namespace", bytes)
"""32 bytes, a secret: the root of every hash chain of one layout and one salt."""

OwnerId = NewType("OwnerId", bytes)
"""16 bytes: who is charged for a block."""

HASH_ALGO = "sha256-chain/1"
HASH_BYTES = 32
OWNER_BYTES = 16
NO_OWNER = OwnerId(bytes(OWNER_BYTES))

_NAMESPACE_TAG = b"halocline/ns/1"
_OWNER_TAG = b"halocline/owner/1"


def length_prefixed(data: bytes) -> bytes:
    """`lp(x)`: four bytes of big-endian length, then `x`."""
    return len(data).to_bytes(4, "big") + data


def namespace(layout_fingerprint: bytes, cache_salt: str | None) -> Namespace:
    """The root of the hash chains of one layout and one salt (kv-semantics 1.2).

    An absent salt is a namespace of its own. Raises ValueError for an empty salt, which is neither.
    """
    if cache_salt is None:
        salt = b"\x00"
    elif cache_salt == "":
        raise ValueError("cache_salt is empty; leave it out or give at least one character")
    else:
        salt = b"\x01" + length_prefixed(cache_salt.encode())
    return Namespace(hashlib.sha256(_NAMESPACE_TAG + length_prefixed(layout_fingerprint) + salt).digest())


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as four little-endian bytes each; raises OverflowError or ValueError outside 0 … 2³²−1."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def block_hash(parent: BlockHash | Namespace, tokens: Sequence[int]) -> BlockHash:
    """The hash of the block that holds `tokens` after `parent` (a namespace for a first block, kv-semantics 1.3)."""
    return BlockHash(hashlib.sha256(parent + token_bytes(tokens)).digest())


def block_hashes(root: BlockHash | Namespace, tokens: Sequence[int], tokens_per_block: int) -> list[BlockHash]:
    """The hashes of all full blocks of `tokens`, first to last; a partial tail has none (kv-semantics 1.5)."""
    packed = token_bytes(tokens)
    step = 4 * tokens_per_block
    hashes: list[BlockHash] = []
    parent: bytes = root
    for start in range(0, len(packed) - step + 1, step):
        parent = hashlib.sha256(parent + packed[start : start + step]).digest()
        hashes.append(BlockHash(parent))
    return hashes


def owner_id(tenant_id: str) -> OwnerId:
    """The 16 bytes under which a tenant's blocks are counted (kv-semantics 5.9)."""
    return OwnerId(hashlib.sha256(_OWNER_TAG + length_prefixed(tenant_id.encode())).digest()[:OWNER_BYTES])


def fingerprint(secret: bytes) -> str:
    """Eight hex digits that stand for a namespace or a salt in logs and tables, and reveal nothing of it."""
    return hashlib.sha256(secret).hexdigest()[:8]


def self_test_vector(values: Iterable[int] = range(1, 33)) -> BlockHash:
    """What daemon and client compare at hello, so that two builds that hash differently never share a block."""
    root = namespace(b"halocline/self-test", "salt")
    return block_hashes(root, list(values), 16)[-1]

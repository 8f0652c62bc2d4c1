"""The index of device blocks: a tree of token runs, one root per namespace (kv-semantics 1.4, 1.5, 3.4).

Knows which block follows which and what tokens it holds; who uses a block, what it is worth and when it goes is the
pool's. Full blocks are found by hash and confirmed by parent and tokens; partial tails only as somebody's child.

A *node* is a block, or the root of a namespace, written as `-1 - namespace index`. Everything is a column.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cached.keys import BlockHash
from engine.sorted_children import SortedChildren

TOKEN_BYTES = 4
_NONE = -1
_MANY = -2
_MAX_SKIPPED = 8
"""How many unusable neighbours a search for the longest child passes over on each side, so that it stays logarithmic."""


@dataclass(frozen=True, slots=True)
class SharedRun:
    """A child that begins with the first `num_tokens` tokens that were asked for."""

    block: int
    num_tokens: int


def root_of(namespace: int) -> int:
    """The node above the first blocks of a namespace."""
    return -1 - namespace


class PrefixTree:
    """Parent, tokens, hash and children of every indexed block. A key is a run of tokens as bytes, four for each, as they
    are hashed; sorted as bytes, the neighbours of a key share the most tokens with it whatever the order of bytes."""

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self._row = tokens_per_block * TOKEN_BYTES
        self._tokens = bytearray(num_blocks * self._row)
        self._filled = array("B", bytes(num_blocks))  # tokens; 0: not indexed
        self._parent = array("q", [_NONE]) * num_blocks
        self._child = array("i", [_NONE]) * num_blocks  # the only child, or _NONE, or _MANY
        self._many: dict[int, SortedChildren] = {}  # of roots, and of blocks with more than one child
        self._hash: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, int] = {}
        self._depth = array("i", [0]) * num_blocks

    def __len__(self) -> int:
        """Full blocks that are indexed."""
        return len(self._by_hash)

    @property
    def tokens_per_block(self) -> int:
        return self._row // TOKEN_BYTES

    def is_indexed(self, block: int) -> bool:
        return self._filled[block] != 0

    def has_children(self, node: int) -> bool:
        return self._child[node] != _NONE if node >= 0 else node in self._many

    def parent(self, block: int) -> int:
        return self._parent[block]

    def depth(self, block: int) -> int:
        return self._depth[block]

    def hash_of(self, block: int) -> BlockHash | None:
        """None for a partial tail, and for a block that is not indexed."""
        return self._hash[block]

    def hashes_of(self, blocks: Sequence[int]) -> list[BlockHash]:
        """The hashes of full blocks that are indexed."""
        hashes = self._hash
        return [block_hash for block in blocks if (block_hash := hashes[block]) is not None]

    def num_tokens(self, block: int) -> int:
        return self._filled[block]

    def key_of(self, block: int) -> bytes:
        """The tokens of an indexed block, as bytes."""
        start = block * self._row
        return bytes(self._tokens[start : start + self._filled[block] * TOKEN_BYTES])

    def find(self, block_hash: BlockHash, node: int, key: bytes) -> int | None:
        """The full block with this hash, if its parent and its tokens are these (kv-semantics 1.4)."""
        block = self._by_hash.get(block_hash)
        if block is None or self._parent[block] != node:
            return None
        start = block * self._row
        return block if self._tokens[start : start + self._row] == key else None

    def find_run(self, node: int, hashes: Sequence[BlockHash], packed: bytes, count: int) -> list[int]:
        """The first of `count` full blocks below `node` that are indexed, each the child of the one before; `packed` has the
        tokens of all."""
        by_hash, parents, tokens, row = self._by_hash.get, self._parent, self._tokens, self._row
        found: list[int] = []
        for place in range(count):
            block = by_hash(hashes[place])
            if block is None or parents[block] != node:
                break
            start = block * row
            if tokens[start : start + row] != packed[place * row : place * row + row]:
                break
            found.append(block)
            node = block
        return found

    def block_of(self, block_hash: BlockHash) -> int | None:
        """The indexed block of this hash, whatever its parent and tokens."""
        return self._by_hash.get(block_hash)

    def knows(self, block_hash: BlockHash) -> bool:
        """Whether a block of this hash is indexed, whatever its parent and tokens."""
        return block_hash in self._by_hash

    def insert_run(self, blocks: Sequence[int], node: int, hashes: Sequence[BlockHash], keys: Sequence[bytes]) -> None:
        """Index full blocks, the first under `node` and each under the one before; the hashes must be new."""
        self._insert(blocks[0], node, keys[0])
        row, tokens, filled, parent = self._row, self._tokens, self._row // TOKEN_BYTES, blocks[0]
        # The rest has parents without other children, so there is nothing to look for.
        for block, key in zip(blocks[1:], keys[1:], strict=True):
            tokens[block * row : (block + 1) * row] = key
            self._filled[block] = filled
            self._parent[block] = parent
            self._child[parent] = block
            self._depth[block] = self._depth[parent] + 1
            parent = block
        self._child[parent] = _NONE
        for block, block_hash in zip(blocks, hashes, strict=True):
            assert block_hash not in self._by_hash
            self._hash[block] = block_hash
            self._by_hash[block_hash] = block

    def insert_partial(self, block: int, node: int, key: bytes) -> None:
        """Index a partial tail under `node`; only `longest_child` finds it."""
        assert 0 < len(key) < self._row
        self._insert(block, node, key)

    def remove(self, block: int) -> int:
        """Take a leaf out of the index; returns its parent node."""
        assert self._filled[block]
        return self.remove_chain((block,))[0]

    def lone_parent(self, block: int) -> int:
        """The parent block that has no other child; -1 where there is none."""
        node = self._parent[block]
        return node if node >= 0 and self._child[node] == block else _NONE

    def remove_chain(self, chain: Sequence[int]) -> tuple[int, list[BlockHash]]:
        """Take a leaf and the blocks above it, each the lone parent of the one before, out of the index.

        Returns the parent node of the last one, and the hashes of full blocks, in the order of the chain.
        """
        assert self._child[chain[0]] == _NONE, "dependents first (kv-semantics 4.1)"
        node = self._parent[chain[-1]]
        self._unlink(chain[-1], node)
        hashes, by_hash, filled = self._hash, self._by_hash, self._filled
        gone: list[BlockHash] = []
        for block in chain:
            filled[block] = 0
            block_hash = hashes[block]
            if block_hash is not None:
                del by_hash[block_hash]
                hashes[block] = None
                gone.append(block_hash)
        return node, gone

    def children(self, node: int) -> list[int]:
        """All children of a node, in order of their tokens."""
        if node in self._many:
            return list(self._many[node])
        if node >= 0 and self._child[node] >= 0:
            return [self._child[node]]
        return []

    def descendants_first(self, block: int) -> list[int]:
        """A block and all below it, children before parents."""
        found = [block]
        for each in found:
            found.extend(self.children(each))
        found.reverse()
        return found

    def longest_child(self, node: int, key: bytes, is_usable: Callable[[int], bool]) -> SharedRun | None:
        """The usable child of `node` that shares the longest non-empty run of tokens with `key` (kv-semantics 3.4)."""
        if node >= 0 and self._child[node] >= 0:
            return self._best_of(iter((self._child[node],)), key, is_usable, None)
        children = self._many.get(node)
        if children is None:
            return None
        before, after = children.around(key)
        best = self._best_of(after, key, is_usable, None)
        return self._best_of(before, key, is_usable, best)

    def indexed(self) -> Iterator[int]:
        """Every indexed block; slow."""
        return (block for block, filled in enumerate(self._filled) if filled)

    def copied_hashes(self) -> list[BlockHash | None]:
        """The column of hashes; what is not indexed, and partial tails, have none."""
        return self._hash.copy()

    def copied_shape(self) -> tuple[array[int], array[int], array[int]]:
        """The columns of parents, depths and tokens filled."""
        return self._parent[:], self._depth[:], self._filled[:]

    def copied_tokens(self) -> bytes:
        """The column of tokens, four little-endian bytes each."""
        return bytes(self._tokens)

    def check_invariants(self) -> None:
        """Raise AssertionError when columns, hashes and children disagree; slow."""
        count = 0
        for block in self.indexed():
            node = self._parent[block]
            assert block in self.children(node), f"block {block} is not among its parent's children"
            assert node < 0 or self._filled[node] * TOKEN_BYTES == self._row, "a partial tail has no children"
            assert self._depth[block] == (self._depth[node] + 1 if node >= 0 else 0)
            block_hash = self._hash[block]
            assert (block_hash is not None) == (self._filled[block] * TOKEN_BYTES == self._row)
            if block_hash is not None:
                count += 1
                assert self._by_hash[block_hash] == block
        assert count == len(self._by_hash)
        for node in [*self._many, *self.indexed()]:
            keys = [self.key_of(child) for child in self.children(node)]
            assert keys == sorted(keys)
            assert all(self._parent[child] == node for child in self.children(node))

    def _best_of(
        self, near: Iterator[int], key: bytes, is_usable: Callable[[int], bool], best: SharedRun | None
    ) -> SharedRun | None:
        for skipped, block in enumerate(near):
            shared = _shared_tokens(self.key_of(block), key)
            if shared <= (best.num_tokens if best else 0):
                return best  # What is further away shares no more.
            if is_usable(block):
                return SharedRun(block, shared)
            if skipped >= _MAX_SKIPPED:
                return best
        return best

    def _insert(self, block: int, node: int, key: bytes) -> None:
        assert not self._filled[block]
        start = block * self._row
        self._tokens[start : start + len(key)] = key
        self._filled[block] = len(key) // TOKEN_BYTES
        self._parent[block] = node
        self._child[block] = _NONE
        self._depth[block] = self._depth[node] + 1 if node >= 0 else 0
        self._link(block, node)

    def _link(self, block: int, node: int) -> None:
        if node >= 0 and self._child[node] == _NONE:
            self._child[node] = block
            return
        children = self._many.get(node)
        if children is None:
            children = self._many[node] = SortedChildren(self.key_of)
            if node >= 0:
                children.add(self._child[node])
                self._child[node] = _MANY
        children.add(block)

    def _unlink(self, block: int, node: int) -> None:
        if node >= 0 and self._child[node] == block:
            self._child[node] = _NONE
            return
        children = self._many[node]
        children.remove(block)
        if node < 0 and not len(children):
            del self._many[node]
        elif node >= 0 and len(children) == 1:
            del self._many[node]
            self._child[node] = next(iter(children))


def _shared_tokens(left: bytes, right: bytes) -> int:
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length // TOKEN_BYTES
    difference = int.from_bytes(left[:length], "big") ^ int.from_bytes(right[:length], "big")
    return (length - (difference.bit_length() + 7) // 8) // TOKEN_BYTES

"""What one sequence does with the pool: walk, take, publish, commit, roll back, give back (kv-semantics §3).

Publishing happens when a step is planned, so that others in the same step may point at the block; committing happens
when the step has succeeded. Between the two a block is indexed but *unwritten*. Who is scheduled is the core's choice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from cached.keys import BlockHash
from engine.block_pool import BlockPool
from engine.plan import BlockCopy
from engine.prefix_tree import SharedRun, root_of
from engine.sequence import Sequence
from engine.tier_work import LoadedBlock
from engine.values import CoreSettings


@dataclass(frozen=True, slots=True)
class Walk:
    """What the device has of a sequence's tokens. `stopped_at` is the first block that is missing, if 3.1 lets it be
    served at all. Nothing was acquired."""

    blocks: tuple[int, ...]
    node: int
    stopped_at: BlockHash | None
    is_written: bool


class PrefixCache:
    """Joins sequences and pool. `on_indexed(hashes)` hears of all full blocks that become shareable."""

    def __init__(self, settings: CoreSettings, pool: BlockPool, on_indexed: Callable[[list[BlockHash]], None]) -> None:
        self._settings = settings
        self._pool = pool
        self._on_indexed = on_indexed

    def walk(self, sequence: Sequence) -> Walk:
        """Full blocks on the device, of at most all tokens but one (kv-semantics 3.1, 3.4)."""
        root = root_of(sequence.namespace_index)
        if not self._settings.enable_block_reuse:
            return Walk((), root, None, True)
        count = self.num_servable(sequence)
        hashes = sequence.block_hashes(count)
        blocks = self._pool.tree.find_run(root, hashes, bytes(sequence.key), count)
        stopped_at = hashes[len(blocks)] if len(blocks) < count else None
        return Walk(tuple(blocks), blocks[-1] if blocks else root, stopped_at, self._is_written(blocks))

    def num_cached(self, sequence: Sequence) -> int:
        """How many full blocks `walk` would find; a handful of look-ups, since a block is there only if its parent is."""
        count = self.num_servable(sequence) if self._settings.enable_block_reuse else 0
        hashes = sequence.block_hashes(count)
        return bisect_left(range(count), True, key=lambda place: not self._pool.tree.knows(hashes[place]))

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """How many tokens an admission now would find: full blocks, and what continues them by part of a block."""
        num_blocks = self.num_cached(sequence)
        node: int | None = root_of(sequence.namespace_index)
        if num_blocks:
            node = self._pool.tree.block_of(sequence.block_hashes(num_blocks)[num_blocks - 1])
        partial = self._continuing(sequence, node, num_blocks) if node is not None else None
        return num_blocks * self._settings.tokens_per_block + (partial.num_tokens if partial is not None else 0)

    def num_servable(self, sequence: Sequence) -> int:
        """Full blocks that may come from a cache: one token has to be computed."""
        return (sequence.num_tokens - 1) // self._settings.tokens_per_block

    def partial_child(self, sequence: Sequence, walk: Walk) -> SharedRun | None:
        """The child that continues a walk by part of a block (kv-semantics 3.4, 3.5)."""
        return self._continuing(sequence, walk.node, len(walk.blocks))

    def _continuing(self, sequence: Sequence, node: int, num_blocks: int) -> SharedRun | None:
        if not self._settings.enable_block_reuse or not self._settings.enable_partial_reuse:
            return None
        size = self._settings.tokens_per_block
        start = num_blocks * size
        end = min(start + size, sequence.num_tokens - 1)
        if end <= start:
            return None
        usable = self._pool.is_written if self._settings.copy_on_partial_reuse else self._pool.is_idle_leaf
        return self._pool.tree.longest_child(node, sequence.tokens_key(start, end), usable)

    def take(
        self,
        sequence: Sequence,
        walk: Walk,
        partial: SharedRun | None,
        depart: Callable[[int], bool] | None,
    ) -> BlockCopy | bool:
        """Give the sequence matched blocks and new ones for all its tokens, or change nothing (kv-semantics 4.4).

        Returns the copy a partial match asks for, True where none is needed, False where no blocks could be had. A
        copy's source is acquired: the caller releases it when the copy is done.
        """
        pool = self._pool
        size = self._settings.tokens_per_block
        num_new = -(-sequence.num_tokens // size) - len(walk.blocks)
        is_copy = partial is not None and self._settings.copy_on_partial_reuse
        if partial is not None and not is_copy:
            num_new -= 1
        pinned = [*walk.blocks, *([partial.block] if partial else [])]
        for block in pinned:
            pool.acquire(block)
        new = pool.allocate(num_new, sequence.owner_index, depart)
        if new is None or (partial and not is_copy):
            for block in reversed(pinned if new is None else pinned[-1:]):
                pool.unacquire(block)
        if new is None:
            return False
        if partial is not None and not is_copy:
            pool.take_over(partial.block, sequence.owner_index)
            new.insert(0, partial.block)
        num_matched = len(walk.blocks)
        for place, block in enumerate(walk.blocks):
            pool.mark_matched(block, sequence.explicit_retention(place))
        if sequence.has_retention:
            pool.set_new(new, sequence.new_block_retentions(num_matched, num_matched + len(new)))
        sequence.table = [*walk.blocks, *new]
        sequence.num_matched = sequence.num_published = num_matched
        sequence.parent_node = walk.node
        sequence.num_computed = num_matched * size + (partial.num_tokens if partial else 0)
        if partial is None or not is_copy:
            return True
        pool.mark_matched(partial.block, None)
        return BlockCopy(partial.block, new[0], partial.num_tokens)

    def catch_up(self, sequence: Sequence) -> int:
        """Take, instead of computing them, blocks that others have made shareable since the walk (kv-semantics 3.3).

        That happens where a prompt ends in just the block that a longer one has yet to compute: 3.1 has it compute that
        block itself. Returns how many blocks were taken; their producers may be writing them in the step being planned.
        """
        size = self._settings.tokens_per_block
        place, inside = divmod(sequence.num_computed, size)
        if inside or place != sequence.num_published or not self._settings.enable_block_reuse:
            return 0
        count = self.num_servable(sequence)
        if place >= count:
            return 0
        hashes = sequence.block_hashes(count)
        if not self._pool.tree.knows(hashes[place]):
            return 0
        packed = sequence.tokens_key(place * size, count * size)
        found = self._pool.tree.find_run(sequence.parent_node, hashes[place:count], packed, count - place)
        for at, block in enumerate(found, place):
            self._pool.acquire(block)
            self._pool.mark_matched(block, sequence.explicit_retention(at))
            self._pool.drop_private(sequence.table[at])
            sequence.table[at] = block
            sequence.parent_node = block
        if sequence.num_matched == place:
            sequence.num_matched += len(found)
        sequence.num_published += len(found)
        sequence.num_computed += len(found) * size
        return len(found)

    def grow(self, sequence: Sequence, depart: Callable[[int], bool] | None) -> bool:
        """A block for the next token to compute, if it has none; False where none could be had."""
        place = sequence.num_computed // self._settings.tokens_per_block
        if place < len(sequence.table):
            return True
        new = self._pool.allocate(1, sequence.owner_index, depart)
        if new is None:
            return False
        self._pool.set_retention(new[0], sequence.new_block_retention(place))
        sequence.table.append(new[0])
        return True

    def publish(self, sequence: Sequence, end: int, is_written: bool) -> None:
        """Index the full blocks among the first `end` tokens, as far as they may be (kv-semantics 3.2, 3.6).

        Where a block with the same content is indexed already, ours stays private and its twin counts as in use by
        us from now on (1.6); `commit` puts it into the table.
        """
        if not self._settings.enable_block_reuse:
            return
        last = min(end, sequence.num_publishable) // self._settings.tokens_per_block
        if last <= sequence.num_published:
            return
        hashes = sequence.block_hashes(last)
        place = sequence.num_published
        while place < last:
            twin = self._pool.tree.find(hashes[place], sequence.parent_node, sequence.block_key(place))
            if twin is not None:
                self._pool.acquire(twin)
                sequence.twins[place] = twin
                sequence.parent_node = twin
                self._on_indexed(hashes[place : place + 1])
                place += 1
                continue
            start = place
            while place < last and not self._pool.tree.knows(hashes[place]):
                place += 1
            if place == start:
                last = place  # The same hash under another parent: impossible, and then ours simply stays private.
                break
            self._index_run(sequence, start, place, is_written)
        sequence.num_published = last
        if is_written:
            self._adopt_twins(sequence)

    def _index_run(self, sequence: Sequence, start: int, end: int, is_written: bool) -> None:
        blocks = sequence.table[start:end]
        hashes = sequence.hashes[start:end]
        keys = sequence.block_keys(start, end)
        namespace = sequence.namespace_index
        self._pool.index_run(blocks, sequence.parent_node, namespace, hashes, keys, is_written)
        sequence.parent_node = blocks[-1]
        if is_written:
            self._pool.announce_stored(blocks)
        else:
            sequence.unwritten.extend(range(start, end))
        self._on_indexed(hashes)

    def commit(self, sequence: Sequence, end: int) -> None:
        """The step wrote everything up to `end`: what it published is there, and twins enter the table."""
        sequence.num_computed = end
        start = 0
        places = sequence.unwritten
        for index in range(1, len(places) + 1):
            if index == len(places) or places[index] != places[index - 1] + 1:
                run = [sequence.table[place] for place in places[start:index]]
                self._pool.mark_written(run)
                self._pool.announce_stored(run)
                start = index
        sequence.unwritten = []
        self._adopt_twins(sequence)
        self.publish(sequence, end, is_written=True)

    def publish_loaded(self, sequence: Sequence, travelled: list[LoadedBlock | None]) -> None:
        """The first blocks behind the matched ones came from the tier, with what they were worth there (2.6)."""
        size = self._settings.tokens_per_block
        for place, block in enumerate(travelled, sequence.num_matched):
            explicit = sequence.explicit_retention(place)
            self._pool.mark_matched(sequence.table[place], explicit)
            if explicit is None and block is not None:
                self._pool.set_travelled(sequence.table[place], block.priority, block.deadline, block.on_expiry)
        sequence.num_computed = (sequence.num_matched + len(travelled)) * size
        self.publish(sequence, sequence.num_computed, is_written=True)

    def roll_back(self, sequence: Sequence) -> None:
        """The step did not write what this sequence published: out of the index with it.

        Call it for the last of a plan first, since later sequences may have published below these blocks.
        """
        for place in reversed(sequence.unwritten):
            self._pool.unindex_unwritten(sequence.table[place])
        for twin in sequence.twins.values():
            self._pool.unacquire(twin)
        sequence.num_published = min([sequence.num_published, *sequence.unwritten, *sequence.twins])
        sequence.unwritten = []
        sequence.twins = {}

    def release(self, sequence: Sequence, now: float, is_good: bool = True) -> list[int]:
        """Give everything back; what was written and may be indexed stays, a partial tail too (kv-semantics 1.5).

        Returns the full indexed blocks it had, first to last: what the tier may want to hear of.
        """
        if is_good:
            self.publish(sequence, sequence.num_computed, is_written=True)
            self._index_tail(sequence)
        table = sequence.table
        self._pool.release(reversed(table), now)
        full = [block for block in table[: sequence.num_published] if self._pool.tree.hash_of(block) is not None]
        sequence.reset_device()
        return full

    def own_blocks(self, sequence: Sequence) -> list[int]:
        """Indexed blocks that the sequence computed and nobody else uses, and what is below them; children first."""
        for place in range(sequence.num_matched, sequence.num_published):
            block = sequence.table[place]
            if self._pool.tree.is_indexed(block) and self._pool.ref_count(block) == 1:
                return self._pool.tree.descendants_first(block)
        return []

    def _index_tail(self, sequence: Sequence) -> None:
        size = self._settings.tokens_per_block
        end = min(sequence.num_computed, sequence.num_publishable)
        place, num_tail = divmod(end, size)
        if not num_tail or place != sequence.num_published:
            return
        if not self._settings.enable_block_reuse or not self._settings.enable_partial_reuse:
            return
        block = sequence.table[place]
        key = sequence.tokens_key(place * size, end)
        covering = self._pool.tree.longest_child(sequence.parent_node, key, lambda _: True)
        if covering is not None and covering.num_tokens == num_tail:
            return
        self._pool.index_partial(block, sequence.parent_node, sequence.namespace_index, key)

    def _adopt_twins(self, sequence: Sequence) -> None:
        for place, twin in sequence.twins.items():
            own = sequence.table[place]
            sequence.table[place] = twin
            self._pool.mark_matched(twin, sequence.explicit_retention(place))
            self._pool.drop_private(own)
        sequence.twins = {}

    def _is_written(self, blocks: list[int]) -> bool:
        # Unwritten blocks come last: a written block's parent is written.
        return not blocks or self._pool.is_written(blocks[-1])

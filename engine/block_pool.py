"""The device's blocks: who uses them, what they are worth, and which of them goes when one is needed (kv-semantics §2, §4).

Owns the prefix tree, so that an index entry and the life of its block cannot fall out of step. Which block a sequence
gets is decided here; which sequence gets one is the scheduler's, and what the host tier is told is the core's.

    free ── allocate ──▶ private ── index ──▶ in use ── release ──▶ idle ── evict ──▶ free
                            └── release (never indexed) ──▶ free       └── acquire ──▶ in use

A block whose bytes are being copied to the tier is *held*: idle, but not evictable, and neither are its ancestors. One
that leaves the index while held is free only when the copy is over.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence

from cached.keys import BlockHash, OwnerId, fingerprint
from cached.retention import DEFAULT_PRIORITY, MAX_PRIORITY, OnExpiry, Retention, demoted_priority
from engine.event_log import EventLog
from engine.events import Event
from engine.idle_leaves import IdleLeaves
from engine.index_columns import IndexColumns
from engine.interning import InternTable
from engine.owner_shares import Claim, OwnerShares
from engine.prefix_tree import PrefixTree
from engine.retention_clock import NEVER, RetentionClock

TIER = "device"
_CARRIED = math.nan
"""The duration of a block that was loaded with its deadline: how long it was to last from each release is not known."""
_BAND = 20


class BlockPool:
    """Columns over all blocks, the free list, the index, the eviction order and the expiry clock."""

    def __init__(
        self, num_blocks: int, tokens_per_block: int, record_events: bool = False, event_token_ids: bool = False
    ) -> None:
        self.num_blocks = num_blocks
        self.tree = PrefixTree(num_blocks, tokens_per_block)
        self.owners = InternTable()
        self.namespaces = InternTable()
        self._fingerprints: dict[int, str] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref_count = array("i", bytes(4 * num_blocks))
        self._holds = array("i", bytes(4 * num_blocks))  # own copies under way, and children with holds
        self._owner = array("i", [-1]) * num_blocks  # of blocks that are not free
        self._namespace = array("i", [-1]) * num_blocks  # of indexed blocks
        self._priority = array("B", [DEFAULT_PRIORITY]) * num_blocks
        self._duration = array("d", [NEVER]) * num_blocks
        self._deadline = array("d", [NEVER]) * num_blocks
        self._is_drop = bytearray(num_blocks)
        self._is_written = bytearray(num_blocks)  # of indexed blocks; false while the step that writes it is under way
        self._was_matched = bytearray(num_blocks)
        self._in_tier_since = array("d", [-NEVER]) * num_blocks  # when the tier was last known to hold a copy
        self._tick = array("q", bytes(8 * num_blocks))
        self._is_evictable = bytearray(num_blocks)
        self._num_evictable = 0
        self._num_idle = 0
        self._num_departing = 0  # unindexed and unused, but their copy is not over
        self._ticks = 0
        self._leaves = IdleLeaves(self.tree, self._owner, self._priority, self._tick, self._is_evictable)
        self._clock = RetentionClock(num_blocks)
        self._shares = OwnerShares(num_blocks, self.owners)
        self._events = EventLog(TIER, num_blocks) if record_events else None
        self._event_token_ids = event_token_ids
        self.indexed_by_priority = array("i", bytes(4 * (MAX_PRIORITY + 1)))
        self._evictions_by_priority = array("q", bytes(8 * (MAX_PRIORITY + 1)))
        self.num_expired = 0
        self.num_dropped_unused = 0

    # What there is.

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Indexed blocks that no sequence uses."""
        return self._num_idle

    @property
    def num_evictable(self) -> int:
        """Idle blocks that could be had, dependents first: none of them or of their descendants is being copied."""
        return self._num_evictable

    @property
    def num_delayed(self) -> int:
        """Blocks nobody uses that will be to be had when copies to the tier are over."""
        return self._num_idle - self._num_evictable + self._num_departing

    @property
    def num_available(self) -> int:
        return len(self._free) + self._num_evictable

    @property
    def num_used(self) -> int:
        """Blocks of sequences, and unindexed ones whose copy is not over."""
        return self.num_blocks - len(self._free) - self._num_idle

    def ref_count(self, block: int) -> int:
        return self._ref_count[block]

    def is_written(self, block: int) -> bool:
        return bool(self._is_written[block])

    def is_evictable(self, block: int) -> bool:
        return bool(self._is_evictable[block])

    def is_idle_leaf(self, block: int) -> bool:
        return block in self._leaves

    def is_held(self, block: int) -> bool:
        return self._holds[block] > 0

    def priority(self, block: int) -> int:
        return self._priority[block]

    def on_expiry(self, block: int) -> OnExpiry:
        return "drop" if self._is_drop[block] else "demote"

    def deadline_after_release(self, block: int, now: float) -> float | None:
        """The deadline a block has if it becomes idle now (kv-semantics 2.5); None for ever."""
        deadline = self._deadline_from(block, now)
        return None if deadline == NEVER else deadline

    def deadline(self, block: int) -> float | None:
        """The running deadline of an idle block."""
        return None if self._deadline[block] == NEVER else self._deadline[block]

    def owner(self, block: int) -> OwnerId:
        return OwnerId(self.owners.value(self._owner[block]))

    def namespace_fingerprint(self, block: int) -> str:
        return self._fingerprints[self._namespace[block]]

    def evictions_of_bands(self) -> dict[str, int]:
        """Evicted blocks by band of priority: "0-19", …, "80-100"."""
        bands: dict[str, int] = {}
        for first in range(0, MAX_PRIORITY, _BAND):
            last = first + _BAND - 1 if first + _BAND < MAX_PRIORITY else MAX_PRIORITY
            bands[f"{first}-{last}"] = sum(self._evictions_by_priority[first : last + 1])
        return bands

    def next_deadline(self) -> float | None:
        return self._clock.next_deadline()

    # Sequences come and go.

    def enter(self, owner: OwnerId, namespace: bytes) -> tuple[int, int]:
        """Numbers for an owner and a namespace, for as long as a sequence lives."""
        owner_index = self.owners.acquire(owner)
        namespace_index = self.namespaces.acquire(namespace)
        if namespace_index not in self._fingerprints or self.namespaces.references(namespace_index) == 1:
            self._fingerprints[namespace_index] = fingerprint(namespace)
        return owner_index, namespace_index

    def leave(self, owner: int, namespace: int) -> None:
        """A sequence is over; its numbers live on in its blocks."""
        self.owners.release(owner)
        self.namespaces.release(namespace)

    def set_weights(self, weights: dict[OwnerId, float]) -> None:
        """Weights of owners on the device (kv-semantics 4.3); an owner that is not named has 1."""
        self._shares.set_weights(weights)

    # Blocks come and go.

    def allocate(self, count: int, owner: int, depart: Callable[[int], bool] | None = None) -> list[int] | None:
        """`count` private blocks with default retention, or None and an unchanged cache (kv-semantics 4.4).

        `depart(block)` is asked before a victim leaves and may begin a copy of it (`on_evict`): then the block is not
        to be had yet, and None means that some are on their way.
        """
        missing = count - len(self._free)
        # Only with `on_evict` is it worth counting on blocks that are on their way; without, nothing may change.
        to_evict = missing - (self._num_departing if depart else 0)
        if to_evict > self._num_evictable:
            return None
        if to_evict > 0:
            self._evict(to_evict, count, owner, depart)
        if len(self._free) < count:
            return None
        return self._take_free(count, owner)

    def acquire(self, block: int) -> None:
        """One more sequence uses an indexed block."""
        self._ref_count[block] += 1
        if self._ref_count[block] == 1:
            self._num_idle -= 1
            if self._deadline[block] != NEVER:
                self._clock.stop(block)
            self._settle(block)

    def unacquire(self, block: int) -> None:
        """Take back an `acquire` as if it had not been: recency and deadline are unchanged (kv-semantics 3.7)."""
        self._ref_count[block] -= 1
        if self._ref_count[block] == 0:
            self._num_idle += 1
            self._clock.start(block, self._deadline[block])
            self._settle(block)

    def release(self, blocks: Iterable[int], now: float) -> None:
        """A sequence gives up its blocks: one tick for all of them (kv-semantics 4.2). Unindexed ones become free."""
        self._ticks += 1
        tick, ref_count, holds, duration_of = self._ticks, self._ref_count, self._holds, self._duration
        is_indexed, has_children = self.tree.is_indexed, self.tree.has_children
        expiring: dict[float, list[int]] = {}
        # Children first: a parent is looked at once, when nothing of this release is above it any more.
        for block in blocks:
            left = ref_count[block] - 1
            assert left >= 0, f"block {block} was released more often than acquired"
            ref_count[block] = left
            if left:
                continue
            if not is_indexed(block):
                self._leave_unindexed(block)
                continue
            self._num_idle += 1
            self._tick[block] = tick
            if duration_of[block] != NEVER:
                self._deadline[block] = deadline = self._deadline_from(block, now)
                expiring.setdefault(deadline, []).append(block)
            if not holds[block]:
                self._is_evictable[block] = 1
                self._num_evictable += 1
                if not has_children(block):
                    self._leaves.add(block)
        for deadline, those in expiring.items():
            self._clock.start_all(those, deadline)

    def _leave_unindexed(self, block: int) -> None:
        if self._holds[block]:
            self._num_departing += 1
        else:
            self._give_free(block)

    def drop_private(self, block: int) -> None:
        """Free a block that one sequence has and that never was in the index: no release, so no tick."""
        assert self._ref_count[block] == 1
        assert not self.tree.is_indexed(block)
        self._ref_count[block] = 0
        self._give_free(block)

    def mark_matched(self, block: int, explicit: Retention | None) -> None:
        """A request matched the block; an explicit range replaces what it has (kv-semantics 2.4)."""
        self._was_matched[block] = 1
        if explicit is not None:
            self.set_retention(block, explicit)

    def set_retention(self, block: int, retention: Retention) -> None:
        """Priority and duration together; tells of a changed priority of an indexed block."""
        self._duration[block] = NEVER if retention.duration_s is None else retention.duration_s
        self._deadline[block] = NEVER  # It is in use; its release starts the new duration.
        self._is_drop[block] = retention.on_expiry == "drop"
        self._set_priority(block, retention.priority)

    def set_new(self, blocks: Sequence[int], retentions: Sequence[Retention]) -> None:
        """What private blocks get that have just been allocated."""
        priorities, durations, is_drop = self._priority, self._duration, self._is_drop
        for block, retention in zip(blocks, retentions, strict=True):
            priorities[block] = retention.priority
            durations[block] = NEVER if retention.duration_s is None else retention.duration_s
            is_drop[block] = retention.on_expiry == "drop"

    def set_travelled(self, block: int, priority: int, deadline: float | None, on_expiry: OnExpiry) -> None:
        """What came with a loaded block (kv-semantics 2.6): its deadline goes on running, whatever is released."""
        self._duration[block] = NEVER if deadline is None else _CARRIED
        self._deadline[block] = NEVER if deadline is None else deadline
        self._is_drop[block] = on_expiry == "drop"
        self._set_priority(block, priority)

    def take_over(self, block: int, owner: int) -> None:
        """Turn an idle leaf into a private block of `owner`, content and all (kv-semantics 3.5 without copying)."""
        assert block in self._leaves
        self._tell_removed((block,))
        self._unindex(block)
        self._forget_content((block,))
        self._shares.charge(owner, 1)
        self._shares.charge(self._owner[block], -1)
        self._owner[block] = owner
        self._ref_count[block] = 1

    # The index.

    def index_run(
        self,
        blocks: Sequence[int],
        node: int,
        namespace: int,
        hashes: Sequence[BlockHash],
        keys: Sequence[bytes],
        is_written: bool,
    ) -> None:
        """Make private full blocks shareable, each below the one before; unwritten ones only in the step that writes
        them."""
        self.tree.insert_run(blocks, node, hashes, keys)
        self._index(blocks, node, namespace, is_written)

    def index_partial(self, block: int, node: int, namespace: int, key: bytes) -> None:
        """Index a written partial tail (kv-semantics 1.5)."""
        self.tree.insert_partial(block, node, key)
        self._index((block,), node, namespace, True)

    def mark_written(self, blocks: Iterable[int]) -> None:
        """The step that writes the blocks has succeeded."""
        for block in blocks:
            self._is_written[block] = 1

    def unindex_unwritten(self, block: int) -> None:
        """The step that was to write the block has not: it was never there. Dependents first."""
        assert not self._is_written[block]
        self._unindex(block)

    def forget(self, blocks: Sequence[int]) -> None:
        """Take blocks out of the index, children first; idle ones become free, those in use private."""
        self._tell_removed(blocks)
        for block in blocks:
            self._leave_index(block, self._holds[block] > 0)

    def announce_stored(self, blocks: Sequence[int]) -> None:
        """Tell of full blocks that became shareable: a run, each the child of the one before."""
        if self._events is None or not blocks:
            return
        node = self.tree.parent(blocks[0])
        self._events.stored(
            self.tree.hash_of(node) if node >= 0 else None,
            self.tree.hashes_of(blocks),
            [self._priority[block] for block in blocks],
            self.namespace_fingerprint(blocks[0]),
            self.owner(blocks[0]),
            [self._token_ids(block) for block in blocks] if self._event_token_ids else None,
        )

    def take_events(self) -> list[Event]:
        """Everything since the last call, oldest first."""
        return [] if self._events is None else self._events.take()

    def snapshot_columns(self) -> IndexColumns:
        """All that events have told of and that is still there, parents before children (kv-semantics 6.3).

        It is the index after every event so far, also those that nobody has taken yet. Copying is all it costs here.
        """
        parents, depths, filled = self.tree.copied_shape()
        return IndexColumns(
            tier=TIER,
            tokens_per_block=self.tree.tokens_per_block,
            hashes=self.tree.copied_hashes(),
            parents=parents,
            depths=depths,
            filled=filled,
            is_written=bytes(self._is_written),
            priorities=self._priority[:],
            namespaces=self._namespace[:],
            owners=self._owner[:],
            fingerprint_of=self._fingerprints.copy(),
            owner_of={each: OwnerId(self.owners.value(each)) for each in set(self._owner) if each >= 0},
            tokens=self.tree.copied_tokens() if self._event_token_ids else None,
        )

    # Copies to the tier.

    def hold(self, block: int) -> None:
        """A copy of the block begins: neither it nor its ancestors can be evicted (kv-semantics 4.4, 5.2)."""
        while True:
            self._holds[block] += 1
            if self._holds[block] > 1:
                return
            self._settle(block)
            if not self.tree.is_indexed(block):
                return
            block = self.tree.parent(block)
            if block < 0:
                return

    def unhold(self, block: int) -> None:
        """A copy is over. No release: recency and deadline are unchanged (kv-semantics 5.2)."""
        self._unhold_path(block)
        if not self._holds[block] and self._ref_count[block] == 0 and not self.tree.is_indexed(block):
            self._num_departing -= 1
            self._give_free(block)

    def note_in_tier(self, block: int, now: float) -> None:
        """The tier holds a copy of the block."""
        self._in_tier_since[block] = now

    def in_tier_since(self, block: int) -> float:
        """When the tier was last known to hold a copy of what is in the block; minus infinity: never."""
        return self._in_tier_since[block]

    # Time.

    def expire(self, now: float) -> None:
        """Let go of what idle blocks were promised up to `now` (kv-semantics 2.5)."""
        while (block := self._clock.pop_expired(now)) is not None:
            self.num_expired += 1
            self._deadline[block] = self._duration[block] = NEVER
            if self._is_drop[block]:
                self.forget(self.tree.descendants_first(block))
                continue
            self._set_priority(block, demoted_priority(self._priority[block]))

    # Below: one door for each kind of change.

    def _evict(self, missing: int, allocating: int, owner: int, depart: Callable[[int], bool] | None) -> None:
        claim = self._shares.claim(owner, allocating)
        if depart is not None:
            self._evict_departing(missing, claim, depart)
            return
        while missing:
            chain = self._leaves.next_chain(claim, missing)
            self._drop_chain(chain)
            missing -= len(chain)

    def _evict_departing(self, missing: int, claim: Claim, depart: Callable[[int], bool]) -> None:
        """One by one, since a victim whose copy begins is not to be had yet, and pins its ancestors."""
        for _ in range(missing):
            block = self._leaves.next_victim(claim)
            if block is None:
                return  # The ancestors of those that depart are being copied, too.
            if not depart(block):
                self._drop_chain([block])
                continue
            self._count_evicted((block,))
            self._tell_removed((block,))
            self._leave_index(block, is_held=True)

    def _drop_chain(self, chain: list[int]) -> None:
        """Free evictable blocks of one owner, a leaf and those above it, without asking what is known: this is what eviction
        costs."""
        owner, namespace = self._owner[chain[0]], self._namespace[chain[0]]
        self._count_evicted(chain)
        node, hashes = self.tree.remove_chain(chain)
        if self._events is not None and hashes:
            self._events.removed(hashes, self._fingerprints[namespace], self.owner(chain[0]))
        self._num_evictable -= len(chain)
        self._num_idle -= len(chain)
        is_evictable, deadlines = self._is_evictable, self._deadline
        indexed, priorities = self.indexed_by_priority, self._priority
        for block in chain:
            indexed[priorities[block]] -= 1
            is_evictable[block] = 0
            if deadlines[block] != NEVER:
                self._clock.stop(block)
        self._leaves.discard(chain[0])
        self.namespaces.release(namespace, len(chain))
        self._shares.charge(owner, -len(chain))
        self._free.extend(chain)
        if node >= 0 and is_evictable[node] and not self.tree.has_children(node):
            self._leaves.add(node)

    def _count_evicted(self, blocks: Sequence[int]) -> None:
        evicted, priorities, was_matched = self._evictions_by_priority, self._priority, self._was_matched
        for block in blocks:
            evicted[priorities[block]] += 1
            if not was_matched[block]:
                self.num_dropped_unused += 1

    def _leave_index(self, block: int, is_held: bool) -> None:
        self._unindex(block)
        if self._ref_count[block]:
            return
        if is_held:
            self._num_departing += 1
        else:
            self._give_free(block)

    def _take_free(self, count: int, owner: int) -> list[int]:
        blocks = self._free[len(self._free) - count :]
        blocks.reverse()
        del self._free[len(self._free) - count :]
        ref_count, owners = self._ref_count, self._owner
        for block in blocks:
            ref_count[block] = 1
            owners[block] = owner
        self._forget_content(blocks)
        self._shares.charge(owner, count)
        return blocks

    def _forget_content(self, blocks: Sequence[int]) -> None:
        priority, duration, deadline = self._priority, self._duration, self._deadline
        is_drop, was_matched, in_tier_since = self._is_drop, self._was_matched, self._in_tier_since
        for block in blocks:
            priority[block] = DEFAULT_PRIORITY
            duration[block] = deadline[block] = NEVER
            is_drop[block] = was_matched[block] = 0
            in_tier_since[block] = -NEVER

    def _give_free(self, block: int) -> None:
        self._shares.charge(self._owner[block], -1)
        self._free.append(block)

    def _index(self, blocks: Sequence[int], node: int, namespace: int, is_written: bool) -> None:
        self.namespaces.acquire_index(namespace, len(blocks))
        for block in blocks:
            self._namespace[block] = namespace
            self._is_written[block] = is_written
            self.indexed_by_priority[self._priority[block]] += 1
        if node >= 0 and self._ref_count[node] == 0:
            self._settle(node)

    def _unindex(self, block: int) -> None:
        """Out of the index; the block is a leaf. Its parent may become one."""
        self.indexed_by_priority[self._priority[block]] -= 1
        is_holding_parent = self._holds[block] > 0
        node = self.tree.remove(block)
        if self._ref_count[block] == 0:
            self._num_idle -= 1
        self._clock.stop(block)
        self._settle(block)
        self.namespaces.release(self._namespace[block])
        if node >= 0:
            if is_holding_parent:
                self._unhold_path(node)
            self._settle(node)

    def _unhold_path(self, block: int) -> None:
        while True:
            self._holds[block] -= 1
            assert self._holds[block] >= 0
            if self._holds[block]:
                return
            self._settle(block)
            if not self.tree.is_indexed(block):
                return
            block = self.tree.parent(block)
            if block < 0:
                return

    def _settle(self, block: int) -> None:
        """Derive from what a block is whether it counts as evictable and stands in the order."""
        is_evictable = not self._ref_count[block] and not self._holds[block] and self.tree.is_indexed(block)
        if is_evictable != self._is_evictable[block]:
            self._is_evictable[block] = is_evictable
            self._num_evictable += 1 if is_evictable else -1
        if is_evictable and not self.tree.has_children(block):
            self._leaves.add(block)
        else:
            self._leaves.discard(block)

    def _set_priority(self, block: int, priority: int) -> None:
        old = self._priority[block]
        if old == priority:
            return
        self._priority[block] = priority
        if not self.tree.is_indexed(block):
            return
        self.indexed_by_priority[old] -= 1
        self.indexed_by_priority[priority] += 1
        if block in self._leaves:
            self._settle(block)
        block_hash = self.tree.hash_of(block)
        if self._events is not None and self._is_written[block] and block_hash is not None:
            self._events.updated(block_hash, old, priority, self.namespace_fingerprint(block), self.owner(block))

    def _deadline_from(self, block: int, now: float) -> float:
        duration = self._duration[block]
        if duration == NEVER:
            return NEVER
        return self._deadline[block] if math.isnan(duration) else now + duration

    def _token_ids(self, block: int) -> tuple[int, ...]:
        key = self.tree.key_of(block)
        return tuple(int.from_bytes(key[at : at + 4], "little") for at in range(0, len(key), 4))

    def _tell_removed(self, blocks: Iterable[int]) -> None:
        """Tell of blocks that are about to leave the index, one after the other."""
        if self._events is None:
            return
        for block in blocks:
            block_hash = self.tree.hash_of(block)
            # Unwritten blocks were never announced; partial tails have no events (kv-semantics 1.5).
            if block_hash is not None and self._is_written[block]:
                self._events.removed((block_hash,), self.namespace_fingerprint(block), self.owner(block))

    def check_invariants(self) -> None:
        """Raise AssertionError where a structure contradicts another; slow and complete."""
        self.tree.check_invariants()
        self._leaves.check_order()
        free = set(self._free)
        assert len(free) == len(self._free)
        held_by: dict[int, int] = {}
        histogram = [0] * (MAX_PRIORITY + 1)
        for block in range(self.num_blocks):
            is_indexed = self.tree.is_indexed(block)
            is_free = not is_indexed and not self._ref_count[block] and not self._holds[block]
            assert is_free == (block in free), f"block {block}"
            assert self._is_evictable[block] == (is_indexed and not self._ref_count[block] and not self._holds[block])
            self._leaves.check_invariants(block)
            is_idle = is_indexed and not self._ref_count[block]
            assert self._clock.is_running(block) == (is_idle and self._deadline[block] != NEVER)
            if not is_free:
                held_by[self._owner[block]] = held_by.get(self._owner[block], 0) + 1
            if is_indexed:
                histogram[self._priority[block]] += 1
                self._check_family(block)
        departing = sum(
            1
            for block in range(self.num_blocks)
            if self._holds[block] and not self._ref_count[block] and not self.tree.is_indexed(block)
        )
        assert departing == self._num_departing
        assert held_by == self._shares.held_by
        assert histogram == list(self.indexed_by_priority)
        assert self._num_evictable == sum(self._is_evictable)
        idle = sum(1 for block in self.tree.indexed() if not self._ref_count[block])
        assert idle == self._num_idle

    def _check_family(self, block: int) -> None:
        node = self.tree.parent(block)
        if node >= 0:
            assert self._namespace[node] == self._namespace[block]
            assert self._is_written[node] or not self._is_written[block]
            if self._ref_count[block]:
                assert self._ref_count[node], f"block {block} is in use and its parent {node} is not"
        holding = sum(1 for child in self.tree.children(block) if self._holds[child])
        assert self._holds[block] >= holding

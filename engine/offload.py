"""What the host tier is offered and told when blocks become idle or leave (kv-semantics 2.6, 5.1, 5.2).

Decides by priority threshold and by what the tier is known to hold; whether a block is taken, and what has to go for
it, is the tier's. Offers under way are bounded: beyond that, blocks are not offered this time (counted), since the
next release offers them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from cached.keys import BlockHash
from cached.retention import MIN_PRIORITY
from engine.block_pool import BlockPool
from engine.tier_work import Offer, OfferedDeviceBlock, TierWork, Touch, TouchedBlock
from engine.values import CoreSettings

KNOWLEDGE_S = 30.0
"""How long the tier is taken to hold what it was known to hold; then a block is offered again, which costs little."""
_MIN_BLOCKS_UNDER_WAY = 16
_MAX_TICKETS = 256


class Outbox:
    """Tickets, and work for the tier until the shell takes it, in the order in which it was decided."""

    def __init__(self) -> None:
        self._work: list[TierWork] = []
        self._tickets = 0

    def next_ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def send(self, work: TierWork) -> None:
        self._work.append(work)

    def take(self) -> list[TierWork]:
        """Everything since the last call."""
        work, self._work = self._work, []
        return work


class Offloader:
    """Offers under way, by ticket, and the choice of what to offer next. A block is in one offer at most."""

    def __init__(
        self,
        settings: CoreSettings,
        pool: BlockPool,
        outbox: Outbox,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._outbox = outbox
        self._ready_since: float | None = None
        self._chains: dict[int, tuple[int, ...]] = {}
        self._under_way: set[int] = set()
        self._max_blocks = max(_MIN_BLOCKS_UNDER_WAY, settings.num_blocks // 2)
        self.num_offers = 0
        self.num_touches = 0
        self.num_blocks_offered = 0
        self.num_dropped = 0

    @property
    def num_blocks_under_way(self) -> int:
        return len(self._under_way)

    @property
    def num_tickets(self) -> int:
        return len(self._chains)

    @property
    def is_on(self) -> bool:
        """Whether blocks go either way (kv-semantics 5.6)."""
        return self._ready_since is not None and self._settings.tier_enabled and self._settings.onboard_blocks

    def set_ready(self, is_ready: bool, now: float) -> None:
        """A tier that comes (back) may be another one: nothing is known of it."""
        if is_ready != (self._ready_since is not None):
            self._ready_since = now if is_ready else None

    def released(self, blocks: Sequence[int], now: float) -> None:
        """A sequence has released these full blocks, first to last: one `Touch`, and an offer of what is missing."""
        if not self.is_on:
            return
        offer_now = self._settings.offload_policy == "on_release"
        touched: list[int] = []
        offered: list[int] = []
        for block in blocks:
            if block in self._under_way or self._is_known(block, now):
                touched.append(block)
                continue
            if offer_now and self._is_worth_it(block):
                offered.append(block)
            if self._was_known(block):
                touched.append(block)  # A copy that is still there has to hear of this release, whatever is offered.
        if offered:
            self._offer(offered, now)
        if touched:
            self.num_touches += 1
            self._outbox.send(Touch(tuple(self._touch_of(block, now) for block in touched)))

    def withdraw(self, blocks: Sequence[int], now: float) -> None:
        """What these blocks hold is unusable: copies of it, also those under way, are to go, with all that is below them.

        The tier's protocol has no message for one block's removal; a duration that is over, with `drop`, says the same.
        """
        hashes = self._pool.tree.hashes_of(blocks)
        if self.is_on and hashes:
            self.num_touches += 1
            self._outbox.send(Touch(tuple(TouchedBlock(each, MIN_PRIORITY, now, "drop") for each in hashes)))

    def depart(self, block: int, now: float) -> bool:
        """A block is about to be evicted (`on_evict`): True if a copy begins, so that it cannot be reused yet."""
        if not self.is_on or self._pool.tree.hash_of(block) is None or not self._is_worth_it(block):
            return False
        if self._is_known(block, now):
            return False
        chain = [each for each in self._root_first(block) if self._is_missing(each, now)]
        if len(chain) + len(self._under_way) > self._max_blocks:
            self.num_dropped += 1
            return False
        return self._offer(chain, now)

    def offered(self, ticket: int, now: float, in_tier: Sequence[bool]) -> None:
        """The tier has answered: the blocks may be evicted again."""
        chain = self._chains.pop(ticket, ())
        for place, block in enumerate(chain):
            self._under_way.discard(block)
            if place < len(in_tier) and in_tier[place]:
                self._pool.note_in_tier(block, now)
        for block in reversed(chain):
            self._pool.unhold(block)

    def _is_worth_it(self, block: int) -> bool:
        return self._pool.priority(block) >= self._settings.secondary_offload_min_priority

    def _is_known(self, block: int, now: float) -> bool:
        since = self._pool.in_tier_since(block)
        return self._ready_since is not None and since >= self._ready_since and now - since <= KNOWLEDGE_S

    def _was_known(self, block: int) -> bool:
        return self._pool.in_tier_since(block) != -math.inf

    def _is_missing(self, block: int, now: float) -> bool:
        return self._is_worth_it(block) and block not in self._under_way and not self._is_known(block, now)

    def _root_first(self, block: int) -> Iterator[int]:
        path = [block]
        while (parent := self._pool.tree.parent(path[-1])) >= 0:
            path.append(parent)
        return reversed(path)

    def _offer(self, blocks: list[int], now: float) -> bool:
        room = self._max_blocks - len(self._under_way) if len(self._chains) < _MAX_TICKETS else 0
        chain = tuple(blocks[:room])  # Root first, so what is cut off are the deepest.
        self.num_dropped += len(blocks) - len(chain)
        if not chain:
            return False
        ticket = self._outbox.next_ticket()
        self._chains[ticket] = chain
        self._under_way.update(chain)
        for block in chain:
            self._pool.hold(block)
        self.num_offers += 1
        self.num_blocks_offered += len(chain)
        self._outbox.send(Offer(ticket, tuple(self._offered_block(block, now) for block in chain)))
        return True

    def _offered_block(self, block: int, now: float) -> OfferedDeviceBlock:
        pool = self._pool
        node = pool.tree.parent(block)
        return OfferedDeviceBlock(
            block_hash=self._hash_of(block),
            parent=pool.tree.hash_of(node) if node >= 0 else None,
            device_block=block,
            priority=pool.priority(block),
            deadline=self._deadline_of(block, now),
            on_expiry=pool.on_expiry(block),
            owner=pool.owner(block),
            namespace_fingerprint=pool.namespace_fingerprint(block),
        )

    def _touch_of(self, block: int, now: float) -> TouchedBlock:
        return TouchedBlock(
            self._hash_of(block), self._pool.priority(block), self._deadline_of(block, now), self._pool.on_expiry(block)
        )

    def _deadline_of(self, block: int, now: float) -> float | None:
        # A block that others still use has no running deadline; its copies get one from this release (2.6).
        if self._pool.ref_count(block):
            return self._pool.deadline_after_release(block, now)
        return self._pool.deadline(block)

    def _hash_of(self, block: int) -> BlockHash:
        block_hash = self._pool.tree.hash_of(block)
        assert block_hash is not None
        return block_hash

    def check_invariants(self) -> None:
        listed = [block for chain in self._chains.values() for block in chain]
        assert len(listed) == len(set(listed))
        assert set(listed) == self._under_way
        assert all(self._pool.is_held(block) for block in listed)

"""Which idle blocks of the device go next, and in what order (kv-semantics 4.1–4.3, 4.6).

Reads the pool's columns and changes none of them: what becomes of a victim is the pool's.
"""

from __future__ import annotations

from collections.abc import Sequence

from cached.eviction import EvictionOrder, device_giver, device_victim, place_of, rank_at, rank_of
from engine.owner_shares import Claim
from engine.prefix_tree import PrefixTree


class IdleLeaves:
    """The eviction order over evictable blocks without children; their ancestors follow when they are gone."""

    def __init__(
        self,
        tree: PrefixTree,
        owners: Sequence[int],
        priorities: Sequence[int],
        ticks: Sequence[int],
        is_evictable: Sequence[int],
    ) -> None:
        self._tree = tree
        self._owners = owners
        self._priorities = priorities
        self._ticks = ticks
        self._is_evictable = is_evictable
        self._order = EvictionOrder(len(owners))

    def __contains__(self, block: int) -> bool:
        return block in self._order

    def add(self, block: int) -> None:
        """The block can go; one that is here already moves to the place that it has now."""
        self._order.add(
            block, self._owners[block], self._priorities[block], self._ticks[block], self._tree.depth(block)
        )

    def discard(self, block: int) -> None:
        """The block is in use, has a child, or is gone."""
        self._order.discard(block)

    def next_victim(self, claim: Claim) -> int | None:
        """The block that goes next; it stays where it is. None when there is none."""
        return device_victim(self._order, claim.held, claim.share)

    def next_chain(self, claim: Claim, most: int) -> list[int]:
        """Take out the next victims, at most so many: a leaf, and above it what would come next anyway.

        So a chain costs one place in the order, not one a block. Blocks of another owner end it, and so does the moment
        from which another owner gives: then the choice between owners begins anew.
        """
        giver: int | None = None
        if claim.has_rivals:
            giver, rest = device_giver(self._order, claim.held, claim.share)
            if giver is not None:
                most = min(most, _num_to_give(claim.held(giver), claim.share(giver), rest, most))
        return self._chain(giver, most)

    def _chain(self, giver: int | None, most: int) -> list[int]:
        block = self._order.least_valuable(giver)
        assert block is not None, "evictable blocks are counted, so there is a victim"
        self._order.discard(block)
        chain, owner = [block], self._owners[block]
        next_place = self._order.first_place(giver)
        next_rank = None if next_place is None else rank_at(next_place)
        owners, priorities, ticks, is_evictable = self._owners, self._priorities, self._ticks, self._is_evictable
        lone_parent = self._tree.lone_parent
        while len(chain) < most:
            block = lone_parent(block)
            if block < 0 or not is_evictable[block] or owners[block] != owner:
                break
            if next_rank is not None:
                rank = rank_of(priorities[block], ticks[block])
                if rank > next_rank:
                    break
                if rank == next_rank and place_of(rank, self._tree.depth(block), block) > next_place:  # type: ignore[operator]
                    break
            chain.append(block)
        return chain

    def check_invariants(self, block: int) -> None:
        """Raise AssertionError where a block is not at the place that it should have, or where none should be."""
        is_leaf = bool(self._is_evictable[block]) and not self._tree.has_children(block)
        assert is_leaf == (block in self._order)
        if is_leaf:
            expected = (self._priorities[block], self._ticks[block], -self._tree.depth(block))
            assert self._order.key_of(block) == expected
            assert self._order.owner_of(block) == self._owners[block]

    def check_order(self) -> None:
        """The order's own invariants; slow."""
        self._order.check_invariants()


def _num_to_give(held: int, share: float, rest: float, most: int) -> int:
    """How many blocks an owner gives, one after the other, while it is further above its share than `rest`; at least the
    one for which it was chosen."""
    count = min(most, max(1, int(held - share - rest)))
    # Exactly as if each had been asked about alone, whatever rounding did above.
    while count > 1 and not held - (count - 1) - share > rest:
        count -= 1
    while count < most and held - count - share > rest:
        count += 1
    return count

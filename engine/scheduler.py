"""Whose turn it is: the waiting queue, fair between owners, and who computes which block for everybody (kv-semantics 3.3).

Between owners it goes round robin, whatever is cached: anything else would be a timing oracle between tenants. Inside one
owner's lane, of the few that have waited longest the one with most in the cache goes first, before what it needs is evicted;
else first come, first served. Preempted sequences come before all others. What fits is the core's question.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain, islice

from cached.keys import BlockHash
from engine.fair_places import FairPlaces
from engine.sequence import Sequence

_Lane = list[tuple[int, int, Sequence]]
_WINDOW = 8
"""How many of a lane are compared by what is cached of them."""
_SWEEP_AFTER = 64
"""Removals, beyond as many as wait, after which lanes are swept: so the cost of it is shared by many."""
MAX_PASSED = 8
"""How often the one that has waited longest is passed by others of its owner, so that nobody waits for ever."""


class WaitingQueue:
    """Sequences that hold nothing. Each is ready, parked behind a producer, waiting for a lookup, or set aside for
    the rest of one plan."""

    def __init__(self) -> None:
        self.places = FairPlaces()
        self._members: set[Sequence] = set()
        self._ready: set[Sequence] = set()
        self._front: _Lane = []
        self._lanes: dict[int, _Lane] = {}
        self._rotation: deque[int] = deque()  # owners with a lane
        self._parked: dict[BlockHash, list[Sequence]] = {}
        self._parked_on: dict[Sequence, BlockHash] = {}
        self._aside: list[Sequence] = []
        self._pushes = 0
        self._num_removed = 0  # since the last sweep

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def push(self, sequence: Sequence) -> None:
        """Add a sequence, or make one that was elsewhere in the queue ready; it keeps its place by arrival."""
        self._enter(sequence)
        if sequence in self._ready:
            return
        self._ready.add(sequence)
        self._pushes += 1
        heapq.heappush(self._lane_of(sequence), (sequence.arrival, self._pushes, sequence))

    def candidate(
        self,
        num_cached: Callable[[Sequence], int] | None = None,
        is_excluded: Callable[[int], bool] = lambda owner: False,
    ) -> Sequence | None:
        """The sequence whose turn it is; it stays where it is. `num_cached` says how much of a prompt need not be computed;
        it is asked only about sequences of the owner whose turn it is, and decides only between them. Owners that are
        excluded keep their turn."""
        first = self._top(self._front)
        if first is not None:
            return first
        for owner in list(self._rotation):
            if is_excluded(owner):
                continue
            lane = self._lanes[owner]
            first = self._top(lane)
            if first is not None:
                return first if num_cached is None else self._most_cached(lane, first, num_cached)
            del self._lanes[owner]
            self._rotation.remove(owner)
        return None

    def first(self, count: int) -> list[Sequence]:
        """At most so many that are ready or parked, about in the order of their turns: preempted ones, then by owner."""
        found: dict[Sequence, None] = {}
        if count > 0:
            lanes = (self._front, *(self._lanes[owner] for owner in self._rotation))
            # A lane is a heap, of which only the beginning is in order; that of one with few entries is put in order here.
            for entry in chain.from_iterable(chain(sorted(lane[: 2 * count]), lane[2 * count :]) for lane in lanes):
                if len(found) == min(count, len(self._ready)):
                    break
                if entry[2] in self._ready:  # What has left may still stand in a lane.
                    found[entry[2]] = None
            found.update(dict.fromkeys(islice(self._parked_on, count)))
        return list(islice(found, count))

    def ready_owners(self) -> set[int]:
        """All owners of which a sequence is ready, a preempted one as well; maybe some of which one has been."""
        return {entry[2].owner_index for entry in self._front} | set(self._rotation)

    def parked_on(self, sequence: Sequence) -> BlockHash | None:
        """The block that a parked sequence waits for; None of any other."""
        return self._parked_on.get(sequence)

    def take(self, sequence: Sequence) -> None:
        """The candidate leaves the queue: it is admitted, and its owner goes to the end of the round."""
        self.remove(sequence)
        if not sequence.was_preempted:
            passed = self._top(self._lanes.get(sequence.owner_index, []))
            if passed is not None and passed.arrival < sequence.arrival:
                passed.num_passed += 1
        if not sequence.was_preempted and self._rotation and self._rotation[0] == sequence.owner_index:
            self._rotation.rotate(-1)

    def remove(self, sequence: Sequence) -> None:
        """Out of the queue, wherever it stands."""
        if sequence in self._members:
            self._members.remove(sequence)
            self.places.give_back(sequence.request.owner)
            self._num_removed += 1
        self._ready.discard(sequence)
        parked_on = self._parked_on.pop(sequence, None)
        if parked_on is not None:
            left = [each for each in self._parked[parked_on] if each is not sequence]
            if left:
                self._parked[parked_on] = left
            else:
                del self._parked[parked_on]
        if self._num_removed > _SWEEP_AFTER + len(self._members):
            self._sweep()

    def park(self, sequence: Sequence, block_hash: BlockHash) -> None:
        """Wait until this block is shareable or its producer is gone."""
        self._ready.discard(sequence)
        self._parked.setdefault(block_hash, []).append(sequence)
        self._parked_on[sequence] = block_hash

    def wake(self, hashes: Iterable[BlockHash]) -> None:
        """Whoever waits for one of these blocks walks again."""
        if not self._parked:
            return
        for block_hash in hashes:
            for sequence in self._parked.pop(block_hash, ()):
                del self._parked_on[sequence]
                self.push(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Wait for the tier's answer; `push` makes it ready again."""
        self._enter(sequence)
        self._ready.discard(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """Not in this plan, though others behind it may be."""
        self._ready.discard(sequence)
        self._aside.append(sequence)

    def restore_aside(self) -> None:
        """The plan is made."""
        aside, self._aside = self._aside, []
        for sequence in aside:
            if sequence in self._members:
                self.push(sequence)

    def check_invariants(self) -> None:
        assert self._ready <= self._members
        assert set(self._parked_on) <= self._members
        assert not self._ready & set(self._parked_on)
        assert {each for group in self._parked.values() for each in group} == set(self._parked_on)
        assert sorted(self._lanes) == sorted(self._rotation)
        queued = {entry[2] for lane in (self._front, *self._lanes.values()) for entry in lane}
        assert self._ready <= queued
        assert self._num_removed <= _SWEEP_AFTER + len(self._members) + 1
        self.places.check_invariants()
        assert len(self.places) == len(self._members)

    def check_places(self, is_asking: Callable[[Sequence], bool], is_being_made: Callable[[BlockHash], bool]) -> None:
        """Between plans: nobody waits for what will not come."""
        for sequence in self._members:
            assert sequence in self._ready or sequence in self._parked_on or is_asking(sequence)
        assert all(map(is_being_made, self._parked))

    def _enter(self, sequence: Sequence) -> None:
        if sequence not in self._members:
            self._members.add(sequence)
            self.places.take(sequence.request.owner)

    def _lane_of(self, sequence: Sequence) -> _Lane:
        if sequence.was_preempted:
            return self._front
        lane = self._lanes.get(sequence.owner_index)
        if lane is None:
            lane = self._lanes[sequence.owner_index] = []
            self._rotation.append(sequence.owner_index)
        return lane

    def _sweep(self) -> None:
        """What has left stands in its lane until it would be next. Behind one that cannot be admitted that may be long, and
        whoever asks and leaves again meanwhile would fill the memory with prompts."""
        self._num_removed = 0
        self._front = self._swept(self._front)
        self._lanes = {owner: left for owner, lane in self._lanes.items() if (left := self._swept(lane))}
        self._rotation = deque(owner for owner in self._rotation if owner in self._lanes)

    def _swept(self, lane: _Lane) -> _Lane:
        first_entries: dict[Sequence, tuple[int, int, Sequence]] = {}
        for entry in sorted(lane):
            if entry[2] in self._ready:
                first_entries.setdefault(entry[2], entry)
        return list(first_entries.values())  # Sorted, and so a heap.

    def _most_cached(self, lane: _Lane, first: Sequence, num_cached: Callable[[Sequence], int]) -> Sequence:
        if first.num_passed >= MAX_PASSED or len(lane) == 1:
            return first
        window: dict[Sequence, tuple[int, int, Sequence]] = {}
        while lane and len(window) < _WINDOW:
            entry = heapq.heappop(lane)
            if entry[2] in self._ready:
                window.setdefault(entry[2], entry)  # One that was elsewhere meanwhile may have two entries.
        for entry in window.values():
            heapq.heappush(lane, entry)
        return max(window, key=lambda each: (num_cached(each), -each.arrival))

    def _top(self, lane: _Lane) -> Sequence | None:
        while lane:
            sequence = lane[0][2]
            if sequence in self._ready:
                return sequence
            heapq.heappop(lane)
        return None


class Producers:
    """Which running sequence computes (or loads) which full prompt block that is not there yet."""

    def __init__(self) -> None:
        self._by_hash: dict[BlockHash, Sequence] = {}
        self._hashes: dict[Sequence, set[BlockHash]] = {}

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._by_hash

    def __len__(self) -> int:
        return len(self._by_hash)

    def register(self, sequence: Sequence, hashes: Iterable[BlockHash]) -> None:
        """`sequence` will make these blocks, except those that somebody else makes already."""
        mine = self._hashes.setdefault(sequence, set())
        for block_hash in hashes:
            if block_hash not in self._by_hash:
                self._by_hash[block_hash] = sequence
                mine.add(block_hash)

    def published(self, hashes: Iterable[BlockHash]) -> None:
        """These blocks are shareable; nobody has to wait for them."""
        for block_hash in hashes:
            producer = self._by_hash.pop(block_hash, None)
            if producer is not None:
                self._hashes[producer].discard(block_hash)

    def drop(self, sequence: Sequence) -> set[BlockHash]:
        """`sequence` makes nothing any more; returns what it leaves unmade."""
        left = self._hashes.pop(sequence, set())
        for block_hash in left:
            del self._by_hash[block_hash]
        return left

    def last_awaited(self, hashes: list[BlockHash], start: int, end: int) -> int:
        """The place of the last block of the run from `start` that is being made: to wait for that one is to wait for all."""
        place = start
        while place + 1 < end and hashes[place + 1] in self._by_hash:
            place += 1
        return place

    def check_invariants(self) -> None:
        for sequence, hashes in self._hashes.items():
            assert all(self._by_hash[block_hash] is sequence for block_hash in hashes)
        assert sum(map(len, self._hashes.values())) == len(self._by_hash)

"""Which sequences live, wait and run, and how one stops running: ended, or preempted.

One door for each change of a sequence's state, so that queue, running table and producers cannot disagree. When that
happens is the planner's or the core's decision.
"""

from __future__ import annotations

from collections.abc import Iterator

from cached.keys import BlockHash
from engine.block_pool import BlockPool
from engine.offload import Offloader
from engine.prefix_cache import PrefixCache
from engine.scheduler import Producers, WaitingQueue
from engine.sequence import Sequence, State
from engine.tally import Tally
from engine.values import CoreSettings


class Roster:
    """All sequences by id; those that run in order of admission, loading ones included."""

    def __init__(self, settings: CoreSettings, pool: BlockPool, offloader: Offloader, tally: Tally) -> None:
        self.cache = PrefixCache(settings, pool, self._on_indexed)
        self.waiting = WaitingQueue()
        self.producers = Producers()
        self.sequences: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self._settings = settings
        self._pool = pool
        self._offloader = offloader
        self._tally = tally

    def start_running(self, sequence: Sequence, step_id: int, now: float) -> None:
        """The candidate has its blocks: it leaves the queue and makes what is missing of its prompt."""
        self.waiting.take(sequence)
        sequence.admitted_in_step = step_id
        sequence.state = State.RUNNING
        self.running[sequence.sequence_id] = sequence
        if sequence.admitted_at is None:
            sequence.admitted_at = now
        self._register(sequence)

    def youngest_running(self) -> Sequence:
        """The one admitted last of those whose blocks nobody else is writing."""
        return next(self._youngest_first())

    def preempt(self, sequence: Sequence, now: float, is_good: bool = True) -> None:
        """Its blocks become idle; it comes back before all others and computes again what is gone by then."""
        self._give_back(sequence, now, is_good)
        self._tally.preemptions += 1
        sequence.was_preempted = True
        sequence.state = State.WAITING
        self.waiting.push(sequence)

    def end(self, sequence: Sequence, now: float, is_good: bool = True) -> None:
        """It is over; `is_good` False: what it has computed is not to be found by others."""
        if sequence.state is State.FINISHED:
            return
        self._give_back(sequence, now, is_good)
        self.waiting.remove(sequence)
        sequence.state = State.FINISHED
        del self.sequences[sequence.sequence_id]
        self._pool.leave(sequence.owner_index, sequence.namespace_index)

    def check_invariants(self) -> None:
        """Every living sequence either runs or waits, and one that waits holds nothing."""
        self.waiting.check_invariants()
        self.producers.check_invariants()
        assert self.running.keys() <= self.sequences.keys()
        waiting = [each for each in self.sequences.values() if each.sequence_id not in self.running]
        assert len(waiting) == len(self.waiting)
        for sequence in waiting:
            assert sequence in self.waiting
            assert not sequence.table

    def _youngest_first(self) -> Iterator[Sequence]:
        return (each for each in reversed(self.running.values()) if each.state is State.RUNNING)

    def _give_back(self, sequence: Sequence, now: float, is_good: bool) -> None:
        if self.running.pop(sequence.sequence_id, None) is None:
            return
        unmade = self.producers.drop(sequence)
        blocks = self.cache.release(sequence, now, is_good)
        if is_good:
            self._offloader.released(blocks, now)
        self._hand_over(unmade)

    def _hand_over(self, hashes: set[BlockHash]) -> None:
        """Who computes one of these blocks already becomes its producer (3.3); otherwise a waiter does."""
        if not hashes:
            return
        for sequence in self.running.values():
            self._register(sequence)
        self.waiting.wake([block_hash for block_hash in hashes if block_hash not in self.producers])

    def _register(self, sequence: Sequence) -> None:
        """Tell that the sequence makes what is left of its prompt's full blocks."""
        if self._settings.enable_block_reuse:
            count = sequence.num_prompt // self._settings.tokens_per_block
            self.producers.register(sequence, sequence.block_hashes(count)[sequence.num_published : count])

    def _on_indexed(self, hashes: list[BlockHash]) -> None:
        self.producers.published(hashes)
        self.waiting.wake(hashes)

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

MAX_UNCONFIRMED = 64
CONFIRMATION_TIMEOUT_S = 5.0
"""A gateway confirms with the last event it reads. One that has not by then never will: the blocks are not kept in use."""


class Roster:
    """All sequences by id; those that run in order of admission, loading ones included."""

    def __init__(self, settings: CoreSettings, pool: BlockPool, offloader: Offloader, tally: Tally) -> None:
        self.cache = PrefixCache(settings, pool, self._on_indexed)
        self.waiting = WaitingQueue()
        self.producers = Producers()
        self.sequences: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self.unconfirmed: dict[int, Sequence] = {}  # oldest first
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
        self.sequences.pop(sequence.sequence_id, None)
        self._pool.leave(sequence.owner_index, sequence.namespace_index)

    def finish(self, sequence: Sequence, now: float) -> None:
        """It has its last token. It ends, unless the word that lets its generated blocks be found is still to come: then it
        keeps its blocks, no longer counts as running, and is the first to give them up when others need them."""
        if not self._settings.enable_block_reuse or not sequence.is_unconfirmed:
            self.end(sequence, now)
            return
        del self.running[sequence.sequence_id], self.sequences[sequence.sequence_id]
        self._hand_over(self.producers.drop(sequence))
        sequence.state = State.UNCONFIRMED
        sequence.let_go_at = now + CONFIRMATION_TIMEOUT_S
        self.unconfirmed[sequence.sequence_id] = sequence
        if len(self.unconfirmed) > MAX_UNCONFIRMED:
            self.let_go(now)

    def let_go(self, now: float) -> bool:
        """End the sequence that has waited longest for its confirmation; False where there is none."""
        oldest = next(iter(self.unconfirmed.values()), None)
        if oldest is not None:
            self.end(oldest, now)
        return oldest is not None

    def let_go_overdue(self, now: float) -> None:
        """End those whose confirmation did not come in time."""
        while (deadline := self.next_let_go()) is not None and deadline <= now:
            self.let_go(now)

    def next_let_go(self) -> float | None:
        """When the first confirmation is overdue."""
        oldest = next(iter(self.unconfirmed.values()), None)
        return None if oldest is None else oldest.let_go_at

    def find(self, sequence_id: int) -> Sequence | None:
        """A sequence that lives, or that waits for its confirmation."""
        return self.sequences.get(sequence_id) or self.unconfirmed.get(sequence_id)

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
        assert len(self.unconfirmed) <= MAX_UNCONFIRMED
        assert not self.unconfirmed.keys() & self.sequences.keys()
        for sequence in self.unconfirmed.values():
            assert sequence.state is State.UNCONFIRMED

    def _youngest_first(self) -> Iterator[Sequence]:
        return (each for each in reversed(self.running.values()) if each.state is State.RUNNING)

    def _give_back(self, sequence: Sequence, now: float, is_good: bool) -> None:
        ran = self.running.pop(sequence.sequence_id, None) or self.unconfirmed.pop(sequence.sequence_id, None)
        if ran is None:
            return
        unmade = self.producers.drop(sequence)
        blocks = self.cache.release(sequence, now, is_good)
        # Also of one whose last step came to nothing: what is indexed still was written before, or by others.
        self._offloader.released(blocks, now)
        self._hand_over(unmade, is_good)

    def _hand_over(self, hashes: set[BlockHash], is_good: bool = True) -> None:
        """Who computes one of these blocks already becomes its producer (3.3); otherwise a waiter does.

        Blocks of a step that failed were shareable for a moment: they are not among `hashes`, and nobody makes them now.
        """
        if is_good and not hashes:
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

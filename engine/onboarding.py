"""What a waiting request asks the host tier for, and what becomes of the answer (kv-semantics 3.4, 5.4–5.7).

Lookups are asked by requests that hold nothing; loads go into blocks that the request has already. Whether loading is
faster than computing is judged by the tier worker, which answers a lookup with nothing when it is not.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed

from engine.block_pool import BlockPool
from engine.offload import Offloader, Outbox
from engine.prefix_cache import Walk
from engine.roster import Roster
from engine.sequence import Sequence, Served, State
from engine.tally import Tally
from engine.tier_work import Load, LoadedBlock, Lookup
from engine.values import CoreSettings

_MAX_LOOKUPS = 3
"""Lookups for one admission: the device may lose what a lookup built upon, but not for ever."""


class Onboarding:
    """Lookups and loads under way, by ticket."""

    def __init__(
        self,
        settings: CoreSettings,
        pool: BlockPool,
        roster: Roster,
        offloader: Offloader,
        outbox: Outbox,
        tally: Tally,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._roster = roster
        self._offloader = offloader
        self._outbox = outbox
        self._tally = tally
        self._lookups: dict[int, Sequence] = {}
        self._loads: dict[int, tuple[Sequence, int]] = {}  # and how many blocks were asked for

    @property
    def num_tickets(self) -> int:
        return len(self._lookups) + len(self._loads)

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    def wants_lookup(self, sequence: Sequence, walk: Walk) -> bool:
        """Whether the tier may continue this walk and has not been asked, or only about what follows a lost block."""
        if walk.stopped_at is None or not self._offloader.is_on or sequence.num_lookups >= _MAX_LOOKUPS:
            return False
        return sequence.tier_run is None or len(walk.blocks) < sequence.tier_run[0]

    def look_up(self, sequence: Sequence, walk: Walk) -> None:
        """Ask; the sequence waits for the answer."""
        self._ask(sequence, len(walk.blocks))
        self._roster.waiting.hold(sequence)

    def look_ahead(self, sequence: Sequence, start: int) -> None:
        """Ask about what follows the blocks that a parked sequence waits for, unless it has asked before: whoever is told
        that they are made would otherwise begin to wait for the tier. What the tier gets between the answer and then is
        not found; its share of a prompt that others compute meanwhile would be small."""
        is_worth_asking = start < self._roster.cache.num_servable(sequence) and self._offloader.is_on
        if is_worth_asking and sequence.tier_run is None and sequence.num_lookups < _MAX_LOOKUPS:
            self._ask(sequence, start)

    def _ask(self, sequence: Sequence, start: int) -> None:
        count = self._roster.cache.num_servable(sequence)
        sequence.num_lookups += 1
        sequence.tier_run = (start, 0)
        ticket = sequence.lookup = self._outbox.next_ticket()
        self._lookups[ticket] = sequence
        self._tally.lookups += 1
        self._outbox.send(Lookup(ticket, tuple(sequence.block_hashes(count)[start:count])))

    def looked_up(self, ticket: int, num_blocks: int) -> None:
        """The answer; an unknown ticket is nobody's any more, and one that its sequence has forgotten is of no use to it."""
        sequence = self._lookups.pop(ticket, None)
        if sequence is None or sequence.lookup != ticket or sequence not in self._roster.waiting:
            return
        sequence.lookup = None
        start = sequence.tier_run[0] if sequence.tier_run else 0
        sequence.tier_run = (start, num_blocks)
        if self._roster.waiting.parked_on(sequence) is None:
            self._roster.waiting.push(sequence)

    def has_yet_to_hear(self, sequence: Sequence, walk: Walk) -> bool:
        """Whether the tier has yet to answer what a parked sequence asked, and the answer is still of use; else that is
        forgotten: the device has all there is to have, or less than the question stands on."""
        if sequence.lookup is None:
            return False
        start = sequence.tier_run[0] if sequence.tier_run else 0
        if walk.stopped_at is None or len(walk.blocks) < start:
            sequence.lookup = None
        return sequence.lookup is not None

    def num_to_load(self, sequence: Sequence, walk: Walk) -> int:
        """Full blocks with which the tier continues the walk."""
        if walk.stopped_at is None or sequence.tier_run is None or not self._offloader.is_on:
            return 0
        start, count = sequence.tier_run
        end = min(start + count, self._roster.cache.num_servable(sequence))
        return max(0, end - len(walk.blocks)) if start <= len(walk.blocks) else 0

    def load(self, sequence: Sequence, count: int) -> None:
        """Load the first `count` blocks behind the matched ones; until they are there, nobody touches the sequence."""
        sequence.state = State.LOADING
        first = sequence.num_matched
        ticket = self._outbox.next_ticket()
        self._loads[ticket] = (sequence, count)
        self._tally.loads += 1
        hashes = sequence.block_hashes(first + count)
        places = range(first, first + count)
        self._outbox.send(Load(ticket, tuple((hashes[place], sequence.table[place]) for place in places)))

    def loaded(self, ticket: int, num_blocks: int, travelled: Listed[LoadedBlock], now: float) -> None:
        """The first `num_blocks` are there and shareable; the rest of the prompt is computed."""
        entry = self._loads.pop(ticket, None)
        if entry is None:
            return
        sequence, num_asked = entry
        num_good = min(num_blocks, num_asked)
        self._tally.blocks_loaded += num_good
        self._tally.blocks_load_failed += num_asked - num_good
        came = [travelled[place] if place < len(travelled) else None for place in range(num_good)]
        first = sequence.num_matched
        self._roster.cache.publish_loaded(sequence, came)
        for block in sequence.table[first : first + num_good]:
            self._pool.note_in_tier(block, now)
        sequence.state = State.RUNNING
        if sequence.served is None:
            size = self._settings.tokens_per_block
            device = min(first * size, sequence.num_prompt)
            host = min(num_good * size, sequence.num_prompt - device)
            sequence.served = Served(device, host, first + num_good, False)
        if sequence.is_cancelled:
            self._roster.end(sequence, now)

    def check_invariants(self) -> None:
        """One that waits is ready, parked, or waits for an answer that will come; of what runs nobody asks anything."""
        for sequence in self._roster.sequences.values():
            if sequence.lookup is not None:
                assert self._lookups[sequence.lookup] is sequence
                assert sequence in self._roster.waiting
        self._roster.waiting.check_places(lambda each: each.lookup is not None, self._roster.producers.__contains__)

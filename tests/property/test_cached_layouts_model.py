"""Layouts that come and go on a tier of several parts, against a model that knows where each must be and what it holds."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cached.arena import Arena
from cached.keys import self_test_vector
from cached.parts import PartPlan
from cached.protocol import NO_PARENT, PROTOCOL_VERSION, RESERVED, Hello, Layout, Reserve, f64s, u32s
from cached.tier import Admitted, Tier, TierSettings

LINGER_S = 10.0
LAYOUTS = tuple(Layout(b"layout %d" % number, 4096 * (1 + number % 2), 16) for number in range(4))
LABELS = ("named", "", "", "")
PLANS = (PartPlan("named", 2**15), PartPlan("", 2**14), PartPlan("", 2**14))
layouts = st.integers(0, len(LAYOUTS) - 1)
waits = st.sampled_from([1.0, 6.0, LINGER_S])


class LayoutsMachine(RuleBasedStateMachine):
    """The model: which part holds which layout, its blocks, its sessions, and when the last of those ended."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="hl"))
        self.now, self.lives, self.blocks_made = 0.0, 0, 0
        self.layout_of: list[int | None] = [None] * len(PLANS)
        self.blocks: dict[int, list[bytes]] = {number: [] for number in range(len(LAYOUTS))}
        self.sessions: dict[int, list[int]] = {number: [] for number in range(len(LAYOUTS))}
        self.left_at: list[float] = [0.0] * len(PLANS)
        self.open()

    def open(self) -> None:
        self.lives += 1
        self.arena = Arena.open(self.folder / "arena", 2**16, plans=PLANS)
        while self.arena.allocate_next():
            pass
        self.tier = Tier(self.arena.parts, TierSettings(10.0, 30.0, LINGER_S), self.lives << 32, self.now)
        for part in self.tier.parts:
            if part.store is not None:
                for item in part.store.next_unverified(1000):
                    part.store.verified(item, is_sound=True)

    def teardown(self) -> None:
        self.arena.close(keep=False)
        shutil.rmtree(self.folder)

    def may_have(self, number: int) -> set[int]:
        """The parts that a layout may get now; which of several equal ones is the tier's choice."""
        mine = {0} if LABELS[number] else {1, 2}
        holding = {at for at in mine if self.layout_of[at] == number}
        if holding:
            return holding
        empty = {at for at in mine if (it := self.layout_of[at]) is None or not (self.blocks[it] or self.sessions[it])}
        if empty:
            return empty
        left = {
            at: self.left_at[at]
            for at in mine
            if (it := self.layout_of[at]) is not None
            and not self.sessions[it]
            and self.now >= self.left_at[at] + LINGER_S
        }
        return {at for at, when in left.items() if when == min(left.values())}

    @rule(number=layouts)
    def an_engine_comes(self, number: int) -> None:
        allowed = self.may_have(number)
        hello = Hello(1, PROTOCOL_VERSION, bytes(16), self_test_vector(), LAYOUTS[number], LABELS[number])

        answer = self.tier.admit(hello, 1, 1, self.now)

        assert isinstance(answer, Admitted) == bool(allowed)
        if isinstance(answer, Admitted):
            assert answer.part is not None
            at = self.tier.parts.index(answer.part)
            assert at in allowed
            former = self.layout_of[at]
            if former is not None and former != number:
                self.blocks[former].clear()
            self.layout_of[at] = number
            self.sessions[number].append(answer.session)

    @rule(number=layouts, priority=st.integers(0, 100))
    def an_engine_stores(self, number: int, priority: int) -> None:
        if not self.sessions[number]:
            return
        part, session = self.tier.parts[self.layout_of.index(number)], self.sessions[number][-1]
        self.blocks_made += 1
        key = self.blocks_made.to_bytes(32, "little")
        one = Reserve(1, key, NO_PARENT, u32s([1]), bytes([priority]), f64s([float("inf")]), bytes(1), bytes(16))

        decided = part.reserve(session, one, self.now)

        if decided.outcomes == bytes([RESERVED]):
            part.require_store().commit(session, [(decided.first_reservation, 1)], self.now)
            self.blocks[number].append(key)

    @rule(number=layouts, is_clean=st.booleans())
    def an_engine_goes(self, number: int, is_clean: bool) -> None:
        if self.sessions[number]:
            session = self.sessions[number].pop()
            self.tier.end_session(session, is_clean, self.now)
            self.tier.process_gone(session)
            self.left_at[self.layout_of.index(number)] = self.now

    @rule(number=layouts, is_clean=st.booleans(), seconds=waits)
    def an_engine_leaves_a_block_behind(self, number: int, is_clean: bool, seconds: float) -> None:
        self.an_engine_comes(number)
        self.an_engine_stores(number, 50)
        self.an_engine_goes(number, is_clean)
        self.time_passes(seconds)

    @rule(seconds=waits)
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.tier.expire(self.now)

    @rule()
    def the_daemon_is_killed(self) -> None:
        self.arena.close(keep=True)
        for number in self.sessions:
            self.sessions[number].clear()
        self.left_at = [self.now] * len(PLANS)
        self.open()

    @invariant()
    def every_layout_has_its_own_and_no_other(self) -> None:
        held = {part.files.layout for part in self.tier.parts} - {None}
        assert held == {LAYOUTS[number] for number in self.layout_of if number is not None}
        for at, part in enumerate(self.tier.parts):
            if part.store is None:
                continue
            part.store.check_invariants()
            number = self.layout_of[at]
            assert number is not None
            # What a layout stored is there but for what it evicted itself, and nothing of anybody else's is.
            kept = set(part.store.blocks.index)
            assert kept <= set(self.blocks[number])
            evicted = sum(count.value for count in part.statistics().evicted_by_priority)
            assert len(self.blocks[number]) - len(kept) <= evicted
            self.blocks[number] = [key for key in self.blocks[number] if key in kept]
            part.store.counters.evicted[:] = [0] * len(part.store.counters.evicted)
        assert self.tier.statistics().sessions == sum(map(len, self.sessions.values()))


LayoutsMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestLayouts = LayoutsMachine.TestCase

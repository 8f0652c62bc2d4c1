"""When the durations of blocks end: a heap in columns with one place per slot, so that a million deadlines cost what columns do.

A new deadline moves its slot's entry; nothing is ever outdated twice, and nothing is gone through from end to end. Whether
the block in a slot still is one that ends then, is for whoever takes the entry out to look at.
"""

from __future__ import annotations

from array import array

from cached.protocol import NEVER

_NOWHERE = -1


class DeadlineHeap:
    """Slots by deadline, the earliest first; every operation is O(log n), of a deadline later than most O(1)."""

    def __init__(self, num_slots: int) -> None:
        self._times = array("d")
        self._slots = array("I")
        self._place = array("i", [_NOWHERE]) * num_slots

    def __len__(self) -> int:
        return len(self._times)

    @property
    def first(self) -> float:
        """The earliest deadline; infinity when there is none."""
        return self._times[0] if self._times else NEVER

    def set(self, slot: int, deadline: float) -> None:
        """The block in `slot` ends at `deadline`, and at no other time."""
        at = self._place[slot]
        if at == _NOWHERE:
            at = len(self._times)
            self._times.append(deadline)
            self._slots.append(slot)
        else:
            self._times[at] = deadline
        self._sink(self._rise(at))

    def pop(self) -> tuple[float, int]:
        """Take the earliest deadline out, and the slot it is about."""
        deadline, slot = self._times[0], self._slots[0]
        self._place[slot] = _NOWHERE
        last_time, last_slot = self._times.pop(), self._slots.pop()
        if self._times:
            self._times[0], self._slots[0] = last_time, last_slot
            self._sink(0)
        return deadline, slot

    def deadline_of(self, slot: int) -> float:
        """The deadline that stands here for a slot; infinity when there is none."""
        at = self._place[slot]
        return NEVER if at == _NOWHERE else self._times[at]

    def check_invariants(self) -> None:
        """Raise AssertionError when the order or the places are wrong; slow."""
        for at, slot in enumerate(self._slots):
            assert self._place[slot] == at
            assert self._times[(at - 1) >> 1 if at else 0] <= self._times[at]
        assert sum(at != _NOWHERE for at in self._place) == len(self._slots) == len(self._times)

    def _rise(self, at: int) -> int:
        times, slots, place = self._times, self._slots, self._place
        time, slot = times[at], slots[at]
        while at:
            above = (at - 1) >> 1
            if times[above] <= time:
                break
            times[at], slots[at] = times[above], slots[above]
            place[slots[at]] = at
            at = above
        times[at], slots[at], place[slot] = time, slot, at
        return at

    def _sink(self, at: int) -> None:
        times, slots, place = self._times, self._slots, self._place
        time, slot, end = times[at], slots[at], len(times)
        while (below := 2 * at + 1) < end:
            if below + 1 < end and times[below + 1] < times[below]:
                below += 1
            if times[below] >= time:
                break
            times[at], slots[at] = times[below], slots[below]
            place[slots[at]] = at
            at = below
        times[at], slots[at], place[slot] = time, slot, at

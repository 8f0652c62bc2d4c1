"""Who holds what for how long: sessions, their reservations and leases, and what ended sessions left behind.

Decides nothing about blocks: it hands out ids, remembers deadlines, and gives back what belongs to a session. Both
kinds of holding have one time to live each, so the order of creation is the order of expiry and a queue suffices; what
one message reserves is one entry of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cached.blocks import EXPIRED, ORPHANED, QUARANTINED, RESERVED
from cached.protocol import NEVER
from cached.records import Holder

_SLACK = 1024
"""Deadlines of what has ended that are tolerated beyond as many as there are live ones: a deadline is half a minute away,
and a busy engine makes a million holdings in that time."""


class ReservationDeadline(NamedTuple):
    """After `deadline` the reservations [first, end) of a session may no longer be committed, those that it still has."""

    deadline: float
    session: int
    first: int
    end: int


class LeaseHolding(NamedTuple):
    """A session reads `slots`, which held content of these `generations` when the lease began."""

    session: int
    deadline: float
    slots: list[int]
    generations: list[int]


@dataclass(slots=True)
class SessionHoldings:
    """What one session holds, in order: slots it may write into, by the reservation's id, and ids of leases. `slots` only
    for what a former daemon noted and this one never gave out."""

    holder: Holder
    reservations: dict[int, int] = field(default_factory=dict)
    leases: dict[int, None] = field(default_factory=dict)
    slots: Sequence[int] = ()


class Holdings:
    """Ids begin at `first_id`, which the shell chooses new at every start, so that none from a former life is known."""

    def __init__(self, first_id: int) -> None:
        self.leases: dict[int, LeaseHolding] = {}
        self._sessions: dict[int, SessionHoldings] = {}
        self._quarantined: dict[int, SessionHoldings] = {}
        self._reservation_queue: deque[ReservationDeadline] = deque()
        self._lease_queue: deque[tuple[float, int]] = deque()
        self._next_id = first_id

    def open(self, session: int, holder: Holder) -> None:
        """A session begins; its number was never used before."""
        assert session not in self._sessions
        assert session not in self._quarantined
        self._sessions[session] = SessionHoldings(holder)

    def close(self, session: int) -> SessionHoldings | None:
        """A session ends; what it holds stays known until the caller has dealt with it."""
        return self._sessions.pop(session, None)

    def holder_of(self, session: int) -> Holder:
        """Who is behind an open session."""
        return self._sessions[session].holder

    def add_reservations(self, session: int, deadline: float, slots: Sequence[int]) -> int:
        """Remember a reservation of each slot; their ids are consecutive, and the first of them is said."""
        first = self._next_id
        self._next_id = end = first + len(slots)
        self._sessions[session].reservations.update(zip(range(first, end), slots, strict=True))
        queue = self._reservation_queue
        queue.append(ReservationDeadline(deadline, session, first, end))
        if len(queue) > _SLACK and len(queue) > 2 * self._num_reservations() + _SLACK:
            self._reservation_queue = deque(entry for entry in queue if self._live(entry))
        return first

    def reservations_of(self, session: int) -> dict[int, int]:
        """The slots an open session may write into, by reservation; whoever ends a reservation takes it out."""
        return self._sessions[session].reservations

    def add_lease(self, lease: LeaseHolding) -> int:
        """Remember a lease and say its id."""
        number = self._new_id()
        self.leases[number] = lease
        self._sessions[lease.session].leases[number] = None
        self._lease_queue.append((lease.deadline, number))
        return number

    def take_lease(self, session: int, number: int) -> LeaseHolding | None:
        """End a lease; None when this session has none of that id (any more)."""
        held = self.leases.get(number)
        if held is None or held.session != session or session not in self._sessions:
            return None
        del self.leases[number]
        del self._sessions[session].leases[number]
        if len(self._lease_queue) > 2 * len(self.leases) + _SLACK:
            self._lease_queue = deque(entry for entry in self._lease_queue if entry[1] in self.leases)
        return held

    def leases_due(self, now: float) -> Iterator[LeaseHolding]:
        """Take the leases of open sessions whose deadline has come; those in quarantine last until it ends."""
        while self._lease_queue and self._lease_queue[0][0] <= now:
            _, number = self._lease_queue.popleft()
            held = self.leases.get(number)
            if held is not None and self.take_lease(held.session, number) is not None:
                yield held

    def reservations_due(self, now: float) -> Iterator[int]:
        """The slots of open sessions whose reservations' deadline has come, each once; the reservations stay known, since
        only their session can say that it has stopped writing."""
        while self._reservation_queue and self._reservation_queue[0].deadline <= now:
            yield from self._live(self._reservation_queue.popleft())

    def next_deadline(self) -> float:
        """The earliest deadline that still means something; infinity without one."""
        while self._lease_queue and self._lease_queue[0][1] not in self.leases:
            self._lease_queue.popleft()
        lease = self._lease_queue[0][0] if self._lease_queue else NEVER
        return min(lease, self._next_reservation_deadline())

    def _next_reservation_deadline(self) -> float:
        queue = self._reservation_queue
        while queue:
            deadline, session, first, end = queue[0]
            held = self._sessions.get(session)
            live = next((n for n in range(first, end) if n in held.reservations), end) if held is not None else end
            if live < end:
                # What was found to have ended is not looked at again.
                queue[0] = ReservationDeadline(deadline, session, live, end)
                return deadline
            queue.popleft()
        return NEVER

    def quarantine(self, session: int, held: SessionHoldings) -> bool:
        """Keep what an ended session held out of reach until `leave_quarantine`; False when it held nothing."""
        if not held.reservations and not held.leases:
            return False
        self._quarantined[session] = held
        return True

    def restore_quarantine(self, session: int, holder: Holder, slots: Sequence[int]) -> None:
        """The same for slots that a former daemon noted."""
        self._quarantined[session] = SessionHoldings(holder, slots=tuple(slots))

    def leave_quarantine(self, session: int) -> SessionHoldings | None:
        """What was kept for an ended session; the caller frees it."""
        return self._quarantined.pop(session, None)

    def quarantined_sessions(self) -> dict[int, Holder]:
        """Ended sessions with something in quarantine."""
        return {session: held.holder for session, held in self._quarantined.items()}

    def has_any(self) -> bool:
        """Whether a session is open or in quarantine."""
        return bool(self._sessions or self._quarantined)

    def check_invariants(self, state: bytearray) -> None:
        """Raise AssertionError when ids and sessions disagree, or a slot is held that is in no state to be."""
        everyone = list(self._sessions.values()) + list(self._quarantined.values())
        reserved = [number for held in everyone for number in held.reservations]
        leased = [number for held in everyone for number in held.leases]
        assert len(set(reserved)) == len(reserved)
        assert sorted(leased) == sorted(self.leases)
        writable = [slot for held in everyone for slot in (*held.reservations.values(), *held.slots)]
        assert len(set(writable)) == len(writable), "two reservations share a slot"
        states = (RESERVED, ORPHANED, EXPIRED, QUARANTINED)
        assert all(state[slot] in states for slot in writable)
        assert len(writable) == sum(state.count(each) for each in states), "a slot is held back for nobody"

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _num_reservations(self) -> int:
        return sum(len(held.reservations) for held in self._sessions.values())

    def _live(self, entry: ReservationDeadline) -> list[int]:
        """The slots that an open session may still write into of those that one message gave it."""
        held = self._sessions.get(entry.session)
        if held is None:
            return []
        return [held.reservations[n] for n in range(entry.first, entry.end) if n in held.reservations]

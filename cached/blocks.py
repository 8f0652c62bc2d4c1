"""What the tier knows of each slot and of the block in it: columns indexed by slot, the index by hash, the family tree.

Keeps facts that belong together together (state and its counts, child lists, owners' counts) and refuses moves between
states that are not in `MOVES`. Which block comes, goes or is served is the store's to decide.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from cached.keys import OWNER_BYTES
from cached.protocol import NEVER, NO_CEILING, OwnerShare

UNALLOCATED = 0
FREE = 1
RESERVED = 2
WAITING = 3
STORED = 4
UNVERIFIED = 5
ORPHANED = 6
EXPIRED = 7
QUARANTINED = 8

STATE_NAMES = (
    "unallocated",
    "free",
    "reserved",
    "waiting",
    "stored",
    "unverified",
    "orphaned",
    "expired",
    "quarantined",
)

MOVES: dict[int, frozenset[int]] = {
    # The arena's memory for the slot is there; after a restart it may hold a block or be in a stranger's hands.
    UNALLOCATED: frozenset({FREE, UNVERIFIED, QUARANTINED}),
    FREE: frozenset({RESERVED}),
    # A peer writes into the slot; the block is indexed, so that nobody else stores it.
    RESERVED: frozenset({STORED, WAITING, ORPHANED}),
    # Committed, but an ancestor is not yet; nobody writes into it any more.
    WAITING: frozenset({STORED, FREE}),
    # Reserved at once for the newcomer that it gives way to.
    STORED: frozenset({FREE, UNVERIFIED, RESERVED}),
    # Stored in a former life of the daemon, or under suspicion: evictable, not served.
    UNVERIFIED: frozenset({STORED, FREE, RESERVED}),
    # No longer indexed, but the peer that reserved it may still write: free when it says so.
    ORPHANED: frozenset({FREE, EXPIRED, QUARANTINED}),
    EXPIRED: frozenset({FREE, QUARANTINED}),
    # Its peer is gone without a word: free when its process is known to be gone.
    QUARANTINED: frozenset({FREE}),
}

_NUM_STATES = len(STATE_NAMES)
_IS_LEGAL = bytes([new in MOVES[old] for old in range(_NUM_STATES) for new in range(_NUM_STATES)])
"""`MOVES` as one column, since it is asked for every move."""

VISIBLE = frozenset({STORED, UNVERIFIED})
INDEXED = frozenset({RESERVED, WAITING, STORED, UNVERIFIED})
NO_SLOT = -1
_NO_SHARE = (0, NO_CEILING)


class Owners:
    """Small numbers for 16-byte owner ids, how many slots each holds or is getting, and what each may count on.

    `held`, `floors` and `ceilings` are columns by number, for reading only; they stay the same objects for good. An owner
    that holds nothing is forgotten, its share is not. `changed` has the owners for whom one of the three is another than
    when somebody last cleared it.
    """

    def __init__(self) -> None:
        self.changed: set[int] = set()
        self.held: list[int] = []
        self.floors: list[int] = []
        self.ceilings: list[int] = []
        self._number_of: dict[bytes, int] = {}
        self._ids: list[bytes] = []
        self._spare: list[int] = []
        self._shares: dict[bytes, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._number_of)

    def enter(self, owner: bytes) -> int:
        """Count one more slot for `owner` and say its number."""
        number = self._number_of.get(owner)
        if number is None:
            number = self._admit(owner)
        self.held[number] += 1
        self.changed.add(number)
        return number

    def leave(self, number: int) -> None:
        """Count one slot less; the number is used again once it holds none."""
        self.held[number] -= 1
        self.changed.add(number)
        if self.held[number] == 0:
            del self._number_of[self._ids[number]]
            self._spare.append(number)

    def set_shares(self, shares: Iterable[OwnerShare]) -> None:
        """From now on these floors and ceilings count, and no others."""
        self._shares = {
            share.owner: (share.floor, NO_CEILING if share.ceiling is None else share.ceiling) for share in shares
        }
        for owner, number in self._number_of.items():
            self.floors[number], self.ceilings[number] = self._shares.get(owner, _NO_SHARE)
            self.changed.add(number)

    def above_ceiling(self) -> list[int]:
        """The numbers of owners that hold more than they may."""
        return [number for number in self._number_of.values() if self.held[number] > self.ceilings[number]]

    def number_of(self, owner: bytes) -> int | None:
        """The number of an owner that holds something."""
        return self._number_of.get(owner)

    def id_of(self, number: int) -> bytes:
        """The 16 bytes behind a number."""
        return self._ids[number]

    def counts(self) -> dict[bytes, int]:
        """Slots by owner id."""
        return {owner: self.held[number] for owner, number in self._number_of.items()}

    def _admit(self, owner: bytes) -> int:
        assert len(owner) == OWNER_BYTES
        if self._spare:
            number = self._spare.pop()
            self._ids[number] = owner
        else:
            number = len(self._ids)
            self._ids.append(owner)
            for column in (self.held, self.floors, self.ceilings):
                column.append(0)
        self.floors[number], self.ceilings[number] = self._shares.get(owner, _NO_SHARE)
        self._number_of[owner] = number
        return number


class Blocks:
    """Columns by slot. `key`, `parent` and the child links mean something for indexed slots only.

    Children are a doubly linked list through the columns, newest first: `first_child` of the parent, `next_sibling`
    and `previous_sibling` of the children. A leaf is a slot whose `first_child` is NO_SLOT; there is no count.
    """

    def __init__(self, num_slots: int) -> None:
        none = [NO_SLOT]
        self.num_slots = num_slots
        self.index: dict[bytes, int] = {}
        self.key: list[bytes | None] = [None] * num_slots
        self.state = bytearray(num_slots)
        self.parent = array("i", none) * num_slots
        self.first_child = array("i", none) * num_slots
        self.next_sibling = array("i", none) * num_slots
        self.previous_sibling = array("i", none) * num_slots
        self.depth = array("I", [0]) * num_slots
        self.namespace = array("I", [0]) * num_slots
        self.priority = bytearray(num_slots)
        self.drops = bytearray(num_slots)
        self.reused = bytearray(num_slots)
        self.deadline = array("d", [NEVER]) * num_slots
        self.owner = array("i", none) * num_slots
        self.checksum = array("Q", [0]) * num_slots
        self.generation = array("Q", [0]) * num_slots
        self.tick = array("Q", [0]) * num_slots
        self.leases = array("I", [0]) * num_slots
        self.num_in_state = [num_slots] + [0] * (len(STATE_NAMES) - 1)

    def move(self, slot: int, state: int) -> None:
        """The one door: change a slot's state; a move that is not in `MOVES` is our bug."""
        old = self.state[slot]
        assert _IS_LEGAL[old * _NUM_STATES + state], (
            f"slot {slot} cannot go from {STATE_NAMES[old]} to {STATE_NAMES[state]}"
        )
        self.num_in_state[old] -= 1
        self.num_in_state[state] += 1
        self.state[slot] = state

    def enter(self, slot: int, key: bytes, parent: int) -> None:
        """Index the block of `slot` as a child of `parent` (NO_SLOT: a first block)."""
        self.index[key] = slot
        self.key[slot] = key
        self.parent[slot] = parent
        # Whatever was here before left as a leaf: `first_child` is NO_SLOT already.
        self.previous_sibling[slot] = NO_SLOT
        if parent == NO_SLOT:
            self.next_sibling[slot] = NO_SLOT
            self.depth[slot] = 0
            return
        self.depth[slot] = self.depth[parent] + 1
        next_elder = self.first_child[parent]
        self.next_sibling[slot] = next_elder
        if next_elder != NO_SLOT:
            self.previous_sibling[next_elder] = slot
        self.first_child[parent] = slot

    def leave(self, slot: int) -> int:
        """Take the block of `slot`, a leaf by now, out of index and family; says its parent."""
        assert self.first_child[slot] == NO_SLOT, f"slot {slot} leaves before its children"
        key = self.key[slot]
        assert key is not None
        del self.index[key]
        self.key[slot] = None
        parent, left, right = self.parent[slot], self.previous_sibling[slot], self.next_sibling[slot]
        if right != NO_SLOT:
            self.previous_sibling[right] = left
        if left != NO_SLOT:
            self.next_sibling[left] = right
        elif parent != NO_SLOT:
            self.first_child[parent] = right
        self.parent[slot] = NO_SLOT
        return parent

    def children(self, slot: int) -> list[int]:
        """The indexed children of a block."""
        found = []
        child = self.first_child[slot]
        while child != NO_SLOT:
            found.append(child)
            child = self.next_sibling[child]
        return found

    def subtree(self, slot: int) -> list[int]:
        """A block and all that descend from it, every block before its children."""
        found = [slot]
        for each in found:  # Grows while it is walked.
            child = self.first_child[each]
            while child != NO_SLOT:
                found.append(child)
                child = self.next_sibling[child]
        return found

    def check_invariants(self) -> None:
        """Raise AssertionError when index, links, depths and counts disagree; slow."""
        counts = [0] * len(STATE_NAMES)
        for slot in range(self.num_slots):
            counts[self.state[slot]] += 1
            key = self.key[slot]
            if self.state[slot] not in INDEXED:
                assert key is None, f"slot {slot} is {STATE_NAMES[self.state[slot]]} and has a key"
                assert self.leases[slot] == 0
                continue
            assert key is not None
            assert self.index[key] == slot
            parent = self.parent[slot]
            if parent == NO_SLOT:
                assert self.depth[slot] == 0
            else:
                assert self.state[parent] in INDEXED
                assert slot in self.children(parent)
                assert self.depth[slot] == self.depth[parent] + 1
            for child in self.children(slot):
                assert self.parent[child] == slot
        assert counts == self.num_in_state
        assert len(self.index) == sum(counts[state] for state in INDEXED)

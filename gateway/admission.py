"""Decides whether one tenant may take more of the places that all tenants share, so that none can take them all.

Dynamic thresholds (A. K. Choudhury and E. L. Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches",
IEEE/ACM Transactions on Networking 6(2), 1998): a tenant may take another place only while it holds fewer than `alpha`
times the places that are free. A tenant alone gets alpha ÷ (1 + alpha) of them (half, at 1), n greedy ones
alpha ÷ (1 + n·alpha) each, and what stays free lets the next one in at once, without anything being taken from anybody.
What the places are (requests, sequences of the engine) and when they are given back is `drain`'s business.
"""

from __future__ import annotations

from enum import Enum, auto


class Verdict(Enum):
    """What comes of asking for places; only `ADMITTED` changes anything."""

    ADMITTED = auto()
    OVER_SHARE = auto()
    """There is room, but not for who holds so much already: the asker's own doing."""
    FULL = auto()
    """There is no room for anybody who would ask for as many."""


def judge(held: int, free: int, wanted: int, alpha: float) -> Verdict:
    """Whether who holds `held` places may have `wanted` more of the `free` ones.

    Places are taken one after another and the last must pass too. Who holds nothing is only measured by what is free:
    otherwise a request for many places could never be served, not even on an idle server.
    """
    if wanted > free:
        return Verdict.FULL
    if held > 0 and held + wanted - 1 >= alpha * (free - wanted + 1):
        return Verdict.OVER_SHARE
    return Verdict.ADMITTED


class Places:
    """Who holds how many of one kind of places."""

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._held: dict[str, int] = {}
        self._num_taken = 0

    def __repr__(self) -> str:
        return f"Places({self._num_taken} taken by {len(self._held)})"

    @property
    def num_taken(self) -> int:
        return self._num_taken

    def held_by(self, tenant: str) -> int:
        return self._held.get(tenant, 0)

    def take(self, tenant: str, wanted: int, capacity: int) -> Verdict:
        """Take `wanted` places of `capacity`, or change nothing. The capacity may be another at every call."""
        held = self.held_by(tenant)
        verdict = judge(held, max(capacity - self._num_taken, 0), wanted, self._alpha)
        if verdict is Verdict.ADMITTED and wanted > 0:
            self._held[tenant] = held + wanted
            self._num_taken += wanted
        return verdict

    def give_back(self, tenant: str, count: int) -> None:
        """Places that were taken are free again."""
        left = self.held_by(tenant) - count
        assert left >= 0, "more places came back than were taken"
        self._num_taken -= count
        if left > 0:
            self._held[tenant] = left
        else:
            self._held.pop(tenant, None)

    def check_invariants(self) -> None:
        assert self._num_taken == sum(self._held.values())
        assert all(count > 0 for count in self._held.values())

"""Some descriptors kept for when there are no others: enough to take a peer in and tell it why it is not served."""

from __future__ import annotations

import os

NUM_SPARE = 4
FOR_A_PEER = 3
"""What a session takes beside its socket: its process's, its lock's while that is handed over, and one for what comes."""


class SpareDescriptors:
    """They lead to nothing; what counts is their numbers, of which a process has so many and no more."""

    def __init__(self) -> None:
        self._fds: list[int] = []
        self._refill(NUM_SPARE)

    def are_not_needed(self) -> bool:
        """Whether a session more would leave all of them untouched."""
        enough = self._refill(NUM_SPARE + FOR_A_PEER)
        while len(self._fds) > NUM_SPARE:
            os.close(self._fds.pop())
        return enough

    def give_one(self) -> bool:
        """Make room for one descriptor; False when all have been given and none has come back."""
        self._refill(NUM_SPARE)
        if self._fds:
            os.close(self._fds.pop())
            return True
        return False

    def close(self) -> None:
        """Give all of them back for good."""
        while self._fds:
            os.close(self._fds.pop())

    def _refill(self, count: int) -> bool:
        try:
            while len(self._fds) < count:
                self._fds.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return False
        return True

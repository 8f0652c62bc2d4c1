"""A peer's end of the locks by which the daemon knows that it lives, where it cannot see its process (`peer_locks`).

They came locked, and are held by being kept open; the kernel drops them when the process dies.
"""

from __future__ import annotations

import os

PAYLOAD_AND_LOCK = 2


class HeldLocks:
    """One descriptor for each file the daemon gave: as a rule one file, another one when the daemon's arena is new."""

    def __init__(self) -> None:
        self._fds: dict[tuple[int, int], int] = {}

    def keep_last_of(self, fds: list[int]) -> None:
        """Keep the lock that came with a welcome behind the payload; of a file that is kept already the first one stays,
        since copies may have begun under it."""
        if len(fds) != PAYLOAD_AND_LOCK:
            return
        fd = fds.pop()
        found = os.fstat(fd)
        file = found.st_dev, found.st_ino
        former = self._fds.pop(file, None)
        if former is not None:
            os.close(fd)
        self._fds[file] = fd if former is None else former

    def let_go(self, but_last: int = 0) -> None:
        """No copy is under way any more, or this process has none of its parent's."""
        for file in list(self._fds)[: len(self._fds) - but_last]:
            os.close(self._fds.pop(file))

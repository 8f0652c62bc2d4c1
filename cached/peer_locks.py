"""Locks that tell when a peer is gone whose process cannot be seen: the kernel drops them when it dies (decision 6).

A client gets, with its welcome, a descriptor of a file of its own that is locked already (flock, shared); it does nothing
with it but keep it open until none of its copies is under way. The lock belongs to the open file, so it lasts exactly as
long as somebody, in whatever namespace of processes, has that file open: the client, or a child it forked, which has its
mapping of the payload as well. The daemon keeps none of them open and asks by trying for the lock alone.

The files bear the clients' ids, so that a daemon started anew finds them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Container
from pathlib import Path

from cached.errors import ArenaError


class PeerLocks:
    """The locks in one directory, which the arena makes; for one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def give(self, client_id: bytes) -> int:
        """A locked descriptor to pass to this client; whoever passed it closes it. Raises ArenaError when it cannot be made,
        or when the client itself has locked others out."""
        path = self._path(client_id)
        try:
            # Whoever cleans up directories may have removed this one, whose arena lives on in what is open of it.
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Opened anew for every session: the lock of a former one stays with the client until it lets go of that.
            fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ArenaError(f"cannot make a peer's lock {path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise ArenaError(f"cannot lock {path} for a peer: {error.strerror}") from error
        return fd

    def is_released(self, client_id: bytes) -> bool:
        """Whether nobody holds this client's lock any more. False where there is none: that says nothing of its process."""
        try:
            fd = os.open(self._path(client_id), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def keep_only(self, client_ids: Container[bytes]) -> None:
        """Remove the locks of clients that hold nothing here."""
        names: list[str] = []
        with contextlib.suppress(OSError):  # It was removed, or there is no descriptor left to read it with.
            names = os.listdir(self._directory)
        for name in names:
            with contextlib.suppress(ValueError, OSError):
                if bytes.fromhex(name) not in client_ids:
                    os.unlink(self._directory / name)

    def unlink(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(FileNotFoundError):
            self.keep_only(())
            with contextlib.suppress(OSError):
                self._directory.rmdir()

    def _path(self, client_id: bytes) -> Path:
        return self._directory / client_id.hex()

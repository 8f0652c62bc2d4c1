"""Creates the directories of an installation, with modes that keep other users out, and locks them.

Says no to a directory that somebody else owns or may write to: in a shared place such as /tmp it could be a trap.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from command.errors import CommandError, Exit
from command.paths import Paths


def prepare_directories(paths: Paths) -> None:
    """State, log and socket directories, 0700 where they are new."""
    for directory in (paths.state, paths.logs, paths.run):
        make_private(directory)


def prepare_sockets(paths: Paths, sockets: Iterable[Path]) -> None:
    """The directory of our own naming, when one of `sockets` is to lie in it; others are their owner's business."""
    if any(socket.parent == paths.run for socket in sockets):
        make_private(paths.state)
        make_private(paths.run)


def make_private(directory: Path) -> None:
    """Creates `directory` 0700, or checks that an existing one is ours and not writable by others."""
    try:
        directory.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
        return
    except FileExistsError:
        pass
    except OSError as error:
        raise CommandError(f"cannot create {directory}: {error.strerror}", Exit.PERMISSION) from None
    problem = directory_problem(directory)
    if problem:
        raise CommandError(problem, Exit.PERMISSION)


def directory_problem(directory: Path) -> str | None:
    """What is wrong with an existing directory of ours, or None."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        # A state directory may be reached by a link of its owner's; one in /tmp may not.
        if not (stat.S_ISLNK(found.st_mode) and directory.is_dir() and found.st_uid in (0, os.getuid())):
            return f"{directory} is not a directory: remove it, or name another with --state-dir"
        found = directory.stat()
    if found.st_uid != os.getuid():
        return f"{directory} belongs to user {found.st_uid}, not to you ({os.getuid()}): name another with --state-dir"
    if found.st_mode & 0o022:
        return f"others may write to {directory} (mode {stat.S_IMODE(found.st_mode):04o}): chmod go-w {directory}"
    return None


class Lock:
    """An exclusive lock on a file, held while this object lives and dropped by the kernel when the process dies."""

    def __init__(self, file: Path) -> None:
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def try_acquire(self) -> bool:
        """Whether the lock is ours now; the file then holds our process id, for the message of whoever comes second."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._write_holder()
        return True

    def acquire(self) -> None:
        """Waits for the lock."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self._write_holder()

    def holder(self) -> str:
        """The process id that the holder wrote."""
        return os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"

    def release(self) -> None:
        os.close(self._fd)

    def _write_holder(self) -> None:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

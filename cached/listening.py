"""The daemon's listening socket: born whole at its path, and recognised there later."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from cached.errors import CachedError


def listen_at(path: Path) -> socket.socket:
    """Listen at `path`, whose socket appears with its mode set and its queue open, replacing a dead one's. Raises
    CachedError when somebody answers there, or when it cannot be made."""
    if _is_answered(path):
        raise CachedError(f"another process answers at {path}; stop it, or give another socket")
    newborn = path.with_name(f".{os.getpid()}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            newborn.unlink()
        listener.bind(str(newborn))
        newborn.chmod(0o660)
        listener.listen(128)
        newborn.rename(path)
    except OSError as error:
        listener.close()
        raise CachedError(f"cannot listen at {path}: {error.strerror or error}") from error
    return listener


def file_at(path: Path) -> tuple[int, int] | None:
    """What a path leads to; None where it leads to nothing that can be seen."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except BlockingIOError:  # Its queue is full: somebody lives there.
            return True
        except OSError:
            return False
    return True

"""The arena: a directory on tmpfs that outlives the daemon, the lock that says whose it is, and its parts (decision 5).

Each part holds the blocks of one layout in two files of its own (`arena_part`), so that an engine is given the payload of
its layout and of no other. What a dead owner left is taken over where it fits the configuration and reclaimed where not;
what a live one holds is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from cached import machine
from cached.arena_part import FILE_KINDS, ArenaPart, Life, free_bytes, open_private, shortfall
from cached.errors import ArenaError
from cached.parts import PartPlan
from cached.peer_locks import PeerLocks

DEFAULT_REGISTRATION_BYTES = 64 * 2**30
"""Beyond this, drivers have been seen to refuse one registration."""
_OURS = re.compile(rf"({'|'.join(map(re.escape, FILE_KINDS))})(\.\d+|\.[0-9a-f]{{16}})?")


class Arena:
    """An arena this process owns. Made by `Arena.open`; everything but `allocate_next` is for one thread."""

    def __init__(self, directory: Path, parts: tuple[ArenaPart, ...], peer_locks: PeerLocks, lock_fd: int) -> None:
        self.directory = directory
        self.parts = parts
        self.peer_locks = peer_locks
        self._lock_fd = lock_fd
        self._next_part = 0

    @classmethod
    def open(
        cls,
        directory: Path,
        payload_bytes: int,
        mlock: bool = False,
        plans: Sequence[PartPlan] = (),
        registration_bytes: int = DEFAULT_REGISTRATION_BYTES,
    ) -> Arena:
        """Take the arena in `directory`, which is made if need be: what a dead owner left is reused where it fits and
        reclaimed where not. Without `plans` it is one common part. Raises ArenaError when a live one holds it, or when there
        is no room for it."""
        make_private_directory(directory)
        lock_fd = _take_lock(directory)
        arena = cls(directory, (), PeerLocks(directory / "peers"), lock_fd)
        try:
            make_private_directory(directory / "peers")
            arena._open_parts(plans or (PartPlan("", payload_bytes),), registration_bytes)
            arena._reclaim()
            for part in arena.parts:
                part.adopt()
            arena._check_room()
            if mlock:
                arena._lock_in_memory()
            else:
                for part in arena.parts:
                    part.count_what_is_there()
            for part in arena.parts:
                part.allocate_next()
        except BaseException:
            arena.close(keep=True)
            raise
        return arena

    @property
    def payload_bytes(self) -> int:
        """Bytes of all payloads."""
        return sum(part.payload_bytes for part in self.parts)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all payloads whose memory is there."""
        return sum(part.allocated_bytes for part in self.parts)

    def allocate_next(self) -> bool:
        """Allocate the next piece of one part, in turn, so that each can begin to serve; False when all is there. May run in
        a thread of its own."""
        for _ in self.parts:
            part = self.parts[self._next_part]
            self._next_part = (self._next_part + 1) % len(self.parts)
            if part.allocate_next():
                return True
        return False

    def close(self, keep: bool) -> None:
        """Let go of the arena; with `keep` false nothing of it is left."""
        if not keep:
            for part in self.parts:
                part.unlink()
            self.peer_locks.unlink()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.directory / "lock")
            with contextlib.suppress(OSError):
                self.directory.rmdir()
        for part in self.parts:
            part.close()
        with contextlib.suppress(OSError):
            os.close(self._lock_fd)

    def _open_parts(self, plans: Sequence[PartPlan], registration_bytes: int) -> None:
        life = Life(_boot_id(), machine.process_space())
        suffixes: list[str] = []
        for plan in plans:
            if plan.name:
                suffixes.append("." + hashlib.sha256(plan.name.encode()).hexdigest()[:16])
            else:
                number = sum(not other.name for other in plans[: len(suffixes)]) + 1
                suffixes.append("" if number == 1 else f".{number}")
            part = ArenaPart(self.directory, suffixes[-1], plan.name, plan.num_bytes, registration_bytes, life)
            self.parts = (*self.parts, part)
        self._kept = {f"{kind}{suffix}" for suffix in suffixes for kind in FILE_KINDS}

    def _reclaim(self) -> None:
        """Give back the memory of parts that a former configuration had and this one has not."""
        for path in self.directory.iterdir():
            if path.name not in self._kept and _OURS.fullmatch(path.name) and path.is_file():
                path.unlink()

    def _check_room(self) -> None:
        wanted, free = sum(part.missing_bytes for part in self.parts), free_bytes(self.directory)
        if wanted > free:
            raise shortfall(self.directory, self.payload_bytes, wanted, free)

    def _lock_in_memory(self) -> None:
        limit = machine.lock_limit()
        if limit is not None and limit < self.payload_bytes:
            raise ArenaError(
                f"cannot lock the arena in memory: it needs {self.payload_bytes} bytes and RLIMIT_MEMLOCK is {limit} bytes; "
                "raise it (LimitMEMLOCK=infinity, ulimit -l) or set mlock = false"
            )
        for part in self.parts:
            part.lock_in_memory()


def make_private_directory(directory: Path) -> None:
    """A directory of ours alone; one that is somebody else's, or a link, is refused."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise ArenaError(f"cannot make the arena's directory {directory}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ArenaError(f"{directory} is not a directory (a link is not followed); give another arena_dir")
    if found.st_uid != os.geteuid():
        denied = PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        message = f"{directory} belongs to user {found.st_uid}, not to {os.geteuid()}; give another arena_dir"
        raise ArenaError(message) from denied
    if stat.S_IMODE(found.st_mode) != 0o700:
        directory.chmod(0o700)


def _take_lock(directory: Path) -> int:
    path = directory / "lock"
    while True:
        fd = open_private(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise ArenaError(
                f"the arena in {directory} is held by a running cache daemon (process {owner}); "
                "stop it, or give this one another arena_dir"
            ) from None
        # A daemon that leaves without keeping its arena unlinks the lock it holds: locked, but not there any more.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
        os.close(fd)


def _boot_id() -> bytes:
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))

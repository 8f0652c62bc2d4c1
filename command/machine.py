"""What this machine offers: memory, tmpfs, who we are. Reads it once and hands out a value; decides nothing."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """Sizes in bytes. `memory` is the smaller of what is installed and what the control group allows."""

    memory: int
    shared_memory: int
    shared_memory_free: int
    open_files: int
    uid: int


def probe_machine() -> Machine:
    """The machine as this process sees it; a figure that cannot be read is 0."""
    total, free = _filesystem(Path("/dev/shm"))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Machine(
        memory=_memory(),
        shared_memory=total if filesystem_type(Path("/dev/shm")) == "tmpfs" else 0,
        shared_memory_free=free,
        open_files=soft,
        uid=os.getuid(),
    )


def filesystem_type(path: Path) -> str:
    """The type of the file system that holds `path` or would hold it (`tmpfs`, `ext4`); empty when unknown."""
    wanted = os.path.realpath(path)
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        _, mount, found, *_ = line.split(" ")
        mount = mount.encode().decode("unicode_escape")
        inside = wanted == mount or wanted.startswith(mount.rstrip("/") + "/")
        # A later line covers an earlier one at the same place.
        if inside and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def free_bytes(path: Path) -> int:
    """Bytes free for us where `path` lies or would lie."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return _filesystem(path)[1]


def _filesystem(path: Path) -> tuple[int, int]:
    try:
        told = os.statvfs(path)
    except OSError:
        return 0, 0
    return told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize


def _memory() -> int:
    try:
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return 0
    try:
        allowed = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        return installed
    return min(installed, allowed)

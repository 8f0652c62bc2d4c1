"""What the machine allows and is: limits of memory, the kind of a file system, the namespace of processes. Reads only."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_CAP_IPC_LOCK = 14

UNLIMITED = 2**60
"""Control groups of version 1 say "no limit" with a number beyond any memory."""


def memory_limit(proc: Path = Path("/proc/self"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The least memory limit, in bytes, of this process's control group and those above it; None without one."""
    limits = []
    for line in _lines(proc / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        place = root / path.lstrip("/")
        for folder in (place, *place.parents):
            limits += [int(text) for text in _lines(folder / name) if text.isdigit() and int(text) < UNLIMITED]
            if folder == root:
                break
    return min(limits, default=None)


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The kind of file system that `path`, or what of it exists, lies on: `tmpfs`, `ext4`, …; None when unknown."""
    place = path.resolve()
    best: tuple[int, str] | None = None
    for line in _lines(mounts):
        before, _, after = line.partition(" - ")
        point = Path(before.split()[4].replace("\\040", " "))
        if place.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            best = len(point.parts), after.split()[0]
    return best[1] if best is not None else None


def lock_limit(proc: Path = Path("/proc/self")) -> int | None:
    """How many bytes this process may lock in memory; None: as many as it likes."""
    for line in _lines(proc / "status"):
        name, _, value = line.partition(":")
        if name == "CapEff" and int(value, 16) >> _CAP_IPC_LOCK & 1:
            return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def process_space(proc: Path = Path("/proc/self")) -> int:
    """What names the namespace of processes in which pids mean something here; 0 when it cannot be told."""
    try:
        return os.stat(proc / "ns" / "pid").st_ino
    except OSError:
        return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []

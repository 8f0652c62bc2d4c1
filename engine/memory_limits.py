"""Reads how much memory this process may still take: the machine's, or less where a control group says so.

It decides nothing; `engine/runner.py` refuses a pool that does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Bytes that can still be had, and which limit says so."""

    available_bytes: int
    source: str


def available_memory(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> MemoryLimit | None:
    """The tightest limit there is; None where the system does not say."""
    limits = [limit for limit in (_machine(proc), *_control_groups(proc, cgroup_root)) if limit is not None]
    return min(limits, key=lambda limit: limit.available_bytes, default=None)


def _machine(proc: Path) -> MemoryLimit | None:
    for line in _read(proc / "meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return MemoryLimit(int(value.split()[0]) * 1024, "memory available on this machine")
    return None


def _control_groups(proc: Path, root: Path) -> list[MemoryLimit]:
    """The limit of this process's control group and of each above it; a child may have more than its parent."""
    limits: list[MemoryLimit] = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _walk_up(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            limits += _walk_up(root / "memory", path, *v1)
    return limits


def _walk_up(root: Path, path: str, limit_file: str, usage_file: str, reclaimable: str) -> list[MemoryLimit]:
    limits: list[MemoryLimit] = []
    directory = root / path.lstrip("/")
    while True:
        limit, usage = _number(directory / limit_file), _number(directory / usage_file)
        if limit is not None and usage is not None:
            free = limit - usage + _statistic(directory / "memory.stat", reclaimable)
            limits.append(MemoryLimit(max(0, free), f"limit of {limit} bytes in {directory / limit_file}"))
        if directory == root or root not in directory.parents:
            return limits
        directory = directory.parent


def _statistic(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

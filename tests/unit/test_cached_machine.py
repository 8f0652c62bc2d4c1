"""What the daemon finds out of the machine before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from cached import machine, main
from cached.config import CachedConfig
from cached.errors import ArenaError


def make_machine(folder: Path, cgroup: str, limits: dict[str, str]) -> tuple[Path, Path]:
    proc, cgroups = folder / "proc", folder / "cgroups"
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    for name, text in limits.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    return proc, cgroups


def test_the_least_limit_of_all_groups_above_counts(tmp_path: Path) -> None:
    places = make_machine(
        tmp_path, "0::/a/b\n", {"memory.max": "max\n", "a/memory.max": "1000\n", "a/b/memory.max": "5000\n"}
    )

    assert machine.memory_limit(*places) == 1000


def test_groups_of_the_first_version_are_read_and_no_limit_is_none(tmp_path: Path) -> None:
    text = "3:cpu:/x\n2:memory:/x\n"
    places = make_machine(
        tmp_path, text, {"memory/x/memory.limit_in_bytes": "777\n", "memory/memory.limit_in_bytes": f"{2**63}\n"}
    )

    assert machine.memory_limit(*places) == 777
    assert machine.memory_limit(tmp_path / "none", tmp_path) is None


def test_the_innermost_mount_says_which_file_system_it_is(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text("1 0 0:1 / / rw - ext4 /dev/x rw\n2 1 0:2 / /dev/shm rw shared:1 - tmpfs tmpfs rw\n")

    assert machine.file_system_of(Path("/dev/shm/a/b"), mounts) == "tmpfs"
    assert machine.file_system_of(Path("/var"), mounts) == "ext4"


def test_an_arena_beyond_the_limit_is_refused_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "memory_limit", lambda: 2**30)
    config = CachedConfig(socket=tmp_path / "s", arena_dir=tmp_path, host_cache_size=2**31)

    with pytest.raises(ArenaError, match=r"2147483648 bytes .* 1073741824"):
        main.check_machine(config)

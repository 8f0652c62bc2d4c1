"""A whole stack whose engine and whose cache daemon are killed again and again: hits resume by themselves, and nobody who
survives keeps anything of those who died.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.stack import Stack
from tests.support.tier_hits import NUM_PROMPTS, SMALL_POOL, OffloadedPrompts

NUM_KILLS = 30
NUM_WARM_UP = 4
TOLERANCE = 0.01
SETTLED_S = 3.0


def resident(pid: int) -> int:
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(row.split()[1]) for row in rows if row.startswith("VmRSS"))


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def shared_bytes(stack: Stack) -> int:
    """What the arena takes of the tmpfs, wherever it lies: the daemon has its payload open."""
    links = [os.readlink(link) for link in Path(f"/proc/{stack.pid_of('cached')}/fd").iterdir()]
    directory = next(Path(link).parent for link in links if Path(link).name == "payload")
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


class Survivors:
    """What each of some processes holds, now and later."""

    def __init__(self, stack: Stack, names: tuple[str, ...]) -> None:
        self._stack = stack
        self._pids = {name: stack.pid if name == "up" else stack.pid_of(name) for name in names}
        self._before = self._wait_settled()
        self._shared = shared_bytes(stack)

    def _wait_settled(self) -> dict[str, tuple[int, int]]:
        """Everybody is connected to everybody again: nothing has been opened or closed for a while."""
        found = self._look()
        while True:
            time.sleep(SETTLED_S)
            last, found = found, self._look()
            if all(found[name][1] == last[name][1] for name in found):
                return found

    def _look(self) -> dict[str, tuple[int, int]]:
        return {name: (resident(pid), open_files(pid)) for name, pid in self._pids.items()}

    def check(self) -> None:
        after, shared = self._wait_settled(), shared_bytes(self._stack)
        for name, (size, files) in after.items():
            was = self._before[name]
            print(f"{name}: {was[0] / 2**20:.1f} MiB, {was[1]} files before; {size / 2**20:.1f} MiB, {files} after")
        print(f"arena: {self._shared} bytes before, {shared} after")
        assert shared <= self._shared * (1 + TOLERANCE)
        for name, (size, files) in after.items():
            assert files == self._before[name][1], f"{name} has other files open"
            assert size <= self._before[name][0] * (1 + TOLERANCE), f"{name} has grown"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thirty_kills_of_an_engine_and_thirty_of_the_daemon_leave_the_survivors_as_they_were(
    demo_model_dir: Path,
) -> None:
    with Stack.start(demo_model_dir, **SMALL_POOL) as stack:
        stack.wait_ready(tier="ready")
        prompts = OffloadedPrompts(stack)

        def kill_daemon() -> float:
            return prompts.seconds_to_hits(lambda: stack.kill("cached"))

        def kill_engine() -> None:
            old = stack.kill("engine")
            stack.wait_replaced("engine", old)
            stack.wait_ready(tier="ready")
            stack.wait_for(lambda: prompts.host_tokens() > 0)

        for _ in range(2):
            kill_engine()
        for _ in range(2 * NUM_PROMPTS):  # All of the device's pool has been touched then.
            prompts.host_tokens()
        for _ in range(2 * NUM_WARM_UP):  # What is allocated once for good.
            kill_daemon()
        survivors = Survivors(stack, ("engine", "gateway", "up"))
        seconds = sorted(kill_daemon() for _ in range(NUM_KILLS))
        print(
            f"hits resumed after {seconds[0]:.2f}, {seconds[NUM_KILLS // 2]:.2f}, {seconds[-1]:.2f} s (min, median, max)"
        )
        survivors.check()

        survivors = Survivors(stack, ("cached", "gateway", "up"))
        for _ in range(NUM_KILLS):
            kill_engine()
        survivors.check()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_hits_resume_by_themselves_after_the_daemon_was_killed(demo_model_dir: Path) -> None:
    """How soon is a figure of `bench/restart.py`."""
    with Stack.start(demo_model_dir, **SMALL_POOL) as stack:
        stack.wait_ready(tier="ready")

        assert OffloadedPrompts(stack).seconds_to_hits(lambda: stack.kill("cached")) > 0

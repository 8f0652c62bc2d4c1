"""When hits from the host tier resume: prompts that only the host still has, asked one after the other through a whole stack."""

from __future__ import annotations

import time
from collections.abc import Callable

from cached.client import TierClient
from tests.support.stack import Stack

SMALL_POOL = {"engine_device_cache_size": "64MiB", "cached_host_cache_size": "256MiB"}
"""Some ninety blocks of the demo model on the device, so that prompts are soon left to the host."""
NUM_PROMPTS = 24
DEADLINE_S = 110.0


class OffloadedPrompts:
    """More prompts than the device holds at once, all of them in the host tier; asked in a circle, so that each has left
    the device when its turn comes again."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._next = 0
        for number in range(NUM_PROMPTS):
            stack.chat(_prompt(number), max_tokens=1)
        stack.wait_for(lambda: stack.host_blocks() >= 4 * NUM_PROMPTS)

    def host_tokens(self) -> int:
        """Ask the next prompt: how many of its tokens came from the host tier."""
        answer = self._stack.chat(_prompt(self._next % NUM_PROMPTS), max_tokens=1)
        self._next += 1
        return int(answer["usage"]["halocline"]["host_tokens"])

    def seconds_to_hits(self, kill: Callable[[], object]) -> float:
        """From the first answer of the daemon that replaces a killed one to the end of the first request that the host
        served; raises RuntimeError when none does."""
        socket = self._stack.state_dir / "run" / "cached.sock"
        kill()
        while not _answers(str(socket)):
            time.sleep(0.005)
        began = time.monotonic()
        while time.monotonic() < began + DEADLINE_S:
            if self.host_tokens():
                return time.monotonic() - began
        raise RuntimeError(f"no hits from the host for {DEADLINE_S} s:\n{self._stack.said()}")


def _prompt(number: int) -> str:
    return f"Case {number}. " + " ".join(f"Item {number * 100 + item} is in drawer {item}." for item in range(8))


def _answers(socket: str) -> bool:
    probe = TierClient(socket, None, 1.0)
    try:
        return probe.stats() is not None
    finally:
        probe.close()

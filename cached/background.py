"""What the daemon does beside its loop, in two threads: allocating the arena, and verifying blocks that a restart found.

The threads read files and hand in results; what a result means for the tier happens in the loop's thread, when it calls
`take_in`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import structlog

from cached.arena import Arena
from cached.errors import ArenaError
from cached.offers import Unverified
from cached.part import Part
from cached.store import BlockStore
from cached.tier import Tier

VERIFY_BATCH = 8

_Job = tuple[Part, BlockStore, list[Unverified]]
_Verdict = tuple[Part, BlockStore, Unverified, bool]

log = structlog.get_logger("cached")


class Background:
    """The threads of one arena. `wake` is called in them when there is something to take in."""

    def __init__(self, arena: Arena, tier: Tier, wake: Callable[[], None]) -> None:
        self._arena = arena
        self._tier = tier
        self._wake = wake
        self._stopping = False
        self._to_verify: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._verdicts: queue.SimpleQueue[_Verdict] = queue.SimpleQueue()
        self._num_verifying = 0
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to allocate and to verify."""
        for target in (self._allocate, self._verify):
            thread = threading.Thread(target=target, name=f"cached{target.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def hand_over(self) -> None:
        """Give out the next blocks to verify, unless some are under way."""
        if self._num_verifying:
            return
        found = self._tier.next_unverified(VERIFY_BATCH)
        if found is not None:
            part, batch = found
            self._num_verifying = len(batch)
            self._to_verify.put((part, part.require_store(), batch))

    def take_in(self) -> None:
        """Act on what the threads have done since."""
        self._tier.allocated()
        while True:
            try:
                part, store, item, is_sound = self._verdicts.get_nowait()
            except queue.Empty:
                return
            self._num_verifying -= 1
            if store is part.store and store.verified(item, is_sound):
                log.warning("block failed verification and is dropped", slot=item.slot)

    def stop(self) -> None:
        """Returns when both threads have ended."""
        self._stopping = True
        self._to_verify.put(None)
        for thread in self._threads:
            thread.join()

    def _allocate(self) -> None:
        began, told = time.monotonic(), 0
        try:
            while not self._stopping and self._arena.allocate_next():
                self._wake()
                quarters = 4 * self._arena.allocated_bytes // self._arena.payload_bytes
                if quarters > told:
                    told = quarters
                    seconds, done = round(time.monotonic() - began, 2), self._arena.allocated_bytes
                    log.info("arena is being allocated", percent=25 * told, bytes=done, seconds=seconds)
        except ArenaError as error:
            log.error("the arena stays smaller than asked", reason=str(error), bytes=self._arena.allocated_bytes)

    def _verify(self) -> None:
        buffer = bytearray()
        while (job := self._to_verify.get()) is not None:
            part, store, batch = job
            for item in batch:
                self._verdicts.put((part, store, item, part.files.is_sound(item.slot, item.checksum, buffer)))
            self._wake()

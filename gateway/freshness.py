"""Lets a key be used the moment it was made: has the tenant store looked at before a key is denied.

A snapshot is up to a quarter of a second old. Whoever is denied by it waits for a look at the store that begins after their
request arrived, and is judged again. All who wait share one look, the watcher begins at most 20 a second, and nobody waits
for longer than `WAIT_S`: guesses at keys cost the store no more than that, however many there are. Which denied keys get
to wait is the middleware's decision, and must not depend on what the store knows of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final, Protocol

WAIT_S: Final = 0.25


class Watcher(Protocol):
    """What is needed of `tenants.watch.SnapshotWatcher`."""

    @property
    def looks_begun(self) -> int: ...
    def look_soon(self, then: Callable[[], None]) -> int: ...


class Freshness:
    """Owned by the event loop."""

    def __init__(self, watcher: Watcher, wait_s: float = WAIT_S) -> None:
        self._watcher = watcher
        self._wait_s = wait_s
        self._look: asyncio.Future[None] | None = None
        self._asked_at = -1

    async def wait(self) -> None:
        """Return when the store was looked at since now, or could not be in time."""
        if self._look is None or self._asked_at != self._watcher.looks_begun:
            self._look = self._ask()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._look), self._wait_s)

    def _ask(self) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        look: asyncio.Future[None] = loop.create_future()

        def then() -> None:
            # At a stop the loop may be closed before the watcher's thread has ended.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(look.set_result, None)

        self._asked_at = self._watcher.look_soon(then)
        return look

"""Which generations are running, and how the last of them are ended when the process has to go.

Counts what `max_inflight` limits. A generation is entered with `async with`, so that it is counted out however it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from gateway.errors import draining, overloaded


class InFlight:
    """Owned by the event loop."""

    def __init__(self, max_inflight: int) -> None:
        self.is_draining = False
        self.has_expired = False
        self._max = max_inflight
        self._tasks: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._tasks)

    def enter(self) -> Slot:
        """A place for the current task; raises ApiError (503) when there is none."""
        if self.is_draining:
            raise draining()
        if len(self._tasks) >= self._max:
            raise overloaded(f"The server is at its limit of {self._max} requests. The request may be retried.")
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        return Slot(self, task)

    @contextmanager
    def interruption(self) -> Iterator[None]:
        """Turns our own interruption of the current task into an ApiError; a client that left stays a cancellation."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self.has_expired or task is None:
                raise
            task.uncancel()
            raise draining() from None

    def begin_drain(self) -> None:
        """Let nobody in any more."""
        self.is_draining = True

    async def finish(self, timeout_s: float) -> int:
        """Wait for the running ones, then interrupt the rest; how many that were."""
        if await self._wait_idle(timeout_s):
            return 0
        self.has_expired = True
        rest = list(self._tasks)
        for task in rest:
            task.cancel("drained")
        await self._wait_idle(1.0)
        return len(rest)

    async def _wait_idle(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _add(self, task: asyncio.Task[object]) -> None:
        self._tasks.add(task)
        self._idle.clear()

    def _remove(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._idle.set()


class Slot:
    """One running generation."""

    def __init__(self, inflight: InFlight, task: asyncio.Task[object]) -> None:
        self._inflight = inflight
        self._task = task

    async def __aenter__(self) -> None:
        self._inflight._add(self._task)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inflight._remove(self._task)
        if isinstance(error, asyncio.CancelledError):
            with self._inflight.interruption():
                raise error

"""Which generations are running, and how the last of them are ended when the process has to go.

Holds the places of requests (`max_inflight`) and of sequences (the engine's credits), which `admission` shares out among
tenants. A generation is entered with `async with`, so that its places come back however it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from gateway.admission import Places, Verdict
from gateway.errors import draining, over_share, overloaded


class InFlight:
    """Owned by the event loop."""

    def __init__(self, max_inflight: int, alpha: float = 1.0) -> None:
        self.is_draining = False
        self.has_expired = False
        self._max = max_inflight
        self._tasks: set[asyncio.Task[object]] = set()
        self._requests = Places(alpha)
        self._sequences = Places(alpha)
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._tasks)

    def enter(self, tenant: str) -> Slot:
        """A place for the current task; on entering raises ApiError: 503 when there is none, 429 when not for `tenant`."""
        if self.is_draining:
            raise draining()
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        return Slot(self, task, tenant)

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

    def _add(self, task: asyncio.Task[object], tenant: str) -> None:
        verdict = self._requests.take(tenant, 1, self._max)
        _check(verdict, "requests", f"The server is at its limit of {self._max} requests. The request may be retried.")
        self._tasks.add(task)
        self._idle.clear()

    def _add_sequences(self, tenant: str, count: int, max_sequences: int) -> None:
        verdict = self._sequences.take(tenant, count, max_sequences)
        _check(verdict, "sequences", "The engine has no room for as many sequences now. The request may be retried.")

    def _remove(self, task: asyncio.Task[object], tenant: str, num_sequences: int) -> None:
        self._requests.give_back(tenant, 1)
        self._sequences.give_back(tenant, num_sequences)
        self._tasks.discard(task)
        if not self._tasks:
            self._idle.set()


class Slot:
    """One running generation."""

    def __init__(self, inflight: InFlight, task: asyncio.Task[object], tenant: str) -> None:
        self._inflight = inflight
        self._task = task
        self._tenant = tenant
        self._num_sequences = 0

    def take_sequences(self, count: int, max_sequences: int) -> None:
        """Places for the request's sequences too, until the slot is left; raises ApiError (429 or 503)."""
        self._inflight._add_sequences(self._tenant, count, max_sequences)
        self._num_sequences += count

    async def __aenter__(self) -> Slot:
        self._inflight._add(self._task, self._tenant)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inflight._remove(self._task, self._tenant, self._num_sequences)
        if isinstance(error, asyncio.CancelledError):
            with self._inflight.interruption():
                raise error


def _check(verdict: Verdict, what: str, full: str) -> None:
    if verdict is Verdict.OVER_SHARE:
        raise over_share(what)
    if verdict is Verdict.FULL:
        raise overloaded(full)

"""Runs one request's sequences on the engine: submits all, merges what comes back, and cancels whatever is left.

`async with` is the whole safety: however the block is left (finished, refused, client gone, engine gone), every sequence
that has not ended is cancelled before the block is over.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final

from cached.keys import OwnerId
from cached.retention import RetentionConfig
from engine.client import EngineStream
from engine.errors import EngineUnavailable, RequestRejected
from engine.protocol import TokenEvent
from gateway.engines import ReadyEngine
from gateway.errors import (
    ApiError,
    bad_request,
    engine_failed,
    engine_timeout,
    engine_unavailable,
    overloaded,
)
from gateway.sequence import Progress, SequenceText
from gateway.usage import SequenceUsage, total
from gateway.values import Choice, Delta, ScoredToken, SequencePlan, Usage

MAX_UNREAD_EVENTS: Final = 1024

_Numbered = tuple[int, TokenEvent | Exception]


@dataclass(frozen=True, slots=True)
class Work:
    """Everything the engine is to be given for one request; the salt is the tenant's derived one."""

    plans: tuple[SequencePlan, ...]
    stops: tuple[str, ...]
    retention: RetentionConfig
    owner: OwnerId
    cache_salt: str = field(repr=False)


class Generation:
    """One request in the engine: within `async with`, iterate over its deltas once."""

    def __init__(self, engine: ReadyEngine, work: Work, silence_timeout_s: float) -> None:
        self._engine = engine
        self._work = work
        self._silence_timeout_s = silence_timeout_s
        self.first_token_s: float | None = None
        """When the first token of any choice came, by the monotonic clock."""
        self._streams: list[EngineStream] = []
        self._sequences = [self._sequence(plan) for plan in work.plans]
        self._running = {plan.index for plan in work.plans}
        self._merged: asyncio.Queue[_Numbered] = asyncio.Queue(MAX_UNREAD_EVENTS)
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Generation:
        try:
            for plan in self._work.plans:
                self._streams.append(self._submit(plan))
        except BaseException:
            self._cancel_all()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._cancel_all()
        for pump in self._pumps:
            pump.cancel()
        if self._pumps:
            await asyncio.gather(*self._pumps, return_exceptions=True)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        """News of any choice in the order in which they come, until each has finished.

        Raises ApiError: the engine refused, failed, went away, or said nothing for too long.
        """
        if not self._running:
            raise StopAsyncIteration
        try:
            # Around the wait alone: a slow client is not the engine's silence.
            async with asyncio.timeout(self._silence_timeout_s):
                index, event = await self._next_event()
        except TimeoutError:
            raise engine_timeout() from None
        except RequestRejected as error:
            raise _rejection(error) from None
        except EngineUnavailable:
            raise engine_unavailable() from None
        if event.finish in ("error", "cancelled"):
            raise engine_failed(event.error or "The engine could not finish the request. It may be retried.")
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()
        progress = self._sequences[index].feed(event)
        self._tell_engine(self._streams[index], progress)
        if progress.delta.finish is not None:
            self._running.discard(index)
        return progress.delta

    async def choices(self) -> list[Choice]:
        """All choices, whole."""
        texts: list[list[str]] = [[] for _ in self._sequences]
        scored: list[list[ScoredToken]] = [[] for _ in self._sequences]
        finishes: dict[int, Delta] = {}
        async for delta in self:
            texts[delta.index].append(delta.text)
            scored[delta.index].extend(delta.scored)
            if delta.finish is not None:
                finishes[delta.index] = delta
        made = []
        for index in range(len(self._sequences)):
            finish = finishes[index].finish
            assert finish is not None, "iteration ends when every choice has finished"
            made.append(Choice(index, "".join(texts[index]), tuple(scored[index]), finish))
        return made

    @property
    def has_begun(self) -> bool:
        """Whether the engine has given a first token, so that there is something to count."""
        return any(sequence.first is not None for sequence in self._sequences)

    def usage(self) -> Usage:
        """What has been used so far; after the last delta, in all."""
        return total(
            [
                SequenceUsage(plan.prompt_index, len(plan.prompt) // 4, sequence.first, sequence.tokens_kept)
                for plan, sequence in zip(self._work.plans, self._sequences, strict=True)
            ]
        )

    def _sequence(self, plan: SequencePlan) -> SequenceText:
        text = self._engine.text
        return SequenceText(
            plan.index,
            text.new_decoder(),
            text.describe,
            stops=self._work.stops,
            min_tokens=plan.sampling.min_tokens,
            skipped=text.skipped,
        )

    def _submit(self, plan: SequencePlan) -> EngineStream:
        work = self._work
        try:
            return self._engine.client.submit(
                plan.prompt,
                plan.max_tokens,
                plan.sampling,
                work.cache_salt,
                work.owner,
                work.retention,
                bool(work.stops),
            )
        except RequestRejected as error:
            raise _rejection(error) from None
        except EngineUnavailable:
            raise engine_unavailable() from None

    def _tell_engine(self, stream: EngineStream, progress: Progress) -> None:
        if progress.confirm is not None:
            stream.confirm(progress.confirm)
        if progress.stop is not None:
            stream.stop(progress.stop)

    async def _next_event(self) -> tuple[int, TokenEvent]:
        if len(self._streams) == 1:  # The usual case needs no queue and no task.
            return 0, await _next_of(self._streams[0])
        if not self._pumps:
            self._pumps = [
                asyncio.create_task(_pump(index, stream, self._merged)) for index, stream in enumerate(self._streams)
            ]
        while True:
            index, event = await self._merged.get()
            if index not in self._running:  # What was on its way when a stop string was found.
                continue
            if isinstance(event, Exception):
                raise event
            return index, event

    def _cancel_all(self) -> None:
        for stream in self._streams:
            stream.cancel()


async def _next_of(stream: EngineStream) -> TokenEvent:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        raise EngineUnavailable("the stream ended without a finish") from None


async def _pump(index: int, stream: EngineStream, merged: asyncio.Queue[_Numbered]) -> None:
    """Move one stream's events to the queue of all; a stop string found on the other side ends the stream quietly."""
    try:
        async for event in stream:
            await merged.put((index, event))
    except Exception as error:  # Whatever it is, the request has to hear of it.
        await merged.put((index, error))


def _rejection(error: RequestRejected) -> ApiError:
    if error.retryable:
        return overloaded(error.message, error.code)
    return bad_request(error.message, error.param, error.code)

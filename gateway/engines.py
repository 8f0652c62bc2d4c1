"""The engine as requests see it: there or not, and the text tools of the model that it serves.

Holds the client and, per model directory, the tokenizer; decides how long a request waits for an engine that is just
restarting, and asks the engine for a sign of life: a stopped process keeps its socket. One engine for now; choosing among
several is a later module's decision.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from engine.client import EngineClient
from engine.errors import EngineUnavailable
from engine.protocol import TierState, Welcome
from gateway.errors import engine_unavailable, engine_unresponsive
from gateway.tokenizer import ModelText

RECONNECT_WAIT_S: Final = 2.0
STATS_TIMEOUT_S: Final = 1.0
HEARTBEAT_INTERVAL_S: Final = 2.0

EngineState = Literal["connected", "unresponsive", "absent"]


@dataclass(frozen=True, slots=True)
class ReadyEngine:
    """An engine that is connected, with what it said of itself and its model's text tools."""

    client: EngineClient
    info: Welcome
    text: ModelText

    @property
    def max_total_tokens(self) -> int:
        """The longest prompt and answer together: the model's context, or the whole pool when that is smaller."""
        return min(self.info.max_context_tokens, self.info.num_blocks * self.info.tokens_per_block)


class Engines:
    """Owned by the event loop. `model_dir` None: the tokenizer is read from where the engine has its model."""

    def __init__(
        self,
        client: EngineClient,
        model_dir: Path | None,
        load_text: Callable[[Path], ModelText] = ModelText,
        heartbeat_s: float = 10.0,
    ) -> None:
        self.client = client
        self._heartbeat_s = heartbeat_s
        self._silent_at: float | None = None
        self._beating: asyncio.Task[None] | None = None
        self._model_dir = model_dir
        self._load_text = load_text
        self._loading: dict[Path, asyncio.Task[ModelText]] = {}

    async def start(self) -> None:
        """Begin connecting; load the tokenizer now if it is known which."""
        await self.client.start()
        self._beating = asyncio.get_running_loop().create_task(self._beat())
        if self._model_dir is not None:
            await self._text_of(self._model_dir)

    async def close(self) -> None:
        """Disconnect; the engine cancels what was running."""
        if self._beating is not None:
            self._beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beating
        await self.client.close()

    @property
    def state(self) -> EngineState:
        """What to expect of a request at this moment."""
        if not self.client.connected:
            return "absent"
        # Whatever it says, an answer or a token, is as good a sign of life.
        is_silent = self._silent_at is not None and self.client.heard_at <= self._silent_at
        return "unresponsive" if is_silent else "connected"

    @property
    def tier(self) -> TierState:
        return self.client.tier

    async def ready(self) -> ReadyEngine:
        """The engine, if need be after a short wait for its return; raises ApiError (503) when it is away or silent."""
        if not self.client.connected and not await self.client.wait_connected(RECONNECT_WAIT_S):
            raise engine_unavailable()
        if self.state == "unresponsive":
            raise engine_unresponsive()
        info = self.client.info
        if info is None:
            raise engine_unavailable()
        return ReadyEngine(self.client, info, await self._text_of(self._model_dir or Path(info.model_dir)))

    async def stats(self) -> dict[str, Any] | None:
        """The engine's numbers, or None when it does not answer at once."""
        try:
            return await self.client.stats(STATS_TIMEOUT_S)
        except EngineUnavailable:
            return None

    async def _beat(self) -> None:
        """Ask again and again; an engine that says nothing at all for `heartbeat_s` is silent until it speaks."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(HEARTBEAT_INTERVAL_S, self._heartbeat_s / 2))
            if not self.client.connected:
                continue
            asked_at = loop.time()
            with contextlib.suppress(EngineUnavailable):
                await self.client.stats(self._heartbeat_s)
            if self.client.connected and self.client.heard_at < asked_at:
                self._silent_at = loop.time()

    async def _text_of(self, model_dir: Path) -> ModelText:
        task = self._loading.get(model_dir)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            self._loading.clear()  # An engine that came back with another model: the old one's tables are not needed.
            task = asyncio.get_running_loop().create_task(asyncio.to_thread(self._load_text, model_dir))
            self._loading[model_dir] = task
        # A request that is cancelled while it waits must not take the load away from the others.
        return await asyncio.shield(task)

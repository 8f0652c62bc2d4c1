"""The engine as requests see it: there or not, and the text tools of the model that it serves.

Holds the client and, per model directory, the tokenizer; decides how long a request waits for an engine that is just
restarting, and asks the engine for a sign of life: a stopped process keeps its socket. Sends it the tenants' shares whenever
they change, and the client again whenever it connects; what became of them is in the figures that are the sign of life. One
engine for now; choosing among several is a later module's decision.
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
from gateway.shares import SharesState, owner_table, shares_state
from gateway.tokenizer import ModelText
from tenants.snapshot import NO_SHARES, ShareTable

RECONNECT_WAIT_S: Final = 2.0
STATS_TIMEOUT_S: Final = 1.0
HEARTBEAT_INTERVAL_S: Final = 2.0
SHARES_INTERVAL_S: Final = 0.25
"""How soon a change of shares in the snapshot, which is as old at most, is sent to the engine."""

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
        shares: Callable[[], ShareTable] = lambda: NO_SHARES,
        on_shares: Callable[[SharesState, int], None] = lambda state, version: None,
    ) -> None:
        """`shares` is asked for the newest; `on_shares` is told their state and version whenever one of them changes."""
        self.client = client
        self._shares = shares
        self._on_shares = on_shares
        self._shares_sent = 0
        self._shares_noted: tuple[SharesState, int] = ("unknown", -1)
        self._following: asyncio.Task[None] | None = None
        self._heartbeat_s = heartbeat_s
        self._silent_at: float | None = None
        self._beating: asyncio.Task[None] | None = None
        self._model_dir = model_dir
        self._load_text = load_text
        self._loading: dict[Path, asyncio.Task[ModelText]] = {}

    async def start(self) -> None:
        """Begin connecting; load the tokenizer now if it is known which."""
        await self.client.start()
        # Before anything is awaited: whatever the first connection is used for, its engine knows the shares.
        self._send_shares()
        self._note_shares(None)
        self._beating = asyncio.get_running_loop().create_task(self._beat())
        self._following = asyncio.get_running_loop().create_task(self._follow_shares())
        if self._model_dir is not None:
            await self._text_of(self._model_dir)

    async def close(self) -> None:
        """Disconnect; the engine cancels what was running."""
        for task in (self._beating, self._following):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
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

    @property
    def shares(self) -> SharesState:
        """What became of the tenants' shares, by what the engine last said of them."""
        return self._shares_noted[0]

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
                self._note_shares(await self.client.stats(self._heartbeat_s))
            if self.client.connected and self.client.heard_at < asked_at:
                self._silent_at = loop.time()

    async def _follow_shares(self) -> None:
        while True:
            await asyncio.sleep(SHARES_INTERVAL_S)
            self._send_shares()

    def _send_shares(self) -> None:
        """Give the client the newest shares; of a store that went back to older ones it keeps those that it has."""
        table = self._shares()
        if table.version > self._shares_sent:
            self._shares_sent = table.version
            self.client.set_owner_table(owner_table(table))
            self._note_shares(None)

    def _note_shares(self, stats: dict[str, Any] | None) -> None:
        version = self._shares().version
        noted = shares_state(version, stats), version
        if noted != self._shares_noted:
            self._shares_noted = noted
            self._on_shares(*noted)

    async def _text_of(self, model_dir: Path) -> ModelText:
        task = self._loading.get(model_dir)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            self._loading.clear()  # An engine that came back with another model: the old one's tables are not needed.
            task = asyncio.get_running_loop().create_task(asyncio.to_thread(self._load_text, model_dir))
            self._loading[model_dir] = task
        # A request that is cancelled while it waits must not take the load away from the others.
        return await asyncio.shield(task)

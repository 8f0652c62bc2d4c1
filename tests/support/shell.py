"""An engine in this process: the real core, server, step thread and tier worker around a fake runner."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.client import EngineClient
from engine.core import EngineCore
from engine.loop import Inbox, StepLoop
from engine.server import MAX_UNREAD_BYTES, EngineServer, ServerFacts
from engine.tier import TierWorker
from engine.values import CoreSettings, NewRequest
from tests.support.fake_runner import FakeRunner

WAIT_S = 60.0


@dataclass(slots=True)
class Shell:
    """`async with Shell(FakeRunner()) as shell:`; `make_tier_client` switches the host tier on."""

    runner: FakeRunner = field(default_factory=FakeRunner)
    make_tier_client: Callable[[], Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    credits: int = 1024
    max_unread_bytes: int = MAX_UNREAD_BYTES
    event_buffer_max_size: int = 0
    incarnation: str = "0011223344556677"
    at: Path | None = None
    """A directory that outlives this engine, so that another one can take its place."""
    record: Callable[[NewRequest, float], None] | None = None
    record_path: str | None = None
    check_when_idle: bool = False
    directory: Path = field(init=False)
    inbox: Inbox = field(init=False)
    core: EngineCore = field(init=False)
    server: EngineServer = field(init=False)
    steps: StepLoop = field(init=False)
    tier: TierWorker | None = field(init=False)
    ended: list[str | None] = field(default_factory=list)
    clients: list[EngineClient] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        return self.directory / "engine.sock"

    async def __aenter__(self) -> Shell:
        self.directory = self.at or Path(tempfile.mkdtemp(dir="/tmp", prefix="halocline-shell-"))
        info = self.runner.info
        settings = CoreSettings(
            **{
                "tokens_per_block": info.tokens_per_block,
                "num_blocks": info.num_blocks,
                "max_num_tokens": 64,
                "max_batch_size": 16,
                "max_queue": 1024,
                "max_context_tokens": info.max_context_tokens,
                "vocab_size": info.vocab_size,
                "eos_token_ids": info.eos_token_ids,
                "tier_enabled": self.make_tier_client is not None,
                "record_events": self.event_buffer_max_size > 0,
                **self.settings,
            }
        )
        self.inbox = Inbox()
        self.core = EngineCore(settings, info.layout_fingerprint)
        self.server = EngineServer(
            self._facts(settings),
            self.inbox,
            tier="absent" if settings.tier_enabled else "none",
            max_unread_bytes=self.max_unread_bytes,
            event_buffer_max_size=self.event_buffer_max_size,
            on_ended=self.ended.append,
        )
        self.tier = self._tier_worker()
        self.steps = StepLoop(
            self.core,
            self.runner,
            self.inbox,
            self.server.deliver,
            tier=self.tier,
            record=self.record,
            record_path=self.record_path,
            check_when_idle=self.check_when_idle,
        )
        await self.server.listen(self.socket)
        self.steps.start()
        if self.tier is not None:
            self.tier.start()
            if self.server.feed.is_on:
                assert self.make_tier_client is not None
                self.server.host_events.start(self.make_tier_client)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for client in self.clients:
            await client.close()
        self.inbox.stop()
        if self.runner.gate is not None:
            self.runner.gate.set()
        await self.server.close("The engine is stopping; the request may be retried.")
        await asyncio.to_thread(self.steps.join, WAIT_S)
        if self.tier is not None:
            await asyncio.to_thread(self.tier.stop, 0.0)
            await asyncio.to_thread(self.server.host_events.stop)
        if self.at is None:
            shutil.rmtree(self.directory)

    def _tier_worker(self) -> TierWorker | None:
        if self.make_tier_client is None:
            return None
        return TierWorker(
            self.make_tier_client,
            self.runner.transfer,
            block_bytes=self.runner.info.block_bytes,
            tokens_per_block=self.runner.info.tokens_per_block,
            verify_loads=True,
            answer=self.inbox.put,
            on_stored=self.server.host_events.look_soon,
        )

    def _facts(self, settings: CoreSettings) -> ServerFacts:
        info = self.runner.info
        return ServerFacts(
            incarnation=self.incarnation,
            model_id=info.model_id,
            model_dir="",
            vocab_size=info.vocab_size,
            max_context_tokens=info.max_context_tokens,
            max_prompt_tokens=settings.max_prompt_tokens,
            eos_token_ids=info.eos_token_ids,
            tokens_per_block=info.tokens_per_block,
            num_blocks=info.num_blocks,
            layout_fingerprint=info.layout_fingerprint,
            credits=self.credits,
        )

    async def client(self, name: str = "test") -> EngineClient:
        """A client that is connected."""
        client = EngineClient(str(self.socket), name)
        self.clients.append(client)
        await client.start()
        assert await client.wait_connected(WAIT_S), client.last_error
        return client

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for the engine's figures to say something; fails with them when they never do."""
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while True:
            figures = await asyncio.wait_for(self.server.statistics(), WAIT_S)
            if holds(figures):
                return figures
            assert asyncio.get_running_loop().time() < deadline, f"never came to hold: {figures}"
            await asyncio.sleep(0.01)


def is_quiet(figures: dict[str, Any]) -> bool:
    """Nothing is inside and nothing is held."""
    core = figures["core"]
    return (
        figures["server"]["live"] == 0
        and core["sequences_running"] == core["sequences_waiting"] == 0
        and core["blocks_used"] == core["blocks_offering"] == core["tickets_outstanding"] == 0
    )

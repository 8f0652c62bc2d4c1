"""The device tier as the running engine tells of it, for `halocline cache top`, which itself knows the host tier only."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

ANSWER_WITHIN_S: Final = 1.0


class DeviceTier:
    """One connection to the engine, held between looks, so that a view that is renewed each second is one line in the engine's
    log. The loop turns during a look only; what the engine says in between waits in the socket, and is little."""

    def __init__(self, socket_path: Path) -> None:
        from engine.client import EngineClient

        self._loop = asyncio.new_event_loop()
        self._client = EngineClient(str(socket_path), "halocline cache top")
        self._loop.run_until_complete(self._client.start())

    def look(self) -> dict[str, Any] | None:
        """The engine's figures of its blocks and of where prompt tokens came from; None when no engine answers."""
        return self._loop.run_until_complete(self._look())

    async def _look(self) -> dict[str, Any] | None:
        from engine.errors import EngineUnavailable

        if not await self._client.wait_connected(ANSWER_WITHIN_S):
            return None
        try:
            found = await self._client.stats(ANSWER_WITHIN_S)
        except EngineUnavailable:
            return None
        core: dict[str, Any] = found["core"]
        return core

    def close(self) -> None:
        """Disconnect."""
        self._loop.run_until_complete(self._client.close())
        self._loop.close()

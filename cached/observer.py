"""An operator's end of the cache daemon's link: asks what is there and has things done, stores and loads nothing.

The same client as an engine's, without a layout; every verb answers None when no daemon does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cached.client import TierClient
from cached.protocol import ConfigReply, ConfigRequest, ListedBlock, OwnersReply, OwnersRequest, Verify, VerifyReply


class TierObserver(TierClient):
    """A client that has no layout: for the command line and for whoever only looks."""

    def __init__(self, socket_path: str | Path, timeout_s: float) -> None:
        super().__init__(socket_path, None, timeout_s)

    def layouts(self) -> list[dict[str, Any]] | None:
        """The parts of the arena and their layouts, in the order in which `part` numbers them (`protocol.LayoutLine`)."""
        found: dict[str, Any] | None = self.stats()
        return None if found is None else [*found["layouts"]]

    def owners(self, part: int = 0) -> OwnersReply | None:
        """Owners in one part, what they hold there and what they may count on."""
        return self._ask(OwnersRequest(self._request_id(), part), OwnersReply)

    def config(self) -> dict[str, str] | None:
        """The settings in force."""
        reply = self._ask(ConfigRequest(self._request_id()), ConfigReply)
        return None if reply is None else {setting.name: setting.value for setting in reply.settings}

    def verify(self) -> int | None:
        """Have every block verified; how many that are."""
        reply = self._ask(Verify(self._request_id()), VerifyReply)
        return None if reply is None else reply.num_blocks

    def blocks(self, namespace_fingerprint: str | None = None, part: int = 0) -> Iterator[ListedBlock]:
        """The stored blocks of one part, of one namespace or of all, slot by slot; ends early when the daemon goes away, which
        `state` tells then. Blocks that come or go meanwhile may be in it or not."""
        after: int | None = -1
        while after is not None:
            page = self.list_blocks(after, namespace_fingerprint, part)
            if page is None:
                return
            yield from page.blocks
            after = page.next_after

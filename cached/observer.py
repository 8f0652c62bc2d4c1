"""An operator's end of the cache daemon's link: asks what is there and has things done, stores and loads nothing.

The same client as an engine's, without a layout; every verb answers None when no daemon does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cached.client import TierClient
from cached.protocol import ConfigReply, ConfigRequest, ListedBlock, OwnersReply, OwnersRequest, Verify, VerifyReply


class TierObserver(TierClient):
    """A client that has no layout: for the command line and for whoever only looks."""

    def __init__(self, socket_path: str | Path, timeout_s: float) -> None:
        super().__init__(socket_path, None, timeout_s)

    def owners(self) -> OwnersReply | None:
        """Owners, what they hold and what they may count on."""
        return self._ask(OwnersRequest(self._request_id()), OwnersReply)

    def config(self) -> dict[str, str] | None:
        """The settings in force."""
        reply = self._ask(ConfigRequest(self._request_id()), ConfigReply)
        return None if reply is None else {setting.name: setting.value for setting in reply.settings}

    def verify(self) -> int | None:
        """Have every block verified; how many that are."""
        reply = self._ask(Verify(self._request_id()), VerifyReply)
        return None if reply is None else reply.num_blocks

    def blocks(self, namespace_fingerprint: str | None = None) -> Iterator[ListedBlock]:
        """The stored blocks, of one namespace or of all, slot by slot; ends early when the daemon goes away, which
        `state` tells then. Blocks that come or go meanwhile may be in it or not."""
        after: int | None = -1
        while after is not None:
            page = self.list_blocks(after, namespace_fingerprint)
            if page is None:
                return
            yield from page.blocks
            after = page.next_after

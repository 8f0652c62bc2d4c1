"""An operator's end of the cache daemon's link: asks what is there and has things done, stores and loads nothing.

The same client as an engine's, without a layout; every verb answers None when no daemon does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cached.client import TierClient
from cached.keys import HASH_BYTES, OWNER_BYTES
from cached.protocol import (
    NAMESPACE_FINGERPRINT_BYTES,
    NEVER,
    NO_PARENT,
    ConfigReply,
    ConfigRequest,
    ListedBlock,
    ListReply,
    ListRequest,
    OwnersReply,
    OwnersRequest,
    Verify,
    VerifyReply,
    cut,
    read_f64s,
    read_u32s,
)


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
        namespace = bytes.fromhex(namespace_fingerprint) if namespace_fingerprint else b""
        after: int | None = -1
        while after is not None:
            reply = self._ask(ListRequest(self._request_id(), namespace, after), ListReply)
            if reply is None:
                return
            yield from _read_list(reply)
            after = reply.next_after if reply.next_after > after else None


def _read_list(reply: ListReply) -> Iterator[ListedBlock]:
    rows = zip(
        read_u32s(reply.slots),
        cut(reply.hashes, HASH_BYTES),
        cut(reply.parents, HASH_BYTES),
        cut(reply.namespaces, NAMESPACE_FINGERPRINT_BYTES),
        reply.priorities,
        read_f64s(reply.deadlines),
        cut(reply.owners, OWNER_BYTES),
        reply.states,
        strict=True,
    )
    for slot, key, parent, namespace, priority, deadline, owner, state in rows:
        yield ListedBlock(
            slot,
            key,
            None if parent == NO_PARENT else parent,
            namespace.hex(),
            priority,
            None if deadline == NEVER else deadline,
            owner,
            "unverified" if state else "stored",
        )

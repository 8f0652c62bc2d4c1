"""Events as the pool makes them: runs of blocks stored together, and removals gathered into few events (kv-semantics 6.1).

What happened is told by the pool, in order; here it becomes values of bounded size. Numbers and incarnation are given
by the ring, where consumers read.
"""

from __future__ import annotations

from collections.abc import Sequence

from cached.keys import BlockHash, OwnerId
from engine.events import Created, Event, Removed, Stored, Updated

MAX_BLOCKS_PER_EVENT = 512
"""An event of so many blocks fits any frame; a longer run is told in several."""


class EventLog:
    """Events since they were last taken. Removals that follow each other and are of one owner and namespace are one event;
    whatever else happens in between ends it, so the order of events is the order of what happened."""

    def __init__(self, tier: str, num_blocks: int) -> None:
        self._tier = tier
        self._events: list[Event] = [Created(((tier, num_blocks),))]
        self._removed: list[BlockHash] = []
        self._removed_of: tuple[str, OwnerId] | None = None

    def stored(
        self,
        parent_hash: BlockHash | None,
        hashes: Sequence[BlockHash],
        priorities: Sequence[int],
        namespace_fingerprint: str,
        owner: OwnerId,
        token_ids: Sequence[tuple[int, ...]] | None,
    ) -> None:
        """A run of full blocks, each the child of the one before, became shareable."""
        self._end_removal()
        for start in range(0, len(hashes), MAX_BLOCKS_PER_EVENT):
            end = start + MAX_BLOCKS_PER_EVENT
            self._events.append(
                Stored(
                    parent_hash=hashes[start - 1] if start else parent_hash,
                    block_hashes=tuple(hashes[start:end]),
                    priorities=tuple(priorities[start:end]),
                    tier=self._tier,
                    namespace_fingerprint=namespace_fingerprint,
                    owner=owner,
                    token_ids=None if token_ids is None else tuple(token_ids[start:end]),
                )
            )

    def removed(self, hashes: Sequence[BlockHash], namespace_fingerprint: str, owner: OwnerId) -> None:
        """Full blocks left the index, children before parents."""
        whose = (namespace_fingerprint, owner)
        if whose != self._removed_of:
            self._end_removal()
            self._removed_of = whose
        self._removed.extend(hashes)

    def updated(
        self, block_hash: BlockHash, old_priority: int, new_priority: int, namespace_fingerprint: str, owner: OwnerId
    ) -> None:
        """The priority of a full block changed."""
        self._end_removal()
        self._events.append(Updated(block_hash, self._tier, old_priority, new_priority, namespace_fingerprint, owner))

    def take(self) -> list[Event]:
        """Everything since the last call, oldest first."""
        self._end_removal()
        events, self._events = self._events, []
        return events

    def _end_removal(self) -> None:
        if self._removed_of is None:
            return
        gone, (namespace_fingerprint, owner) = self._removed, self._removed_of
        for start in range(0, len(gone), MAX_BLOCKS_PER_EVENT):
            part = tuple(gone[start : start + MAX_BLOCKS_PER_EVENT])
            self._events.append(Removed(part, self._tier, namespace_fingerprint, owner))
        self._removed, self._removed_of = [], None

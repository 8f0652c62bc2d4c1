"""What operators and readers of events are shown of a store, as columns of the wire. Reads only; decides nothing."""

from __future__ import annotations

from cached import blocks as slots
from cached.blocks import VISIBLE
from cached.contents import Contents
from cached.events import Run
from cached.protocol import (
    MAX_OWNERS_SHOWN,
    MAX_ROWS,
    Count,
    EventsReply,
    ListReply,
    OwnerLine,
    OwnersReply,
    f64s,
    u32s,
)
from cached.shares import ShareTable

_SLOTS_PER_REPLY = 65536
"""Slots looked at for one reply, so that a search for a rare namespace keeps nobody waiting."""


def list_blocks(request_id: int, contents: Contents | None, namespace: int | None, after: int) -> ListReply:
    """Stored blocks in slots above `after`, of one namespace or of all."""
    found: list[int] = []
    end = 0
    if contents is not None:
        columns = contents.blocks
        end = min(columns.num_slots, after + 1 + _SLOTS_PER_REPLY)
        for slot in range(max(after + 1, 0), end):
            if columns.state[slot] in VISIBLE and namespace in (None, columns.namespace[slot]):
                found.append(slot)
                if len(found) == MAX_ROWS:
                    end = slot + 1
                    break
    if contents is None or not found:
        more = contents is not None and end < contents.blocks.num_slots
        return ListReply(request_id, end - 1 if more else -1, *[b""] * 8)
    columns, owners = contents.blocks, contents.owners
    return ListReply(
        request_id,
        end - 1 if end < columns.num_slots else -1,
        u32s(found),
        b"".join([columns.key[slot] or b"" for slot in found]),
        b"".join([contents.parent_key(slot) for slot in found]),
        u32s([columns.namespace[slot] for slot in found]),
        bytes([columns.priority[slot] for slot in found]),
        f64s([columns.deadline[slot] for slot in found]),
        b"".join([owners.id_of(columns.owner[slot]) for slot in found]),
        bytes([columns.state[slot] == slots.UNVERIFIED for slot in found]),
    )


def list_owners(request_id: int, contents: Contents | None, table: ShareTable) -> OwnersReply:
    """Owners that hold something or have a share, those that hold most first."""
    if contents is None:
        return OwnersReply(request_id, 0, 0, 0, ())
    held = contents.owners.counts()
    share_of = {share.owner: share for share in table.shares}
    known = sorted(held.keys() | share_of.keys(), key=lambda owner: (-held.get(owner, 0), owner))
    lines = []
    for owner in known[:MAX_OWNERS_SHOWN]:
        share = share_of.get(owner)
        number = contents.owners.number_of(owner)
        refused = contents.counters.refused_by_owner.get(owner, {})
        lines.append(
            OwnerLine(
                owner,
                share.weight if share else 1.0,
                share.floor if share else 0,
                share.ceiling if share else None,
                held.get(owner, 0),
                contents.order.count_of(number) if number is not None else 0,
                contents.counters.evicted_by_owner.get(owner, 0),
                tuple(Count(reason, count) for reason, count in refused.items()),
            )
        )
    return OwnersReply(
        request_id, table.version, contents.blocks.num_slots, max(0, len(known) - len(lines)), tuple(lines)
    )


def show_events(request_id: int, incarnation: int, run: Run) -> EventsReply:
    """A run of events as columns."""
    rows = run.events
    return EventsReply(
        request_id,
        incarnation,
        run.first,
        run.first + len(rows) - 1,
        run.lost,
        bytes([event.kind for event in rows]),
        b"".join([event.key for event in rows]),
        b"".join([event.parent for event in rows]),
        u32s([event.namespace for event in rows]),
        b"".join([event.owner for event in rows]),
        bytes([event.old_priority for event in rows]),
        bytes([event.priority for event in rows]),
    )

"""`halocline engine events`: what happens to the index of a running engine, line by line, for people and for scripts.

It prints what the engine says and holds no opinion of its own; which events are kept is `event_feed.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator
from typing import Any, Final

import click

from engine.errors import EngineConfigError
from engine.event_connection import EventConnection, Heard
from engine.event_messages import (
    EventBatch,
    EventsLost,
    EventsRefused,
    SnapshotPage,
    Subscribed,
    to_blocks,
    to_events,
)
from engine.events import Created, Event, NumberedEvent, Removed, SnapshotBlock, Stored, Updated

SCHEMA: Final = "halocline.kv_event.v1"
SHOWN_HASH_CHARS: Final = 12


@click.command()
@click.option("--follow", is_flag=True, help="Go on with what happens from now, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, for scripts.")
@click.option(
    "--from", "first", type=click.IntRange(min=0), metavar="ID", help="Begin at this event. [the oldest kept]"
)
@click.option("--snapshot", is_flag=True, help="Begin with all blocks of the index, then what happened since.")
@click.pass_context
def events(ctx: click.Context, follow: bool, as_json: bool, first: int | None, snapshot: bool) -> None:
    """Show what happened to the KV blocks of the running engine: created, stored, removed, updated.

    The engine keeps the newest `event_buffer_max_size` events; a line `lost` stands for those that are gone. Exits with 7
    when no engine answers, or when it ends while being followed.

    \b
    Examples:
      halocline engine events
      halocline engine events --follow --from 1200
      halocline engine events --snapshot --json
    """
    if snapshot and first is not None:
        raise click.UsageError("--snapshot and --from exclude each other: a snapshot says itself from where to go on.")
    cursor = None if snapshot else (first or 0)
    asyncio.run(_show(str(ctx.obj.engine.socket), cursor, follow, as_json))


async def _show(socket_path: str, cursor: int | None, follow: bool, as_json: bool) -> None:
    """Ctrl-C is how following ends: it is no failure, and leaves no half line."""
    showing = asyncio.ensure_future(_print_all(socket_path, cursor, follow, as_json))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, showing.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await showing


async def _print_all(socket_path: str, cursor: int | None, follow: bool, as_json: bool) -> None:
    connection = await EventConnection.open(socket_path, "halocline engine events")
    lines = json_lines if as_json else human_lines
    try:
        connection.subscribe(1, cursor)
        end = 0
        async for message in connection:
            match message:
                case EventsRefused(message=reason):
                    raise EngineConfigError(f"the engine at {socket_path}: {reason}")
                case Subscribed(next_event_id=next_event_id):
                    end = next_event_id
                case _:
                    click.echo("".join(f"{line}\n" for line in lines(message)), nl=False)
            if not follow and _place_after(message, cursor) >= end:
                return
    finally:
        await connection.close()


def _place_after(message: Heard, cursor: int | None) -> int:
    """Where the stream stands after a message; below everything while a snapshot is on its way."""
    match message:
        case EventBatch(events=rows):
            return rows[-1].event_id + 1 if rows else 0
        case EventsLost(next_event_id=next_event_id):
            return next_event_id
        case SnapshotPage(is_last=True, event_id=event_id):
            return event_id
        case Subscribed() if cursor is not None:
            return cursor
        case _:
            return -1


# For scripts. -------------------------------------------------------------------------------------------------------


def json_lines(message: Heard) -> Iterator[str]:
    """A message as JSON objects, one per event; a page of a snapshot is one object."""
    for told in _json_objects(message):
        yield json.dumps({"schema": SCHEMA, **told})


def _json_objects(message: Heard) -> Iterator[dict[str, Any]]:
    match message:
        case EventBatch():
            for numbered in to_events(message):
                yield {**_heading(_kind(numbered.event), message, numbered.event_id), **_json_event(numbered.event)}
        case SnapshotPage():
            yield {
                **_heading("snapshot", message, message.event_id),
                "page": message.page,
                "is_last": message.is_last,
                "blocks": [_json_snapshot_block(block) for block in to_blocks(message)],
            }
        case EventsLost(incarnation, first_event_id, next_event_id):
            yield {
                "kind": "lost",
                "incarnation": incarnation,
                "first_event_id": first_event_id,
                "next_event_id": next_event_id,
            }


def _heading(kind: str, message: EventBatch | SnapshotPage, event_id: int) -> dict[str, Any]:
    return {
        "kind": kind,
        "event_id": event_id,
        "incarnation": message.incarnation,
        "hash_algo": message.hash_algo,
    }


def _json_event(event: Event) -> dict[str, Any]:
    match event:
        case Created(blocks):
            return {"blocks": dict(blocks)}
        case Stored():
            rows = [
                {
                    "block_hash": block.block_hash.hex(),
                    "tier": block.tier,
                    "priority": block.priority,
                    **({} if block.token_ids is None else {"token_ids": list(block.token_ids)}),
                }
                for block in event.blocks
            ]
            return {"parent_hash": _hex(event.parent_hash), "blocks": rows, **_whose(event)}
        case Removed():
            return {"block_hashes": [each.hex() for each in event.block_hashes], "tier": event.tier, **_whose(event)}
        case Updated():
            return {
                "block_hash": event.block_hash.hex(),
                "tier": event.tier,
                "priority": {"old": event.old_priority, "new": event.new_priority},
                **_whose(event),
            }


def _json_snapshot_block(block: SnapshotBlock) -> dict[str, Any]:
    told: dict[str, Any] = {
        "block_hash": block.block_hash.hex(),
        "parent_hash": _hex(block.parent_hash),
        "tier": block.tier,
        "priority": block.priority,
        **_whose(block),
    }
    return told if block.token_ids is None else {**told, "token_ids": list(block.token_ids)}


def _whose(told: Stored | Removed | Updated | SnapshotBlock) -> dict[str, Any]:
    return {"namespace_fingerprint": told.namespace_fingerprint, "owner": told.owner.hex()}


def _hex(block_hash: bytes | None) -> str | None:
    return None if block_hash is None else block_hash.hex()


# For people. --------------------------------------------------------------------------------------------------------


def human_lines(message: Heard) -> Iterator[str]:
    """A message as lines; hashes by their beginnings, which `--json` gives in full."""
    match message:
        case EventBatch():
            for numbered in to_events(message):
                yield _human_event(numbered)
        case SnapshotPage(event_id=event_id):
            for block in to_blocks(message):
                after = "" if block.parent_hash is None else f" after {_short(block.parent_hash)}"
                what = f"{_short(block.block_hash)}@{block.priority}{after}"
                yield _line(event_id, "holds", block.tier, what, block)
        case EventsLost(first_event_id=first_event_id, next_event_id=next_event_id):
            yield f"{'':>8}  lost      events {first_event_id} to {next_event_id - 1} are not kept any more"


def _human_event(numbered: NumberedEvent) -> str:
    event_id, event = numbered.event_id, numbered.event
    match event:
        case Created(blocks):
            sizes = ", ".join(f"{count} blocks in {tier}" for tier, count in blocks)
            return f"{event_id:>8}  created   {sizes}"
        case Stored():
            after = "" if event.parent_hash is None else f" after {_short(event.parent_hash)}"
            what = " ".join(f"{_short(block.block_hash)}@{block.priority}" for block in event.blocks)
            return _line(event_id, "stored", event.tier, what + after, event)
        case Removed():
            return _line(event_id, "removed", event.tier, " ".join(map(_short, event.block_hashes)), event)
        case Updated():
            what = f"{_short(event.block_hash)} {event.old_priority} to {event.new_priority}"
            return _line(event_id, "updated", event.tier, what, event)


def _line(event_id: int, kind: str, tier: str, what: str, told: Stored | Removed | Updated | SnapshotBlock) -> str:
    whose = f"namespace {told.namespace_fingerprint} owner {told.owner.hex()[:SHOWN_HASH_CHARS]}"
    return f"{event_id:>8}  {kind:<8}  {tier:<6}  {what}  {whose}"


def _short(block_hash: bytes) -> str:
    return block_hash.hex()[:SHOWN_HASH_CHARS]


def _kind(event: Event) -> str:
    return type(event).__name__.lower()

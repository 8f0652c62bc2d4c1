"""How the daemon's answers look, as text, as fields for scripts, and as the live view of `top`; asks nobody anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cached.keys import NO_OWNER
from cached.protocol import ListedBlock, OwnerLine, OwnersReply

if TYPE_CHECKING:
    from rich.console import RenderableType

Names = Mapping[Any, str]


def statistics(stats: Mapping[str, Any]) -> str:
    """The statistics as text: what is there, by priority, and what has happened."""
    if not stats["slot_bytes"]:
        return f"capacity  {_size(stats['capacity_bytes'])}, {_size(stats['allocated_bytes'])} allocated; no engine has come yet"
    asked = stats["looked_up"]
    rate = f" ({100 * stats['found'] / asked:.1f} %)" if asked else ""
    shares = (
        f"version {stats['shares_version']}, floors of {stats['floors_total']}" if stats["shares_version"] else "none"
    )
    lines = [
        ("layout", f"{stats['layout_fingerprint']}, {_size(stats['slot_bytes'])} a block"),
        ("capacity", f"{stats['capacity_slots']} blocks, {_size(stats['capacity_bytes'])}"),
        ("allocated", f"{stats['allocated_slots']} blocks, {_size(stats['allocated_bytes'])}"),
        ("sessions", f"{stats['sessions']} of engines"),
        ("used", f"{stats['used']} ({stats['idle']} idle, {stats['leased']} leased, {stats['unverified']} unverified)"),
        (
            "being stored",
            f"{stats['reserved']} reserved, {stats['waiting']} waiting, {stats['quarantined']} quarantined",
        ),
        ("by priority", _labelled(stats["used_by_priority"])),
        ("owners", str(stats["owners"])),
        ("owners' shares", shares),
        ("looked up", f"{asked}, found {stats['found']}{rate}"),
        ("stored", str(stats["stored"])),
        ("loaded", f"{stats['loaded']}, {stats['leases_broken']} leases broken"),
        ("evicted", _labelled(stats["evicted_by_priority"])),
        ("refused", _labelled(stats["refused_by_reason"])),
        ("expired", str(stats["expired"])),
        ("dropped", f"{stats['dropped']}; {stats['dropped_unused']} blocks left without ever being loaded"),
        (
            "restart",
            f"{stats['restored']} restored, {stats['lost_at_restart']} lost, {stats['verified']} verified since",
        ),
        ("corrupt", f"{stats['corrupt']}; the payload was mended {stats['payload_mended']} times"),
    ]
    return pairs(lines)


def pairs(lines: Sequence[tuple[str, str]]) -> str:
    """Names and values, aligned."""
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def owners(found: OwnersReply, names: Names) -> str:
    """A table of owners."""
    head = ("owner", "held", "evictable", "floor", "ceiling", "weight", "evicted", "refused")
    rows = [
        (
            _owner(line.owner, names),
            str(line.held),
            str(line.evictable),
            str(line.floor),
            "-" if line.ceiling is None else str(line.ceiling),
            f"{line.weight:g}",
            str(line.evicted),
            _labelled({count.label: count.value for count in line.refused}),
        )
        for line in found.owners
    ]
    rest = [f"and {found.left_off} owners that hold less"] if found.left_off else []
    return "\n".join([_table([head, *rows]), *rest])


def owner_fields(line: OwnerLine, names: Names) -> dict[str, Any]:
    """One owner for scripts."""
    return {
        "owner": line.owner.hex(),
        "tenant": names.get(line.owner),
        "held": line.held,
        "evictable": line.evictable,
        "floor": line.floor,
        "ceiling": line.ceiling,
        "weight": line.weight,
        "evicted": line.evicted,
        "refused": {count.label: count.value for count in line.refused},
    }


def blocks(found: Sequence[ListedBlock], names: Names) -> str:
    """A table of blocks."""
    head = ("slot", "block", "parent", "namespace", "priority", "deadline", "owner", "state")
    rows = [
        (
            str(block.slot),
            block.block_hash.hex()[:8],
            "-" if block.parent is None else block.parent.hex()[:8],
            block.namespace_fingerprint,
            str(block.priority),
            "-" if block.deadline is None else f"{block.deadline:.1f}",
            _owner(block.owner, names),
            block.state,
        )
        for block in found
    ]
    return _table([head, *rows])


def block_fields(block: ListedBlock, names: Names) -> dict[str, Any]:
    """One block for scripts."""
    return {
        "slot": block.slot,
        "block_hash": block.block_hash.hex(),
        "parent_hash": None if block.parent is None else block.parent.hex(),
        "namespace_fingerprint": block.namespace_fingerprint,
        "priority": block.priority,
        "deadline": block.deadline,
        "owner": block.owner.hex(),
        "tenant": names.get(block.owner),
        "state": block.state,
    }


def top_fields(
    before: Mapping[str, Any], now: Mapping[str, Any], found: OwnersReply, names: Names, seconds: float
) -> dict[str, Any]:
    """One look of `top` for scripts: what is there, and what happened in the seconds before it."""

    def rate(name: str) -> float:
        return round((now[name] - before[name]) / seconds, 3)

    asked = now["looked_up"] - before["looked_up"]
    return {
        "tier": "host",
        "seconds": round(seconds, 3),
        **{name: now[name] for name in ("capacity_slots", "allocated_slots", "used", "idle", "leased", "unverified")},
        "used_by_priority": now["used_by_priority"],
        "hit_rate": round((now["found"] - before["found"]) / asked, 4) if asked else None,
        "looked_up_per_s": rate("looked_up"),
        "stored_per_s": rate("stored"),
        "loaded_per_s": rate("loaded"),
        "stored_bytes_per_s": rate("stored") * now["slot_bytes"],
        "loaded_bytes_per_s": rate("loaded") * now["slot_bytes"],
        "owners": [owner_fields(line, names) for line in found.owners[:50]],
    }


def top(
    before: Mapping[str, Any], now: Mapping[str, Any], found: OwnersReply, names: Names, seconds: float
) -> RenderableType:
    """One look of the live view."""
    from rich.console import Group
    from rich.table import Table

    look = top_fields(before, now, found, names, seconds)
    hits = "no lookups" if look["hit_rate"] is None else f"{100 * look['hit_rate']:.1f} % of lookups hit"
    room = f"{look['used']} of {look['capacity_slots']} blocks used"
    head = Table.grid(padding=(0, 3))
    head.add_row("host tier", room, f"{look['leased']} leased", f"{look['unverified']} unverified", hits)
    head.add_row(
        "",
        f"store {_size(look['stored_bytes_per_s'])}/s",
        f"load {_size(look['loaded_bytes_per_s'])}/s",
        f"{look['looked_up_per_s']:g} looked up/s",
    )
    bands = Table("priority", "blocks", "share", box=None, header_style="bold")
    for priority, count in sorted(look["used_by_priority"].items(), key=lambda pair: -int(pair[0])):
        bands.add_row(priority, str(count), f"{100 * count / max(1, look['used']):.1f} %")
    shares = Table("owner", "held", "floor", "ceiling", "evicted", "refused", box=None, header_style="bold")
    for line in found.owners[:20]:
        refused = sum(count.value for count in line.refused)
        ceiling = "-" if line.ceiling is None else str(line.ceiling)
        shares.add_row(
            _owner(line.owner, names), str(line.held), str(line.floor), ceiling, str(line.evicted), str(refused)
        )
    return Group(head, "", bands, "", shares)


def _owner(owner: bytes, names: Names) -> str:
    if owner in names:
        return names[owner]
    return "(none)" if owner == NO_OWNER else owner.hex()[:8]


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _labelled(counts: Mapping[str, int]) -> str:
    shown = [f"{count} at {label}" for label, count in counts.items() if count]
    return ", ".join(shown) if shown else "none"


def _size(count: float) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"

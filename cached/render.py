"""How the daemon's answers look, as text, as fields for scripts, and as the live view of `top`; asks nobody anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cached.counters import band_of
from cached.keys import NO_OWNER
from cached.protocol import ListedBlock, OwnerLine, OwnersReply

if TYPE_CHECKING:
    from rich.console import RenderableType

Names = Mapping[Any, str]


class OwnersOf(NamedTuple):
    """The owners in one layout, which its fingerprint stands for."""

    layout: str
    reply: OwnersReply


def statistics(stats: Mapping[str, Any]) -> str:
    """The statistics as text: what is there, by priority, and what has happened."""
    layouts = [line for line in stats["layouts"] if line["slot_bytes"]]
    if not layouts:
        return f"capacity  {_size(stats['capacity_bytes'])}, {_size(stats['allocated_bytes'])} allocated; no engine has come yet"
    asked = stats["looked_up"]
    rate = f" ({100 * stats['found'] / asked:.1f} %)" if asked else ""
    shares = (
        f"version {stats['shares_version']}, floors of {stats['floors_total']}" if stats["shares_version"] else "none"
    )
    lines = [
        *(("layout", _layout_text(line, len(layouts) > 1)) for line in layouts),
        ("capacity", f"{stats['capacity_slots']} blocks, {_size(stats['capacity_bytes'])}"),
        ("allocated", f"{stats['allocated_slots']} blocks, {_size(stats['allocated_bytes'])}"),
        ("sessions", f"{stats['sessions']} (an engine that keeps events has two)"),
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


def _layout_text(line: Mapping[str, Any], is_one_of_several: bool) -> str:
    """One layout; what it holds only where the totals do not say it."""
    text = f"{layout_name(line)}, {_size(line['slot_bytes'])} a block"
    if line["name"]:
        text += f", in the part of {line['name']}"
    if is_one_of_several:
        text += (
            f": {line['used']} of {line['capacity_slots']} blocks used, {line['sessions']} sessions, "
            f"found {line['found']} of {line['looked_up']}, {line['stored']} stored, {line['loaded']} loaded, "
            f"{line['evicted']} evicted, {line['unverified']} unverified, {line['corrupt']} corrupt"
        )
    return text


def layout_name(line: Mapping[str, Any]) -> str:
    """How a layout is called: its fingerprint, and what its engines call it."""
    name = line["fingerprint"] or "-"
    return f"{name} ({line['label']})" if line["label"] else str(name)


def verified(line: Mapping[str, Any]) -> str:
    """What a verification found, and in which layout where there are several."""

    def text(of: Mapping[str, Any]) -> str:
        return f"{of['verified']} blocks are sound, {of['corrupt']} were not and are gone, {of['left']} are left"

    several = line["layouts"] if len(line["layouts"]) > 1 else []
    return "\n".join([text(line), *(f"  {each['layout']}  {text(each)}" for each in several)])


def pairs(lines: Sequence[tuple[str, str]]) -> str:
    """Names and values, aligned."""
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def owners(found: Sequence[OwnersOf], names: Names) -> str:
    """A table of owners; with several layouts, of each in each of them."""
    head = ("layout", "owner", "held", "evictable", "floor", "ceiling", "weight", "evicted", "refused")
    rows = [
        (
            each.layout,
            _owner(line.owner, names),
            str(line.held),
            str(line.evictable),
            str(line.floor),
            "-" if line.ceiling is None else str(line.ceiling),
            f"{line.weight:g}",
            str(line.evicted),
            _labelled({count.label: count.value for count in line.refused}),
        )
        for each in found
        for line in each.reply.owners
    ]
    left_off = sum(each.reply.left_off for each in found)
    rest = [f"and {left_off} owners that hold less"] if left_off else []
    return "\n".join([_table(_without_layout([head, *rows], len(found))), *rest])


def shares_in_force(stats: Mapping[str, Any]) -> str:
    """The line below the owners: which shares count, and how much of the tier is promised."""
    if not stats["shares_version"]:
        return "shares: none in force, so nobody has a floor or a ceiling"
    return (
        f"shares: version {stats['shares_version']} in force, floors of {stats['floors_total']} "
        f"of {stats['capacity_slots']} blocks"
    )


def owner_fields(layout: str, line: OwnerLine, names: Names) -> dict[str, Any]:
    """One owner for scripts."""
    return {
        "layout": layout,
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


def blocks(found: Sequence[tuple[str, ListedBlock]], names: Names, num_layouts: int = 1) -> str:
    """A table of blocks and the layouts they are of."""
    head = ("layout", "slot", "block", "parent", "namespace", "priority", "deadline", "owner", "state")
    rows = [
        (
            layout,
            str(block.slot),
            block.block_hash.hex()[:8],
            "-" if block.parent is None else block.parent.hex()[:8],
            block.namespace_fingerprint,
            str(block.priority),
            "-" if block.deadline is None else f"{block.deadline:.1f}",
            _owner(block.owner, names),
            block.state,
        )
        for layout, block in found
    ]
    return _table(_without_layout([head, *rows], num_layouts))


def block_fields(layout: str, block: ListedBlock, names: Names) -> dict[str, Any]:
    """One block for scripts."""
    return {
        "layout": layout,
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
    before: Mapping[str, Any], now: Mapping[str, Any], found: Sequence[OwnersOf], names: Names, seconds: float
) -> dict[str, Any]:
    """One look of `top` for scripts: what is there, and what happened in the seconds before it."""
    layouts = [_layout_look(then, line, seconds) for then, line in zip(before["layouts"], now["layouts"], strict=True)]

    def rate(name: str) -> float:
        return round(max(0, now[name] - before[name]) / seconds, 3)

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
        "stored_bytes_per_s": sum(look["stored_bytes_per_s"] for look in layouts),
        "loaded_bytes_per_s": sum(look["loaded_bytes_per_s"] for look in layouts),
        "layouts": [look for look in layouts if look["layout"]],
        "owners": [owner_fields(layout, line, names) for layout, line in _largest(found)[:50]],
    }


def _layout_look(before: Mapping[str, Any], now: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """What one layout has, and what happened to it; counters of a part that was cut anew meanwhile begin again."""

    def rate(name: str) -> float:
        was = before[name] if before["fingerprint"] == now["fingerprint"] else 0
        return round(max(0, now[name] - was) / seconds, 3)

    return {
        "layout": now["fingerprint"],
        "label": now["label"],
        "part": now["name"],
        **{name: now[name] for name in ("sessions", "capacity_slots", "used", "leased", "unverified")},
        "looked_up_per_s": rate("looked_up"),
        "found_per_s": rate("found"),
        "evicted_per_s": rate("evicted"),
        "stored_bytes_per_s": rate("stored") * now["slot_bytes"],
        "loaded_bytes_per_s": rate("loaded") * now["slot_bytes"],
    }


_FROM = ("device", "host", "computed")


def device_fields(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The device tier for scripts: its blocks, and where prompt tokens came from since the look before. A counter that fell
    is another engine's, which began at 0."""
    if now is None:
        return None
    was = before or now
    names = [f"tokens_{name}" for name in _FROM]
    began_anew = any(now[name] < was[name] for name in names)
    return {
        **{name: now[f"blocks_{name}"] for name in ("total", "used", "idle", "free")},
        **{name: now[name] - (0 if began_anew else was[name]) for name in names},
    }


def _device_line(engine: Mapping[str, Any]) -> str:
    tokens = {name: engine[f"tokens_{name}"] for name in _FROM}
    total = sum(tokens.values())
    served = ", ".join(f"{100 * count / total:.1f} % {name}" for name, count in tokens.items()) if total else "none"
    room = f"{engine['used'] + engine['idle']} of {engine['total']} blocks used, {engine['used']} by requests"
    return f"device tier   {room}   prompt tokens: {served}"


def top(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    found: Sequence[OwnersOf],
    names: Names,
    seconds: float,
    engine: Mapping[str, Any] | None = None,
) -> RenderableType:
    """One look of the live view; `engine` is the device tier's part."""
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
    for band, count in _bands(look["used_by_priority"]):
        bands.add_row(band, str(count), f"{100 * count / max(1, look['used']):.1f} %")
    shares = Table("layout", "owner", "held", "floor", "ceiling", "evicted", "refused", box=None, header_style="bold")
    for layout, line in _largest(found)[:20]:
        refused = sum(count.value for count in line.refused)
        ceiling = "-" if line.ceiling is None else str(line.ceiling)
        shares.add_row(
            layout, _owner(line.owner, names), str(line.held), str(line.floor), ceiling, str(line.evicted), str(refused)
        )
    parts = Table("layout", "label", "blocks", "of", "sessions", "store", "load", box=None, header_style="bold")
    for line in look["layouts"]:
        parts.add_row(
            line["layout"],
            line["label"] or "-",
            str(line["used"]),
            str(line["capacity_slots"]),
            str(line["sessions"]),
            f"{_size(line['stored_bytes_per_s'])}/s",
            f"{_size(line['loaded_bytes_per_s'])}/s",
        )
    device = [] if engine is None else [_device_line(engine)]
    return Group(*device, head, "", parts, "", bands, "", shares)


def _bands(used_by_priority: Mapping[str, int]) -> list[tuple[str, int]]:
    """Blocks by band, the highest first; there may be a hundred priorities, and a screen has fewer lines."""
    counts: dict[str, int] = {}
    for priority in sorted(map(int, used_by_priority), reverse=True):
        band = band_of(priority)
        counts[band] = counts.get(band, 0) + used_by_priority[str(priority)]
    return list(counts.items())


def _largest(found: Sequence[OwnersOf]) -> list[tuple[str, OwnerLine]]:
    """Those that hold most, of whatever layout."""
    lines = [(each.layout, line) for each in found for line in each.reply.owners]
    return sorted(lines, key=lambda pair: -pair[1].held)


def _without_layout(rows: Sequence[Sequence[str]], num_layouts: int) -> Sequence[Sequence[str]]:
    """Where there is one layout only, no row need name it."""
    return rows if num_layouts > 1 else [row[1:] for row in rows]


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

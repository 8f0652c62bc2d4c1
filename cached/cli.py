"""`halocline cache`: asks the running daemon over its socket and prints what it says; holds no opinion of its own."""

from __future__ import annotations

import json
from typing import Any, cast

import click

from cached.client import TierClient

SCHEMA = "halocline.cache_stats.v1"
EXIT_ABSENT = 7
TIMEOUT_S = 2.0


@click.group()
def cache() -> None:
    """Look into the host tier: what it holds, what it has done."""


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, for scripts.")
@click.pass_context
def stats(context: click.Context, as_json: bool) -> None:
    """Show what the host tier holds and has done since its daemon started.

    Counts are blocks. Exits with 7 when no daemon answers.
    """
    socket_path = context.obj.cached.socket
    client = TierClient(socket_path, None, TIMEOUT_S)
    found = client.stats()
    refusal = client.refusal
    client.close()
    if found is None:
        why = (
            refusal.message if refusal is not None else "is it running? `halocline up` or `halocline cached` starts it"
        )
        click.echo(f"no cache daemon answers at {socket_path}: {why}", err=True)
        context.exit(EXIT_ABSENT)
    if as_json:
        click.echo(json.dumps({"schema": SCHEMA, **found}))
    else:
        click.echo(render(found))


def render(found: dict[str, object]) -> str:
    """The statistics as text: what is there, by priority, and what has happened."""
    stats = cast("dict[str, Any]", found)
    if not stats["slot_bytes"]:
        return f"capacity  {_size(stats['capacity_bytes'])}, {_size(stats['allocated_bytes'])} allocated; no engine has come yet"
    asked = stats["looked_up"]
    rate = f" ({100 * stats['found'] / asked:.1f} %)" if asked else ""
    lines = [
        ("layout", f"{stats['layout_fingerprint']}, {_size(stats['slot_bytes'])} a block"),
        ("capacity", f"{stats['capacity_slots']} blocks, {_size(stats['capacity_bytes'])}"),
        ("allocated", f"{stats['allocated_slots']} blocks, {_size(stats['allocated_bytes'])}"),
        ("engines", str(stats["sessions"])),
        ("used", f"{stats['used']} ({stats['idle']} idle, {stats['leased']} leased, {stats['unverified']} unverified)"),
        (
            "being stored",
            f"{stats['reserved']} reserved, {stats['waiting']} waiting, {stats['quarantined']} quarantined",
        ),
        ("by priority", _labelled(stats["used_by_priority"])),
        ("owners", str(stats["owners"])),
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
        ("corrupt", str(stats["corrupt"])),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _labelled(counts: dict[str, int]) -> str:
    shown = [f"{count} at {label}" for label, count in counts.items() if count]
    return ", ".join(shown) if shown else "none"


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"

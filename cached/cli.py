"""`halocline cache`: asks the running daemon over its socket and prints what it says; holds no opinion of its own.

How figures look is `render`'s. What the cache does not know comes from the context object where that has it: tenants' names
(`ctx.obj.tenant_ids`), without which owners are shown as they are, which shares were set for them (`ctx.obj.shares`), and the
engine's figures of its own tier (`ctx.obj.device_tier`).
"""

from __future__ import annotations

import difflib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, NoReturn, Protocol

import click

from cached import render
from cached.keys import OwnerId, owner_id
from cached.observer import TierObserver
from cached.shares import trouble_of

STATS_SCHEMA = "halocline.cache_stats.v1"
OWNERS_SCHEMA = "halocline.cache_owners.v1"
BLOCKS_SCHEMA = "halocline.cache_blocks.v1"
DROP_SCHEMA = "halocline.cache_drop.v1"
VERIFY_SCHEMA = "halocline.cache_verify.v1"
CONFIG_SCHEMA = "halocline.cache_config.v1"
TOP_SCHEMA = "halocline.cache_top.v1"
EXIT_REFUSED = 2
EXIT_UNKNOWN = 3
EXIT_ILLEGAL = 6
EXIT_ABSENT = 7
EXIT_SLOW = 8
TIMEOUT_S = 2.0
POLL_S = 0.05

_as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, for scripts.")


@click.group()
def cache() -> None:
    """Look into the host tier: what it holds, whose it is, what it has done.

    Counts are blocks. Every command exits with 7 when no daemon answers.
    """


@cache.command()
@_as_json
@click.pass_context
def stats(context: click.Context, as_json: bool) -> None:
    """Show what the host tier holds and has done since its daemon started."""
    with _observer(context) as observer:
        found = observer.stats() or _absent(context, observer)
    click.echo(json.dumps({"schema": STATS_SCHEMA, **found}) if as_json else render.statistics(found))


@cache.command()
@click.option(
    "--interval", "interval_s", default=1.0, show_default=True, type=click.FloatRange(0.1, 60), help="Seconds."
)
@click.option("--rounds", type=click.IntRange(1), help="Stop after so many looks; without it at Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a look on stdout, for scripts.")
@click.pass_context
def top(context: click.Context, interval_s: float, rounds: int | None, as_json: bool) -> None:
    """Watch the tiers: room, bands of priority, owners, hit rates, rates of store and load.

    The device's line is the running engine's, and where prompt tokens came from since the look before; without an engine
    that answers it is left out. Everything else is the host tier's.
    """
    names = _names(context)
    # Ctrl-C is how a look that does not end is ended.
    with suppress(KeyboardInterrupt), _observer(context) as observer, _device(context) as device:
        looks = _looks(context, observer, device, interval_s, rounds)
        if as_json:
            for before, now, owners, seconds, engine in looks:
                fields = render.top_fields(before, now, owners, names, seconds)
                click.echo(json.dumps({"schema": TOP_SCHEMA, **fields, "device": engine}))
            return
        from rich.live import Live

        with Live(auto_refresh=False, screen=sys.stdout.isatty()) as live:
            for before, now, owners, seconds, engine in looks:
                live.update(render.top(before, now, owners, names, seconds, engine), refresh=True)


@cache.command("ls")
@click.option(
    "--namespace-fingerprint", metavar="HEX", help="Only blocks of the namespace with these eight hex digits."
)
@click.option("--limit", default=1000, show_default=True, type=click.IntRange(1), help="Most blocks to show.")
@_as_json
@click.pass_context
def list_blocks(context: click.Context, namespace_fingerprint: str | None, limit: int, as_json: bool) -> None:
    """List stored blocks: layout where there are several, slot, name, parent, namespace, priority, deadline, owner.

    Names are cut to eight digits unless --json is given; a deadline is in seconds since the machine booted.
    """
    _check_fingerprint(namespace_fingerprint)
    names = _names(context)
    with _observer(context) as observer:
        layouts = _layouts(context, observer)
        every = ((name, block) for part, name in layouts for block in observer.blocks(namespace_fingerprint, part))
        found = list(islice(every, limit + 1))
        more = len(found) > limit
        del found[limit:]
    if as_json:
        rows = [render.block_fields(layout, block, names) for layout, block in found]
        click.echo(json.dumps({"schema": BLOCKS_SCHEMA, "blocks": rows, "truncated": more}))
        return
    click.echo(render.blocks(found, names, len(layouts)))
    if more:
        click.echo(f"only the first {limit} are shown; raise --limit", err=True)


@cache.command()
@_as_json
@click.pass_context
def owners(context: click.Context, as_json: bool) -> None:
    """Show who holds how much, their floors and ceilings, and what they were refused."""
    names = _names(context)
    with _observer(context) as observer:
        found = _owners(context, observer)
        tier: dict[str, Any] = observer.stats() or _absent(context, observer)
    trouble = _trouble(context, tier)
    if as_json:
        rows = [render.owner_fields(each.layout, line, names) for each in found for line in each.reply.owners]
        head = {
            "version": max((each.reply.version for each in found), default=0),
            "capacity_slots": sum(each.reply.capacity_slots for each in found),
            "left_off": sum(each.reply.left_off for each in found),
            "floors_total": tier["floors_total"],
            "trouble": trouble,
        }
        click.echo(json.dumps({"schema": OWNERS_SCHEMA, **head, "owners": rows}))
    else:
        click.echo(render.owners(found, names))
        click.echo(render.shares_in_force(tier))
        if trouble:
            click.echo(f"warning: {trouble}", err=True)


@cache.command()
@click.option("--tenant", "tenant", metavar="NAME", required=True, help="Whose blocks go.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_as_json
@click.pass_context
def drop(context: click.Context, tenant: str, yes: bool, as_json: bool) -> None:
    """Remove all blocks of one tenant from the host tier, and what descends from them.

    What a device holds is not touched. The tenant's next prompts are computed again.
    """
    known = _tenant_ids(context)
    tenant_id = known.get(tenant)
    if tenant_id is None:
        near = difflib.get_close_matches(tenant, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`halocline tenant list` names them"
        click.echo(f"there is no tenant {tenant!r}; {hint}", err=True)
        context.exit(EXIT_UNKNOWN)
    if not yes and not _can_ask():
        click.echo(f"nothing removed: no terminal to ask on; to drop the blocks of {tenant}, add --yes", err=True)
        context.exit(EXIT_REFUSED)
    if not yes and not click.confirm(f"Remove all host blocks of {tenant}?", err=True):
        context.exit(EXIT_REFUSED)
    with _observer(context) as observer:
        gone = observer.drop_owner(owner_id(tenant_id))
        if gone is None:
            _absent(context, observer)
    line = {"schema": DROP_SCHEMA, "tenant": tenant, "num_blocks": gone}
    click.echo(json.dumps(line) if as_json else f"{gone} blocks of {tenant} are gone")


@cache.command()
@click.option(
    "--timeout", "timeout_s", default=600.0, show_default=True, type=click.FloatRange(0), help="Seconds to wait."
)
@_as_json
@click.pass_context
def verify(context: click.Context, timeout_s: float, as_json: bool) -> None:
    """Read every block again and compare it with its checksum; what does not match goes.

    Blocks are not served before they are verified. Exits with 8 when it takes longer than --timeout; it goes on then.
    """
    with _observer(context) as observer:
        before = observer.stats() or _absent(context, observer)
        asked = observer.verify()
        deadline = time.monotonic() + timeout_s
        while True:
            now: dict[str, Any] = observer.stats() or _absent(context, observer)
            if now["unverified"] == 0 or time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)
    was: dict[str, Any] = before
    line = {
        "asked": asked,
        "verified": now["verified"] - was["verified"],
        "corrupt": now["corrupt"] - was["corrupt"],
        "left": now["unverified"],
        "layouts": [
            {
                "layout": each["fingerprint"],
                "label": each["label"],
                "verified": max(0, each["verified"] - then["verified"]),
                "corrupt": max(0, each["corrupt"] - then["corrupt"]),
                "left": each["unverified"],
            }
            for then, each in zip(was["layouts"], now["layouts"], strict=True)
            if each["fingerprint"]
        ],
    }
    if as_json:
        click.echo(json.dumps({"schema": VERIFY_SCHEMA, **line}))
    else:
        click.echo(render.verified(line))
    if line["left"]:
        context.exit(EXIT_SLOW)


@cache.command()
@_as_json
@click.pass_context
def config(context: click.Context, as_json: bool) -> None:
    """Show the settings that the running daemon has, and what it found of the machine."""
    with _observer(context) as observer:
        found = observer.config() or _absent(context, observer)
    click.echo(
        json.dumps({"schema": CONFIG_SCHEMA, "settings": found}) if as_json else render.pairs(list(found.items()))
    )


@contextmanager
def _observer(context: click.Context) -> Iterator[TierObserver]:
    observer = TierObserver(context.obj.cached.socket, TIMEOUT_S)
    try:
        yield observer
    finally:
        observer.close()


def _absent(context: click.Context, observer: TierObserver) -> NoReturn:
    refusal = observer.refusal
    why = refusal.message if refusal is not None else "is it running? `halocline up` or `halocline cached` starts it"
    click.echo(f"no cache daemon answers at {context.obj.cached.socket}: {why}", err=True)
    raise click.exceptions.Exit(EXIT_ABSENT)


def _looks(
    context: click.Context, observer: TierObserver, device: Device | None, interval_s: float, rounds: int | None
) -> Iterator[Any]:
    """The statistics before and now, the owners, the seconds between, and what the engine says of its tier."""
    before, at = observer.stats() or _absent(context, observer), time.monotonic()
    engine_before = device.look() if device is not None else None
    number = 0
    while rounds is None or number < rounds:
        number += 1
        time.sleep(interval_s)
        now = observer.stats() or _absent(context, observer)
        found = _owners(context, observer)
        seen = time.monotonic()
        engine = device.look() if device is not None else None
        yield before, now, found, seen - at, render.device_fields(engine_before, engine)
        before, at, engine_before = now, seen, engine


def _layouts(context: click.Context, observer: TierObserver) -> list[tuple[int, str]]:
    """The parts that are cut for a layout: their numbers and its fingerprint; one at least."""
    found = observer.layouts()
    if found is None:
        _absent(context, observer)
    return [(part, line["fingerprint"]) for part, line in enumerate(found) if line["fingerprint"]] or [(0, "")]


def _owners(context: click.Context, observer: TierObserver) -> list[render.OwnersOf]:
    return [
        render.OwnersOf(name, observer.owners(part) or _absent(context, observer))
        for part, name in _layouts(context, observer)
    ]


class Device(Protocol):
    """What is needed of an engine's figures."""

    def look(self) -> dict[str, Any] | None: ...
    def close(self) -> None: ...


@contextmanager
def _device(context: click.Context) -> Iterator[Device | None]:
    connect: Callable[[], Device] | None = getattr(context.obj, "device_tier", None)
    device = None if connect is None else connect()
    try:
        yield device
    finally:
        if device is not None:
            device.close()


def _trouble(context: click.Context, tier: dict[str, Any]) -> str | None:
    """Why the shares that were set are not in force; None also where nobody knows which were set."""
    known: Callable[[], tuple[int, int] | None] | None = getattr(context.obj, "shares", None)
    found = None if known is None else known()
    if found is None or not tier["capacity_slots"]:
        return None
    return trouble_of(*found, tier["shares_version"], tier["capacity_bytes"])


def _can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _tenant_ids(context: click.Context) -> dict[str, str]:
    """Ids of tenants by name; empty where nobody knows any."""
    known: Callable[[], dict[str, str]] | None = getattr(context.obj, "tenant_ids", None)
    return {} if known is None else known()


def _names(context: click.Context) -> dict[OwnerId, str]:
    return {owner_id(tenant_id): name for name, tenant_id in _tenant_ids(context).items()}


def _check_fingerprint(text: str | None) -> None:
    if text is None:
        return
    try:
        is_legal = len(bytes.fromhex(text)) == 4
    except ValueError:
        is_legal = False
    if not is_legal:
        click.echo(f"{text!r} is no fingerprint of a namespace; it has eight hex digits", err=True)
        raise click.exceptions.Exit(EXIT_ILLEGAL)

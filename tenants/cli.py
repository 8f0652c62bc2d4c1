"""The commands `halocline tenant …` and `halocline key …`: they change the store, and running gateways follow it.

Decides about words, confirmation and exit codes. The command line's context object brings the configuration
(`ctx.obj.tenants`) and knows what this package does not: what retention is legal (`ctx.obj.check_retention`), and how
large the host tier is set to be (`ctx.obj.host_tier_bytes`). How things look is `render`'s. What is heavy is imported when
a command runs, so that help is quick.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any, Protocol

import click

from tenants import render
from tenants.errors import (
    AccessDenied,
    InvalidValue,
    KeyNotFound,
    TenantExists,
    TenantNotFound,
    TenantsError,
)
from tenants.keys import name_key
from tenants.values import EVEN_SHARE, NO_RETENTION_RULES, ApiKey, CacheShare, RetentionRules

if TYPE_CHECKING:
    from tenants.config import TenantsConfig
    from tenants.store import Store

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130

MAX_DEFAULT_CHARS = 64 * 1024
_SIZE = re.compile(r"[0-9]+(\.[0-9]+)?[A-Za-z]*")
_DAY_S = 86_400

_EXIT_CODES: tuple[tuple[type[TenantsError], int], ...] = (
    (TenantNotFound, 3),
    (KeyNotFound, 3),
    (AccessDenied, 4),
    (TenantExists, 5),
    (InvalidValue, 6),
)

_EXIT_CODE_HELP = """
\b
Exit codes: 0 done, 1 failed, 2 wrong usage or not confirmed, 3 not found,
4 no permission, 5 exists already, 6 not a legal value, 130 interrupted.
"""


class Failure(click.ClickException):
    """A message on its way to standard error, and the exit code that goes with it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance.

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {self.format_message()}", err=True, file=file)


class _Group(click.Group):
    """A group whose commands may raise our errors."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except TenantsError as error:
            raise Failure(str(error), _exit_code(error)) from error
        except BrokenPipeError:
            raise  # click ends quietly when the reader has seen enough.
        except OSError as error:
            _drop_output()
            raise Failure(f"standard output cannot be written: {error.strerror}", EXIT_FAILED) from error
        except KeyboardInterrupt:
            click.echo("\ninterrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        return result


class CheckRetention(Protocol):
    """What this module needs of whoever knows the cache's rules."""

    def __call__(self, rules: RetentionRules) -> tuple[RetentionRules, tuple[str, ...]]:
        """`rules` in one spelling, and what of their default their own ceilings will lower; raises InvalidValue."""


_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, whose form is stable, for scripts.")


@click.group(cls=_Group, epilog=_EXIT_CODE_HELP)
def tenant() -> None:
    """Make, show, suspend and delete tenants.

    A tenant is whoever has a cache of their own: no request is ever answered from another tenant's cache. Running
    gateways follow every change within a second, without a restart. Lists are tables on a terminal and
    tab-separated, without a header, in a pipe.

    \b
    Examples:
      halocline tenant create acme
      halocline key create acme > acme.key
      halocline tenant list --json
    """


@tenant.command("create")
@click.argument("name")
@_json_option
@click.pass_context
def create_tenant(ctx: click.Context, name: str, as_json: bool) -> None:
    """Make the tenant NAME.

    A name has 1 to 63 of the characters a-z, 0-9 and '-', and begins with a letter or a digit. The tenant has no key
    yet; `halocline key create NAME` makes one. A tenant that was deleted and is made again starts with an empty cache.

    \b
    Example:
      halocline tenant create acme
    """
    now = time.time()
    with _store(ctx) as store:
        made = store.create_tenant(name, now)
        render.one(sys.stdout, render.tenant_fields(made, [], now), render.TENANT_SCHEMA, as_json)
    _note(f"next: halocline key create {name} > {name}.key")


@tenant.command("list")
@_json_option
@click.pass_context
def list_tenants(ctx: click.Context, as_json: bool) -> None:
    """List all tenants, by name.

    Columns: name, state, active keys, salt epoch, created, id, what `halocline tenant retention` has set (priority
    ceiling, duration ceiling, default), and what `halocline tenant share` has set (weight, floor and ceiling in bytes);
    not in the table on a terminal: what was set.

    \b
    Examples:
      halocline tenant list
      halocline tenant list | cut -f1
      halocline tenant list --json
    """
    now = time.time()
    with _store(ctx) as store:
        tenants, keys = store.list_tenants(), store.list_keys()
    keys_of: dict[str, list[ApiKey]] = {one.id: [] for one in tenants}
    for key_ in keys:
        keys_of.setdefault(key_.tenant_id, []).append(key_)
    rows = [render.tenant_fields(one, keys_of[one.id], now) for one in tenants]
    render.many(sys.stdout, rows, render.TENANT_SCHEMA, render.TENANT_LIST_SCHEMA, "tenants", as_json)
    if not rows:
        _note("there are no tenants yet; halocline tenant create NAME makes one")


@tenant.command("show")
@click.argument("name")
@_json_option
@click.pass_context
def show_tenant(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show the tenant NAME.

    \b
    Example:
      halocline tenant show acme --json
    """
    with _store(ctx) as store:
        _show_tenant(store, name, as_json)


@tenant.command("suspend")
@click.argument("name")
@_json_option
@click.pass_context
def suspend_tenant(ctx: click.Context, name: str, as_json: bool) -> None:
    """Stop serving the tenant NAME.

    Its requests are answered 403 from the next second on. Keys, salt and cache stay; `halocline tenant resume NAME`
    undoes it.

    \b
    Example:
      halocline tenant suspend acme
    """
    with _store(ctx) as store:
        store.suspend_tenant(name)
        _show_tenant(store, name, as_json)


@tenant.command("resume")
@click.argument("name")
@_json_option
@click.pass_context
def resume_tenant(ctx: click.Context, name: str, as_json: bool) -> None:
    """Serve the tenant NAME again after a suspension.

    \b
    Example:
      halocline tenant resume acme
    """
    with _store(ctx) as store:
        store.resume_tenant(name)
        _show_tenant(store, name, as_json)


@tenant.command("retention")
@click.argument("name")
@click.option("--default", "default_file", metavar="FILE|-", help="JSON for requests that say nothing; - is stdin.")
@click.option("--max-priority", metavar="N|none", help="Priority ceiling: a whole number from 35 to 100.")
@click.option("--max-duration", metavar="SECONDS|none", help="Duration ceiling: more than 0; above priority 35.")
@click.option("--clear", is_flag=True, help="Forget what was set before; with other options, before they are applied.")
@_json_option
@click.pass_context
def change_retention(
    ctx: click.Context,
    name: str,
    default_file: str | None,
    max_priority: str | None,
    max_duration: str | None,
    clear: bool,
    as_json: bool,
) -> None:
    """Set how long blocks of the tenant NAME may stay, and show the tenant.

    The default is a `kv_cache_retention_config` for requests that bring none. The ceilings hold for defaults and
    requests alike: what is above them is lowered, never refused, and the answer says so in `x-halocline-clamped`. What
    is not named stays as it is. Running gateways follow within a second.

    The duration ceiling limits priorities above 35, also where no duration is given, which means for ever; at 35 and
    below the end of a duration changes nothing.

    \b
    Examples:
      halocline tenant retention acme --max-priority 80 --max-duration 3600
      halocline tenant retention acme --default retention.json
      halocline tenant retention acme --max-duration none
      halocline tenant retention acme --clear
    """
    said: dict[str, Any] = {}
    if default_file is not None:
        said["default"] = _read_default(default_file)
    if max_priority is not None:
        said["max_priority"] = _parse_ceiling("--max-priority", max_priority, int, "a whole number")
    if max_duration is not None:
        said["max_duration_s"] = _parse_ceiling("--max-duration", max_duration, float, "a number of seconds")
    check: CheckRetention = ctx.obj.check_retention
    lowered: tuple[str, ...] = ()

    def change(rules: RetentionRules) -> RetentionRules:
        nonlocal lowered
        rules, lowered = check(replace(NO_RETENTION_RULES if clear else rules, **said))
        return rules

    with _store(ctx) as store:
        if said or clear:
            store.change_retention(name, change)
        _show_tenant(store, name, as_json)
    if lowered:
        _note(f"note: the ceilings lower this tenant's own default: {', '.join(lowered)}")


@tenant.command("share")
@click.argument("name")
@click.option("--weight", metavar="N", help="Part of the device's blocks, beside the others': 0.01 to 100; all have 1.")
@click.option("--floor", metavar="SIZE|none", help="Bytes of the host tier that others never take: 8GiB.")
@click.option("--ceiling", metavar="SIZE|none", help="Bytes of the host tier that are never exceeded: 64GiB.")
@click.option("--clear", is_flag=True, help="Forget what was set before; with other options, before they are applied.")
@_json_option
@click.pass_context
def change_share(
    ctx: click.Context,
    name: str,
    weight: str | None,
    floor: str | None,
    ceiling: str | None,
    clear: bool,
    as_json: bool,
) -> None:
    """Set what the tenant NAME may count on of the shared caches, and show the tenant.

    The weight shares out the device's blocks, when it is full, among the tenants that use it. The floor is room in the host
    tier that no other tenant takes, whatever its priorities; what lies idle of it is lent until its owner wants it. The
    ceiling is the most that the tenant ever holds there. What is not named stays as it is. Running gateways follow within
    a second.

    Floors are promises: the cache daemon refuses the shares of all tenants together, and keeps the former ones, while the
    floors add up to more than its tier. `halocline cache owners` and `halocline doctor` show what is in force.

    \b
    Examples:
      halocline tenant share acme --floor 8GiB --ceiling 64GiB
      halocline tenant share acme --weight 2
      halocline tenant share acme --ceiling none
      halocline tenant share acme --clear
    """
    said: dict[str, Any] = {}
    if weight is not None:
        said["weight"] = _parse_weight(weight)
    if floor is not None:
        said["floor_bytes"] = _parse_size("--floor", floor, "no floor") or 0
    if ceiling is not None:
        said["ceiling_bytes"] = _parse_size("--ceiling", ceiling, "no ceiling")

    def change(share: CacheShare) -> CacheShare:
        return replace(EVEN_SHARE if clear else share, **said)

    with _store(ctx) as store:
        if said or clear:
            store.change_share(name, change, time.time())
        _show_tenant(store, name, as_json)
        floors_bytes = sum(share.floor_bytes for share in store.shares().shares.values())
    tier_bytes: int = ctx.obj.host_tier_bytes()
    if floors_bytes > tier_bytes:
        _note(
            f"warning: the floors of all tenants are {render.show_size(floors_bytes)} together, and cached.host_cache_size "
            f"is {render.show_size(tier_bytes)}: a daemon of that size refuses all shares and keeps the former ones; "
            "lower a floor, or raise cached.host_cache_size and restart cached"
        )


@tenant.command("delete")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Delete without asking; needed where there is no terminal.")
@_json_option
@click.pass_context
def delete_tenant(ctx: click.Context, name: str, yes: bool, as_json: bool) -> None:
    """Delete the tenant NAME, its keys and its salt secret.

    There is no way back: its keys stop working within a second and its cache can never be found again, not even by a
    new tenant of the same name. On a terminal you are asked to type the name; elsewhere --yes is needed.

    \b
    Examples:
      halocline tenant delete acme
      halocline tenant delete acme --yes
    """
    now = time.time()
    with _store(ctx) as store:
        doomed = render.tenant_fields(store.get_tenant(name), store.list_keys(name), now)
        if not yes:
            _confirm_by_name(
                name, f"This deletes the tenant {name} with {doomed['active_keys']} active keys, for good."
            )
        store.delete_tenant(name)
    render.one(sys.stdout, {**doomed, "state": "deleted"}, render.TENANT_SCHEMA, as_json)


@click.group(cls=_Group, epilog=_EXIT_CODE_HELP)
def key() -> None:
    """Make, list and revoke API keys.

    A key is shown once, when it is made; the store keeps only a digest of it. It is known by its public id, the
    twelve characters after `hl_live_`. A tenant may have several keys, all with the same cache: to change keys, make
    a new one, put it to use, then revoke the old.

    \b
    Examples:
      halocline key create acme --label laptop > acme.key
      halocline key list acme
      halocline key revoke 3fQm0Zr81LxC
    """


@key.command("create")
@click.argument("tenant_name", metavar="TENANT")
@click.option("--label", default="", help="Words for people, shown in lists: who or what uses the key.")
@click.option("--expires", metavar="WHEN", help="Days from now (30), or an ISO 8601 date or time (2031-01-31, in UTC).")
@_json_option
@click.pass_context
def create_key(ctx: click.Context, tenant_name: str, label: str, expires: str | None, as_json: bool) -> None:
    """Make an API key for TENANT and print it, alone, on standard output.

    This is the only time that it is shown. Send the output to a file that nobody else can read, or to a secret store.

    \b
    Examples:
      (umask 077; halocline key create acme > acme.key)
      halocline key create acme --label ci --expires 30
      halocline key create acme --expires 2031-01-31T12:00:00+01:00
    """
    now = time.time()
    expires_at = None if expires is None else _parse_expiry(expires, now)
    with _store(ctx) as store:
        text = store.create_key(tenant_name, label, expires_at, now)
        named = name_key(text)
        assert named is not None
        made = store.get_key(named.public_id)
        try:
            render.new_key(sys.stdout, text, render.key_fields(made, tenant_name, now), as_json)
            sys.stdout.flush()
        except OSError as error:
            # Nobody has read it, so nobody may use it: a live key that got lost would only be found by a thief.
            store.revoke_key(made.public_id, now)
            _drop_output()
            message = (
                f"the key could not be written to standard output ({error.strerror}); it was revoked, make another"
            )
            raise Failure(message, EXIT_FAILED) from error
    _note(f"key {made.public_id} of {tenant_name}: shown this once, store it now" + _readable_output_warning())


@key.command("list")
@click.argument("tenant_name", metavar="[TENANT]", required=False)
@_json_option
@click.pass_context
def list_keys(ctx: click.Context, tenant_name: str | None, as_json: bool) -> None:
    """List the keys of TENANT, or of all tenants, oldest first.

    Columns: public id, tenant, label, state, created, expires, revoked. No part of a secret is shown: none is kept.

    \b
    Examples:
      halocline key list acme
      halocline key list --json
    """
    now = time.time()
    with _store(ctx) as store:
        names = {one.id: one.name for one in store.list_tenants()}
        keys = store.list_keys(tenant_name)
    # A tenant made between the two questions has no name here yet, so its keys wait for the next list.
    rows = [render.key_fields(one, names[one.tenant_id], now) for one in keys if one.tenant_id in names]
    render.many(sys.stdout, rows, render.KEY_SCHEMA, render.KEY_LIST_SCHEMA, "keys", as_json)
    if not rows:
        _note("there are no keys; halocline key create TENANT makes one")


@key.command("revoke")
@click.argument("public_id")
@_json_option
@click.pass_context
def revoke_key(ctx: click.Context, public_id: str, as_json: bool) -> None:
    """Make the key with this PUBLIC_ID useless, for ever.

    Running gateways refuse it within a second. The public id is the twelve characters after `hl_live_`, and what
    `halocline key list` shows; never write the whole key on a command line, where other users can see it.

    \b
    Example:
      halocline key revoke 3fQm0Zr81LxC
    """
    named = name_key(public_id)
    if named is None:
        # Not repeated: it may be a secret that went astray.
        raise InvalidValue("this is no public id: one has 12 letters and digits; `halocline key list` shows them")
    now = time.time()
    with _store(ctx) as store:
        revoked = store.revoke_key(named.public_id, now)
        names = {one.id: one.name for one in store.list_tenants()}
    fields = render.key_fields(revoked, names.get(revoked.tenant_id, ""), now)
    render.one(sys.stdout, fields, render.KEY_SCHEMA, as_json)
    if named.carried_secret:
        _note(
            "warning: a whole key on the command line is visible to other users (ps) and stays in the shell's history; "
            f"the public id is enough: halocline key revoke {named.public_id}"
        )


@contextlib.contextmanager
def _store(ctx: click.Context) -> Iterator[Store]:
    from tenants.store import open_store

    config: TenantsConfig = ctx.obj.tenants
    with open_store(config.url, config.master_key_file) as store:
        yield store


def _show_tenant(store: Store, name: str, as_json: bool) -> None:
    fields = render.tenant_fields(store.get_tenant(name), store.list_keys(name), time.time())
    render.one(sys.stdout, fields, render.TENANT_SCHEMA, as_json)


def _read_default(name: str) -> str:
    try:
        with click.open_file(name, encoding="utf-8") as file:
            text = file.read(MAX_DEFAULT_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidValue(f"--default: {name} cannot be read: {why}") from error
    if len(text) > MAX_DEFAULT_CHARS:
        raise InvalidValue(f"--default: {name} has more than {MAX_DEFAULT_CHARS} characters; no default is that long")
    return text


def _parse_ceiling(option: str, text: str, kind: type[int] | type[float], legal: str) -> float | None:
    """What an option says; None for `none`. Whether a number is in range is for the check to say."""
    if text == "none":
        return None
    try:
        return kind(text)
    except ValueError:
        raise InvalidValue(f"{option} is {text[:64]!r}; it must be {legal}, or none for no ceiling") from None


def _parse_weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidValue(f"--weight is {text[:64]!r}; it must be a number from 0.01 to 100") from None


def _parse_size(option: str, text: str, absent: str) -> int | None:
    """Bytes by the same rules as sizes among the settings; None for `none`."""
    from pydantic import ByteSize, TypeAdapter

    if text == "none":
        return None
    try:
        # Alone it reads the beginning of a text and drops the rest: 25% would be 25 bytes.
        if not _SIZE.fullmatch(text):
            raise ValueError
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValueError:
        raise InvalidValue(
            f"{option} is {text[:64]!r}; it must be a size, such as 512MiB or 8GiB, or none for {absent}"
        ) from None


def _confirm_by_name(name: str, consequence: str) -> None:
    """Go on only when a person types `name`; without a terminal nobody is waited for."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise Failure(f"not deleted: no terminal to confirm on; to delete {name} all the same, add --yes", EXIT_REFUSED)
    click.echo(f"{consequence}\nType the tenant's name to go on: ", err=True, nl=False)
    if sys.stdin.readline().strip() != name:
        raise Failure("not deleted: that was not the tenant's name", EXIT_REFUSED)


def _parse_expiry(text: str, now: float) -> float:
    try:
        if text.isascii() and text.isdigit():
            expires_at = now + int(text) * _DAY_S
        else:
            when = datetime.fromisoformat(text)
            expires_at = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
        render.iso_time(expires_at)  # What cannot be shown later is refused now.
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(
            "write a number of days (30), a date (2031-01-31) or a time (2031-01-31T12:00:00+01:00), before the year 10000",
            param_hint="--expires",
        ) from error
    return expires_at


def _readable_output_warning() -> str:
    """A warning when the key went into a file that others can read; it is too late for an umask then."""
    try:
        mode = os.fstat(sys.stdout.fileno()).st_mode
    except (OSError, ValueError):
        return ""
    if stat.S_ISREG(mode) and mode & 0o077:
        return "\nwarning: other users can read that file; run chmod 600 on it, and umask 077 before the next"
    return ""


def _exit_code(error: TenantsError) -> int:
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), EXIT_FAILED)


def _drop_output() -> None:
    """Send what could not be written nowhere, or the interpreter would try again at its end and complain."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _note(text: str) -> None:
    click.echo(text, err=True)

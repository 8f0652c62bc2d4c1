"""Shapes the command tree: sub-commands imported when used, did-you-mean, and flags that work everywhere.

`--state-dir` and `--config` may stand after any sub-command, also after those that other packages define: the flags are
added to their commands here, so that no package has to know of them. Settings are loaded when a command first asks.
"""

from __future__ import annotations

import copy
import difflib
import importlib
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import click

from command.directories import make_private
from command.settings import Flags, Settings, load_settings

if TYPE_CHECKING:
    from cached.config import CachedConfig
    from command.device_tier import DeviceTier
    from engine.config import EngineConfig
    from gateway.config import GatewayConfig
    from tenants.config import TenantsConfig
    from tenants.values import RetentionRules


class CommandContext:
    """`ctx.obj` of every command: the flags said so far, and the settings, loaded on first use."""

    def __init__(self) -> None:
        self.state_dir: str | None = None
        self.config: str | None = None
        self._values: list[tuple[str, str, Any, str]] = []

    def say(self, section: str, key: str, value: Any, flag: str) -> None:
        """A flag that stands for a setting; has to be said before settings are first read."""
        self._values.append((section, key, value, flag))

    @cached_property
    def settings(self) -> Settings:
        return load_settings(Flags(self.state_dir, self.config, tuple(self._values)))

    @property
    def tenants(self) -> TenantsConfig:
        # The first command of all may be one that makes a tenant: the store's directory is then not there yet.
        if not self.settings.paths.state.exists():
            make_private(self.settings.paths.state)
        return self.settings.tenants

    @property
    def cached(self) -> CachedConfig:
        return self.settings.cached

    @property
    def engine(self) -> EngineConfig:
        return self.settings.engine

    @property
    def gateway(self) -> GatewayConfig:
        return self.settings.gateway

    def tenant_ids(self) -> dict[str, str]:
        """Ids of tenants by name, for `halocline cache`, which knows owners only; empty where there is no store yet."""
        from tenants.errors import TenantsError
        from tenants.store import open_store

        if not self.settings.paths.state.exists():
            return {}
        config = self.settings.tenants
        try:
            with open_store(config.url, config.master_key_file) as store:
                return {tenant.name: tenant.id for tenant in store.list_tenants()}
        except TenantsError:
            return {}

    def shares(self) -> tuple[int, int] | None:
        """For `halocline cache` and `doctor`: the version of all tenants' shares and the bytes of their floors together; None
        where nobody can say."""
        from tenants.errors import TenantsError
        from tenants.store import open_store

        if not self.settings.paths.state.exists():
            return None
        config = self.settings.tenants
        try:
            with open_store(config.url, config.master_key_file) as store:
                table = store.shares()
        except TenantsError:
            return None
        return table.version, sum(share.floor_bytes for share in table.shares.values())

    def device_tier(self) -> DeviceTier:
        """A connection to the engine, for `halocline cache top`; to be closed."""
        from command.device_tier import DeviceTier

        return DeviceTier(self.settings.engine.socket)

    def host_tier_bytes(self) -> int:
        """How large the host tier is set to be; the daemon that runs may be another's."""
        return int(self.settings.cached.host_cache_size)

    def check_retention(self, rules: RetentionRules) -> tuple[RetentionRules, tuple[str, ...]]:
        """What `halocline tenant retention` has checked, since tenants know nothing of the cache's rules."""
        from gateway.retention import check_rules

        return check_rules(rules)


class HaloclineGroup(click.Group):
    """A group that knows where commands of other packages live and imports one only when it is called."""

    def __init__(self, *args: Any, elsewhere: dict[str, tuple[str, str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # name -> (module:attribute, one line of help, so that --help need not import the module)
        self._elsewhere = elsewhere or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self._elsewhere])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is None and cmd_name in self._elsewhere:
            module, _, attribute = self._elsewhere[cmd_name][0].partition(":")
            command = getattr(importlib.import_module(module), attribute)
        return None if command is None else with_global_flags(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise click.UsageError(error.message + did_you_mean(args[0], self.list_commands(ctx)), ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: list[tuple[str, str]] = []
        for name in self.list_commands(ctx):
            if name in self._elsewhere:
                rows.append((name, self._elsewhere[name][1]))
            elif (command := super().get_command(ctx, name)) is not None and not command.hidden:
                rows.append((name, command.get_short_help_str(limit=90)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """A hint to append to a message about an unknown word; empty when nothing is near."""
    near = difflib.get_close_matches(word, known, n=2, cutoff=0.5)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def with_global_flags(command: click.Command) -> click.Command:
    """A copy of `command` and of everything below it that also takes `--state-dir` and `--config`.

    A copy, because the command is another package's: whoever calls it there must find it as it was made.
    """
    own = copy.copy(command)
    if not any(parameter.name == "state_dir" for parameter in command.params):
        own.params = [*command.params, *global_flags()]
    if isinstance(own, click.Group):
        own.commands = {name: with_global_flags(child) for name, child in own.commands.items()}
        if not isinstance(own, HaloclineGroup):
            _suggest(own)
    return own


def global_flags() -> list[click.Option]:
    """The two flags that every command takes; what they say goes to `ctx.obj`."""
    return [
        click.Option(
            ["--state-dir"],
            metavar="DIR",
            expose_value=False,
            callback=_remember,
            help="Where keys, tenants, models, logs and sockets lie. [HALOCLINE_STATE_DIR; ~/.local/state/halocline]",
        ),
        click.Option(
            ["--config"],
            metavar="FILE",
            expose_value=False,
            callback=_remember,
            help="TOML file with settings. [HALOCLINE_CONFIG; ~/.config/halocline/config.toml, as root /etc/halocline/config.toml]",
        ),
    ]


def _remember(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None and parameter.name is not None:
        setattr(ctx.ensure_object(CommandContext), parameter.name, value)


def _suggest(group: click.Group) -> None:
    """Gives a plain group of another package the did-you-mean of ours."""
    plain = group.resolve_command

    def resolve(ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return plain(ctx, args)
        except click.UsageError as error:
            if "Did you mean" in error.message:
                raise
            raise click.UsageError(error.message + did_you_mean(args[0], group.list_commands(ctx)), ctx) from None

    group.resolve_command = resolve  # type: ignore[method-assign]

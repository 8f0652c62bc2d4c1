"""`halocline simulate` and `halocline tune`: a trace through the engine's core, and what comes out for people and scripts.

What is simulated is `engine/simulate.py`'s, what a trace is `engine/traces.py`'s; here are options, progress, tables and
files.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from command.errors import CommandError, Exit
from command.group import CommandContext, HaloclineGroup
from command.output import print_table

if TYPE_CHECKING:
    from cached.retention import RetentionConfig
    from engine.simulate import RunResult, SimulationResult
    from engine.trace_files import Trace
    from engine.traces import TracedRequest
    from engine.tune import Recommendation, SizeFigures

SIMULATE_SCHEMA = "halocline.simulate.v1"
TUNE_SCHEMA = "halocline.tune.v1"
MAX_RUNS = 64
MAX_BLOCKS = 1 << 24
MAX_RETENTION_BYTES = 1 << 20
ASSUMED_PREFILL_RATE = 1000.0
ASSUMED_POOL_TOKENS = 65536
_PROGRESS_EVERY = 64


@click.command()
@click.argument("trace", metavar="TRACE", type=click.Path(path_type=Path))
@click.option(
    "--blocks",
    multiple=True,
    metavar="N[,N…]",
    default=("2%,5%,10%",),
    help="Capacities of the pool, in blocks or in per cent of the trace's distinct blocks. [2%,5%,10%]",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME[,NAME…]",
    default=("lru,priority",),
    help="lru, priority (seen again: 80 for 240 s), adaptive, retention (what --retention says), belady (the ceiling: "
    "it knows the future). [lru,priority]",
)
@click.option(
    "--host-blocks", type=click.IntRange(0, MAX_BLOCKS), default=0, help="Blocks of a host tier behind it. [0]"
)
@click.option(
    "--retention",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="JSON kv_cache_retention_config that every request carries, under the policy `retention`.",
)
@click.option("--tokens-per-block", type=int, metavar="N", help="Block size. [16; a mooncake trace's own 512]")
@click.option("--tokenizer", metavar="DIR", type=click.Path(path_type=Path), help="For text. [the engine's model]")
@click.option("--partial-reuse/--no-partial-reuse", default=True, help="Of text only: others do not know. [on]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for scripts.")
@click.option("--plot", metavar="FILE.png", type=click.Path(path_type=Path), help="A chart of hit rate over capacity.")
@click.pass_context
def simulate(
    ctx: click.Context,
    trace: Path,
    blocks: tuple[str, ...],
    policies: tuple[str, ...],
    host_blocks: int,
    retention: Path | None,
    tokens_per_block: int | None,
    tokenizer: Path | None,
    partial_reuse: bool,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Replay a trace through the engine's own cache, without a model, and say what would have been served.

    TRACE is mooncake JSONL, JSONL with texts, or a request log (`record`), as a file (.gz and .xz, too), an archive, or
    a directory of them. Each request is served at once and is over before the next; generated tokens are left out.

    \b
    Examples:
      halocline simulate trace.jsonl.gz
      halocline simulate trace.jsonl --blocks 1000,4000,16000 --policy lru,priority,belady --plot hits.png
      halocline simulate requests.log --blocks 2000 --host-blocks 20000 --retention retention.json --json
    """
    from engine.simulate import Simulation, SimulationSettings

    chart = _chart() if plot is not None else None
    config = None if retention is None else _read_retention(retention)
    names = _names(policies, config is not None)
    with _opened(ctx, trace, tokenizer) as opened:
        capacities = _capacities(blocks, opened, tokens_per_block)
        if len(capacities) * len(names) > MAX_RUNS:
            raise CommandError(f"{len(capacities)} capacities × {len(names)} policies are more than {MAX_RUNS} runs", Exit.INVALID)  # fmt: skip
        settings = SimulationSettings(capacities, names, host_blocks, tokens_per_block, config, partial_reuse)
        simulation = Simulation(settings, opened.format)
        for request in _watched(opened, "replaying"):
            simulation.take(request)
        result = simulation.result()
    if not result.requests:
        raise CommandError(f"{trace} has no whole request in it", Exit.INVALID)
    if chart is not None and plot is not None:
        chart(result, plot)
    if as_json:
        click.echo(json.dumps(simulation_document(trace, result), indent=2))
    else:
        _print_simulation(result)


@click.group(cls=HaloclineGroup)
def tune() -> None:
    """Find settings from what was asked before."""


@tune.command("block-size")
@click.option("--from", "trace", metavar="TRACE", type=click.Path(path_type=Path), help="A trace, as for simulate.")
@click.option("--last", "hours", type=click.FloatRange(min=0, min_open=True), metavar="HOURS", help="The engine's own request log: the running one's, else the setting's.")  # fmt: skip
@click.option("--capacity", type=click.IntRange(min=128), metavar="TOKENS", help="KV memory, equal for all sizes. [the engine's]")  # fmt: skip
@click.option("--prefill-rate", type=click.FloatRange(min=0, min_open=True), metavar="TOKENS/S", help="[as the running engine measures]")  # fmt: skip
@click.option("--tokenizer", metavar="DIR", type=click.Path(path_type=Path), help="For text. [the engine's model]")
@click.option("--partial-reuse/--no-partial-reuse", default=None, help="Of text only. [as the engine is set]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for scripts.")
@click.pass_context
def block_size(
    ctx: click.Context,
    trace: Path | None,
    hours: float | None,
    capacity: int | None,
    prefill_rate: float | None,
    tokenizer: Path | None,
    partial_reuse: bool | None,
    as_json: bool,
) -> None:
    """Replay prompts at every block size, and recommend one.

    A request log knows sizes from 8 up, a trace of text all from 2 up.

    \b
    Examples:
      halocline tune block-size --last 24
      halocline tune block-size --from prompts.jsonl --capacity 100000 --prefill-rate 4000
    """
    from engine.tune import BlockSizeTuner, recommend

    engine = ctx.ensure_object(CommandContext).engine
    if (trace is None) == (hours is None):
        raise click.UsageError("Give either --from TRACE or --last HOURS.")
    running = _running_engine(engine) if hours is not None or prefill_rate is None else {}
    since = None
    if hours is not None:
        trace, since = _request_log(engine, running), time.time() - hours * 3600
    assert trace is not None
    rate, rate_origin = _prefill_rate(running, prefill_rate)
    pool, pool_origin = _pool_tokens(engine, capacity)
    partial = engine.enable_partial_reuse if partial_reuse is None else partial_reuse
    with _opened(ctx, trace, tokenizer) as opened:
        tuner = BlockSizeTuner(opened.format, pool, rate, partial)
        for request in _watched(opened, "replaying"):
            if since is None or request.at_s >= since:
                tuner.take(request)
        trace_format = opened.format
    figures = tuner.figures()
    if not figures:
        raise CommandError(f"{trace} has no request{' of that time' if since else ''} in it", Exit.INVALID)
    advice = recommend(figures)
    basis = {
        "trace": str(trace),
        "format": trace_format,
        "requests": tuner.num_requests,
        "capacity_tokens": pool,
        "capacity_origin": pool_origin,
        "prefill_tokens_per_s": rate,
        "prefill_origin": rate_origin,
    }
    if as_json:
        click.echo(json.dumps(tuning_document(basis, figures, advice), indent=2))
        return
    _print_tuning(basis, figures, advice)


# Documents. ---------------------------------------------------------------------------------------------------------


def simulation_document(trace: Path, result: SimulationResult) -> dict[str, Any]:
    """What `simulate --json` prints."""
    return {
        "schema": SIMULATE_SCHEMA,
        "trace": {
            "path": str(trace),
            "format": result.trace_format,
            "requests": result.requests,
            "prompt_tokens": result.tokens_prompt,
            "block_references": result.blocks_referenced,
        },
        "tokens_per_block": result.tokens_per_block,
        "runs": [{**asdict(run), "hit_rate": round(run.hit_rate, 6)} for run in result.runs],
    }


def tuning_document(basis: dict[str, Any], figures: list[SizeFigures], advice: Recommendation) -> dict[str, Any]:
    """What `tune block-size --json` prints."""
    return {
        "schema": TUNE_SCHEMA,
        **basis,
        "sizes": [asdict(each) for each in figures],
        "recommended": advice.tokens_per_block,
        "reason": advice.reason,
    }


def _print_simulation(result: SimulationResult) -> None:
    base = {run.blocks: run.hit_rate for run in result.runs if run.policy == "lru"}
    columns = ("policy", "blocks", "hit rate", "vs lru", "device", "host", "evicted", "never reused", "refused")
    print_table(columns, [_row(run, base.get(run.blocks)) for run in result.runs])
    click.echo(
        f"{result.requests:,} requests, {result.tokens_prompt:,} prompt tokens, {result.tokens_per_block} tokens per block",
        err=True,
    )


def _row(run: RunResult, base: float | None) -> tuple[str, ...]:
    versus = f"{run.hit_rate / base - 1:+.1%}" if base else ""
    return (
        run.policy,
        str(run.blocks),
        f"{run.hit_rate:.2%}",
        versus,
        f"{run.tokens_device / run.tokens_prompt:.2%}",
        f"{run.tokens_host / run.tokens_prompt:.2%}",
        str(run.evicted),
        str(run.dropped_unused),
        str(run.refused),
    )


def _print_tuning(basis: dict[str, Any], figures: list[SizeFigures], advice: Recommendation) -> None:
    columns = ("tokens per block", "reused", "blocks", "metadata", "first token")
    print_table(
        columns,
        [
            (
                str(each.tokens_per_block),
                f"{each.hit_rate:.2%}",
                str(each.blocks),
                f"{each.metadata_bytes / 2**20:.1f} MiB",
                f"{each.ttft_s * 1e3:.1f} ms",
            )
            for each in figures
        ],
    )
    click.echo(
        f"{basis['requests']:,} requests; KV memory of {basis['capacity_tokens']:,} tokens ({basis['capacity_origin']}); "
        f"prefill at {basis['prefill_tokens_per_s']:,.0f} tokens/s ({basis['prefill_origin']})",
        err=True,
    )
    click.echo(f"recommended\t{advice.tokens_per_block}\t{advice.reason}")


# Reading. -----------------------------------------------------------------------------------------------------------


def _opened(ctx: click.Context, trace: Path, tokenizer: Path | None) -> Trace:
    from engine.trace_files import Tokenize, Trace, tokenizer_of

    def tokenize() -> Tokenize:
        return tokenizer_of(tokenizer or ctx.ensure_object(CommandContext).engine.model_dir)

    return Trace(trace, tokenize, lambda sentence: click.echo(f"warning: {sentence}", err=True))


def _watched(trace: Trace, stage: str) -> Iterator[TracedRequest]:
    """The trace's requests, with a bar on stderr if somebody looks."""
    with _bar(stage, trace.num_bytes) as advance:
        for number, request in enumerate(trace.requests()):
            yield request
            if number % _PROGRESS_EVERY == 0:
                advance(trace.bytes_read)


@contextmanager
def _bar(stage: str, total: int) -> Iterator[Callable[[int], None]]:
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(stage, total=total)
        yield lambda done: progress.update(task, completed=done)


def _capacities(said: tuple[str, ...], trace: Trace, tokens_per_block: int | None) -> tuple[int, ...]:
    words = _words(said, "--blocks")
    distinct = _count_distinct(trace, tokens_per_block) if any(word.endswith("%") for word in words) else 0
    found = []
    for word in words:
        try:
            count = max(1, _per_cent(word, distinct)) if word.endswith("%") else int(word)
        except (ValueError, OverflowError):
            raise CommandError(f"--blocks: {word!r} is neither a number nor a percentage, such as 4000 or 5%", Exit.INVALID) from None  # fmt: skip
        if not 1 <= count <= MAX_BLOCKS:
            raise CommandError(f"--blocks: {word} are {count} blocks; legal are 1 to {MAX_BLOCKS}", Exit.INVALID)
        found.append(count)
    return tuple(dict.fromkeys(found))


def _per_cent(word: str, whole: int) -> int:
    share = float(word[:-1])
    if not 0 < share <= 100:
        raise ValueError(share)
    return int(whole * share / 100)


def _count_distinct(trace: Trace, tokens_per_block: int | None) -> int:
    from engine.simulate import DistinctBlocks

    blocks = DistinctBlocks(trace.format, tokens_per_block)
    for request in _watched(trace, "counting blocks"):
        blocks.take(request)
    return len(blocks)


def _names(said: tuple[str, ...], has_retention: bool) -> tuple[str, ...]:
    from engine.policies import POLICIES

    names = list(dict.fromkeys(_words(said, "--policy")))
    for name in names:
        if name not in POLICIES:
            raise CommandError(f"--policy: there is no {name!r}; there are {', '.join(POLICIES)}", Exit.INVALID)
    if has_retention and "retention" not in names:
        names.append("retention")
    return tuple(names)


def _words(said: tuple[str, ...], flag: str) -> list[str]:
    words = [word.strip() for each in said for word in each.split(",") if word.strip()]
    if not words:
        raise CommandError(f"{flag} is empty", Exit.USAGE)
    return words


def _read_retention(path: Path) -> RetentionConfig:
    from cached.errors import RetentionError
    from cached.retention import parse_retention

    try:
        with path.open("rb") as file:
            raw = json.loads(file.read(MAX_RETENTION_BYTES))
        return parse_retention(raw.get("kv_cache_retention_config", raw) if isinstance(raw, dict) else raw)
    except FileNotFoundError:
        raise CommandError(f"--retention: there is no file {path}", Exit.NOT_FOUND) from None
    except (OSError, ValueError, RecursionError, RetentionError) as error:
        raise CommandError(f"--retention {path}: {error}", Exit.INVALID) from None


def _chart() -> Callable[[SimulationResult, Path], None]:
    from command.chart import MISSING, is_available, save_chart

    if not is_available():  # Said before the minutes that a replay may take.
        raise CommandError(MISSING)
    return save_chart


# What tuning rests on. ----------------------------------------------------------------------------------------------


def _request_log(engine: Any, running: dict[str, Any]) -> Path:
    """Where the running engine writes, which a flag may have said; else where the settings say that one would."""
    written = running.get("settings", {}).get("record")
    if written:
        return Path(written)
    if engine.record is None:
        raise CommandError(
            "--last reads the engine's request log, which is off; set engine.record, or start it with --record FILE",
            Exit.INVALID,
        )
    return Path(engine.record)


def _prefill_rate(running: dict[str, Any], said: float | None) -> tuple[float, str]:
    if said is not None:
        return said, "--prefill-rate"
    measured = running.get("rates", {}).get("prefill_tokens_per_s")
    if measured:
        return float(measured), "measured by the running engine"
    why = "since the running engine has measured none yet" if running else "since no engine runs"
    return ASSUMED_PREFILL_RATE, f"assumed, {why}; give --prefill-rate"


def _running_engine(engine: Any) -> dict[str, Any]:
    """Figures and settings of the engine that runs; empty without one."""
    import asyncio

    return asyncio.run(_statistics(str(engine.socket))) or {}


async def _statistics(socket: str) -> dict[str, Any] | None:
    import asyncio

    from engine.client import EngineClient
    from engine.errors import EngineUnavailable

    client = EngineClient(socket, "tune")
    await client.start()
    try:
        for _ in range(10):
            if client.connected:
                return await client.stats()
            await asyncio.sleep(0.05)
        return None
    except EngineUnavailable:
        return None
    finally:
        await client.close()


def _pool_tokens(engine: Any, said: int | None) -> tuple[int, str]:
    """KV memory in tokens: said, or what the engine's model and settings come to on a CPU."""
    if said is not None:
        return said, "--capacity"
    try:
        model = json.loads((engine.model_dir / "config.json").read_text())
        heads = model["num_attention_heads"]
        width = model.get("head_dim") or model["hidden_size"] // heads
        values = model["num_hidden_layers"] * 2 * (model.get("num_key_value_heads") or heads) * width
        item_bytes = 2 if engine.dtype in ("bfloat16", "float16") else 4
        pool = int(engine.device_cache_size or 2**30) // (values * item_bytes)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return ASSUMED_POOL_TOKENS, "assumed; give --capacity"
    return max(128, pool), "the engine's device_cache_size" if engine.device_cache_size else "1 GiB, the CPU's default"

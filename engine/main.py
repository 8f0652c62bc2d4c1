"""Starts and stops one engine process: model, warm-up, threads, socket, readiness; and the reverse.

It decides the order of start and stop and the exit code. The environment that torch reads is set before anything that
imports torch; the model is loaded before the socket exists, so that whoever can connect can be served.
"""

from __future__ import annotations

import engine.environment  # noqa: F401  (first: what it sets is read when torch is loaded)

# isort: split
import asyncio
import contextlib
import gc
import os
import pwd
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import structlog
import uvloop

from cached.client import TierClient, prepare_copies
from cached.protocol import TierHello
from engine import host_events, logs
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineConfigError, EngineError, ModelRefused
from engine.kernel_builds import KernelBuilds, start_builds
from engine.loop import Inbox, StepLoop
from engine.metrics import MetricsEndpoint, check_listen
from engine.pace import StepRates, work_of
from engine.plan import Chunk, SampleRequest, StepPlan
from engine.protocol import Sampling
from engine.rates import Rate
from engine.request_recorder import RequestRecorder
from engine.server import EngineServer, ServerFacts, clear_socket
from engine.tier import TierWorker
from engine.values import CoreSettings

if TYPE_CHECKING:
    from engine.runner import ModelRunner

STEP_THREAD_END_S: Final = 5.0
TIER_DRAIN_S: Final = 2.0
WARM_UP_FAR: Final = 1536
WARM_UP_DECODES: Final = 5
STOPPING: Final = "The engine is stopping; the request may be retried."

log = structlog.get_logger("engine.main")


def run(config: EngineConfig) -> int:
    """Serve until SIGTERM or SIGINT; the exit code is 0 for an orderly stop, 1 for a failure, 2 for a setting or a model
    that has to be another."""
    logs.configure(config.log_level)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # While loading there is nothing to put away.
    try:
        # Before the minutes that a model may take, not after.
        clear_socket(config.socket)
        if config.metrics_listen:
            check_listen(config.metrics_listen)
        runner, prefill_rate, step_rates = _load(config)
        gc.collect()
        gc.freeze()  # The model stays; no collection has to walk it again.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as event_loop:
            return event_loop.run(_serve(config, runner, prefill_rate, step_rates))
    except (EngineConfigError, ModelRefused) as error:  # What a second try would find as it is.
        print(f"engine: {error}", file=sys.stderr, flush=True)  # noqa: T201
        return 2
    except EngineError as error:
        print(f"engine: {error}", file=sys.stderr, flush=True)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)


# Loading. -----------------------------------------------------------------------------------------------------------


def _load(config: EngineConfig) -> tuple[ModelRunner, Rate, StepRates]:
    """The runner, and what a step was measured to cost, from a thread that is over.

    OpenMP keeps a team of threads for each thread that has computed, as long as that lives; and with more of them in all
    than there are processors, none waits a moment for work any more (`engine/environment.py`). So whoever steps must be
    the only one.
    """
    builds = start_builds(config)
    with ThreadPoolExecutor(1, "engine-load") as loader:
        try:
            return loader.submit(_load_here, config, builds).result()
        except KeyboardInterrupt:
            builds.stop()
            sys.stderr.flush()
            os._exit(0)  # There is nothing to leave in order yet, and the thread cannot be interrupted inside torch.
        finally:
            builds.stop()


def _load_here(config: EngineConfig, builds: KernelBuilds) -> tuple[ModelRunner, Rate, StepRates]:
    progress = Progress()
    progress("loading libraries", 0.0)
    from engine.runner import load_runner  # Imports torch, which takes seconds: not before it is needed.

    runner = load_runner(config, progress, builds)
    progress("measuring a full step", 0.0)
    return runner, *warm_up(runner, config.max_num_tokens)


class Progress:
    """Lines on stderr, and the service manager's status, at most one per stage and tenth."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, stage: str, share: float) -> None:
        line = f"engine: {stage} {int(share * 10) * 10} %"
        if line != self._last and stage != "ready":  # The model is; the engine is not yet.
            self._last = line
            print(line, file=sys.stderr, flush=True)  # noqa: T201
            notify(f"STATUS={line}")


def warm_up(runner: ModelRunner, max_num_tokens: int) -> tuple[Rate, StepRates]:
    """Run a prefill of one step's length, and tokens after it, on blocks nobody uses yet.

    The core never hears of it, so it counts nowhere (kv-semantics 7.1). A full step cannot meet a request unprepared
    after this, and the times are the first measurements of the prefill rate and of what steps cost.
    """
    info = runner.info
    rate, step_rates = Rate(), StepRates(info.attended_at_once)
    room = min(info.num_blocks * info.tokens_per_block, info.max_context_tokens)
    num_tokens = max(1, min(max_num_tokens, room) - 1)
    far = min(WARM_UP_FAR, room - num_tokens)
    kinds = [(0, num_tokens, 1), (num_tokens, 1, WARM_UP_DECODES)]
    if far >= num_tokens:
        # What attention costs, and what reading for it does: the first time finds nothing in a cache.
        kinds += [(far, min(16, num_tokens), 2), (far, min(64, num_tokens), 1)]
    measured = []
    for start, length, times in kinds:
        plan = _warm_up_plan(start, length, info.tokens_per_block)
        measured.append((work_of(plan), min(_seconds(runner, plan) for _ in range(times))))
    rate.observe(num_tokens, measured[0][1])
    step_rates.begin_with(measured)
    return rate, step_rates


def _seconds(runner: ModelRunner, plan: StepPlan) -> float:
    began = time.monotonic()
    runner.execute(plan, lambda: False)
    return time.monotonic() - began


def _warm_up_plan(start: int, length: int, tokens_per_block: int) -> StepPlan:
    tokens = (1,) * length
    num_blocks = -(-(start + length) // tokens_per_block)
    sample = SampleRequest(Sampling(temperature=0.0), 0, 0, tokens, (), True)
    return StepPlan(0, (), (Chunk(0, start, tokens, tuple(range(num_blocks)), sample),))


# Serving. -----------------------------------------------------------------------------------------------------------


async def _serve(config: EngineConfig, runner: ModelRunner, prefill_rate: Rate, step_rates: StepRates) -> int:
    loop = asyncio.get_running_loop()
    over: asyncio.Future[int] = loop.create_future()

    def end(code: int) -> None:
        if not over.done():
            over.set_result(code)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, 0)
    incarnation = os.urandom(8).hex()
    settings = core_settings(config, runner)
    inbox = Inbox()
    server = EngineServer(
        _facts(config, runner, settings, incarnation),
        inbox,
        tier="absent" if settings.tier_enabled else "none",
        allowed_uids=frozenset(_uid(name) for name in config.allowed_users),
        event_buffer_max_size=config.event_buffer_max_size,
        on_ended=lambda failure: end(1) if failure else None,
    )
    tier = _tier_worker(config, runner, inbox, server) if settings.tier_enabled else None
    recorder = None
    if config.record is not None:
        recorder = RequestRecorder(config.record, config.state_dir, runner.info.layout_fingerprint)
    steps = StepLoop(
        EngineCore(settings, runner.info.layout_fingerprint),
        runner,
        inbox,
        server.deliver,
        tier=tier,
        prefill_rate=prefill_rate,
        step_rates=step_rates,
        decode_pace=config.decode_pace,
        record=recorder.record if recorder is not None else None,
        record_path=str(config.record.absolute()) if config.record is not None else None,
        check_when_idle=config.log_level == "debug",
    )
    async with contextlib.AsyncExitStack() as stack:
        if recorder is not None:
            stack.callback(recorder.close)
        await server.listen(config.socket)
        stack.push_async_callback(_stop_threads, server, inbox, steps, tier)
        steps.start()
        if tier is not None:
            tier.start()
            if server.feed.is_on:
                stack.push_async_callback(asyncio.to_thread, server.host_events.stop)
                server.host_events.start(lambda: _tier_client(config, runner, host_events.TIMEOUT_S))
        if config.metrics_listen:
            await _start_metrics(config, server, stack)
        log.info(
            "ready",
            socket=str(config.socket),
            model_id=config.model_id,
            device=str(runner.info.device),
            dtype=str(runner.info.dtype),
            quantization=runner.info.quantization,
            num_blocks=runner.info.num_blocks,
            incarnation=incarnation,
        )
        notify("READY=1\nSTATUS=serving")
        watch = asyncio.ensure_future(keep_watchdog(server))
        code = await over
        watch.cancel()
        notify("STOPPING=1")
        log.info("stopping", failure="" if code == 0 else "see above")
    return code


async def _stop_threads(server: EngineServer, inbox: Inbox, steps: StepLoop, tier: TierWorker | None) -> None:
    """The reverse of the start: clients are told first, then nothing steps any more, then the last blocks are stored."""
    inbox.stop()
    await server.close(STOPPING)
    if not await asyncio.to_thread(steps.join, STEP_THREAD_END_S):
        log.error("the running step does not end; the process ends without it", timeout_s=STEP_THREAD_END_S)
        os._exit(1)  # The interpreter would wait for, or crash under, a thread that is inside torch.
    if tier is not None:
        await asyncio.to_thread(tier.stop, TIER_DRAIN_S)


async def keep_watchdog(server: EngineServer) -> None:
    """Tell the service manager that the engine lives, at half the interval it asks for (WatchdogSec), and only as often as
    the step thread answers: an event loop that runs beside a thread that hangs is not alive."""
    interval_s = watchdog_s() / 2
    while interval_s > 0:
        asked = asyncio.get_running_loop().time()
        await server.statistics()
        notify("WATCHDOG=1")
        await asyncio.sleep(max(0.0, asked + interval_s - asyncio.get_running_loop().time()))


def watchdog_s() -> float:
    """After how much silence the service manager ends this process; 0 when it does not."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    is_ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(microseconds) / 1e6 if is_ours and microseconds.isdigit() else 0.0


async def _start_metrics(config: EngineConfig, server: EngineServer, stack: contextlib.AsyncExitStack) -> None:
    assert config.metrics_listen is not None
    endpoint = MetricsEndpoint(config.metrics_listen, server.statistics)
    await endpoint.start()
    stack.push_async_callback(endpoint.close)


def core_settings(config: EngineConfig, runner: ModelRunner) -> CoreSettings:
    """What the core is told: the configuration, and what the model and its memory turned out to be."""
    info = runner.info
    return CoreSettings(
        tokens_per_block=info.tokens_per_block,
        num_blocks=info.num_blocks,
        max_num_tokens=config.max_num_tokens,
        max_batch_size=config.max_batch_size,
        max_queue=max(1, config.max_queue),
        max_context_tokens=info.max_context_tokens,
        vocab_size=info.vocab_size,
        eos_token_ids=tuple(info.eos_token_ids),
        enable_block_reuse=config.enable_block_reuse,
        enable_partial_reuse=config.enable_partial_reuse,
        copy_on_partial_reuse=config.copy_on_partial_reuse,
        tier_enabled=config.tier_enabled and config.onboard_blocks,  # kv-semantics 5.6
        onboard_blocks=config.onboard_blocks,
        secondary_offload_min_priority=config.secondary_offload_min_priority,
        offload_policy=config.offload_policy,
        record_events=config.event_buffer_max_size > 0,
        event_token_ids=config.event_token_ids,
    )


def _facts(config: EngineConfig, runner: ModelRunner, settings: CoreSettings, incarnation: str) -> ServerFacts:
    return ServerFacts(
        incarnation=incarnation,
        model_id=config.model_id,
        model_dir=str(config.model_dir),
        vocab_size=settings.vocab_size,
        max_context_tokens=settings.max_context_tokens,
        max_prompt_tokens=settings.max_prompt_tokens,
        eos_token_ids=settings.eos_token_ids,
        tokens_per_block=settings.tokens_per_block,
        num_blocks=settings.num_blocks,
        layout_fingerprint=runner.info.layout_fingerprint,
        # What a lone owner may have inside by the core's rule, a full batch and half of the queue, is half of this.
        credits=settings.max_queue + 2 * settings.max_batch_size,
    )


def _tier_worker(config: EngineConfig, runner: ModelRunner, inbox: Inbox, server: EngineServer) -> TierWorker:
    info = runner.info
    return TierWorker(
        lambda: _tier_client(config, runner, config.tier_timeout_ms / 1e3),
        runner.kv.transfer(config.pin_chunk_size),
        block_bytes=info.block_bytes,
        tokens_per_block=info.tokens_per_block,
        verify_loads=config.verify_loads,
        num_device_blocks=info.num_blocks,
        answer=inbox.put,
        on_stored=server.host_events.look_soon,
        prepare=prepare_copies,
    )


def _tier_client(config: EngineConfig, runner: ModelRunner, timeout_s: float) -> TierClient:
    info = runner.info
    assert config.cached_socket is not None
    hello = TierHello(info.layout_fingerprint, info.block_bytes, info.tokens_per_block, label=config.model_id)
    return TierClient(config.cached_socket, hello, timeout_s)


def _uid(name: str) -> int:
    if name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise EngineConfigError(f"allowed_users names {name!r}, and this machine has no such user") from None


def notify(message: str, address: str | None = None) -> None:
    """Tell the service manager, if there is one (sd_notify); its absence is not an error."""
    address = address or os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    target = "\0" + address[1:] if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.sendto(message.encode(), target)

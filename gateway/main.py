"""The gateway as a process: reads the tenants, starts the server, and waits for a signal.

READY is said when a request would be answered by the engine, or, after `ENGINE_WAIT_S`, with a status that says that it
would not yet be.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import structlog
import uvloop

from gateway import logs
from gateway.app import GatewayServer
from gateway.config import GatewayConfig
from gateway.errors import GatewayConfigError
from gateway.freshness import Freshness
from gateway.notify import notify
from tenants.errors import TenantsError
from tenants.store import open_store
from tenants.watch import SnapshotWatcher

ENGINE_WAIT_S = 20.0


def run(config: GatewayConfig) -> int:
    """Serve until SIGTERM or SIGINT; 0 after an orderly stop, 1 when the start is impossible."""
    logs.configure(config.log_level)
    log = structlog.get_logger()
    try:
        with open_store(config.tenants_url, config.master_key_file) as store, SnapshotWatcher(store) as watcher:
            uvloop.run(_serve(config, watcher, log))
    except (GatewayConfigError, TenantsError) as error:
        log.error("start_failed", reason=str(error))
        return 1
    log.info("stopped")
    return 0


async def _serve(config: GatewayConfig, watcher: SnapshotWatcher, log: structlog.typing.FilteringBoundLogger) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: _log_stray(log, context))
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    manager = os.environ.get("NOTIFY_SOCKET")
    server = GatewayServer(
        config,
        lambda text, now: watcher.current.authenticate(text, now),
        log,
        tenants_age_s=lambda: watcher.age_s,
        refresh_tenants=Freshness(watcher).wait,
        shares=lambda: watcher.current.shares,
    )
    async with server:
        log.info("listening", port=server.port, admin=config.admin_listen)
        announcing = loop.create_task(_announce(server, manager, log))
        # It fails when the engine's model has no tokenizer that could be read: then this start is impossible.
        announcing.add_done_callback(lambda task: None if task.cancelled() or not task.exception() else stopping.set())
        await stopping.wait()
        announcing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await announcing
        notify(manager, "STOPPING=1\nSTATUS=draining")
        log.info("stopping", inflight=len(server.inflight))


async def _announce(server: GatewayServer, manager: str | None, log: structlog.typing.FilteringBoundLogger) -> None:
    notify(manager, "STATUS=waiting for the engine")
    if await server.wait_engine(ENGINE_WAIT_S):
        await server.engines.ready()  # The tokenizer is loaded before the first request needs it.
        notify(manager, "READY=1\nSTATUS=serving")
        log.info("ready", engine="connected")
        return
    notify(manager, "READY=1\nSTATUS=degraded: the engine is absent, requests are answered 503")
    log.warning("ready", engine="absent")


def _log_stray(log: structlog.typing.FilteringBoundLogger, context: dict[str, object]) -> None:
    """What no request's error handling saw; named by kind and place, since its text may quote a request."""
    error = context.get("exception")
    where = logs.where(error) if isinstance(error, BaseException) else []
    log.error("stray_exception", kind=type(error).__name__, where=where)

"""Puts the gateway together: routes, listeners, and the order in which everything starts and stops.

Used by `main` with the real tenants, and by tests with their own authenticator and engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from aiohttp import hdrs, web

from engine.client import EngineClient
from gateway.admin import admin_app, bind_admin, bind_tcp
from gateway.body import BodyMemory
from gateway.config import GatewayConfig, UnixAddress, parse_admin, parse_tcp
from gateway.connection import ConnectionFactory, ConnectionSettings
from gateway.drain import InFlight
from gateway.engines import Engines
from gateway.handlers import Handlers
from gateway.metrics import GatewayMetrics
from gateway.middleware import Authenticator, add_common_headers, authenticated, envelope
from gateway.responses import close_after
from gateway.shares import SharesState
from gateway.stream import PING_INTERVAL_S
from gateway.tokenizer import ModelText
from tenants.snapshot import NO_SHARES, ShareTable

CLIENT_NAME: Final = "gateway"
BACKLOG: Final = 1024
CLOSE_TIMEOUT_S: Final = 0.5


async def stay_as_it_is() -> None:
    """For tenants that never change."""


class GatewayServer:
    """A running gateway between `start` and `stop`."""

    def __init__(
        self,
        config: GatewayConfig,
        authenticate: Authenticator,
        log: Any,
        *,
        ping_interval_s: float = PING_INTERVAL_S,
        load_text: Callable[[Path], ModelText] = ModelText,
        tenants_age_s: Callable[[], float] = lambda: 0.0,
        refresh_tenants: Callable[[], Awaitable[None]] = stay_as_it_is,
        shares: Callable[[], ShareTable] = lambda: NO_SHARES,
    ) -> None:
        self.config = config
        self.metrics = GatewayMetrics()
        self.inflight = InFlight(config.max_inflight, config.admission_alpha)
        client = EngineClient(str(config.engine_socket), CLIENT_NAME)
        self.engines = Engines(
            client, config.model_dir, load_text, config.engine_heartbeat_s, shares, self._note_shares
        )
        self.metrics.tenants_age.set_function(tenants_age_s)
        self.metrics.inflight.set_function(lambda: len(self.inflight))
        self._log = log
        self.bodies = BodyMemory(config.body_memory_bytes)
        self.metrics.body_bytes.set_function(lambda: self.bodies.bytes_held)
        handlers = Handlers(config, self.engines, self.inflight, self.bodies, tenants_age_s, ping_interval_s)
        self._app = tenant_app(handlers, authenticate, refresh_tenants, self.metrics, self.inflight, log)
        self._runner = web.AppRunner(self._app, handler_cancellation=True, shutdown_timeout=CLOSE_TIMEOUT_S)
        operators_app = admin_app(self.metrics, self.engines, log)
        self._admin_runner = web.AppRunner(operators_app, handler_cancellation=True, shutdown_timeout=CLOSE_TIMEOUT_S)
        self._socket: socket.socket | None = None
        self._server: asyncio.AbstractServer | None = None
        self._admin_server: asyncio.AbstractServer | None = None
        self._admin_path: Path | None = None

    @property
    def port(self) -> int:
        """Where tenants are listened to; what the kernel chose when the configuration said 0."""
        assert self._socket is not None, "the port is known after start"
        return int(self._socket.getsockname()[1])

    @property
    def is_engine_connected(self) -> bool:
        return self.engines.state == "connected"

    async def wait_engine(self, timeout_s: float) -> bool:
        """Whether the engine is there within `timeout_s`."""
        return await self.engines.client.wait_connected(timeout_s)

    async def start(self) -> None:
        """Engine link first, then the operator's listener, then the tenants'."""
        await self.engines.start()
        await self._start_admin()
        listener = bind_tcp(parse_tcp(self.config.listen), "listen")
        self._socket = listener
        self._server = await self._listen(self._runner, listener, "tenants")

    async def stop(self) -> None:
        """Drain and close, in the reverse order: nobody new, the running ones to their end or their error event."""
        self.inflight.begin_drain()
        if self._server is not None:
            self._server.close()
        num_interrupted = await self.inflight.finish(self.config.drain_timeout_s)
        self._log.info("drained", interrupted=num_interrupted)
        await self._runner.cleanup()
        if self._admin_server is not None:
            self._admin_server.close()
        await self._admin_runner.cleanup()
        if self._admin_path is not None:
            self._admin_path.unlink(missing_ok=True)
        await self.engines.close()

    def _note_shares(self, state: SharesState, version: int) -> None:
        """Tenants' shares of the caches came into another state."""
        self.metrics.set_shares(state)
        match state:
            case "refused":
                self._log.error(
                    "shares_refused",
                    version=version,
                    reason="the floors of all tenants exceed the host tier, which keeps the former shares",
                    remedy="lower a floor with `halocline tenant share`, or raise cached.host_cache_size and restart cached",
                )
            case "superseded":
                self._log.error(
                    "shares_superseded",
                    version=version,
                    reason="the host tier keeps shares that are newer than the tenant store's",
                    remedy="if the store was restored from a backup, set any share again with `halocline tenant share`",
                )
            case "in_force":
                self._log.info("shares_in_force", version=version)
            case _:
                self._log.debug("shares", state=state, version=version)

    async def _start_admin(self) -> None:
        address = parse_admin(self.config.admin_listen)
        listener = bind_admin(address)
        if isinstance(address, UnixAddress):
            self._admin_path = Path(address.path)
        self._admin_server = await self._listen(self._admin_runner, listener, "admin")

    async def _listen(self, runner: web.AppRunner, listener: socket.socket, name: str) -> asyncio.AbstractServer:
        """Serve an application on a bound socket, over our own connections instead of aiohttp's."""
        await runner.setup()
        server = runner.server
        assert isinstance(server, web.Server), "setup made it"
        factory = ConnectionFactory(server, ConnectionSettings.of(self.config), self.metrics, self._log, name)
        loop = asyncio.get_running_loop()
        if listener.family == socket.AF_UNIX:
            return await loop.create_unix_server(factory, sock=listener, backlog=BACKLOG)
        return await loop.create_server(factory, sock=listener, backlog=BACKLOG)

    async def __aenter__(self) -> GatewayServer:
        try:
            await self.start()
        except BaseException:
            with contextlib.suppress(Exception):
                await self.stop()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()


def tenant_app(
    handlers: Handlers,
    authenticate: Authenticator,
    refresh_tenants: Callable[[], Awaitable[None]],
    metrics: GatewayMetrics,
    inflight: InFlight,
    log: Any,
) -> web.Application:
    """The routes of the tenants' listener; everything under /v1 needs a key."""

    async def close_while_draining(request: web.Request, response: web.StreamResponse) -> None:
        if inflight.is_draining:
            close_after(response)

    app = web.Application(middlewares=[envelope(metrics, log)])
    app.on_response_prepare.append(add_common_headers)
    app.on_response_prepare.append(close_while_draining)
    router = app.router
    router.add_get("/healthz", handlers.healthz)
    router.add_get("/readyz", handlers.readyz)
    for method, path, handler in (
        (hdrs.METH_GET, "/v1/models", handlers.models),
        (hdrs.METH_GET, "/v1/models/{model:.+}", handlers.model),
        (hdrs.METH_POST, "/v1/chat/completions", handlers.chat_completions),
        (hdrs.METH_POST, "/v1/completions", handlers.completions),
    ):
        router.add_route(method, path, authenticated(handler, authenticate, refresh_tenants))
    return app

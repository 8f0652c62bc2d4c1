"""The operator's listener: metrics and health, on a unix socket (0600) or loopback, without authentication of its own.

Kept apart from the tenants' listener because counters by tenant would be a signal between tenants (decision 14).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from gateway.config import TcpAddress, UnixAddress
from gateway.engines import Engines
from gateway.errors import GatewayConfigError
from gateway.metrics import GatewayMetrics
from gateway.middleware import add_common_headers, envelope
from gateway.responses import json_response


def admin_app(metrics: GatewayMetrics, engines: Engines, log: Any) -> web.Application:
    """The routes of the admin listener."""

    async def show_metrics(request: web.Request) -> web.Response:
        stats = await engines.stats()
        return web.Response(body=metrics.exposition(stats), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthz(request: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    app = web.Application(middlewares=[envelope(metrics, log)])
    app.on_response_prepare.append(add_common_headers)
    app.router.add_get("/metrics", show_metrics)
    app.router.add_get("/healthz", healthz)
    return app


def bind_admin(address: TcpAddress | UnixAddress) -> socket.socket:
    """A listening socket for the operator only; a dead process's socket file is replaced, a live one's is not."""
    if isinstance(address, TcpAddress):
        return bind_tcp(address)
    path = Path(address.path)
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The mode has to be right from the first moment, not after a chmod.
    umask = os.umask(0o177)
    try:
        listener.bind(address.path)
    except OSError as error:
        listener.close()
        raise GatewayConfigError(f"admin_listen: cannot listen on {path}: {error.strerror}") from error
    finally:
        os.umask(umask)
    listener.setblocking(False)
    return listener


def bind_tcp(address: TcpAddress, setting: str = "admin_listen") -> socket.socket:
    """A bound TCP socket; raises GatewayConfigError naming the setting and the reason."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1" if address.host == "localhost" else address.host, address.port))
    except OSError as error:
        listener.close()
        raise GatewayConfigError(
            f"{setting}: cannot listen on {address.host}:{address.port}: {error.strerror}; "
            "is another server running there?"
        ) from error
    listener.setblocking(False)
    return listener


def _remove_stale(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise GatewayConfigError(
                f"admin_listen: {path} exists and is not a socket; remove it or choose another path"
            )
    except FileNotFoundError:
        return
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass
    raise GatewayConfigError(f"admin_listen: another process listens on {path}")

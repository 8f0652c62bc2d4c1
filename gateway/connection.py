"""One HTTP connection with the deadlines and the manners that aiohttp's own lacks (http-contract.md §10).

Adds: a deadline for a request's headers, a maximum of connections, JSON over HTTP/1.1 for what cannot be parsed, silence
about the offending bytes, and an eye on clients that leave: aiohttp stops reading when much is pipelined, and who does not
read does not see the end. Deadlines end with the headers; a body has its own (`body`), an answer has none.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import HttpVersion11, StreamReader, hdrs, http_exceptions, web
from aiohttp.http_parser import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy

from gateway import errors, logs
from gateway.config import GatewayConfig
from gateway.errors import INVALID, Problem
from gateway.framing import END_OF_HEADER, Framing
from gateway.metrics import GatewayMetrics
from gateway.middleware import new_request_id
from gateway.responses import EXPECTS_CONTINUE, common_headers, error_response, raw_error

LINGERING_S: Final = 5.0
"""How long the rest of a refused body is read and thrown away, so that its sender gets to read the refusal."""

STALL_MS: Final = 60_000

BLIND_S: Final = 0.08
"""How long a connection may go unread behind one request before it is ended; two of these pass at most."""

_UNPARSABLE: Final = Problem(400, INVALID, "invalid_http", "The request is not valid HTTP.")
_HEADERS_TOO_LARGE: Final = Problem(431, INVALID, "headers_too_large", "The request's line or headers are too large.")
_SLOW_HEADERS: Final = Problem(408, "timeout", "request_timeout", "The request's headers did not arrive in time.")
_FULL: Final = errors.overloaded("The server has too many connections. The request may be retried.").problem


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """What a connection must know of the configuration."""

    header_timeout_s: float
    keepalive_timeout_s: float
    max_connections: int

    @staticmethod
    def of(config: GatewayConfig) -> ConnectionSettings:
        return ConnectionSettings(config.header_timeout_s, config.keepalive_timeout_s, config.max_connections)


class ConnectionFactory:
    """Makes the protocol of each accepted connection; give it to `loop.create_server`."""

    def __init__(
        self,
        server: web.Server,
        settings: ConnectionSettings,
        metrics: GatewayMetrics,
        log: Any,
        listener: str = "tenants",
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self.log = log
        self._gauge = metrics.connections.labels(listener)
        self._num_open = 0
        self._server = server

    @property
    def is_full(self) -> bool:
        return self._num_open >= self.settings.max_connections

    def count(self, change: int) -> None:
        """One more, or one less."""
        self._num_open += change
        self._gauge.set(self._num_open)

    def __call__(self) -> Connection:
        return Connection(self, self._server)


class Connection(web.RequestHandler):
    """aiohttp's protocol with the gaps closed. Its timers: one while a header is awaited, one while nothing is read."""

    def __init__(self, factory: ConnectionFactory, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=factory.settings.keepalive_timeout_s,
            lingering_time=LINGERING_S,
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type] # aiohttp: None is no access log.
        )
        self._factory = factory
        self._is_counted = False
        self._framing = Framing()
        self._payload: StreamReader | None = None
        self._kept_end = END_OF_HEADER
        self._header_timer: asyncio.TimerHandle | None = None
        self._blind_timer: asyncio.TimerHandle | None = None
        self._make_request = self._request_factory
        self._request_factory = self._versioned_request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        factory = self._factory
        if factory.is_full:
            factory.metrics.connections_refused.inc()
            assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
            transport.write(raw_error(_FULL, new_request_id()))
            transport.close()
            return
        factory.count(+1)
        self._is_counted = True
        _abandon_stalled(transport)
        super().connection_made(transport)
        self._arm_header_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._disarm_header_timer()
        self._end_blindness()
        if self._is_counted:
            self._is_counted = False
            self._factory.count(-1)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """In pieces none of which reaches beyond the end of a header or body, so that a rest is seen to be one."""
        start = 0
        while start < len(data) and not (self._buffer_paused or self._reading_paused):
            end = self._framing.next_end(data, start)
            self._receive(data[start:end])
            start = end
        if start < len(data) or not data:  # What aiohttp will only keep for later, or parses now of what it kept.
            self._kept_end = data[start:][-4:] or self._kept_end
            self._receive(data[start:])

    def _receive(self, piece: bytes) -> None:
        before = self._request_count
        super().data_received(piece)
        if self._request_count != before:
            self._disarm_header_timer()
            # Only the newest can reach beyond this piece; it may have been taken from the queue, but not in this turn.
            message, payload = self._messages[-1]
            headers = message.headers if isinstance(message, RawRequestMessage) else None
            if headers is None and self._payload is not None and not self._payload.is_eof():
                # It was broken in the middle of a body, whose reader aiohttp would leave waiting.
                self._payload.set_exception(web.RequestPayloadError("the body's transfer encoding is broken"))
            self._payload = payload
            length = headers.get(hdrs.CONTENT_LENGTH) if headers is not None else None
            self._framing.header_ended(length, payload)
            if piece or length is not None or not payload.is_eof() or self._kept_end == END_OF_HEADER:
                return
            piece = self._kept_end  # Of what was kept no piece was cut; a header that began in it ends differently.
        if piece:
            self._framing.received(piece)
            if self._framing.has_partial_header and self._header_timer is None:
                self._arm_header_timer()  # Later bytes do not move it: a trickle is what it is for.

    @property
    def _is_waiting(self) -> bool:
        """Between requests: nothing is being answered or queued."""
        return self._waiter is not None and not self._waiter.done() and not self._messages

    def _arm_header_timer(self) -> None:
        wait_s = self._factory.settings.header_timeout_s
        self._header_timer = self._loop.call_later(wait_s, self._header_expired, self._request_count)

    def _disarm_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _header_expired(self, request_count: int) -> None:
        self._header_timer = None
        if self.transport is None or request_count != self._request_count:
            return  # aiohttp itself has parsed what it kept behind a refused upgrade.
        if not self._is_waiting:  # Half a header behind a long answer: its time begins when it could be read.
            self._arm_header_timer()
            return
        self._factory.metrics.deadlines.labels("header").inc()
        if self._framing.has_partial_header:
            self.transport.write(raw_error(_SLOW_HEADERS, new_request_id()))
        self.force_close()

    def _pause_transport_reading(self) -> None:
        super()._pause_transport_reading()
        if self._blind_timer is None:
            self._watch_blindness()

    def _resume_transport_reading(self) -> None:
        super()._resume_transport_reading()
        self._end_blindness()

    def _watch_blindness(self) -> None:
        self._blind_timer = self._loop.call_later(BLIND_S, self._blindness_lasts, self._current_request)

    def _end_blindness(self) -> None:
        if self._blind_timer is not None:
            self._blind_timer.cancel()
            self._blind_timer = None

    def _blindness_lasts(self, since: web.BaseRequest | None) -> None:
        """Nothing is read, so a client that leaves now would be served on: the one who pipelines so much is ended.

        Not while a request's own body is on its way (its handler reads it), nor while requests are answered so quickly
        that the next reading is near.
        """
        self._blind_timer = None
        if self.transport is None:
            return
        request = self._current_request
        if request is None or request is not since or not request.content.is_eof():
            self._watch_blindness()
            return
        self._factory.metrics.deadlines.labels("pipelining").inc()
        self.transport.abort()

    def _versioned_request(self, message: RawRequestMessage, *rest: Any) -> web.BaseRequest:
        """aiohttp answers what it could not parse as HTTP/1.0; everything we answer is HTTP/1.1.

        An expectation is taken out before aiohttp sees it, which would refuse an unknown one in plain text and tell the
        client to send a body before anybody has looked at path and key. `body` tells it, when it begins to read.
        """
        if message.method == "UNKNOWN" and message.path == "/":
            message = message._replace(version=HttpVersion11)
        assert self._make_request is not None, "only a lost connection has no factory"
        expectation = message.headers.get(hdrs.EXPECT)
        if expectation is None:
            return self._make_request(message, *rest)
        headers = CIMultiDict(message.headers)
        del headers[hdrs.EXPECT]
        request = self._make_request(message._replace(headers=CIMultiDictProxy(headers)), *rest)
        # HTTP allows to ignore an expectation that is not understood, and asks to ignore it from HTTP/1.0.
        if expectation.strip().lower() == "100-continue" and message.version >= HttpVersion11 and request.body_exists:
            request[EXPECTS_CONTINUE] = True
        return request

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What never reached a handler, or came out of one although the middleware lets nothing out."""
        if isinstance(exc, ConnectionError):
            raise exc  # The client is gone; the middleware has noted it.
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun; the connection is closed")
        if status == 400:
            problem = _HEADERS_TOO_LARGE if isinstance(exc, http_exceptions.LineTooLong) else _UNPARSABLE
        else:
            problem = errors.internal_error().problem
        request_id = new_request_id()
        self._log_failure("unparsable" if status == 400 else "internal_error", request_id, problem.status, exc)
        self._factory.metrics.requests.labels("unmatched", str(problem.status), "-").inc()
        response = error_response(problem)
        response.headers.update(common_headers(request_id))
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """aiohttp would log the exception with its text, which quotes what the client sent."""
        self._log_failure("connection_failed", None, None, kwargs.get("exc_info"))

    def _log_failure(self, event: str, request_id: str | None, status: int | None, error: object) -> None:
        fields: dict[str, Any] = {"kind": type(error).__name__}
        if request_id is not None:
            fields |= {"request_id": request_id, "status": status}
        if status == 400 or status == 431:
            self._factory.log.info(event, **fields)
            return
        trace = logs.where(error) if isinstance(error, BaseException) else []
        self._factory.log.error(event, where=trace, **fields)


def _abandon_stalled(transport: asyncio.BaseTransport) -> None:
    """Let the kernel end a connection whose peer has taken nothing for `STALL_MS`; whole answers have no other limit."""
    link = transport.get_extra_info("socket")
    if link is not None and link.family in (socket.AF_INET, socket.AF_INET6):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALL_MS)

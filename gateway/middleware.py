"""What every request goes through: an id, the error envelope, one line in the log, and who it is from.

The outermost layer turns whatever comes out of the handlers into JSON; what is not an `ApiError` is our bug and is
answered without a word about it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.typedefs import Middleware

from gateway import errors, logs
from gateway.errors import ApiError, GatewayConfigError
from gateway.metrics import GatewayMetrics
from gateway.records import RequestRecord
from gateway.responses import EXPECTS_CONTINUE, close_after, common_headers, error_response
from gateway.retention import clamped_header
from tenants.keys import parse_key
from tenants.snapshot import Accepted, Denied, Suspended

RECORD: Final = web.RequestKey("record", RequestRecord)
CLIENT_GONE: Final = 499
CLAMPED: Final = "x-halocline-clamped"
WARM_UP: Final = "x-halocline-warm-up"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Authenticator(Protocol):
    """The tenants' keys as they are now: `lambda text, now: watcher.current.authenticate(text, now)`."""

    def __call__(self, text: str, now: float) -> Accepted | Denied | Suspended: ...


def new_request_id() -> str:
    """Ours, always: a client's own id would be text of the client in our log."""
    return f"req_{uuid.uuid4().hex}"


def envelope(metrics: GatewayMetrics, log: Any) -> Middleware:
    """The outermost middleware."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        record = RequestRecord(new_request_id(), time.monotonic())
        request[RECORD] = record
        status = CLIENT_GONE
        try:
            response = await _answered(request, handler, log)
            status = response.status
            return response
        except ConnectionError:
            # The answer has begun and its reader has left; nothing can be said to anyone. aiohttp closes quietly.
            raise
        finally:
            _note(metrics, log, request, status, time.monotonic())

    return answer


async def _answered(request: web.Request, handler: Handler, log: Any) -> web.StreamResponse:
    record = request[RECORD]
    try:
        check_framing(request)
        return await handler(request)
    except ApiError as error:
        record.error = error.problem.code
        response = error_response(error.problem)
        if error.problem.code == errors.UNSUPPORTED_TRANSFER_ENCODING:
            response.force_close()  # Where the next request begins is not known.
        return response
    except web.HTTPException as error:
        return _translated(error, record)
    except ConnectionError:
        raise
    except GatewayConfigError as error:
        # The engine came back with a model whose files are not usable here. The reason is for the operator.
        record.error = "engine_unavailable"
        log.error("misconfigured", request_id=record.id, reason=str(error))
        return error_response(errors.engine_unavailable().problem)
    except Exception as error:
        record.error = "internal_error"
        log.error("internal_error", request_id=record.id, kind=type(error).__name__, where=logs.where(error))
        return error_response(errors.internal_error().problem)


def check_framing(request: web.Request) -> None:
    """Refuse bodies about whose end two readers could differ (RFC 9112 6.1): only `chunked`, once, in HTTP/1.1."""
    codings = request.headers.getall(hdrs.TRANSFER_ENCODING, [])
    if not codings:
        return
    if request.version < HttpVersion11 or len(codings) > 1 or codings[0].strip().lower() != "chunked":
        raise errors.unsupported_transfer_encoding()


def _translated(error: web.HTTPException, record: RequestRecord) -> web.StreamResponse:
    """The router's own refusals."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        problem = errors.method_not_allowed().problem
        response = error_response(problem)
        response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
    elif error.status == 404:
        problem = errors.unknown_route().problem
        response = error_response(problem)
    else:
        problem = errors.bad_request("The request is not understood.", None, "bad_request").problem
        response = error_response(problem)
    record.error = problem.code
    return response


def _note(metrics: GatewayMetrics, log: Any, request: web.Request, status: int, now_s: float) -> None:
    record = request[RECORD]
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "unmatched"
    if record.is_warm_up:
        metrics.count_warm_up(route, str(status), record.tenant, record.usage)
    else:
        metrics.requests.labels(route, str(status), record.tenant).inc()
        metrics.duration.labels(route).observe(now_s - record.started_s)
        if record.first_token_s is not None:
            metrics.ttft.observe(record.first_token_s - record.started_s)
        if record.usage is not None:
            metrics.count_usage(record.tenant, record.usage)
    level = "debug" if route in ("/healthz", "/readyz", "/metrics") else "info"
    getattr(log, level)("request", method=_method(request), route=route, status=status, **record.log_fields(now_s))


def _method(request: web.Request) -> str:
    return request.method if request.method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS") else "other"


def authenticated(handler: Handler, authenticate: Authenticator, refresh: Callable[[], Awaitable[None]]) -> Handler:
    """`handler` for those who present a good key; the record then says whose it is. Who is denied is judged again after
    `refresh`."""

    async def checked(request: web.Request) -> web.StreamResponse:
        presented = request.headers.getall("Authorization", [])
        if len(presented) > 1:
            raise errors.bad_request("There is more than one Authorization header.", None, "duplicate_header")
        scheme, _, key = (presented[0] if presented else "").partition(" ")
        text = key.strip() if scheme.lower() == "bearer" else ""
        verdict = authenticate(text, time.time())
        # The key may be newer than the snapshot. Whatever has the form of one waits alike, known or not: how long a
        # refusal takes tells nothing about the store, and of the form everybody can judge without asking.
        if isinstance(verdict, Denied) and parse_key(text) is not None:
            await refresh()
            verdict = authenticate(text, time.time())
        if isinstance(verdict, Denied):
            raise errors.invalid_api_key()
        request[RECORD].identity = verdict.identity
        # Only with a good key: guesses at keys are counted among the ordinary requests, whatever they call themselves.
        request[RECORD].is_warm_up = request.headers.get(WARM_UP) == "1"
        if isinstance(verdict, Suspended):
            raise errors.tenant_suspended()
        return await handler(request)

    return checked


async def add_common_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal of the application: just before any answer's headers are sent."""
    if request.get(EXPECTS_CONTINUE):
        # The client may send the body that it announced, or leave it out: what comes next could be either.
        close_after(response)
    record = request.get(RECORD)
    response.headers.update(common_headers(record.id if record is not None else new_request_id()))
    if record is not None and record.clamped:
        response.headers[CLAMPED] = clamped_header(record.clamped)

"""JSON answers, and the error envelope as one; says which headers every answer bears."""

from __future__ import annotations

from typing import Any, Final

import orjson
from aiohttp import hdrs, web

from gateway.errors import Problem
from gateway.openai_responses import error_body

SERVER: Final = "halocline"
JSON: Final = "application/json"
EXPECTS_CONTINUE: Final = web.RequestKey("expects_continue", bool)
"""Set on a request whose client holds its body back until it is told to send it, or refused."""


def json_response(body: Any, status: int = 200) -> web.Response:
    """`body` as JSON."""
    return web.Response(body=orjson.dumps(body), status=status, content_type=JSON)


def error_response(problem: Problem) -> web.Response:
    """A problem as OpenAI's envelope, with what its status needs in headers."""
    response = json_response(error_body(problem), problem.status)
    response.headers.update(_hints(problem))
    return response


def common_headers(request_id: str) -> dict[str, str]:
    """On every answer, streams and errors included; OpenAI's clients read the first id, Anthropic's the second."""
    return {"x-request-id": request_id, "request-id": request_id, "Server": SERVER, "X-Content-Type-Options": "nosniff"}


def close_after(response: web.StreamResponse) -> None:
    """End the connection with this answer, whose headers are being prepared, and say so."""
    response.headers[hdrs.CONNECTION] = "close"
    response.force_close()


def raw_error(problem: Problem, request_id: str) -> bytes:
    """A whole HTTP/1.1 answer, for connections that have no request to answer to; the connection closes after it."""
    body = orjson.dumps(error_body(problem))
    reasons = {408: "Request Timeout", 503: "Service Unavailable"}
    headers = {
        "Content-Type": JSON,
        "Content-Length": str(len(body)),
        "Connection": "close",
        **common_headers(request_id),
        **_hints(problem),
    }
    lines = [
        f"HTTP/1.1 {problem.status} {reasons[problem.status]}",
        *[f"{name}: {value}" for name, value in headers.items()],
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _hints(problem: Problem) -> dict[str, str]:
    hints = {}
    if problem.retry_after_s is not None:
        hints["Retry-After"] = str(problem.retry_after_s)
    if problem.status == 401:
        hints["WWW-Authenticate"] = "Bearer"
    return hints

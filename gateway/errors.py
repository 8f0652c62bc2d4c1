"""The gateway's errors: what a client is told, with its status, type, code, and whether to come again.

Every error that reaches a client is an `ApiError`; the middleware renders it. What is not one is our bug, and is answered
by `internal_error()` without a word of its own text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

INVALID: Final = "invalid_request_error"
DEFAULT_RETRY_AFTER_S: Final = 1
MAX_MESSAGE_CHARS: Final = 500
UNSUPPORTED_TRANSFER_ENCODING: Final = "unsupported_transfer_encoding"


class GatewayError(Exception):
    """Something went wrong in the gateway."""


class GatewayConfigError(GatewayError):
    """A setting is illegal or a file it names is unusable; the message names it and what is legal."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One error as HTTP and as the OpenAI envelope. `retry_after_s` None: coming again would not help."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None


class ApiError(GatewayError):
    """An answer other than the one asked for."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """400: the request can never succeed as it stands."""
    # Some messages quote what was sent; an answer is never as long as a question can be.
    shown = message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}…"
    return ApiError(Problem(400, INVALID, code, shown, param))


def unsupported(param: str, what: str) -> ApiError:
    """400: legal elsewhere, not here; refused rather than silently ignored."""
    return bad_request(f"{param} is not supported here: {what}.", param, "unsupported_parameter")


def invalid_json(why: str) -> ApiError:
    """400: the body is not a JSON object."""
    return bad_request(f"The body is not a JSON object: {why}.", None, "invalid_json")


def context_length_exceeded(message: str, param: str) -> ApiError:
    """400: prompt, or prompt and answer, do not fit; the message bears the limit."""
    return bad_request(message, param, "context_length_exceeded")


def invalid_api_key() -> ApiError:
    """401, in one wording for every way in which a key can be wrong."""
    message = "Invalid API key. Send a valid key as `Authorization: Bearer <key>`."
    return ApiError(Problem(401, INVALID, "invalid_api_key", message))


def tenant_suspended() -> ApiError:
    """403: the key is right and its tenant is switched off."""
    message = "This account is suspended. Ask the operator to resume it."
    return ApiError(Problem(403, "permission_error", "tenant_suspended", message))


def unknown_route() -> ApiError:
    """404 for a path that does not exist."""
    return ApiError(Problem(404, INVALID, "unknown_url", "There is no such path on this server."))


def unknown_model() -> ApiError:
    """404, the same for models that do not exist and models that are not allowed."""
    message = "The model does not exist or you may not use it. GET /v1/models lists what you may use."
    return ApiError(Problem(404, INVALID, "model_not_found", message, "model"))


def method_not_allowed() -> ApiError:
    """405; the Allow header says what would be."""
    message = "This path does not take that method; see the Allow header."
    return ApiError(Problem(405, INVALID, "method_not_allowed", message))


def slow_body() -> ApiError:
    """408: the body did not come in time."""
    return ApiError(Problem(408, "timeout", "request_timeout", "The request body did not arrive in time."))


def too_large(limit_bytes: int) -> ApiError:
    """413, with the limit."""
    message = f"The body is larger than the maximum of {limit_bytes} bytes."
    return ApiError(Problem(413, INVALID, "request_too_large", message))


def too_many_values(limit: int) -> ApiError:
    """413, for a body whose length is legal and whose structure is not."""
    message = f"The body has more than {limit} values (numbers, strings, lists and objects)."
    return ApiError(Problem(413, INVALID, "request_too_large", message))


def unsupported_media(message: str) -> ApiError:
    """415: an encoding or charset that is not read here."""
    return ApiError(Problem(415, INVALID, "unsupported_media_type", message))


def over_share(what: str) -> ApiError:
    """429: the tenant has as many of something in work as it may; without figures, which would tell of other tenants."""
    message = f"You have too many {what} in work at the moment. The request may be retried when some have ended."
    return ApiError(Problem(429, "rate_limit_error", "rate_limit_exceeded", message, None, DEFAULT_RETRY_AFTER_S))


def unsupported_transfer_encoding() -> ApiError:
    """400: it is not certain where this body ends."""
    message = "The only Transfer-Encoding that is read here is chunked, once and in HTTP/1.1."
    return bad_request(message, None, UNSUPPORTED_TRANSFER_ENCODING)


def internal_error() -> ApiError:
    """500: our bug; its details are in our log only."""
    message = "The server had an error. It has been logged under this request's id."
    return ApiError(Problem(500, "server_error", "internal_error", message))


def engine_failed(message: str) -> ApiError:
    """502: the engine took the request and did not finish it."""
    return ApiError(Problem(502, "server_error", "upstream_error", message, None, DEFAULT_RETRY_AFTER_S))


def engine_timeout() -> ApiError:
    """504: the engine said nothing for too long."""
    message = "The engine did not answer in time. The request may be retried."
    return ApiError(Problem(504, "server_error", "upstream_timeout", message, None, DEFAULT_RETRY_AFTER_S))


def engine_unavailable() -> ApiError:
    """503: there is no engine at the moment."""
    message = "No engine is available at the moment. The request may be retried."
    return ApiError(Problem(503, "service_unavailable", "engine_unavailable", message, None, DEFAULT_RETRY_AFTER_S))


def engine_unresponsive() -> ApiError:
    """503: the engine is there and does not answer."""
    message = "The engine does not respond at the moment. The request may be retried."
    return ApiError(Problem(503, "service_unavailable", "engine_unavailable", message, None, DEFAULT_RETRY_AFTER_S))


def overloaded(message: str, code: str = "overloaded") -> ApiError:
    """503: everything is there, and full."""
    return ApiError(Problem(503, "service_unavailable", code, message, None, DEFAULT_RETRY_AFTER_S))


def draining() -> ApiError:
    """503: this server is about to stop."""
    message = "The server is shutting down. The request may be retried."
    return ApiError(Problem(503, "service_unavailable", "draining", message, None, DEFAULT_RETRY_AFTER_S))

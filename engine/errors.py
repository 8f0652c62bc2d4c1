"""The engine's errors: what a request did wrong, what the machine lacks, what a peer broke."""

from __future__ import annotations


class EngineError(Exception):
    """Something went wrong in the engine."""


class EngineConfigError(EngineError):
    """A setting is illegal or does not fit the machine; the message names it, its value and what is legal."""


class ModelRefused(EngineError):
    """This model cannot be served correctly; the message names the architecture and the layer that is the reason."""


class TraceError(EngineError):
    """A trace cannot be read or replayed; the message names the file, the line and what is legal."""


class EngineUnavailable(EngineError):
    """The engine cannot be reached, or went away with the request; the request may be retried."""


class RequestRejected(EngineError):
    """The engine refused a request before it began; `retryable` tells a busy engine (503) from a bad request (400)."""

    def __init__(self, code: str, message: str, param: str | None, retryable: bool) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retryable = retryable

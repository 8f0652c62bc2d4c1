"""What is noted of one request while it is answered: the allow-list of the access log and the labels of the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gateway.metrics import NO_TENANT
from gateway.values import Usage
from tenants.values import Identity


@dataclass(slots=True)
class RequestRecord:
    """Begun by the middleware, filled by whoever learns something; written to the log once, at the end."""

    id: str
    started_s: float
    identity: Identity | None = None
    model: str | None = None
    streamed: bool = False
    usage: Usage | None = field(default=None)
    first_token_s: float | None = None
    error: str | None = None
    is_warm_up: bool = False
    clamped: tuple[str, ...] = ()
    is_default_retention_unreadable: bool = False

    @property
    def tenant(self) -> str:
        return self.identity.tenant_name if self.identity is not None else NO_TENANT

    def log_fields(self, now_s: float) -> dict[str, Any]:
        """The fields that were filled, as the access log has them."""
        fields: dict[str, Any] = {
            "request_id": self.id,
            "tenant": self.tenant,
            "duration_ms": round((now_s - self.started_s) * 1000, 1),
        }
        if self.identity is not None:
            fields["key"] = self.identity.public_id
        if self.model is not None:
            fields |= {"model": self.model, "stream": self.streamed}
        if self.first_token_s is not None:
            fields["first_token_ms"] = round((self.first_token_s - self.started_s) * 1000, 1)
        if self.usage is not None:
            fields |= {
                "prompt_tokens": self.usage.prompt_tokens,
                "completion_tokens": self.usage.completion_tokens,
                "device_tokens": self.usage.device_tokens,
                "host_tokens": self.usage.host_tokens,
                "computed_tokens": self.usage.computed_tokens,
                "blocks_full": self.usage.blocks_full,
                "blocks_partial": self.usage.blocks_partial,
                "blocks_missed": self.usage.blocks_missed,
            }
        if self.is_warm_up:
            fields["warm_up"] = True
        if self.clamped:
            fields["clamped"] = len(self.clamped)
        if self.is_default_retention_unreadable:
            fields["warning"] = "default_retention_unreadable"
        if self.error is not None:
            fields["error"] = self.error
        return fields

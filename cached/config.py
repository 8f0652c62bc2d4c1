"""What the cache daemon is told at its start; checked once, frozen, and passed on explicitly."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator, model_validator

from cached.parts import PartPlan, fault_of_shares, plan_parts, read_share

MAX_SOCKET_PATH_BYTES = 100
"""The kernel takes 107; the rest is room for the name under which the socket is born before it is renamed."""


MAX_REGISTRATION_BYTES = 64 * 2**30
"""Drivers have been seen to refuse more in one registration."""


class CachedConfig(BaseModel):
    """The settings of one cache daemon. Paths are explicit: nothing here is derived from the environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    socket: Path = Field(description="Unix socket on which engines and `halocline cache` reach the daemon.")
    arena_dir: Path = Field(description="Directory on a tmpfs that holds the arena; only one daemon can own it.")
    host_cache_size: ByteSize = Field(description="Bytes of host memory for blocks; allocated in full at the start.")
    lease_ttl_s: float = Field(10.0, gt=0, le=3600, description="How long a lease holds unless it is released before.")
    reservation_ttl_s: float = Field(
        30.0, gt=0, le=3600, description="How long a store may take from reserve to commit."
    )
    max_sessions: int = Field(64, ge=1, le=4096, description="Engines and observers connected at once.")
    layout_linger_s: float = Field(
        60.0, ge=0, description="How long blocks of a layout nobody uses are kept when an engine of another one asks."
    )
    layouts: tuple[str, ...] = Field(
        (),
        description="NAME=SHARE of the arena for layouts with a part of their own; NAME is an engine's model_id, or at least "
        "4 hex digits of the fingerprint that `halocline cache stats` shows.",
    )
    common_layouts: int = Field(
        1,
        ge=1,
        le=64,
        description="Equal parts that the rest of the arena is cut into, each for one layout without a name.",
    )
    registration_bytes: ByteSize = Field(
        ByteSize(MAX_REGISTRATION_BYTES),
        ge=4096,
        le=MAX_REGISTRATION_BYTES,
        multiple_of=4096,
        description="Most bytes that engines register with their device at once; no slot crosses a multiple of it.",
    )
    allowed_users: tuple[str, ...] = Field(
        (), description="Names or numbers of users that may connect besides the daemon's own and root."
    )
    event_buffer_max_size: int = Field(
        16384, ge=0, le=2**22, description="Last events of the tier that are remembered for readers; 0: none."
    )
    mlock: bool = Field(False, description="Lock the arena in memory, so that it is never swapped out.")
    metrics_listen: str | None = Field(
        None, description="Loopback HOST:PORT for Prometheus; none: no metrics endpoint."
    )
    keep_arena: bool = Field(True, description="Leave the arena in place at an orderly stop, for the next start.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level to log.")

    @field_validator("socket")
    @classmethod
    def _socket_is_short(cls, value: Path) -> Path:
        length = len(str(value).encode())
        if length > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"the path has {length} bytes; a unix socket's may have {MAX_SOCKET_PATH_BYTES}")
        return value

    @field_validator("host_cache_size")
    @classmethod
    def _size_is_positive(cls, value: ByteSize) -> ByteSize:
        if value < 4096:
            raise ValueError(f"{int(value)} bytes hold no block; give at least 4096 (0 means: run no daemon)")
        return value

    @field_validator("layouts")
    @classmethod
    def _layouts_have_shares(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        fault = fault_of_shares([read_share(text) for text in value])
        if fault is not None:
            raise ValueError(fault)
        return value

    @field_validator("metrics_listen")
    @classmethod
    def _metrics_on_loopback(cls, value: str | None) -> str | None:
        if value is not None:
            split_loopback(value)
        return value

    @property
    def parts(self) -> tuple[PartPlan, ...]:
        """How the arena is divided."""
        return plan_parts(int(self.host_cache_size), [read_share(text) for text in self.layouts], self.common_layouts)

    @model_validator(mode="after")
    def _parts_hold_something(self) -> CachedConfig:
        for part in self.parts:
            if part.num_bytes == 0:
                raise ValueError(
                    f"the share of layout {part.name!r} is less than one page of {int(self.host_cache_size)} bytes; "
                    "give it more, or take it out of layouts"
                )
        return self

    @model_validator(mode="after")
    def _ttls_fit(self) -> CachedConfig:
        if self.reservation_ttl_s < self.lease_ttl_s:
            raise ValueError(
                f"reservation_ttl_s ({self.reservation_ttl_s}) is below lease_ttl_s ({self.lease_ttl_s}); "
                "a store waits for kernels that a load does not wait for, so it needs at least as long"
            )
        return self


def split_loopback(listen: str) -> tuple[str, int]:
    """`HOST:PORT` taken apart; raises ValueError when the host is no loopback address or the port no port."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not port.isdigit() or not 0 <= int(port) < 65536:
        raise ValueError(f"{listen!r} is not HOST:PORT")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ValueError(f"{listen!r} is not on loopback; metrics tell of all tenants and are served on loopback only")
    return host, int(port)

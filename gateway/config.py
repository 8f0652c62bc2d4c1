"""The gateway's settings: one frozen object, checked once. Reads neither files nor the environment."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, model_validator

MAX_UNIX_PATH_BYTES = 100
"""The kernel takes 107; some room is left for a temporary name beside the socket."""


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host and a port; port 0 lets the kernel choose."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """The path of a unix socket."""

    path: str


def parse_tcp(text: str) -> TcpAddress:
    """`HOST:PORT` or `[V6]:PORT`, the host a literal address or `localhost`; raises ValueError saying what is legal."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT with a port from 0 to 65535")
    try:
        if host != "localhost":
            ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"{text!r} needs an IP address or localhost before the port") from None
    return TcpAddress(host, int(port))


def parse_admin(text: str) -> TcpAddress | UnixAddress:
    """`unix:/path`, or a loopback `HOST:PORT`: the admin listener has no authentication of its own."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/") or len(path.encode()) > MAX_UNIX_PATH_BYTES:
            raise ValueError(f"{text!r} needs an absolute path of at most {MAX_UNIX_PATH_BYTES} bytes after unix:")
        return UnixAddress(path)
    address = parse_tcp(text)
    if not address.is_loopback:
        raise ValueError(f"{text!r} is not a loopback address; the admin listener is unix:/path or 127.0.0.1:PORT")
    return address


def _tcp(text: str) -> str:
    parse_tcp(text)
    return text


def _admin(text: str) -> str:
    parse_admin(text)
    return text


class GatewayConfig(BaseModel):
    """Every wait, queue and size of the gateway has its maximum here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: Annotated[
        str,
        AfterValidator(_tcp),
        Field(description="HOST:PORT of the tenants' API; the host is an address or localhost."),
    ] = "127.0.0.1:8080"
    admin_listen: Annotated[
        str,
        AfterValidator(_admin),
        Field(description="unix:/path or loopback HOST:PORT of metrics and health for operators."),
    ] = "127.0.0.1:8081"
    engine_socket: Annotated[Path, Field(description="Unix socket of the engine.")]
    tenants_url: Annotated[str, Field(description="URL of the tenant store.")]
    master_key_file: Annotated[Path, Field(description="File with the key under which the store's secrets lie.")]
    model_id: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$", description="Name of the model that clients use."),
    ] = "demo"
    model_dir: Annotated[
        Path | None, Field(description="Directory of tokenizer and template; none: what the engine says.")
    ] = None
    max_body_bytes: Annotated[
        ByteSize, Field(ge=1024, le=2**30, description="Largest request body; larger ones are answered 413.")
    ] = ByteSize(32 * 2**20)
    body_memory_bytes: Annotated[
        ByteSize,
        Field(
            ge=1024,
            le=2**40,
            description="Memory for request bodies until they are tokens, all together; what does not fit is answered 503.",
        ),
    ] = ByteSize(256 * 2**20)
    header_timeout_s: Annotated[
        float, Field(gt=0, le=300, description="Longest time a client may take to send its headers.")
    ] = 10.0
    body_timeout_s: Annotated[
        float, Field(gt=0, le=3600, description="Longest time a client may take to send its body.")
    ] = 30.0
    keepalive_timeout_s: Annotated[float, Field(gt=0, le=3600, description="How long an idle connection is kept.")] = (
        75.0
    )
    max_connections: Annotated[int, Field(ge=1, le=1_000_000, description="Connections held at once.")] = 4096
    max_inflight: Annotated[
        int, Field(ge=1, le=1_000_000, description="Requests in work at once; more are answered 503.")
    ] = 256
    admission_alpha: Annotated[
        float,
        Field(
            ge=0.01,
            le=1000,
            description="A tenant may have another request or sequence in work while it has fewer than this times what is "
            "still free, else it is answered 429. At 1 a tenant alone gets half, at 1000 nearly all.",
        ),
    ] = 1.0
    max_n: Annotated[int, Field(ge=1, le=128, description="Most answers that one request may ask for (`n`).")] = 16
    max_stop: Annotated[int, Field(ge=1, le=256, description="Most stop strings of one request.")] = 16
    first_token_timeout_s: Annotated[float, Field(gt=0, le=86_400, description="Longest wait for the first token.")] = (
        600.0
    )
    engine_heartbeat_s: Annotated[
        float,
        Field(
            gt=0,
            le=3600,
            description="An engine that answers nothing for so long counts as unresponsive and requests are answered 503; "
            "has to be above its longest step.",
        ),
    ] = 10.0
    drain_timeout_s: Annotated[
        float,
        Field(
            ge=0,
            le=3600,
            description="How long open streams may go on after the signal to stop (4.5 under `up`).",
        ),
    ] = 8.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="Least severe level to log.")
    ] = "info"

    @model_validator(mode="after")
    def _relations(self) -> GatewayConfig:
        if self.listen == self.admin_listen and not self.listen.endswith(":0"):
            raise ValueError(
                f"listen and admin_listen are both {self.listen!r}; tenants must not reach the admin listener"
            )
        if self.body_memory_bytes < self.max_body_bytes:
            raise ValueError(
                f"body_memory_bytes ({int(self.body_memory_bytes)}) is less than max_body_bytes "
                f"({int(self.max_body_bytes)}); the largest body could never be read"
            )
        return self

"""Asks the gateway for one token, as a tenant would, and says how a person asks next.

A gateway that listens is not yet one that answers: `up` calls the service ready when a real request has succeeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path

from command.errors import CommandError, Exit, SettingsError

PROBE_TIMEOUT_S = 120.0
MAX_ANSWER_BYTES = 1 << 20
WARM_UP = "x-halocline-warm-up"
"""The gateway counts a request with this header apart (gateway/README.md)."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The probe got its token."""


@dataclass(frozen=True, slots=True)
class NotYet:
    """Nobody answers, or the answer says try again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wrong:
    """An answer that waiting will not change."""

    reason: str


@dataclass(frozen=True, slots=True)
class Address:
    """HOST:PORT as configured; `url` is where a client on this machine finds it."""

    host: str
    port: int

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def connect_host(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, origin: str) -> Address:
    """`HOST:PORT` or `[IPV6]:PORT`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise SettingsError(f"gateway.listen = {text!r} ({origin}): legal is HOST:PORT, with PORT from 0 to 65535")
    return Address(host, int(port))


def claim_address(address: Address) -> Address:
    """`address`, with a free port in place of 0; raises CommandError at once when it cannot be listened on.

    The port is only tried, not kept: the gateway binds it a moment later, and again whenever it is restarted.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise SettingsError(f"gateway.listen = '{address}': {error.strerror or error}") from None
    with socket.socket(family, kind, protocol) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(place)
            tried.listen(1)
        except OSError as error:
            raise CommandError(
                f"cannot listen on {address}: {(error.strerror or str(error)).lower()}. Port {address.port} may be "
                f"another server's (`ss -ltnp 'sport = :{address.port}'` shows whose); "
                f"choose another with --listen HOST:PORT, or --listen {address.host}:0 for any",
                Exit.CONFLICT,
            ) from None
        return Address(address.host, tried.getsockname()[1])


async def probe(address: Address, key: str, model: str) -> Answered | NotYet | Wrong:
    """One chat completion of one token over HTTP/1.1, which says that it is no traffic."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}).encode()
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{WARM_UP}: 1\r\nConnection: close\r\n\r\n"
    ).encode() + body
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            status, answer = await _exchange(address, request)
    except TimeoutError:
        return NotYet(f"no answer within {PROBE_TIMEOUT_S:.0f} s")
    except (OSError, EOFError, ValueError) as error:
        return NotYet(f"{address} does not answer yet ({error})")
    if status == 200:
        return Answered()
    reason = f"{address} answers {status}: {answer[:400].decode('utf-8', 'replace')}"
    return NotYet(reason) if status in (408, 425, 429) or status >= 500 else Wrong(reason)


async def _exchange(address: Address, request: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection(address.connect_host, address.port)
    try:
        writer.write(request)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), await reader.read(MAX_ANSWER_BYTES)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def ready_text(address: Address, key_file: Path, model: str) -> str:
    """What `up` prints when all is well: a line for scripts, then commands to paste."""
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "Name three colours."}], "max_tokens": 40}
    )
    quoted = shlex.quote(str(key_file))
    return f"""ready {address.url}

curl {address.url}/v1/chat/completions -H "Authorization: Bearer $(cat {quoted})" -H "Content-Type: application/json" -d '{body}'

from openai import OpenAI
client = OpenAI(base_url="{address.url}/v1", api_key=open({str(key_file)!r}).read().strip())
print(client.chat.completions.create(model={model!r}, messages=[{{"role": "user", "content": "Name three colours."}}], max_tokens=40).choices[0].message.content)
"""

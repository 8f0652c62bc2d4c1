"""Tells the service manager how the process is doing, if there is one."""

from __future__ import annotations

import contextlib
import socket


def notify(address: str | None, message: str) -> None:
    """Send one sd_notify datagram (`READY=1`, `STOPPING=1`, `STATUS=…`); a manager that is gone is no failure of ours."""
    if not address:
        return
    target = "\0" + address[1:] if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as link:
        link.sendto(message.encode(), target)

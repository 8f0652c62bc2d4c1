"""A peer's connection to the cache daemon: deadlines, the breaker, the hello, and what an ended session left handed out.

Owned by one thread. One request, one reply; nothing raises for what the world does: a daemon that is stopped, killed,
restarted or was never started is `state == "absent"`, and `ask` answers None. What the verbs mean is the client's, the
bytes of the payload are `mapped_payload`'s.

A reply that did not come in time closes the connection, so no late reply is ever taken for another's; the breaker then
keeps the peer away for a while, and the next connection is opened without waiting for it. What an ended session had
handed out is remembered until it is given back: only then does `Settled` tell the daemon that nothing is being copied
into those slots any more.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

from cached.errors import PeerError, TierUnavailable, WireError
from cached.held_locks import HeldLocks
from cached.keys import self_test_vector
from cached.mapped_payload import MappedPayload
from cached.protocol import (
    CLIENT_ID_BYTES,
    MAX_FRAME_BYTES,
    NEVER,
    PROTOCOL_VERSION,
    TABLE,
    Bye,
    Hello,
    HelloRefused,
    Layout,
    Settled,
    TierHello,
    Welcome,
)
from cached.wire import FrameReader

FIRST_BACKOFF_S = 0.05
ABSENT_BACKOFF_S = 0.2
"""Between attempts where nobody listens, which costs next to nothing, so that hits resume soon after a restart."""
LAST_BACKOFF_S = 1.0
"""After a breach of the deadline, which costs whoever waits."""
REFUSED_BACKOFF_S = 2.0
RECEIVE_BYTES = 64 * 1024
"""Below the size from which the allocator maps and unmaps memory for every call."""

MAX_DESCRIPTORS = 4
_DESCRIPTOR = struct.Struct("i")

_Reply = TypeVar("_Reply")


class Link:
    """The connection of one client to one daemon, made anew whenever it is needed. `hello` None: an observer's."""

    def __init__(self, socket_path: str | Path, hello: TierHello | None, timeout_s: float) -> None:
        self.state: Literal["ready", "absent"] = "absent"
        self.refusal: HelloRefused | None = None
        self.welcome: Welcome | None = None
        self.payload = MappedPayload()
        self._locks = HeldLocks()
        self._path = str(socket_path)
        self._hello = hello
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._client_id = os.urandom(CLIENT_ID_BYTES)
        self._sock: socket.socket | None = None
        self._poll = select.poll()
        self._reader = FrameReader(MAX_FRAME_BYTES)
        self._fds: list[int] = []
        self._next_request = 1
        self._hello_by: float | None = None
        self._not_before = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self._is_patient = True
        self._held: set[int] = set()
        self._stale: set[int] = set()
        self._must_settle = False

    def poll(self) -> None:
        """Bring a reconnect forward, and see whether the daemon has gone, without asking anything."""
        with contextlib.suppress(TierUnavailable):
            self._ensure_ready(time.monotonic() + self._timeout_s)
            self._notice_the_end()

    def next_request_id(self) -> int:
        """The id of the request that is made next."""
        self._next_request += 1
        return self._next_request - 1

    def ask(self, message: Any, kind: type[_Reply]) -> _Reply | None:
        """The reply to one request, or None: the daemon is absent, and stays so for this verb."""
        deadline = time.monotonic() + self._timeout_s
        try:
            self._ensure_ready(deadline)
            self._transmit(TABLE.encode(message), deadline)
            reply = self._receive(deadline)
        except TierUnavailable:
            return None
        if type(reply) is not kind or reply.request_id != message.request_id:  # type: ignore[attr-defined]
            self.lose(is_breach=True)
            return None
        return reply

    def lose(self, is_breach: bool) -> None:
        """The session is over; after a breach of the deadline or of the protocol the breaker is open for the longest
        backoff."""
        self._disconnect()
        if is_breach:
            self._is_patient = False
            self._not_before = time.monotonic() + LAST_BACKOFF_S
        else:
            self._back_off()

    def close(self) -> None:
        """End the session orderly: no copy may be under way."""
        if self._sock is not None and self.state == "ready" and os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._sock.sendall(TABLE.encode(Bye()))
        self._disconnect()
        self._stale.clear()
        self._not_before = NEVER
        self.payload.forget()
        self._locks.let_go()

    # --- What is handed out ---------------------------------------------------------------------------------

    def hand_out(self, numbers: Iterable[int]) -> None:
        """These reservations or leases were granted in the session that is open."""
        self._held.update(numbers)

    def holds(self, numbers: Iterable[int]) -> bool:
        """Whether these are of the session that is open, and of this process."""
        return self._held.issuperset(numbers) and os.getpid() == self._pid

    def give_back(self, numbers: Collection[int]) -> set[int]:
        """The copies behind these reservations or leases are over; says which of them belong to the session that is open."""
        live = self._held.intersection(numbers)
        self._held -= live
        if self._stale:
            self._stale.difference_update(numbers)
        self._settle()
        return live

    def _settle(self) -> None:
        if not self._must_settle or self._stale or self.state != "ready":
            return
        self._must_settle = False
        with contextlib.suppress(TierUnavailable):
            self._transmit(TABLE.encode(Settled()), time.monotonic() + self._timeout_s)
            self._locks.let_go(but_last=1)

    # --- Bytes ----------------------------------------------------------------------------------------------

    def _transmit(self, data: bytes, deadline: float) -> None:
        assert self._sock is not None
        try:
            sent = self._send_now(data)
            if sent < len(data):  # The daemon is behind with reading.
                self._sock.settimeout(max(deadline - time.monotonic(), 0.001))
                self._sock.sendall(data[sent:])
                self._sock.setblocking(False)
        except TimeoutError:
            self.lose(is_breach=True)
            raise TierUnavailable from None
        except OSError:
            self.lose(is_breach=False)
            raise TierUnavailable from None

    def _send_now(self, data: bytes) -> int:
        assert self._sock is not None
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0

    def _receive(self, deadline: float) -> Any:
        """The next message; raises TierUnavailable when the deadline passes or the daemon goes."""
        while True:
            try:
                if not self._poll.poll(max(deadline - time.monotonic(), 0.001) * 1000):
                    raise TimeoutError
                frames = self._reader.receive(self._recv())
                if len(frames) > 1:
                    raise WireError("more than one reply to one request")
                if frames:
                    return TABLE.decode(frames[0])
            except (TimeoutError, PeerError):
                self.lose(is_breach=True)
                raise TierUnavailable from None
            except OSError:
                self.lose(is_breach=False)
                raise TierUnavailable from None
            if time.monotonic() >= deadline:
                self.lose(is_breach=True)
                raise TierUnavailable

    def _recv(self) -> bytes:
        assert self._sock is not None
        data = self._recv_with_descriptors(self._sock) if self.welcome is None else self._sock.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError
        return data

    def _recv_with_descriptors(self, sock: socket.socket) -> bytes:
        """Descriptors end with this program: one that it starts must not hold its lock. `socket.recv_fds` passes no flags."""
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * _DESCRIPTOR.size)
        data, ancillary, _, _ = sock.recvmsg(RECEIVE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, fds in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(fds) // _DESCRIPTOR.size * _DESCRIPTOR.size
                self._fds += [fd for (fd,) in _DESCRIPTOR.iter_unpack(fds[:whole])]
        return data

    # --- The session ----------------------------------------------------------------------------------------

    def _ensure_ready(self, deadline: float) -> None:
        if os.getpid() != self._pid:
            self._become_a_child()
        if self.state == "ready":
            return
        now = time.monotonic()
        if self._sock is None:
            if now < self._not_before:
                raise TierUnavailable
            self._connect(now)
        # After a breach the daemon may be alive and not answering: nobody waits for it twice.
        self._await_welcome(deadline if self._is_patient else now)

    def _connect(self, now: float) -> None:
        layout, label = None, ""
        if self._hello is not None:
            label = self._hello.label
            layout = Layout(self._hello.layout_fingerprint, self._hello.block_bytes, self._hello.tokens_per_block)
        hello = Hello(self.next_request_id(), PROTOCOL_VERSION, self._client_id, self_test_vector(), layout, label)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            sock.connect(self._path)
            sock.sendall(TABLE.encode(hello))
        except OSError:
            sock.close()
            self._back_off()
            raise TierUnavailable from None
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._reader = FrameReader(MAX_FRAME_BYTES)
        self._hello_by = now + max(self._timeout_s, LAST_BACKOFF_S)

    def _await_welcome(self, deadline: float) -> None:
        assert self._hello_by is not None
        while self.welcome is None:
            try:
                self._poll.poll(max(deadline - time.monotonic(), 0.0) * 1000)
                for frame in self._reader.receive(self._recv()):
                    self._greeted(TABLE.decode(frame))
            except BlockingIOError:
                # Stopped or busy. The hello stays on its way; a daemon that never reads it is given up after a while.
                self._is_patient = False
                if time.monotonic() >= self._hello_by:
                    self.lose(is_breach=True)
                raise TierUnavailable from None
            except (OSError, PeerError):
                self.lose(is_breach=False)
                raise TierUnavailable from None

    def _greeted(self, message: Any) -> None:
        if isinstance(message, HelloRefused):
            self.refusal = message
            self._disconnect()
            self._not_before = time.monotonic() + REFUSED_BACKOFF_S
            raise TierUnavailable
        if not isinstance(message, Welcome):
            raise WireError(f"{type(message).__name__} is no answer to a hello")
        if self._hello is not None and message.slot_bytes < self._hello.block_bytes:
            raise WireError(
                f"the welcome has slots of {message.slot_bytes} bytes, for blocks of {self._hello.block_bytes}"
            )
        fds, self._fds = self._fds, []
        self._locks.keep_last_of(fds)
        self.payload.adopt(message, fds)
        self.welcome = message
        self.refusal = None
        self.state = "ready"
        self._is_patient = True
        self._backoff_s = FIRST_BACKOFF_S
        self._settle()

    def _notice_the_end(self) -> None:
        """See whether the daemon has closed the connection while nothing was asked."""
        if self._sock is None or self.state != "ready":
            return
        try:
            if self._sock.recv(1, socket.MSG_PEEK) == b"":
                self.lose(is_breach=False)
        except BlockingIOError:
            return
        except OSError:
            self.lose(is_breach=False)

    def _back_off(self) -> None:
        self._not_before = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, ABSENT_BACKOFF_S)

    def _disconnect(self) -> None:
        if self._sock is not None:
            self._sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        self._sock = self.welcome = self._hello_by = None
        if self.state == "ready":
            self._must_settle = True
        self.state = "absent"
        self._stale |= self._held
        self._held.clear()

    def _become_a_child(self) -> None:
        """A forked child has nothing of its parent's: not the connection, nor what was handed out over it. It only
        closes its copy of the socket, so the parent's session goes on."""
        self._disconnect()
        self._locks.let_go()
        self._pid = os.getpid()
        self._client_id = os.urandom(CLIENT_ID_BYTES)
        self._stale.clear()
        self._must_settle = False
        self._is_patient = True
        self._not_before = 0.0

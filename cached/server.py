"""The daemon's only loop: one thread, one epoll, plain sockets. Moves bytes between peers and their sessions.

It asks what only the kernel knows: who a peer is (SO_PEERCRED), whether its process still lives (pidfd), what time it is.
Who is behind ended sessions is `former_peers`' to watch, what happens beside the loop `background`'s to do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable

import structlog

from cached import machine
from cached.arena import Arena
from cached.background import Background
from cached.config import CachedConfig
from cached.errors import ArenaError, CachedError, PeerError
from cached.former_peers import FormerPeers, has_ended, open_process, start_time_of
from cached.keys import fingerprint
from cached.listening import file_at, listen_at
from cached.part import TierSettings
from cached.protocol import TABLE, HelloRefused, TierStatistics
from cached.session import Outgoing, Peer, Session, State
from cached.spare_descriptors import SpareDescriptors
from cached.tier import Tier

RECEIVE_BYTES = 64 * 1024
"""Below the size from which the allocator maps and unmaps memory for every call."""
MAX_OUTBOX_BYTES = 4 * 2**20
"""A peer that lets more replies than this pile up is not reading them, and is closed."""
HELLO_TIMEOUT_S = 5.0
TICK_S = 1.0
ACCEPT_PAUSE_S = 0.1
MAX_REFUSED = 64
"""Refused peers whose sockets stay open until they have read why."""

_PEERCRED = struct.Struct("3i")

log = structlog.get_logger("cached")


def boottime() -> float:
    """The clock of every deadline (kv-semantics 2.7)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Connection:
    """One accepted socket: its session, what it has not taken yet, and a descriptor for its process."""

    def __init__(self, sock: socket.socket, session: Session, pid: int, pidfd: int | None, hello_by: float) -> None:
        self.sock = sock
        self.session = session
        self.pid = pid
        self.pidfd = pidfd
        self.hello_by = hello_by
        self.outbox = bytearray()


class Server:
    """Serve one arena on one socket until `stop`. Everything but `stop` belongs to the thread that calls `run`."""

    def __init__(self, config: CachedConfig, arena: Arena, allowed_uids: frozenset[int]) -> None:
        self._config = config
        self._arena = arena
        self._allowed_uids = allowed_uids
        self._settings = TierSettings(
            config.lease_ttl_s,
            config.reservation_ttl_s,
            config.layout_linger_s,
            event_buffer=config.event_buffer_max_size,
        )
        # Ids of a former life must mean nothing in this one: 2³² of them per start, chosen at random.
        first_id = (int.from_bytes(os.urandom(4), "big") >> 1 | 1) << 32
        self.tier = Tier(arena.parts, self._settings, first_id, boottime())
        self.snapshot: TierStatistics = self.tier.statistics()
        """The last statistics; replaced, never changed, so that any thread may read it."""
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._connections: dict[int, Connection] = {}
        self._former = FormerPeers(self._watch, self._forget, arena.peer_locks, self.tier.process_gone)
        self._listener: socket.socket | None = None
        self._socket_id: tuple[int, int] | None = None
        self._unreachable_because = ""
        self._accept_again_at: float | None = None
        self._wake_in, self._wake_out = socket.socketpair()
        self._background = Background(arena, self.tier, self._wake)
        self._stopping = False
        self._snapshot_at = 0.0
        self._look_at = 0.0
        self._refused: deque[tuple[float, socket.socket]] = deque()
        self._spare = SpareDescriptors()

    def run(self, when_ready: Callable[[], None] = lambda: None) -> None:
        """Listen and serve; returns after `stop`, with every session ended and the socket gone."""
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._watch(self._wake_in.fileno(), self._woken)
        self._listener = listen_at(self._config.socket)
        self._socket_id = file_at(self._config.socket)
        self._watch(self._listener.fileno(), self._accept)
        for session, holder in self.tier.quarantined().items():
            self._former.find(session, holder.pid, holder.started)
        self._background.start()
        self._background.hand_over()
        when_ready()
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._close()

    def stop(self) -> None:
        """Make `run` return soon; safe in a signal handler and in any thread."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\x00")

    # --- The loop -------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        for fd, events in self._epoll.poll(self._wait_s()):
            handler = self._handlers.get(fd)
            if handler is not None:
                handler(events)
        now = boottime()
        self.tier.expire(now)
        if now >= self._look_at:
            self._look_at = now + TICK_S
            self._look_at_socket()
            self._look_at_payloads()
            self._former.look_at_locks(self.tier.quarantined())
            self._arena.peer_locks.keep_only(self.tier.clients())
        self._close_refused(now)
        self._background.hand_over()
        if self._former.are_watched:
            self._former.keep_only(self.tier.quarantined())
        if self._accept_again_at is not None and now >= self._accept_again_at:
            self._resume_accepting()
        for connection in [c for c in self._connections.values() if c.session.state is State.NEW and c.hello_by <= now]:
            log.warning("peer said nothing", pid=connection.pid, waited_s=HELLO_TIMEOUT_S)
            self._end(connection)

    def _look_at_payloads(self) -> None:
        for part in self.tier.parts:
            try:
                if part.files.mend():
                    log.error(
                        "a payload was cut short or holed by a peer; it is whole again and every block is verified"
                    )
                    part.mended()
            except ArenaError as error:
                log.error("a payload was cut short by a peer and cannot be mended", reason=str(error))
                part.mended()

    def _look_at_socket(self) -> None:
        """Whoever cleans up directories of sockets may remove one that is in use: nobody new would reach this daemon,
        and nothing would say so. Those who are connected notice nothing."""
        path = self._config.socket
        if file_at(path) == self._socket_id:
            return
        try:
            listener = listen_at(path)
        except (CachedError, OSError) as error:  # The latter: there are no descriptors left for it now.
            if str(error) != self._unreachable_because:
                log.error("the socket is gone and cannot be made again", socket=str(path), reason=str(error))
            self._unreachable_because = str(error)
            return
        if self._listener is not None:
            self._forget(self._listener.fileno())
            self._listener.close()
        self._listener, self._socket_id, self._unreachable_because = listener, file_at(path), ""
        self._accept_again_at = None
        self._watch(listener.fileno(), self._accept)
        self.tier.sockets_remade += 1
        log.warning("the socket was gone and was made again", socket=str(path))

    def _wait_s(self) -> float:
        now = boottime()
        if self._config.metrics_listen is not None and now >= self._snapshot_at:
            self.snapshot = self.tier.statistics()
            self._snapshot_at = now + TICK_S
        due = self.tier.next_deadline()
        wait = TICK_S if due is None else min(TICK_S, max(0.0, due - now))
        return ACCEPT_PAUSE_S if self._accept_again_at is not None and wait > ACCEPT_PAUSE_S else wait

    def _woken(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)
        self._background.take_in()

    # --- Peers ----------------------------------------------------------------------------------------------

    def _accept(self, _events: int) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # Out of descriptors: those who are connected go on being served.
            self._refuse_next(error)
            return
        sock.setblocking(False)
        pid, uid, _ = _PEERCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
        if uid not in self._allowed_uids:
            log.warning("peer of a strange user is refused", pid=pid, uid=uid)
            self._refuse(sock, "user", f"user {uid} may not use this cache daemon; see allowed_users")
            return
        if len(self._connections) >= self._config.max_sessions:
            log.warning("too many peers", pid=pid, max_sessions=self._config.max_sessions)
            self._refuse(sock, "sessions_full", f"{self._config.max_sessions} peers are connected; see max_sessions")
            return
        if not self._spare.are_not_needed():
            self._refuse_for_lack_of_descriptors(sock)
            return
        pidfd = open_process(pid)
        session = Session(self.tier, self._settings, Peer(pid, start_time_of(pid)), self._shown)
        connection = Connection(sock, session, pid, pidfd, boottime() + HELLO_TIMEOUT_S)
        self._connections[sock.fileno()] = connection
        self._watch(sock.fileno(), lambda events: self._serve(connection, events))
        if pidfd is not None:
            self._watch(pidfd, lambda _events: self._process_died(connection))

    def _refuse_next(self, error: OSError) -> None:
        """Take the next peer in with a spare descriptor, to say why it is not served; without one all of them wait."""
        assert self._listener is not None
        if error.errno in (errno.EMFILE, errno.ENFILE) and self._spare.give_one():
            with contextlib.suppress(OSError):
                sock, _ = self._listener.accept()
                sock.setblocking(False)
                self._refuse_for_lack_of_descriptors(sock)
            return
        log.error("cannot accept", reason=error.strerror, again_in_s=ACCEPT_PAUSE_S)
        self._forget(self._listener.fileno())
        self._accept_again_at = boottime() + ACCEPT_PAUSE_S

    def _refuse_for_lack_of_descriptors(self, sock: socket.socket) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        log.error("no descriptors are left: a new peer is refused", limit=limit, peers=len(self._connections))
        message = f"the cache daemon has used up its {limit} descriptors; raise RLIMIT_NOFILE (LimitNOFILE=, ulimit -n)"
        self._refuse(sock, "no_descriptors", message)

    def _refuse(self, sock: socket.socket, reason: str, message: str) -> None:
        """Say why, and close a second later: a socket that is closed before its peer's hello was read takes the answer
        along with it."""
        with contextlib.suppress(OSError):
            sock.send(TABLE.encode(HelloRefused(0, reason, message)))
        self._refused.append((boottime() + TICK_S, sock))

    def _close_refused(self, now: float) -> None:
        while self._refused and (self._refused[0][0] <= now or len(self._refused) > MAX_REFUSED):
            self._refused.popleft()[1].close()

    def _serve(self, connection: Connection, events: int) -> None:
        try:
            if events & select.EPOLLIN:
                data = connection.sock.recv(RECEIVE_BYTES)
                if not data:
                    self._end(connection)
                    return
                for outgoing in connection.session.receive(data, boottime()):
                    self._send(connection, outgoing)
            elif events & (select.EPOLLHUP | select.EPOLLERR):
                self._end(connection)
                return
            if events & select.EPOLLOUT:
                self._flush(connection)
        except BlockingIOError:
            return
        except PeerError as error:
            log.warning("peer broke the protocol and is closed", pid=connection.pid, reason=str(error))
            self._end(connection)
        except ArenaError as error:  # No room to keep what it sent: it comes again, and everybody else stays served.
            log.error("the arena cannot keep what a peer sent; its session is closed", reason=str(error))
            self._end(connection)
        except OSError as error:
            log.info("peer is gone", pid=connection.pid, reason=error.strerror)
            self._end(connection)
        else:
            if connection.session.state is State.CLOSED and not connection.outbox:
                self._end(connection)

    def _send(self, connection: Connection, outgoing: Outgoing) -> None:
        if outgoing.with_payload:
            sent = self._send_welcome(connection, outgoing.frame)
        elif connection.outbox:
            sent = 0
        else:
            try:
                sent = connection.sock.send(outgoing.frame)
            except BlockingIOError:
                sent = 0
        if sent < len(outgoing.frame):
            connection.outbox += outgoing.frame[sent:]
            self._epoll.modify(connection.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
            if len(connection.outbox) > MAX_OUTBOX_BYTES:
                raise PeerError(f"{len(connection.outbox)} bytes of replies were not read")

    def _send_welcome(self, connection: Connection, frame: bytes) -> int:
        session = connection.session
        assert session.part is not None
        files = session.part.files
        lock = self._arena.peer_locks.give(session.holder.client_id)
        try:
            sent = socket.send_fds(connection.sock, [frame], [files.payload_fd, lock])
        finally:
            os.close(lock)  # The lock is the open file's, which is the peer's alone from now on.
        assert files.layout is not None
        log.info(
            "engine connected",
            pid=connection.pid,
            session=session.number,
            layout=fingerprint(files.layout.fingerprint),
            label=files.label,
            slots=files.num_slots,
        )
        return sent

    def _flush(self, connection: Connection) -> None:
        if connection.outbox:
            del connection.outbox[: connection.sock.send(connection.outbox)]
        if not connection.outbox:
            self._epoll.modify(connection.sock.fileno(), select.EPOLLIN)

    def _end(self, connection: Connection, is_gone: bool = False) -> None:
        """A connection is over; its process is watched on if it may still be copying."""
        fd = connection.sock.fileno()
        if self._connections.pop(fd, None) is None:
            return
        self._forget(fd)
        connection.sock.close()
        number = connection.session.number
        unsettled = connection.session.end(boottime())
        if number:
            log.info("peer disconnected", pid=connection.pid, session=number, quarantined=unsettled)
        pidfd, connection.pidfd = connection.pidfd, None
        holder = connection.session.holder
        if unsettled and is_gone:
            self.tier.process_gone(number)
        elif unsettled and pidfd is not None:
            self._forget(pidfd)
            self._former.take(number, pidfd, (holder.pid, holder.started))
            return
        elif unsettled:
            log.warning("cannot see the peer's process: what it held waits until its lock is released", session=number)
        if pidfd is not None:
            self._forget(pidfd)
            os.close(pidfd)

    def _process_died(self, connection: Connection) -> None:
        if connection.pidfd is None or not has_ended(connection.pidfd):
            return
        # Its socket may be open in a child it forked; the session is the process's, and ends with it. What it sent
        # before it died is still acted on, so that an acknowledged abort or bye counts.
        self._serve(connection, select.EPOLLIN)
        self._end(connection, is_gone=True)

    def _shown(self) -> list[tuple[str, str]]:
        """The settings in force, for whoever asks; none of them is a secret."""
        limit = machine.memory_limit()
        return [
            *((name, str(value)) for name, value in self._config.model_dump(mode="json").items()),
            ("(arena's file system)", machine.file_system_of(self._config.arena_dir) or "unknown"),
            ("(memory limit)", "none" if limit is None else str(limit)),
        ]

    # --- Helpers --------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\x00")

    def _watch(self, fd: int, handler: Callable[[int], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def _forget(self, fd: int) -> None:
        self._handlers.pop(fd, None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)

    def _resume_accepting(self) -> None:
        assert self._listener is not None
        self._accept_again_at = None
        self._watch(self._listener.fileno(), self._accept)

    def _close(self) -> None:
        self._stopping = True
        with contextlib.suppress(OSError):
            if file_at(self._config.socket) == self._socket_id:
                os.unlink(self._config.socket)
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections.values()):
            self._end(connection)
        self._former.close()
        self._close_refused(float("inf"))
        self._spare.close()
        self._background.stop()
        self._epoll.close()
        self._wake_in.close()
        self._wake_out.close()

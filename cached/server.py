"""The daemon's only loop: one thread, one epoll, plain sockets. Moves bytes between peers and their sessions.

It also watches what only the kernel knows: who a peer is (SO_PEERCRED), whether its process still lives (pidfd), what
time it is. Two helper threads allocate the arena and verify blocks; they hand in results and touch nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import resource
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import structlog

from cached import machine
from cached.arena import Arena
from cached.config import CachedConfig
from cached.errors import ArenaError, CachedError, PeerError
from cached.keys import fingerprint
from cached.offers import Unverified
from cached.part import Part, TierSettings
from cached.protocol import TABLE, HelloRefused, TierStatistics
from cached.session import Outgoing, Peer, Session, State
from cached.spare_descriptors import SpareDescriptors
from cached.store import BlockStore
from cached.tier import Tier

RECEIVE_BYTES = 64 * 1024
"""Below the size from which the allocator maps and unmaps memory for every call."""
MAX_OUTBOX_BYTES = 4 * 2**20
"""A peer that lets more replies than this pile up is not reading them, and is closed."""
HELLO_TIMEOUT_S = 5.0
TICK_S = 1.0
ACCEPT_PAUSE_S = 0.1
VERIFY_BATCH = 8
MAX_REFUSED = 64
"""Refused peers whose sockets stay open until they have read why."""

_PEERCRED = struct.Struct("3i")
_Verdict = tuple[Part, BlockStore, Unverified, bool]

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
        self._watched: dict[int, int] = {}
        self._listener: socket.socket | None = None
        self._socket_id: tuple[int, int] | None = None
        self._unreachable_because = ""
        self._accept_again_at: float | None = None
        self._wake_in, self._wake_out = socket.socketpair()
        self._stopping = False
        self._to_verify: queue.SimpleQueue[tuple[Part, BlockStore, list[Unverified]] | None] = queue.SimpleQueue()
        self._verdicts: queue.SimpleQueue[_Verdict] = queue.SimpleQueue()
        self._num_verifying = 0
        self._snapshot_at = 0.0
        self._look_at = 0.0
        self._refused: deque[tuple[float, socket.socket]] = deque()
        self._spare = SpareDescriptors()
        self._threads: list[threading.Thread] = []

    def run(self, when_ready: Callable[[], None] = lambda: None) -> None:
        """Listen and serve; returns after `stop`, with every session ended and the socket gone."""
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._watch(self._wake_in.fileno(), self._woken)
        self._listener = _listen(self._config.socket)
        self._socket_id = _file_id(self._config.socket)
        self._watch(self._listener.fileno(), self._accept)
        for session, holder in self.tier.quarantined().items():
            self._watch_former(session, holder.pid, holder.started)
        self._start_threads()
        self._verify_some()
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
            self._look_for_the_gone()
        self._close_refused(now)
        self._verify_some()
        if self._watched:
            self._unwatch_settled()
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

    def _look_for_the_gone(self) -> None:
        """Who is in quarantine is gone when the kernel has dropped its lock, whether or not it can be watched as well: the
        number of a process that a former daemon noted may be another's by now."""
        locks = self._arena.peer_locks
        for session, holder in self.tier.quarantined().items():
            if locks.is_released(holder.client_id):
                log.info("a peer's lock is released: it is gone", session=session)
                self.tier.process_gone(session)
        locks.keep_only(self.tier.clients())

    def _look_at_socket(self) -> None:
        """Whoever cleans up directories of sockets may remove one that is in use: nobody new would reach this daemon,
        and nothing would say so. Those who are connected notice nothing."""
        path = self._config.socket
        if _file_id(path) == self._socket_id:
            return
        try:
            listener = _listen(path)
        except (CachedError, OSError) as error:  # The latter: there are no descriptors left for it now.
            if str(error) != self._unreachable_because:
                log.error("the socket is gone and cannot be made again", socket=str(path), reason=str(error))
            self._unreachable_because = str(error)
            return
        if self._listener is not None:
            self._forget(self._listener.fileno())
            self._listener.close()
        self._listener, self._socket_id, self._unreachable_because = listener, _file_id(path), ""
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
        self.tier.allocated()
        while True:
            try:
                part, store, item, is_sound = self._verdicts.get_nowait()
            except queue.Empty:
                return
            self._num_verifying -= 1
            if store is part.store and store.verified(item, is_sound):
                log.warning("block failed verification and is dropped", slot=item.slot)

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
        pidfd = _open_process(pid)
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
        if unsettled and is_gone:
            self.tier.process_gone(number)
        elif unsettled and pidfd is not None:
            self._watched[pidfd] = number
            self._handlers[pidfd] = lambda _events: self._former_gone(pidfd)
            return
        elif unsettled:
            log.warning("cannot see the peer's process: what it held waits until its lock is released", session=number)
        if pidfd is not None:
            self._forget(pidfd)
            os.close(pidfd)

    def _process_died(self, connection: Connection) -> None:
        if connection.pidfd is None or not _has_ended(connection.pidfd):
            return
        # Its socket may be open in a child it forked; the session is the process's, and ends with it. What it sent
        # before it died is still acted on, so that an acknowledged abort or bye counts.
        self._serve(connection, select.EPOLLIN)
        self._end(connection, is_gone=True)

    def _watch_former(self, session: int, pid: int, started: int) -> None:
        if pid <= 0:
            # In a namespace of processes that is not seen from here: not being visible says nothing of being gone.
            log.warning("cannot see the former peer's process: what it held waits until its lock is released")
            return
        if start_time_of(pid) != started:
            self.tier.process_gone(session)
            return
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.tier.process_gone(session)
            return
        except OSError as error:
            log.error("cannot watch the former peer's process", pid=pid, reason=error.strerror)
            return
        self._watched[pidfd] = session
        self._watch(pidfd, lambda _events: self._former_gone(pidfd))

    def _former_gone(self, pidfd: int) -> None:
        if _has_ended(pidfd):
            self.tier.process_gone(self._watched[pidfd])
            self._unwatch(pidfd)

    def _unwatch_settled(self) -> None:
        """Watch nobody whose session has been settled otherwise, so that a peer's reconnects cost no descriptors."""
        waiting = self.tier.quarantined()
        for pidfd in [pidfd for pidfd, session in self._watched.items() if session not in waiting]:
            self._unwatch(pidfd)

    def _unwatch(self, pidfd: int) -> None:
        del self._watched[pidfd]
        self._forget(pidfd)
        os.close(pidfd)

    def _shown(self) -> list[tuple[str, str]]:
        """The settings in force, for whoever asks; none of them is a secret."""
        limit = machine.memory_limit()
        return [
            *((name, str(value)) for name, value in self._config.model_dump(mode="json").items()),
            ("(arena's file system)", machine.file_system_of(self._config.arena_dir) or "unknown"),
            ("(memory limit)", "none" if limit is None else str(limit)),
        ]

    # --- Helpers --------------------------------------------------------------------------------------------

    def _start_threads(self) -> None:
        for target in (self._allocate, self._verify):
            thread = threading.Thread(target=target, name=f"cached{target.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _allocate(self) -> None:
        began, told = time.monotonic(), 0
        try:
            while not self._stopping and self._arena.allocate_next():
                self._wake()
                quarters = 4 * self._arena.allocated_bytes // self._arena.payload_bytes
                if quarters > told:
                    told = quarters
                    seconds = round(time.monotonic() - began, 2)
                    log.info(
                        "arena is being allocated",
                        percent=25 * told,
                        bytes=self._arena.allocated_bytes,
                        seconds=seconds,
                    )
        except ArenaError as error:
            log.error("the arena stays smaller than asked", reason=str(error), bytes=self._arena.allocated_bytes)

    def _verify_some(self) -> None:
        if self._num_verifying:
            return
        found = self.tier.next_unverified(VERIFY_BATCH)
        if found is not None:
            part, batch = found
            self._num_verifying = len(batch)
            self._to_verify.put((part, part.require_store(), batch))

    def _verify(self) -> None:
        buffer = bytearray()
        while (job := self._to_verify.get()) is not None:
            part, store, batch = job
            for item in batch:
                self._verdicts.put((part, store, item, part.files.is_sound(item.slot, item.checksum, buffer)))
            self._wake()

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
            if _file_id(self._config.socket) == self._socket_id:
                os.unlink(self._config.socket)
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections.values()):
            self._end(connection)
        for pidfd in list(self._watched):
            os.close(pidfd)
        self._close_refused(float("inf"))
        self._spare.close()
        self._to_verify.put(None)
        for thread in self._threads:
            thread.join()
        self._epoll.close()
        self._wake_in.close()
        self._wake_out.close()


def _file_id(path: Path) -> tuple[int, int] | None:
    """What a path leads to; None where it leads to nothing that can be seen."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def start_time_of(pid: int) -> int:
    """When a process started, in clock ticks since boot, which with its pid names it for good; 0 when not visible."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def _open_process(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None


def _has_ended(pidfd: int) -> bool:
    """Ask again: within one turn of the loop the number of a closed descriptor may have become another's."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _listen(path: Path) -> socket.socket:
    """Listen at `path`, whose socket appears with its mode set and its queue open, replacing a dead one's."""
    if _is_answered(path):
        raise CachedError(f"another process answers at {path}; stop it, or give another socket")
    newborn = path.with_name(f".{os.getpid()}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            newborn.unlink()
        listener.bind(str(newborn))
        newborn.chmod(0o660)
        listener.listen(128)
        newborn.rename(path)
    except OSError as error:
        listener.close()
        raise CachedError(f"cannot listen at {path}: {error.strerror or error}") from error
    return listener


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except BlockingIOError:  # Its queue is full: somebody lives there.
            return True
        except OSError:
            return False
    return True

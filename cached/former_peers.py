"""Who is behind ended sessions, watched until they are known to be gone: what they held is untouchable until then.

The kernel says it: by the process's pidfd where the process is seen, by its lock in any case (`peer_locks`). Not being seen
says nothing. What becomes free is the tier's business.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Container, Mapping
from pathlib import Path

import structlog

from cached.peer_locks import PeerLocks
from cached.records import Holder

log = structlog.get_logger("cached")

Handler = Callable[[int], None]


class FormerPeers:
    """`watch` and `forget` tell the loop which descriptors to wait for; `gone` is told the sessions of those who are."""

    def __init__(
        self,
        watch: Callable[[int, Handler], None],
        forget: Callable[[int], None],
        locks: PeerLocks,
        gone: Callable[[int], None],
    ) -> None:
        self._watch = watch
        self._forget = forget
        self._locks = locks
        self._gone = gone
        self._watched: dict[int, set[int]] = {}
        self._pidfd_of: dict[tuple[int, int], int] = {}

    @property
    def are_watched(self) -> bool:
        """Whether any descriptor is held for them."""
        return bool(self._watched)

    def take(self, session: int, pidfd: int, process: tuple[int, int]) -> None:
        """Watch on, with a descriptor that is ours from now on, a process whose session has ended. `process` is its pid and
        its start: one descriptor does for all of its sessions, however many it leaves behind."""
        known = self._pidfd_of.get(process)
        if known is not None and not has_ended(known):
            os.close(pidfd)
            self._watched[known].add(session)
            return
        self._watched[pidfd] = {session}
        self._pidfd_of[process] = pidfd
        self._watch(pidfd, lambda _events: self._ended(pidfd))

    def find(self, session: int, pid: int, started: int) -> None:
        """Watch the process that a former daemon noted, if it is there."""
        if pid <= 0:
            # In a namespace of processes that is not seen from here: not being visible says nothing of being gone.
            log.warning("cannot see the former peer's process: what it held waits until its lock is released")
            return
        if start_time_of(pid) != started:
            self._gone(session)
            return
        try:
            self.take(session, os.pidfd_open(pid), (pid, started))
        except ProcessLookupError:
            self._gone(session)
        except OSError as error:
            log.error("cannot watch the former peer's process", pid=pid, reason=error.strerror)

    def look_at_locks(self, waiting: Mapping[int, Holder]) -> None:
        """Whose lock the kernel has dropped is gone, whether or not it seems to be watched as well: the number of a process
        that a former daemon noted may be another's by now."""
        for session, holder in waiting.items():
            if self._locks.is_released(holder.client_id):
                log.info("a peer's lock is released: it is gone", session=session)
                self._gone(session)

    def keep_only(self, waiting: Container[int]) -> None:
        """Watch nobody whose session has been settled otherwise, so that a peer's reconnects cost no descriptors."""
        for sessions in self._watched.values():
            sessions -= {session for session in sessions if session not in waiting}
        for pidfd in [pidfd for pidfd, sessions in self._watched.items() if not sessions]:
            self._unwatch(pidfd)

    def close(self) -> None:
        """Watch nobody any more."""
        self.keep_only(())

    def _ended(self, pidfd: int) -> None:
        if has_ended(pidfd):
            for session in self._watched[pidfd]:
                self._gone(session)
            self._unwatch(pidfd)

    def _unwatch(self, pidfd: int) -> None:
        del self._watched[pidfd]
        self._pidfd_of = {process: other for process, other in self._pidfd_of.items() if other != pidfd}
        self._forget(pidfd)
        os.close(pidfd)


def start_time_of(pid: int) -> int:
    """When a process started, in clock ticks since boot, which with its pid names it for good; 0 when not visible."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def open_process(pid: int) -> int | None:
    """A descriptor for a process; None where it cannot be seen, or not be had."""
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None


def has_ended(pidfd: int) -> bool:
    """Ask again: within one turn of a loop the number of a closed descriptor may have become another's."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))

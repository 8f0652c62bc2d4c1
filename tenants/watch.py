"""Keeps the newest snapshot at hand: asks the store's version a few times a second and reads again when it changed.

This is what makes a revocation in one process take effect in another within a second. Whoever cannot wait, because a key
made a moment ago is not known yet, has it look soon. When the store cannot be read the last snapshot stays and its age is
told; what to do about an old one is for its user to decide.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from tenants.errors import TenantsError
from tenants.snapshot import TenantSnapshot
from tenants.store import Store

_log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
LOOK_GAP_S = 0.05
"""Looks begin at least so far apart, however many are asked for: at most 20 a second, each a query of one row."""


@dataclass(frozen=True, slots=True)
class WatchStatistics:
    """How fresh the snapshot is; `error` says what has kept the store from being read since the last success."""

    version: int
    num_keys: int
    age_s: float
    num_loads: int
    num_failures: int
    error: str | None


class SnapshotWatcher:
    """Holds a snapshot from its construction on, and a thread that renews it from `start` to `stop`.

    Construction reads the store, and raises what that raises: nobody is to serve without knowing any key. Only the
    thread (or `check_now`, in its absence) changes anything here; readers see one reference replaced by another.
    """

    def __init__(self, store: Store, interval_s: float = 0.25) -> None:
        self._store = store
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._wanted = threading.Event()
        self._looks_begun = 0
        self._after_look: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._num_failures = 0
        self._error: str | None = None
        self._num_loads = 1
        self._fresh_at = time.monotonic()
        self._current = store.snapshot()
        _report_unreadable(self._current)

    @property
    def current(self) -> TenantSnapshot:
        """The newest snapshot there is; ask for it anew for every request."""
        return self._current

    @property
    def age_s(self) -> float:
        """Seconds since the store last said that the snapshot is its newest; below a second when all is well."""
        return time.monotonic() - self._fresh_at

    def statistics(self) -> WatchStatistics:
        """A frozen view, for metrics and for `/readyz`."""
        snapshot = self._current
        return WatchStatistics(
            version=snapshot.version,
            num_keys=len(snapshot.keys),
            age_s=self.age_s,
            num_loads=self._num_loads,
            num_failures=self._num_failures,
            error=self._error,
        )

    def start(self) -> SnapshotWatcher:
        """Begin to watch."""
        if self._thread is None:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._watch, name="tenants-watch", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread; the snapshot stays. Closing the store is for whoever opened it."""
        if self._thread is not None:
            self._stopping.set()
            self._wanted.set()
            self._thread.join(STOP_TIMEOUT_S)
            self._thread = None

    def __enter__(self) -> SnapshotWatcher:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def looks_begun(self) -> int:
        """While this is what `look_soon` returned, the look that was asked for has yet to begin: others may share it."""
        return self._looks_begun

    def look_soon(self, then: Callable[[], None]) -> int:
        """Look at the store without waiting for the next turn, and call `then` in the watcher's thread afterwards, whether
        the store could answer or not. The look begins after this call, within `LOOK_GAP_S` when the store answers."""
        with self._lock:
            self._after_look.append(then)
            begun = self._looks_begun
        self._wanted.set()
        return begun

    def check_now(self) -> bool:
        """Ask the store once; whether it could answer."""
        asked_at = time.monotonic()
        try:
            if self._store.version() != self._current.version:
                self._current = self._store.snapshot()
                self._num_loads += 1
                _report_unreadable(self._current)
        except Exception as error:  # The thread must outlive whatever a database driver invents.
            self._note_failure(error)
            return False
        if self._error is not None:
            _log.info("the tenant store answers again; changes to tenants and keys take effect")
        self._error = None
        self._fresh_at = asked_at
        return True

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while True:
            self._wanted.wait(self._interval_s)
            # Nobody waits when the last look is long ago, as it is unless somebody asks for one after the other.
            self._stopping.wait(max(0.0, looked_at + LOOK_GAP_S - time.monotonic()))
            looked_at = time.monotonic()
            # Cleared before the list is taken: one look too many does no harm, one that is missing would.
            self._wanted.clear()
            with self._lock:
                self._looks_begun += 1
                waiting, self._after_look = self._after_look, []
            if not self._stopping.is_set():
                self.check_now()
            for then in waiting:
                then()
            if self._stopping.is_set():
                return

    def _note_failure(self, error: Exception) -> None:
        self._num_failures += 1
        text = str(error) if isinstance(error, TenantsError) else f"{type(error).__name__} while reading tenants"
        # Once per kind of trouble, and not four times a second.
        if text != self._error:
            _log.error("changes to tenants and keys do not take effect until this is mended: %s", text)
        self._error = text


def _report_unreadable(snapshot: TenantSnapshot) -> None:
    for name in snapshot.unreadable_tenants:
        _log.error("the salt secret of tenant %s does not open; its keys are refused, restore its record", name)

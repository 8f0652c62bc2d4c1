"""Follows the host tier's events, and hands them on in the order in which they belong into the engine's stream.

It decides what to ask the daemon next, one bounded question at a time, and how often. What the answers mean is
`host_index.py`'s. It has a thread and a session of its own: a page of events or of a list may take the daemon as long as a
lookup may take in all, and no request is to wait for one, nor the tier to be absent because of one.

The event loop takes what happened; a snapshot is taken together with everything that happened before it, so that the two
cannot disagree.

    [skipping] ── no older events left ──▶ [listing] ── last page ──▶ [comparing] ── done ──▶ [following]
        ▲                                      │ daemon absent             │                      │ loss, another daemon
        └──────────────────────────────────────┴──── another session ─────┴──────────────────────┘
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

import structlog

from cached.client import TierClient
from cached.protocol import TierEvent
from engine.events import Event
from engine.host_index import HostIndex, HostList
from engine.index_columns import IndexColumns

BUSY_PAUSE_S: Final = 0.1
"""Between questions while something happens in the tier."""
QUIET_PAUSE_S: Final = 0.25
CATCH_UP_PAUSE_S: Final = 0.01
"""Between questions, or steps of comparing, while the index is brought up to date."""
RESTART_PAUSE_S: Final = 1.0
TIMEOUT_S: Final = 2.0
"""For the client: a page of thousands of rows takes its time on a busy machine, and nobody waits for this one."""
STOP_S: Final = TIMEOUT_S + 1.0
EVENTS_PER_STEP: Final = 512
"""So that the event loop, which takes what happened in between, never waits for long."""
FORGET_AFTER_S: Final = 30.0
"""So long after the tier went away consumers are told that its blocks are gone. One that comes back sooner, as after a
restart, is compared with what is known, and most of it is there still."""


log = structlog.get_logger("engine.host_events")


class HostEvents:
    """`start`, `stop`, `take` and `take_with_columns` are the event loop's; `tell` is called in the thread, and must not
    block."""

    def __init__(self, num_device_blocks: int, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._wake = threading.Event()
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._index = HostIndex(num_device_blocks)
        self._happened: list[Event] = []
        self._state: Literal["absent", "skipping", "listing", "comparing", "following"] = "absent"
        self._steps: Iterator[list[Event]] = iter(())
        self._listed = HostList()
        self._list_after = -1
        self._incarnation: int | None = None
        self._cursor = 0
        self._due = 0.0
        self._asked_at = 0.0
        self.num_lists = 0

    def start(self, make_client: Callable[[], TierClient]) -> None:
        """Begin to follow; the client is made, used and closed in the thread."""
        self._thread = threading.Thread(target=self._run, args=(make_client,), name="engine-host-events", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits for the question that is under way."""
        self._is_stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def look_soon(self) -> None:
        """This engine has just stored something. For any thread; never blocks."""
        self._wake.set()

    # The event loop's. ----------------------------------------------------------------------------------------------

    def take(self) -> list[Event]:
        """What happened since the last call."""
        with self._lock:
            happened, self._happened = self._happened, []
            return happened

    def take_with_columns(self) -> tuple[list[Event], IndexColumns]:
        """What happened since the last call, and the blocks that there are after it."""
        with self._lock:
            happened, self._happened = self._happened, []
            return happened, self._index.columns()

    # The thread's. --------------------------------------------------------------------------------------------------

    def _run(self, make_client: Callable[[], TierClient]) -> None:
        while not self._is_stopping:
            client = make_client()
            try:
                self._serve(client)
            except Exception:
                # A defect must not leave consumers with what is not so: a new session begins with a list.
                log.exception("following the host tier's events failed; they are listed anew")
                self._tier_went(time.monotonic())
                self._wake.wait(RESTART_PAUSE_S)
            finally:
                client.close()

    def _serve(self, client: TierClient) -> None:
        while not self._is_stopping:
            if self._wake.wait(max(0.0, min(QUIET_PAUSE_S, self._due - time.monotonic()))):
                self._wake.clear()
                self._due = min(self._due, self._asked_at + BUSY_PAUSE_S)
            client.poll()
            self._look_at_state(client)
            if time.monotonic() >= self._due:
                self._turn(client, time.monotonic())
                self._look_at_state(client)

    def _look_at_state(self, client: TierClient) -> None:
        """After every question, so that no session ends unseen: only the next one, or `poll`, opens another."""
        if client.state == "absent" and self._state != "absent":
            self._tier_went(time.monotonic())
        elif client.state == "ready" and self._state == "absent":
            self._tier_came(client.num_slots, time.monotonic())

    def _tier_came(self, num_blocks: int, now: float) -> None:
        """A session began, with a daemon that may be another one."""
        self._state, self._incarnation, self._cursor, self._due = "skipping", None, 0, now
        self._steps = self._index.resize(num_blocks)

    def _tier_went(self, now: float) -> None:
        """The session is over; what the tier holds is as it was, as far as anybody knows."""
        self._state, self._due, self._steps = "absent", now + FORGET_AFTER_S, iter(())
        self._listed = HostList()

    def _turn(self, client: TierClient, now: float) -> None:
        """The next bounded piece of work."""
        self._due = now + CATCH_UP_PAUSE_S
        if self._step():
            return
        match self._state:
            case "absent":
                self._due = now + FORGET_AFTER_S
                if len(self._index):
                    self._steps, self._due = self._index.become(HostList()), now
            case "skipping":
                self._skip(client)
            case "listing":
                self._list(client)
            case "comparing":
                self._listed = HostList()
                self._state = "following"
            case "following":
                self._follow(client, now)

    def _step(self) -> bool:
        """One step of a change that takes several; False: there is none."""
        with self._lock:
            happened = next(self._steps, None)
            self._happened += happened or ()
        if happened:
            self._tell()
        return happened is not None

    def _apply(self, told: Sequence[TierEvent]) -> Iterator[list[Event]]:
        for start in range(0, len(told), EVENTS_PER_STEP):
            yield self._index.apply(told[start : start + EVENTS_PER_STEP])

    def _skip(self, client: TierClient) -> None:
        """Old events are of no use to whoever takes a list: find the place from which they will be."""
        reply = client.events(self._cursor)
        if reply is None:
            return
        self._incarnation, self._cursor = reply.incarnation, reply.last
        if not reply.events:
            self._state, self._list_after, self._listed = "listing", -1, HostList()
            self.num_lists += 1

    def _list(self, client: TierClient) -> None:
        page = client.list_blocks(self._list_after)
        if page is None:
            return
        self._listed.add(page.blocks)
        if page.next_after is None:
            self._state, self._steps = "comparing", self._index.become(self._listed)
        else:
            self._list_after = page.next_after

    def _follow(self, client: TierClient, now: float) -> None:
        self._asked_at = now
        reply = client.events(self._cursor)
        if reply is None:
            return
        if reply.lost or reply.incarnation != self._incarnation:
            self._state = "skipping"
            self._incarnation, self._cursor = reply.incarnation, reply.last
            return
        self._cursor = reply.last
        self._steps = self._apply(reply.events)
        while self._step():
            pass
        self._due = now + (BUSY_PAUSE_S if reply.events else QUIET_PAUSE_S)

"""A device with three streams, in threads: what it is told is done later, in order within a stream and in any order between.

`lags` names streams that do nothing until somebody waits for it, so that whatever forgot to wait for them comes first,
every time. `omits` names waits that are forgotten: (who waits, for whose event). `pace` sleeps before each deed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine.copy_streams import Stream

STREAMS: tuple[Stream, ...] = ("steps", "stores", "loads")
HOST = "host"
WAIT_S = 30.0


@dataclass(eq=False)
class Event:
    """Over when everything before place `place` of its stream is done."""

    stream: Stream
    place: int


@dataclass
class _Queue:
    deeds: deque[Callable[[], None] | Event] = field(default_factory=deque)
    told: int = 0
    done: int = 0
    wanted: int = 0


class AsyncDevice:
    """Memory of `num_blocks` blocks and the streams that work on it."""

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        lags: frozenset[str] = frozenset(),
        omits: frozenset[tuple[str, str]] = frozenset(),
        pace: Callable[[], None] = lambda: None,
    ) -> None:
        self.memory = np.zeros((num_blocks, block_bytes), np.uint8)
        self.num_calls = 0
        self.refuses: Callable[[memoryview], bool] = lambda host: False
        self._lags, self._omits, self._pace = lags, omits, pace
        self._changed = threading.Condition()
        self._queues = {stream: _Queue() for stream in STREAMS}
        self._is_over = False
        self._threads = [threading.Thread(target=self._work, args=(stream,), daemon=True) for stream in STREAMS]
        for thread in self._threads:
            thread.start()

    # What `engine.copy_streams.CopyDevice` asks for.

    def record(self, stream: Stream) -> Event:
        return Event(stream, self._queues[stream].told)

    def wait(self, stream: Stream, event: Event) -> None:
        if (stream, event.stream) not in self._omits:
            self._tell(stream, event)

    def synchronize(self, event: Event) -> None:
        if (HOST, event.stream) in self._omits:
            return
        with self._changed:
            self._want(event)
            done = self._changed.wait_for(lambda: self._queues[event.stream].done >= event.place, WAIT_S)
            assert done, "the streams wait for one another"

    def copy_out(self, stream: Stream, device_block: int, num_blocks: int, host: memoryview) -> None:
        assert not self.refuses(host), "a device copies from and to pinned memory only"
        part = self.memory[device_block : device_block + num_blocks].reshape(-1)
        self.num_calls += 1
        self._tell(stream, lambda: np.copyto(np.frombuffer(host, np.uint8), part))

    def copy_in(self, stream: Stream, device_block: int, num_blocks: int, host: memoryview) -> None:
        assert not self.refuses(host), "a device copies from and to pinned memory only"
        part = self.memory[device_block : device_block + num_blocks].reshape(-1)
        self.num_calls += 1
        self._tell(stream, lambda: np.copyto(part, np.frombuffer(host, np.uint8)))

    # What a test tells it.

    def launch(self, kernel: Callable[[np.ndarray], None]) -> None:
        """A kernel of a step, which may do anything with the memory."""
        self._tell("steps", lambda: kernel(self.memory))

    def settle(self) -> None:
        """Return when everything is done."""
        with self._changed:
            for stream, queue in self._queues.items():
                self._want(Event(stream, queue.told))
            done = self._changed.wait_for(lambda: all(each.done == each.told for each in self._queues.values()), WAIT_S)
            assert done, "the streams wait for one another"

    def close(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _tell(self, stream: Stream, deed: Callable[[], None] | Event) -> None:
        with self._changed:
            queue = self._queues[stream]
            queue.deeds.append(deed)
            queue.told += 1
            self._changed.notify_all()

    def _want(self, event: Event) -> None:
        """Somebody waits for this event, so for everything before it, and for what that waits for."""
        queue = self._queues[event.stream]
        if event.place <= queue.wanted:
            return
        queue.wanted = event.place
        for deed in list(queue.deeds)[: event.place - queue.done]:
            if isinstance(deed, Event):
                self._want(deed)
        self._changed.notify_all()

    def _may_begin(self, stream: Stream) -> bool:
        queue = self._queues[stream]
        if not queue.deeds or (stream in self._lags and queue.done >= queue.wanted):
            return False
        deed = queue.deeds[0]
        if isinstance(deed, Event):
            self._want(deed)
            return self._queues[deed.stream].done >= deed.place
        return True

    def _work(self, stream: Stream) -> None:
        queue = self._queues[stream]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._may_begin(stream))
                if self._is_over:
                    return
                deed = queue.deeds[0]
            if not isinstance(deed, Event):
                self._pace()
                deed()
            with self._changed:
                queue.deeds.popleft()
                queue.done += 1
                self._changed.notify_all()

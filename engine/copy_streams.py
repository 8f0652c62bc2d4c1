"""Tells a device its copies and its steps in an order that holds: each on a stream of its own, waiting for what it must.

Who waits for whom is `fences.py`'s; a device is whatever keeps three streams in order and lets one wait for an event of
another. Steps come from the step thread, copies from the tier worker's; what is told to the device under one lock is in
one order for both. Waiting on the host is done without it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol

from engine.copy_runs import Run
from engine.fences import Fences, StepBlocks

Stream = Literal["steps", "stores", "loads"]
HostRun = tuple[Run, memoryview]
"""A run of blocks and the memory that its `offset` counts in."""


class CopyDevice(Protocol):
    """What ordering needs of a device. Everything but `synchronize` returns at once and is done later, in order within one
    stream and in no order between two."""

    def record(self, stream: Stream) -> Any:
        """An event that is over when all that the stream was told so far is done."""

    def wait(self, stream: Stream, event: Any) -> None:
        """What the stream is told from here on is done after the event."""

    def synchronize(self, event: Any) -> None:
        """Return when the event is over."""

    def copy_out(self, stream: Stream, device_block: int, num_blocks: int, host: memoryview) -> None:
        """Copy neighbouring blocks to host memory, of exactly their size."""

    def copy_in(self, stream: Stream, device_block: int, num_blocks: int, host: memoryview) -> None:
        """Copy host memory to neighbouring blocks, of exactly its size."""


_COPY_STREAMS: Final[tuple[Stream, ...]] = ("stores", "loads")


class CopyStreams:
    """Steps, stores and loads of one device. Every store and load is to be `finish`ed."""

    def __init__(self, device: CopyDevice, block_bytes: int) -> None:
        self._device = device
        self._block_bytes = block_bytes
        self._fences: Fences[Any] = Fences()
        self._lock = threading.Lock()

    def begin_step(self, blocks: StepBlocks) -> None:
        """Before a step's kernels are launched: they wait for the copies that they could meet."""
        with self._lock:
            for event in self._fences.begin_step(blocks):
                self._device.wait("steps", event)

    def end_step(self) -> Any:
        """After a step's kernels were launched, all or some of them: the event of their end."""
        with self._lock:
            end = self._device.record("steps")
            self._fences.end_step(end)
        return end

    def finish_step(self, end: Any) -> None:
        """Return when the kernels are done."""
        self._device.synchronize(end)
        with self._lock:
            self._fences.seen_step(end)

    def store(self, blocks: Sequence[int], copies: Sequence[HostRun]) -> Any:
        """Copy device blocks out, which `copies` may name more than once; the event of the end."""
        with self._lock:
            for event in self._fences.store_waits(blocks):
                self._device.wait("stores", event)
            try:
                for run, memory in copies:
                    self._device.copy_out("stores", run.device_block, run.num_blocks, self._part(run, memory))
            finally:
                end = self._device.record("stores")
                self._fences.add_store(blocks, end)
        return end

    def load(self, blocks: Sequence[int], copies: Sequence[HostRun], back: Sequence[HostRun] = ()) -> Any:
        """Copy into device blocks, and then some of them `back` out to see what arrived; the event of the end."""
        with self._lock:
            for event in self._fences.load_waits(blocks):
                self._device.wait("loads", event)
            try:
                for run, memory in copies:
                    self._device.copy_in("loads", run.device_block, run.num_blocks, self._part(run, memory))
                for run, memory in back:
                    self._device.copy_out("loads", run.device_block, run.num_blocks, self._part(run, memory))
            finally:
                end = self._device.record("loads")
                self._fences.add_load(blocks, end)
        return end

    def finish(self, end: Any) -> None:
        """Return when a store or load is over; only now may anybody touch its host memory, or trust it."""
        self._device.synchronize(end)
        with self._lock:
            self._fences.seen_copy(end)

    def drain(self) -> None:
        """Return when no copy is under way. For whoever stores and loads: nobody else may begin one meanwhile."""
        for stream in _COPY_STREAMS:
            with self._lock:
                end = self._device.record(stream)
            self._device.synchronize(end)
        with self._lock:
            self._fences.seen_copies()

    def _part(self, run: Run, memory: memoryview) -> memoryview:
        return memory[run.offset : run.offset + run.num_blocks * self._block_bytes]

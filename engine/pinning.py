"""Registers the payload with CUDA, chunk by chunk in the background, so that a device copies from and to it by itself.

A chunk that could not be registered is pageable memory and never used as anything else: its slots are copied through the
engine's own buffer, the bytes are counted and the log says so once. The same goes for every slot until its chunk's turn has
come. In what chunks is `pin_chunks.py`'s to say; what is copied how, `stream_transfer.py`'s.

A registration holds its mapping: the mapping cannot go before it. It lasts over a reconnect to the same payload, and ends
when the client maps another one, when the pages under it are not the payload's any more, and when the engine stops.
"""

from __future__ import annotations

import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import structlog

from cached.client import RegistrableMemory
from engine.pin_chunks import PinChunk, pin_chunks

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

log = structlog.get_logger("engine.pinning")

NOTHING_PINNED: Final[Mapping[str, int]] = {"pinned_bytes": 0, "unpinned_bytes": 0, "pin_failures": 0}
"""The figures of an engine that pins nothing."""


class Cudart(Protocol):
    """What is needed of CUDA's runtime, by its own names; 0 is success, and an error is not left behind for others."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int: ...

    def cudaHostUnregister(self, address: int) -> int: ...


class PinnablePayload(Protocol):
    """What is needed of the tier's client."""

    @property
    def payload(self) -> memoryview | None: ...

    @property
    def registrable(self) -> RegistrableMemory | None: ...


class PinnedMemory:
    """A mapping's chunks, and which of them are registered. `register` may run in a thread of its own."""

    def __init__(self, cudart: Cudart, memory: memoryview, chunks: Sequence[PinChunk]) -> None:
        self.memory = memory
        self.is_over = False
        """All chunks have had their turn."""
        self.num_failed = 0
        self._cudart = cudart
        self._chunks = tuple(chunks)
        self._offsets = [chunk.offset for chunk in chunks]
        self._is_pinned = [False] * len(chunks)
        self._address = np.frombuffer(memory, np.uint8).ctypes.data
        self._is_abandoned = False
        self._pid = os.getpid()

    @property
    def pinned_bytes(self) -> int:
        """Bytes a device may copy from and to."""
        return sum(chunk.num_bytes for chunk, pinned in zip(self._chunks, self._is_pinned, strict=True) if pinned)

    @property
    def unpinned_bytes(self) -> int:
        """Bytes that are copied through the engine's own buffer."""
        return sum(chunk.num_bytes for chunk in self._chunks) - self.pinned_bytes

    def register(self) -> None:
        """Give every chunk its turn. What CUDA refuses stays unpinned; anything worse takes back what was done."""
        first_error = 0
        try:
            for at, chunk in enumerate(self._chunks):
                if self._is_abandoned:
                    return
                code = self._cudart.cudaHostRegister(self._address + chunk.offset, chunk.num_bytes, 0)
                self._is_pinned[at] = code == 0
                self.num_failed += code != 0
                first_error = first_error or code
        except BaseException:
            self.unregister()
            raise
        self.is_over = True
        if first_error:
            log.warning(
                "CUDA cannot pin part of the host tier: its blocks are copied through a buffer, which is slower; raise "
                "RLIMIT_MEMLOCK, or lower pin_chunk_size",
                reason=f"CUDA error {first_error}",
                bytes=self.unpinned_bytes,
            )

    def abandon(self) -> None:
        """Let `register` end with the chunk it is at."""
        self._is_abandoned = True

    def unregister(self) -> None:
        """Take back what is registered. In a forked child there is nothing to take back: it has no CUDA."""
        if os.getpid() != self._pid:
            return
        for at, chunk in enumerate(self._chunks):
            if not self._is_pinned[at]:
                continue
            self._is_pinned[at] = False  # Whatever CUDA says: nobody uses it from here on.
            code = self._cudart.cudaHostUnregister(self._address + chunk.offset)
            if code:
                log.warning("CUDA does not let go of pinned memory", reason=f"CUDA error {code}", bytes=chunk.num_bytes)

    def covers(self, offset: int, num_bytes: int) -> bool:
        """Whether a device may copy from and to these bytes of the payload: they lie within one registered chunk, and
        their pages are still the ones that were registered."""
        at = bisect_right(self._offsets, offset) - 1
        chunk = self._chunks[at]
        is_inside = chunk.offset <= offset and offset + num_bytes <= chunk.offset + chunk.num_bytes
        return is_inside and self._is_pinned[at] and os.getpid() == self._pid

    def is_intact(self, offset: int, num_bytes: int) -> bool:
        """Whether the pages are where they were: cutting the file short, or punching a hole into it, takes them out of every
        mapping, but not from a device that had them registered, which would go on with bytes that are nobody's. Only a
        device touches a registered chunk, so a page that is missing here was taken out."""
        return pages_are_present(self._address + offset, num_bytes)


def pages_are_present(address: int, num_bytes: int) -> bool:
    """Whether each page of this process's memory is there; False also where the kernel does not say."""
    first, last = address // _PAGE_BYTES, (address + num_bytes - 1) // _PAGE_BYTES
    try:
        fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        entries = os.pread(fd, (last - first + 1) * 8, first * 8)
    finally:
        os.close(fd)
    return len(entries) == (last - first + 1) * 8 and bool((np.frombuffer(entries, np.int64) < 0).all())


class StagingBuffer:
    """Memory of the engine's own between a device and what is not pinned, or not to be trusted. Exactly as large as asked:
    torch's allocator of pinned memory rounds up to a power of two."""

    def __init__(self, cudart: Cudart | None, num_bytes: int) -> None:
        mapping = mmap.mmap(-1, num_bytes)
        # A child that shares its pages would make this process's next write go to another page than the device's.
        mapping.madvise(mmap.MADV_DONTFORK)
        self.memory = np.frombuffer(mapping, np.uint8).data
        self._pinned: PinnedMemory | None = None
        if cudart is not None:
            self._pinned = PinnedMemory(cudart, self.memory, [PinChunk(0, num_bytes)])
            self._pinned.register()

    def close(self) -> None:
        """Unregister; no copy may be under way."""
        if self._pinned is not None:
            self._pinned.unregister()


class PayloadPins:
    """Keeps the payload of a client registered, whatever becomes of it. For the tier worker's thread."""

    def __init__(self, cudart: Cudart | None, chunk_bytes: int) -> None:
        """`cudart` None, or no bytes: nothing is ever pinned."""
        self._cudart = cudart if chunk_bytes else None
        self._chunk_bytes = chunk_bytes
        self._pinned: PinnedMemory | None = None
        self._thread: threading.Thread | None = None

    def look(self, payload: PinnablePayload) -> None:
        """Begin to register a payload that is new, once all of its memory is there: CUDA would have to find it."""
        found = payload.registrable if self._cudart is not None else None
        if self._cudart is None or found is None or not found.num_slots:
            return
        if self._pinned is not None:
            if self._pinned.memory.obj is found.memory.obj:
                return
            self.close()
        chunks = pin_chunks(found.num_slots, found.slot_bytes, found.registration_bytes, self._chunk_bytes)
        self._pinned = PinnedMemory(self._cudart, found.memory, chunks)
        self._thread = threading.Thread(target=_register, args=(self._pinned,), name="tier-pin", daemon=True)
        self._thread.start()

    def usable(self, payload: PinnablePayload, offsets: Sequence[int], num_bytes: int) -> list[bool]:
        """Which of these places a device may copy from and to."""
        pinned, memory = self._pinned, payload.payload
        if pinned is None or memory is None or pinned.memory.obj is not memory.obj:
            return [False] * len(offsets)
        usable = [pinned.covers(offset, num_bytes) for offset in offsets]
        if all(
            pinned.is_intact(offset, num_bytes) for offset, is_usable in zip(offsets, usable, strict=True) if is_usable
        ):
            return usable
        log.warning("the host tier's memory was taken from under its registration; it is registered afresh")
        self.close()
        return [False] * len(offsets)

    def wait_registered(self) -> None:
        """Until every chunk has had its turn."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Unregister; no copy may be under way. Waits for the chunk that is being registered."""
        if self._pinned is None:
            return
        self._pinned.abandon()
        self.wait_registered()
        self._pinned.unregister()
        self._pinned = self._thread = None

    def statistics(self) -> dict[str, int]:
        """Bytes by what they are, and chunks that CUDA refused."""
        pinned = self._pinned
        if pinned is None:
            return dict(NOTHING_PINNED)
        return {
            "pinned_bytes": pinned.pinned_bytes,
            "unpinned_bytes": pinned.unpinned_bytes,
            "pin_failures": pinned.num_failed,
        }


def _register(pinned: PinnedMemory) -> None:
    try:
        pinned.register()
    except Exception:
        log.exception("the host tier could not be pinned: its blocks are copied through a buffer, which is slower")

"""The arena's bytes as an engine sees them: the descriptor that came with the welcome, and the mapping to copy through.

Which slots may be copied from and to is the client's to know. A mapping that a peer spoiled by cutting the file short is
replaced at the next copy; the copy that noticed is worth nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cached.errors import WireError
from cached.places import SlotPlaces
from cached.protocol import Welcome

POPULATE_PAUSE_S = 0.02
"""Between looks for memory that the daemon has not allocated yet, of which it makes a piece in 30 ms."""

if TYPE_CHECKING:
    from cached.guarded_mapping import GuardedMapping


@dataclass(frozen=True, slots=True)
class RegistrableMemory:
    """A payload's bytes and where slots lie in them: see `protocol.Welcome`."""

    memory: memoryview
    slot_bytes: int
    num_slots: int
    registration_bytes: int


class MappedPayload:
    """The payload of the daemon last welcomed by. It is mapped when somebody first copies, so that an observer, which gets
    none, imports nothing for it."""

    def __init__(self) -> None:
        self._mapping: GuardedMapping | None = None
        self._identity: tuple[int, int, int] | None = None
        self._fd = -1

    def adopt(self, welcome: Welcome, fds: list[int]) -> None:
        """Take what came with a welcome; the same payload as before keeps its mapping, and whatever was registered with
        it. Raises WireError when it is not what the welcome says."""
        try:
            if not welcome.payload_bytes:
                return
            if len(fds) != 1:
                raise WireError(f"{len(fds)} descriptors came with the welcome, not one")
            found = os.fstat(fds[0])
            identity = (found.st_dev, found.st_ino, welcome.payload_bytes)
            if not 0 < welcome.slot_bytes <= welcome.registration_bytes:
                raise WireError("the welcome speaks of slots that no registration can hold")
            whole = SlotPlaces(welcome.slot_bytes, welcome.registration_bytes).slots_within(welcome.payload_bytes)
            if found.st_size < welcome.payload_bytes or welcome.num_slots > whole:
                raise WireError("the payload is shorter than the welcome says")
            if identity != self._identity:
                self.forget()
                self._fd = fds.pop()
                self._identity = identity
        finally:
            for fd in fds:
                os.close(fd)

    def forget(self) -> None:
        """A mapping that somebody still refers to lives on, its descriptor does not."""
        self._mapping = self._identity = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def view(self) -> memoryview | None:
        """All bytes, writable; None without a payload, or while it is cut short."""
        mapping = self._map()
        return None if mapping is None else mapping.array.data

    def registrable(self, welcome: Welcome) -> RegistrableMemory | None:
        """What to register with a device; None until the mapping is populated: a driver would have to fetch its pages."""
        mapping = self._map()
        if mapping is None or not mapping.is_populated:
            return None
        return RegistrableMemory(mapping.array.data, welcome.slot_bytes, welcome.num_slots, welcome.registration_bytes)

    def copy_out(self, offsets: Sequence[int], outs: Sequence[memoryview]) -> bool:
        """Copy to each of `outs` from its offset; False: bytes were missing."""
        mapping = self._map()
        return mapping is not None and mapping.copy_out(offsets, outs)

    def copy_in(self, offsets: Sequence[int], data: Sequence[memoryview]) -> bool:
        """Copy each of `data` to its offset; False: bytes went nowhere."""
        mapping = self._map()
        return mapping is not None and mapping.copy_in(offsets, data)

    def copy_out_hashed(self, offsets: Sequence[int], outs: Sequence[memoryview]) -> list[int] | None:
        """`copy_out`, and the hashes of what has arrived; None: bytes were missing."""
        mapping = self._map()
        return None if mapping is None else mapping.copy_out_hashed(offsets, outs)

    def copy_in_hashed(self, offsets: Sequence[int], data: Sequence[memoryview]) -> list[int] | None:
        """`copy_in`, and the hashes of `data`; None: bytes went nowhere."""
        mapping = self._map()
        return None if mapping is None else mapping.copy_in_hashed(offsets, data)

    def _map(self) -> GuardedMapping | None:
        """The mapping to copy through; a new one when the last was spoiled. None while the payload is cut short."""
        if self._mapping is not None and self._mapping.is_spoiled:
            self._mapping = None
        if self._mapping is None and self._identity is not None:
            from cached.guarded_mapping import GuardedMapping  # numpy and numba, which an observer does without.

            with contextlib.suppress(OSError, ValueError):
                self._mapping = GuardedMapping(self._fd, self._identity[2])
                work = weakref.ref(self._mapping), os.dup(self._fd)
                threading.Thread(target=_populate, args=work, name="tier-populate", daemon=True).start()
        return self._mapping


def _populate(mapping_of: Callable[[], GuardedMapping | None], fd: int) -> None:
    """Decision 5: engines populate their own mapping in the background, behind the daemon that allocates the payload. A page
    that an engine made first would count as its own control group's memory. Ends with the mapping."""
    try:
        while (mapping := mapping_of()) is not None and not mapping.is_populated:
            is_made = mapping.populate_next(os.fstat(fd).st_blocks * 512)
            del mapping
            if not is_made:
                time.sleep(POPULATE_PAUSE_S)
    finally:
        os.close(fd)


def prepare_copies() -> None:
    """Compile what copies need (half a second) now, and not in the middle of the first one. Does nothing on a machine
    where payloads cannot be mapped: there the client says so itself."""
    from cached.guarded_mapping import prepare  # numpy and numba, which an observer does without.

    with contextlib.suppress(OSError):
        prepare()

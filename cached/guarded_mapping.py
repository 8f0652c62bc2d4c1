"""A mapping of the payload whose copies survive that a peer cuts the file short: such a copy is spoiled, not the process.

Touching a page of a file that is not there any more raises SIGBUS. For faults within a guarded mapping a handler puts an
empty page of the process's own in the place and counts; whoever copied sees the count and knows that the copy is worth
nothing. Faults elsewhere go to whatever handled them before. When to copy, and what a spoiled copy means, is the client's.

The handler is machine code without Python in it (numba), since it runs in the middle of a copy, on any thread, with or
without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import signal
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from cached import hashing_copy, streaming_copy
from cached.hashing_copy import can_hash

MAX_MAPPINGS = 64
"""Guarded mappings of one process at once; the ones before the last live only as long as somebody refers to them."""
PIECE_BYTES = 16 * 2**20

_MADV_POPULATE_WRITE = 23
_SA_SIGINFO = 4


class _SigAction(ctypes.Structure):
    """glibc's `struct sigaction`."""

    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


class GuardedMapping:
    """One shared, writable mapping of the first `length` bytes of a file. Raises ValueError or OSError when the file is
    shorter. Unmapped when nobody refers to it, or to `array`, any more."""

    def __init__(self, fd: int, length: int) -> None:
        self._guard = _guard()
        self._mapping = mmap.mmap(fd, length)
        self.array = np.frombuffer(self._mapping, np.uint8)
        self._length = length
        self._populated = 0
        self.is_populated = False
        """Every page has been made present, or cannot be: `populate_next` has nothing more to do."""
        self._address = self.array.ctypes.data
        self._copy_spans = streaming_copy.compiled()  # Not all processes that copy hash as well.
        self._place = self._guard.add(self._address, length)
        self._faults = self._guard.faults_at(self._place)
        # The mapping outlives this object while a view of it does, and is guarded as long.
        weakref.finalize(self._mapping, self._guard.remove, self._place).atexit = False

    @property
    def is_spoiled(self) -> bool:
        """Whether a page was missing when somebody touched it: this mapping is to be replaced by another one."""
        return self._guard.faults_at(self._place) != self._faults

    def copy_out(self, offsets: Sequence[int], outs: Sequence[memoryview]) -> bool:
        """Copy from each offset to each of `outs`, all in one call; False: bytes were missing, and none of it counts."""
        mapped, own, sizes = self._places(offsets, outs)
        self._copy_spans(own, mapped, sizes)
        return not self.is_spoiled

    def copy_in(self, offsets: Sequence[int], data: Sequence[memoryview]) -> bool:
        """Copy each of `data` to its offset, all in one call; False: bytes went nowhere, and none of it counts."""
        mapped, own, sizes = self._places(offsets, data)
        self._copy_spans(mapped, own, sizes)
        return not self.is_spoiled

    def copy_out_hashed(self, offsets: Sequence[int], outs: Sequence[memoryview]) -> list[int] | None:
        """`copy_out`, and xxh3-64 of what has arrived in each of `outs`; None: bytes were missing."""
        mapped, own, sizes = self._places(offsets, outs)
        if can_hash(own, sizes):
            hashes: list[int] = hashing_copy.compiled()(own, mapped, sizes).tolist()
        else:
            self._copy_spans(own, mapped, sizes)
            hashes = [xxh3_64_intdigest(out) for out in outs]
        return None if self.is_spoiled else hashes

    def copy_in_hashed(self, offsets: Sequence[int], data: Sequence[memoryview]) -> list[int] | None:
        """`copy_in`, and xxh3-64 of each of `data`; None: bytes went nowhere."""
        mapped, own, sizes = self._places(offsets, data)
        if can_hash(mapped, sizes):
            hashes: list[int] = hashing_copy.compiled()(mapped, own, sizes).tolist()
        else:
            hashes = [xxh3_64_intdigest(each) for each in data]
            self._copy_spans(mapped, own, sizes)
        return None if self.is_spoiled else hashes

    def _places(
        self, offsets: Sequence[int], buffers: Sequence[memoryview]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Addresses in the mapping, addresses of the buffers, and how many bytes each."""
        places = np.array(offsets, np.int64)
        sizes = np.array([buffer.nbytes for buffer in buffers], np.int64)
        assert len(places) == len(sizes), f"{len(places)} offsets for {len(sizes)} buffers"
        is_inside = (places >= 0) & (places + sizes <= self._length)
        assert is_inside.all(), f"a copy outside the {self._length} bytes of the mapping"
        return places + self._address, np.array([_address_of(buffer) for buffer in buffers], np.int64), sizes

    def populate_next(self, allocated: int) -> bool:
        """Make the next piece's pages present in this process, so that no copy pays for it, of the file's first `allocated`
        bytes: a page that is not there yet would be made, and paid for, here. False: that was all for now, for good if
        `is_populated` says so. May run in a thread of its own."""
        size = min(PIECE_BYTES, min(self._length, allocated) - self._populated)
        is_made = size > 0
        if is_made:
            address = self._address + self._populated
            self._populated += size
            libc = ctypes.CDLL(None, use_errno=True)
            is_made = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_WRITE) == 0
            self.is_populated = not is_made
        self.is_populated |= self._populated >= self._length
        return is_made


class _Guard:
    """The process's handler and the table it reads: a row `start, end, faults` per mapping, zeros where there is none."""

    def __init__(self) -> None:
        self._table = np.zeros((MAX_MAPPINGS, 3), np.int64)
        self._former = _SigAction()
        self._handler = _compile(self._table.ctypes.data, ctypes.addressof(self._former))
        mine = _SigAction(handler=self._handler.address, flags=_SA_SIGINFO)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.sigaction(int(signal.SIGBUS), ctypes.byref(mine), ctypes.byref(self._former)) != 0:
            raise OSError(ctypes.get_errno(), "cannot handle SIGBUS")

    def add(self, start: int, length: int) -> int:
        """Guard [start, start + length); says in which row."""
        free = np.flatnonzero(self._table[:, 0] == 0)
        if not len(free):
            raise OSError(f"{MAX_MAPPINGS} mappings of payloads are guarded already; somebody holds on to old ones")
        place = int(free[0])
        self._table[place, 1] = start + length
        self._table[place, 0] = start
        return place

    def remove(self, place: int) -> None:
        """Guard it no longer."""
        self._table[place, 0] = 0

    def faults_at(self, place: int) -> int:
        """Pages of a mapping that were missing so far."""
        return int(self._table[place, 2])


def prepare() -> None:
    """Compile copies and handler, and install it, now (a second), and not in the middle of the first copy."""
    streaming_copy.compiled()
    hashing_copy.compiled()
    _guard()


def _address_of(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


@functools.cache
def _guard() -> _Guard:
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise OSError("payloads are mapped on 64-bit Linux only")
    return _Guard()


def _compile(table: int, former: int) -> Any:
    """The handler, for a table and a former action at these addresses."""
    from numba import carray, cfunc, extending, types
    from numba.core import cgutils

    def to_pointer(_typing: Any, address: Any) -> Any:
        def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], cgutils.voidptr_t)

        return types.voidptr(address), build

    pointer: Any = extending.intrinsic(to_pointer)

    libc = ctypes.CDLL(None)
    map_page = libc.mmap
    map_page.restype = ctypes.c_void_p
    ints = ctypes.c_int, ctypes.c_int, ctypes.c_int
    map_page.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *ints, ctypes.c_long]
    set_action = libc.sigaction
    set_action.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    page = os.sysconf("SC_PAGE_SIZE")
    access = mmap.PROT_READ | mmap.PROT_WRITE
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED, which Python does not name.

    @cfunc(types.void(types.int32, types.voidptr, types.voidptr))
    def handle(number: Any, info: Any, _context: Any) -> None:
        address = carray(info, 4, np.int64)[2]  # si_addr
        rows = carray(pointer(table), (MAX_MAPPINGS, 3), np.int64)
        for row in range(MAX_MAPPINGS):
            if rows[row, 0] != 0 and rows[row, 0] <= address and address < rows[row, 1]:
                rows[row, 2] += 1
                map_page(pointer(address // page * page), page, access, kind, -1, 0)
                return
        # Not ours: the instruction runs again, under whatever was in force before.
        set_action(number, pointer(former), pointer(0))

    return handle

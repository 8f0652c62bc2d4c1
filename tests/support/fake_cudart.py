"""CUDA's registration of host memory without CUDA: what it accepts, refuses and complains about."""

from __future__ import annotations

import threading

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713


class FakeCudart:
    """Refuses what is larger than `limit`, the calls numbered in `fails_at`, and overlaps; `gate`, if any, holds each call."""

    def __init__(self, limit: int | None = None, fails_at: tuple[int, ...] = (), raises_at: int | None = None) -> None:
        self.limit = limit
        self.fails_at = fails_at
        self.raises_at = raises_at
        self.gate: threading.Event | None = None
        self.calls = 0
        self.registered: dict[int, int] = {}
        self.errors: list[int] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if self.gate is not None:
            self.gate.wait(30)
        call, self.calls = self.calls, self.calls + 1
        if call == self.raises_at:
            raise RuntimeError("injected")
        if address % 4096 or num_bytes <= 0:
            return self._error(INVALID_VALUE)
        if call in self.fails_at or (self.limit is not None and num_bytes > self.limit):
            return self._error(OUT_OF_MEMORY)
        if any(address < start + size and start < address + num_bytes for start, size in self.registered.items()):
            return self._error(ALREADY_REGISTERED)
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) is not None else self._error(NOT_REGISTERED)

    def is_registered(self, address: int, num_bytes: int) -> bool:
        """Whether all of it is within one registration, as a device's copy needs it."""
        return any(start <= address and address + num_bytes <= start + size for start, size in self.registered.items())

    def _error(self, code: int) -> int:
        self.errors.append(code)
        return code

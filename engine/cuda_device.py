"""CUDA behind `copy_streams.CopyDevice` and `pinning.Cudart`, and nothing else: what is told when is decided there.

Steps run on the stream that is current where they are launched, stores and loads on a stream each. A copy's host memory may
be pinned or not: CUDA copies pageable memory correctly, only slower and not in the background.
"""

from __future__ import annotations

import ctypes

import numpy as np
import structlog
import torch

from engine.copy_streams import Stream
from engine.pinning import Cudart

log = structlog.get_logger("engine.cuda_device")


class CudaDevice:
    """The pool's memory and three streams."""

    def __init__(self, pool: torch.Tensor, block_bytes: int) -> None:
        self._bytes = pool.view(torch.uint8).view(-1)
        self._block_bytes = block_bytes
        self._own: dict[str, torch.cuda.Stream] = {name: torch.cuda.Stream(pool.device) for name in ("stores", "loads")}

    def record(self, stream: Stream) -> torch.cuda.Event:
        """See `CopyDevice`. Whoever waits for a copy sleeps; whoever waits for a step is in a hurry."""
        event = torch.cuda.Event(blocking=stream != "steps")
        event.record(self._stream(stream))
        return event

    def wait(self, stream: Stream, event: torch.cuda.Event) -> None:
        """See `CopyDevice`."""
        self._stream(stream).wait_event(event)

    def synchronize(self, event: torch.cuda.Event) -> None:
        """See `CopyDevice`."""
        event.synchronize()

    def copy_out(self, stream: Stream, device_block: int, num_blocks: int, host: memoryview) -> None:
        """See `CopyDevice`."""
        with torch.cuda.stream(self._stream(stream)):
            _on_host(host).copy_(self._part(device_block, num_blocks), non_blocking=True)

    def copy_in(self, stream: Stream, device_block: int, num_blocks: int, host: memoryview) -> None:
        """See `CopyDevice`."""
        with torch.cuda.stream(self._stream(stream)):
            self._part(device_block, num_blocks).copy_(_on_host(host), non_blocking=True)

    def _stream(self, name: Stream) -> torch.cuda.Stream:
        return self._own.get(name) or torch.cuda.current_stream(self._bytes.device)

    def _part(self, device_block: int, num_blocks: int) -> torch.Tensor:
        first = device_block * self._block_bytes
        return self._bytes[first : first + num_blocks * self._block_bytes]


def _on_host(host: memoryview) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(host, np.uint8))


class LoadedCudart:
    """The runtime that torch has loaded. Its last error is cleared after a refusal: torch would take it for its own."""

    def __init__(self, library: ctypes.CDLL, device_index: int) -> None:
        self._library = library
        self._device_index = device_index

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self._library.cudaSetDevice(self._device_index)  # Each thread has its own, and 0 to begin with.
        return self._told(
            self._library.cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(flags))
        )

    def cudaHostUnregister(self, address: int) -> int:
        self._library.cudaSetDevice(self._device_index)
        return self._told(self._library.cudaHostUnregister(ctypes.c_void_p(address)))

    def _told(self, code: int) -> int:
        if code:
            self._library.cudaGetLastError()
        return code


def load_cudart(device: torch.device) -> Cudart | None:
    """The runtime, or None where there is none of its own to be found: then nothing is pinned, and the log says so."""
    name = f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        return LoadedCudart(ctypes.CDLL(name), torch.cuda.current_device() if device.index is None else device.index)
    except OSError as error:
        log.warning(
            "the host tier is not pinned, so that copies are slower: no CUDA runtime to do it", error=str(error)
        )
        return None

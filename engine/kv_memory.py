"""Owns the device's KV pool: `[block, layer, K or V, token, kv_head, head_dim]`, one block one run of bytes.

It copies beginnings of blocks from one to another, hands views to the attention, and says how whole blocks go to the host
tier and come back. Which block holds what is for the block pool to know. The tier worker copies on a thread of its own
while a step runs on other blocks; the core keeps the two apart (what is named in a plan does not move), and on a device with
streams `begin_step` and `end_step` do so once more.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.copy_streams import CopyStreams
from engine.cuda_device import CudaDevice, load_cudart
from engine.fences import blocks_of
from engine.huge_pages import huge_pages, take_pages
from engine.layout import BlockLayout
from engine.pinning import PayloadPins, StagingBuffer
from engine.plan import BlockCopy, StepPlan
from engine.stream_transfer import StreamTransfer
from engine.transfer import BlockTransfer, HostTransfer

STAGING_BYTES = 32 * 2**20
"""Of a device's copies that do not go straight to the arena, or are compared: as much goes in one batch."""
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KvMemory:
    """The pool. On the CPU its pages are there when first written, or when `take_pages` asked for them."""

    def __init__(self, layout: BlockLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        dtype, shape = TORCH_DTYPES[layout.dtype], (num_blocks, *layout.shape)
        if device.type == "cpu":
            self.pool = torch.from_numpy(huge_pages(num_blocks * layout.block_bytes)).view(dtype).view(shape)
        else:
            self.pool = torch.empty(shape, dtype=dtype, device=device)
        # The same memory as rows: of one token, for writing, and of one block's tokens in one layer, for reading.
        token_width = layout.num_kv_heads * layout.head_dim
        self._token_rows = self.pool.view(-1, token_width)
        self._block_rows = self.pool.view(-1, layout.tokens_per_block * token_width)
        self._bytes = self.pool.view(torch.uint8).view(num_blocks, layout.block_bytes)
        self._host_bytes = self._bytes.numpy() if device.type == "cpu" else None
        self._streams: CopyStreams | None = None
        if device.type == "cuda":
            self._streams = CopyStreams(CudaDevice(self.pool, layout.block_bytes), layout.block_bytes)

    def take_pages(self, progress: Callable[[float], None]) -> None:
        """Take the memory of a pool that nobody has written to, where the system would give it when first touched."""
        if self._host_bytes is not None:
            take_pages(self._host_bytes.reshape(-1), progress)

    def token_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """The row of each slot's K in layer 0, for `write`."""
        tokens = self.layout.tokens_per_block
        return (slots // tokens) * (2 * self.layout.num_layers * tokens) + slots % tokens

    def write(self, layer: int, token_rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Puts K and V (`[token, kv_head, head_dim]`) of one layer where `token_rows` says."""
        rows = token_rows + 2 * layer * self.layout.tokens_per_block
        self._token_rows.index_copy_(0, rows, key.reshape(len(key), -1))
        self._token_rows.index_copy_(0, rows + self.layout.tokens_per_block, value.reshape(len(value), -1))

    def gather(self, layer: int, blocks: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies K and V of the first `num_tokens` tokens that `blocks` hold: `[token, kv_head, head_dim]` each."""
        rows = blocks * (2 * self.layout.num_layers) + 2 * layer
        shape = (-1, self.layout.num_kv_heads, self.layout.head_dim)
        keys = self._block_rows.index_select(0, rows).view(shape)
        values = self._block_rows.index_select(0, rows + 1).view(shape)
        return keys[:num_tokens], values[:num_tokens]

    def copy_tokens(self, copies: tuple[BlockCopy, ...]) -> None:
        """The beginnings of blocks, all layers, one after another (kv-semantics 3.5)."""
        for copy in copies:
            assert 0 <= copy.source < self.num_blocks, f"copy from block {copy.source}, outside the pool"
            assert 0 <= copy.target < self.num_blocks, f"copy to block {copy.target}, outside the pool"
            assert copy.source != copy.target, f"copy of block {copy.source} onto itself"
            assert 0 < copy.num_tokens <= self.layout.tokens_per_block, f"copy of {copy.num_tokens} tokens"
            self.pool[copy.target, :, :, : copy.num_tokens] = self.pool[copy.source, :, :, : copy.num_tokens]

    def begin_step(self, plan: StepPlan) -> None:
        """Before anything of a step is told to the device: see `copy_streams.py`."""
        if self._streams is not None:
            self._streams.begin_step(blocks_of(plan, self.layout.tokens_per_block))

    def end_step(self) -> None:
        """After all of a step, or as much as was wanted, was told to the device: return when it is done."""
        if self._streams is not None:
            self._streams.finish_step(self._streams.end_step())

    def transfer(self, pin_chunk_bytes: int) -> BlockTransfer:
        """How blocks go to the host tier and come back; its payload is pinned in chunks of that size, 0: it is not."""
        block_bytes = self.layout.block_bytes
        if self._streams is None:
            return HostTransfer(self, block_bytes)
        cudart = load_cudart(self.device) if pin_chunk_bytes else None
        staging = StagingBuffer(cudart, max(1, STAGING_BYTES // block_bytes) * block_bytes)
        return StreamTransfer(self._streams, PayloadPins(cudart, pin_chunk_bytes), staging, block_bytes)

    def block_view(self, block_id: int) -> memoryview:
        """The bytes of one block in place, where the device is the processor."""
        assert self._host_bytes is not None, f"the processor cannot reach the memory of {self.device}"
        self._check(block_id, self.layout.block_bytes)
        return memoryview(self._host_bytes[block_id])

    def read_block(self, block_id: int, out: memoryview) -> None:
        """Copies one whole block into `out` (`block_bytes` long), after all that the device was told to do before."""
        self._check(block_id, len(out))
        torch.from_numpy(np.frombuffer(out, np.uint8)).copy_(self._bytes[block_id])

    def write_block(self, block_id: int, data: memoryview) -> None:
        """Copies `data` into one whole block, before all that the device is told to do later."""
        self._check(block_id, len(data))
        self._bytes[block_id].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _check(self, block_id: int, num_bytes: int) -> None:
        assert 0 <= block_id < self.num_blocks, f"block {block_id}, outside the pool of {self.num_blocks}"
        assert num_bytes == self.layout.block_bytes, f"{num_bytes} bytes for a block of {self.layout.block_bytes}"

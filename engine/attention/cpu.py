"""Attends on the CPU in float32: short chunks over the pool in place, longer ones by gathering.

Gathering for a decode reads and writes all of a context to use it once, and calls torch per sequence and layer; the
kernel reads it once and takes all sequences in one call. For a prefill chunk torch's matrix products win.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from engine.attention.gather import GatherStep
from engine.attention.paged_decode import attend_segments
from engine.batch import PackedBatch, ShortRows
from engine.kv_memory import KvMemory


class CpuAttention:
    """Keeps one scratch array, so that steps do not allocate; it is the runner's thread that owns it."""

    name = "cpu"
    max_short_tokens = 4

    def __init__(self, kv: KvMemory, num_threads: int) -> None:
        assert kv.pool.dtype is torch.float32
        assert kv.device.type == "cpu"
        self._kv = kv
        self._num_threads = num_threads
        self._scratch = np.empty(0, np.float32)

    def begin(self, batch: PackedBatch) -> CpuStep:
        """Makes ready what all layers of one step need."""
        # numba keeps this number for each thread that calls, and steps run on another one than the start.
        numba.set_num_threads(self._num_threads)
        return CpuStep(self, self._kv, batch)

    def scratch(self, num_floats: int) -> np.ndarray:
        """At least `num_floats` numbers of any content."""
        if len(self._scratch) < num_floats:
            self._scratch = np.empty(num_floats + num_floats // 4, np.float32)
        return self._scratch[:num_floats]


class CpuStep(GatherStep):
    """A gather step whose short rows go to the kernel."""

    def __init__(self, attention: CpuAttention, kv: KvMemory, batch: PackedBatch) -> None:
        super().__init__(kv, batch)
        self._attention = attention
        self._short: ShortRows | None = batch.short
        self._pool = kv.pool.numpy()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """As `GatherStep.attend`."""
        self._kv.write(layer, self._token_rows, key, value)
        query = query.contiguous()
        out = torch.empty_like(query)
        self.attend_spans(layer, query, scale, out)
        if (short := self._short) is not None:
            heads, head_dim = query.shape[1:]
            shape = (len(short.item_row), heads, head_dim + 2)
            attend_segments(
                self._pool,
                layer,
                query.numpy(),
                float(scale),
                short.item_row,
                short.item_table,
                short.item_first,
                short.item_last,
                short.tables,
                short.row_items,
                self._attention.scratch(shape[0] * shape[1] * shape[2]).reshape(shape),
                out.numpy(),
            )
        return out

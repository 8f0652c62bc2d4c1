"""Attends on the CPU in float32, over the pool in place: single rows by one kernel, many by tiles.

Every part of a row's context (what it shares with other chunks, what it does not) is attended apart and leaves a result
and the logarithm of its weight; parts are folded into what is there. For few rows reading K and V once is all there is
to do (`paged_decode.py`); for many, products are (`tiled.py`).
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
import torch

from engine.attention.interface import Floats, Rotation
from engine.attention.paged_decode import segment_kernel
from engine.attention.tiled import Part, Parts, attend_parts, plan_parts
from engine.batch import PackedBatch, ShortRows
from engine.kv_memory import KvMemory
from engine.layer_kernels import rotate_and_store
from engine.register_tiles import LANES


class CpuAttention:
    """Keeps one scratch array, so that steps do not allocate; it is the runner's thread that owns it."""

    name = "cpu"
    max_short_tokens = 4
    queries_at_once = LANES  # Half a panel.
    shares_prefixes = True

    def __init__(self, kv: KvMemory, num_threads: int) -> None:
        assert kv.pool.dtype is torch.float32
        assert kv.device.type == "cpu"
        self._kv = kv
        self.num_threads = num_threads
        self._scratch = np.empty(0, np.float32)

    def begin(self, batch: PackedBatch) -> CpuStep:
        """Makes ready what all layers of one step need."""
        # numba keeps this number for each thread that calls, and steps run on another one than the start.
        numba.set_num_threads(self.num_threads)
        return CpuStep(self, self._kv, batch)

    def scratch(self, num_floats: int) -> np.ndarray:
        """At least `num_floats` numbers of any content."""
        if len(self._scratch) < num_floats:
            self._scratch = np.empty(num_floats + num_floats // 4, np.float32)
        return self._scratch[:num_floats]


class CpuStep:
    """One step: each layer is attended once, in order, through `attend` or `attend_projected`."""

    def __init__(self, attention: CpuAttention, kv: KvMemory, batch: PackedBatch) -> None:
        tokens = kv.layout.tokens_per_block
        self._kv = kv
        self._blocks, self._offsets = np.divmod(batch.slot_mapping, tokens)
        self._attention = attention
        self._pool = kv.pool.numpy()
        self._is_short_only = not batch.spans and not batch.shared
        # The logarithm of the weight of what is in the output so far.
        self._weights = np.empty(0, np.float32)
        self._kv_heads = kv.layout.num_kv_heads
        self._batch = batch
        self._parts: tuple[Parts, ...] | None = None
        self._of_short: tuple[Any, ...] | None = None  # What the kernel for short rows is given in each layer.
        self._token_rows: torch.Tensor | None = None  # Where `attend` writes; fused layers store by themselves.

    def _planned(self, group: int) -> tuple[Parts, ...]:
        """What is attended by tiles, in turn: each shared run, then what chunks have alone. No row is twice in one."""
        if self._parts is None:
            tokens = self._kv.layout.tokens_per_block
            found = []
            for run in self._batch.shared:
                ends = np.full(len(run.rows), len(run.blocks) * tokens)
                found.append([Part(run.rows, ends, run.blocks, 0)])
            alone = []
            for span in self._batch.spans:
                rows = np.arange(span.first_row, span.first_row + span.num_rows)
                ends = np.arange(span.start + 1, span.start + span.num_rows + 1)
                alone.append(Part(rows, ends, span.blocks, span.own_from))
            if alone:
                found.append(alone)
            threads = self._attention.num_threads
            self._parts = tuple(plan_parts(parts, self._kv_heads, group, threads) for parts in found)
        return self._parts

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Writes K and V of all tokens of the step, and only then reads any: a chunk may point at blocks that another
        chunk of this step fills (kv-semantics 3.2). All tensors are `[token, head, head_dim]`."""
        if self._token_rows is None:
            self._token_rows = self._kv.token_rows(torch.from_numpy(self._batch.slot_mapping))
        self._kv.write(layer, self._token_rows, key, value)
        out = torch.empty(query.shape)
        self._attend(layer, query.contiguous().numpy(), scale, out.numpy())
        return out

    def attend_projected(
        self, layer: int, projected: Floats, rotation: Rotation, scale: float, out: Floats | None
    ) -> None:
        """As `attend`, from what the projection gave: Q, K and V one after another, `[row, head, head_dim]`, rotated
        here. `out` is `[row, query head, head_dim]`; without it nothing is attended, only stored. Rows beyond those of
        the step are left alone."""
        rotate_and_store(projected, *rotation, self._pool, layer, self._blocks, self._offsets)
        if out is not None:
            self._attend(layer, projected, scale, out)

    def _attend(self, layer: int, queries: Floats, scale: float, out: Floats) -> None:
        group = out.shape[1] // self._kv_heads
        if not self._is_short_only:
            if self._weights.shape != out.shape[:2]:
                self._weights, self._of_short = np.empty(out.shape[:2], np.float32), None
            self._weights.fill(-np.inf)
            for parts in self._planned(group):
                attend_parts(self._pool, layer, queries, float(scale), *parts.arguments, self._weights, out)
        if self._batch.short is not None:
            self._attend_short(self._batch.short, layer, queries, scale, out)

    def _attend_short(self, short: ShortRows, layer: int, queries: Floats, scale: float, out: Floats) -> None:
        heads, head_dim = out.shape[1:]
        if self._of_short is None:
            shape = (len(short.item_row), heads, head_dim + 2)
            self._of_short = (
                *short.arguments,
                self._attention.scratch(shape[0] * shape[1] * shape[2]).reshape(shape),
                self._is_short_only,
                _NO_WEIGHTS if self._is_short_only else self._weights,
            )
        kernel = segment_kernel(head_dim, heads // self._kv_heads)
        kernel(self._pool, layer, queries, float(scale), *self._of_short, out)


_NO_WEIGHTS: Final = np.empty((0, 0), np.float32)

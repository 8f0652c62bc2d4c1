"""Attends on the CPU in float32: short chunks over the pool in place, longer ones and shared prefixes by products.

Every part of a row's context (its own chunk, what lies before it, a prefix that it shares) is attended apart and
leaves a result and the logarithm of its weight; parts are folded into what is there, so that no mask is ever made.
Gathering for a decode reads and writes all of a context to use it once; the kernel reads it once and takes all
sequences in one call. For many rows torch's matrix products win, also where the rows are decodes of many sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numba
import numpy as np
import torch

from engine.attention.folding import fold
from engine.attention.interface import Rotation
from engine.attention.paged_decode import segment_kernel
from engine.batch import PackedBatch, ShortRows
from engine.kv_memory import KvMemory
from engine.layer_kernels import rotate_and_store


class CpuAttention:
    """Keeps one scratch array, so that steps do not allocate; it is the runner's thread that owns it."""

    name = "cpu"
    max_short_tokens = 4
    shares_prefixes = True

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


LEAF_ROWS: Final = 128
"""Rows of a chunk whose triangle of own keys is attended with a mask, which costs as much as the whole square would;
everything before these rows is attended without one."""


class CpuStep:
    """One step: each layer is attended once, in order, through `attend` or `attend_projected`."""

    def __init__(self, attention: CpuAttention, kv: KvMemory, batch: PackedBatch) -> None:
        tokens = kv.layout.tokens_per_block
        self._kv = kv
        self._token_rows = kv.token_rows(torch.from_numpy(batch.slot_mapping))
        self._blocks, self._offsets = np.divmod(batch.slot_mapping, tokens)
        self._attention = attention
        self._short: ShortRows | None = batch.short
        self._pool = kv.pool.numpy()
        self._is_short_only = not batch.spans and not batch.shared
        # The logarithm of the weight of what is in the output so far.
        self._weights = np.empty(0, np.float32)
        self._shared = [
            (torch.from_numpy(one.blocks), len(one.blocks) * tokens, torch.from_numpy(one.rows), one.rows)
            for one in batch.shared
        ]
        self._spans = [
            _OwnSpan(
                np.arange(span.first_row, span.first_row + span.num_rows),
                torch.from_numpy(span.blocks[span.own_from // tokens : -(-span.start // tokens)]),
                span.start - span.own_from,
            )
            for span in batch.spans
        ]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Writes K and V of all tokens of the step, and only then reads any: a chunk may point at blocks that another
        chunk of this step fills (kv-semantics 3.2). All tensors are `[token, head, head_dim]`."""
        self._kv.write(layer, self._token_rows, key, value)
        out = torch.empty(query.shape)
        self._attend(layer, query, key, value, scale, out, query.contiguous().numpy())
        return out

    def attend_projected(
        self, layer: int, projected: torch.Tensor, rotation: Rotation, scale: float, out: torch.Tensor | None
    ) -> None:
        """As `attend`, from what the projection gave: Q, K and V one after another, `[row, head, head_dim]`, rotated
        here. `out` is `[row, query head, head_dim]`; without it nothing is attended, only stored. Rows beyond those of
        the step are left alone."""
        kv_heads = self._pool.shape[4]
        first_key = projected.shape[1] - 2 * kv_heads
        rows = projected.numpy()
        rotate_and_store(rows, *rotation, self._pool, layer, self._blocks, self._offsets)
        if out is None:
            return
        if self._is_short_only:
            self._attend_short(layer, rows, scale, out)
            return
        query, key, value = projected.split((first_key, kv_heads, kv_heads), dim=1)
        self._attend(layer, query, key, value, scale, out, rows)

    def _attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        queries: np.ndarray,
    ) -> None:
        if self._weights.shape != (len(query), query.shape[1]):
            self._weights = np.empty((len(query), query.shape[1]), np.float32)
        self._weights.fill(-np.inf)
        for blocks, num_tokens, rows, row_numbers in self._shared:
            keys, values = self._kv.gather(layer, blocks, num_tokens)
            self._fold(_product(query.index_select(0, rows), keys, values, scale), row_numbers, out)
        for span in self._spans:
            self._attend_span(span, layer, query, key, value, scale, out)
        self._attend_short(layer, queries, scale, out)

    def _attend_span(
        self,
        span: _OwnSpan,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """The context before the chunk and the chunk's own keys, in one array; then strips of rows over it."""
        before, count, first = span.num_before, len(span.rows), span.rows[0]
        own_keys, own_values = key[first : first + count], value[first : first + count]
        keys, values = own_keys, own_values
        if before > 0:
            keys, values = self._kv.gather(layer, span.blocks, before + count)
            keys, values = torch.cat((keys[:before], own_keys)), torch.cat((values[:before], own_values))
        for begin in range(0, count, LEAF_ROWS):
            end = min(begin + LEAF_ROWS, count)
            asks, rows = query[first + begin : first + end], span.rows[begin:end]
            self._fold(_triangle(asks, own_keys[begin:end], own_values[begin:end], scale), rows, out)
            seen = before + begin
            if seen > 0:
                self._fold(_product(asks, keys[:seen], values[:seen], scale), rows, out)

    def _fold(self, part: tuple[np.ndarray, np.ndarray], rows: np.ndarray, out: torch.Tensor) -> None:
        fold(*part, rows, out.numpy(), self._weights)

    def _attend_short(self, layer: int, queries: np.ndarray, scale: float, out: torch.Tensor) -> None:
        short = self._short
        if short is None:
            return
        heads, head_dim = out.shape[1:]
        shape = (len(short.item_row), heads, head_dim + 2)
        kernel = segment_kernel(head_dim, heads // self._pool.shape[4])
        kernel(
            self._pool,
            layer,
            queries,
            float(scale),
            short.item_row,
            short.item_table,
            short.item_first,
            short.item_last,
            short.tables,
            short.row_items,
            self._attention.scratch(shape[0] * shape[1] * shape[2]).reshape(shape),
            self._is_short_only,
            _NO_WEIGHTS if self._is_short_only else self._weights,
            out.numpy(),
        )


@dataclass(frozen=True, slots=True)
class _OwnSpan:
    """A chunk's packed rows, the blocks before it that no shared run covers, and how many tokens of them it sees."""

    rows: np.ndarray
    blocks: torch.Tensor
    num_before: int


_NO_WEIGHTS: Final = np.empty((0, 0), np.float32)


def _product(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of all rows over all keys: `[kv_head, row, group, head_dim]`, and the logarithms of the weights,
    `[kv_head, row, group]`."""
    rows, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    # The query heads of one KV head are rows of one product, which is larger than one for each of them.
    asks = query.unflatten(1, (kv_heads, heads // kv_heads)).transpose(0, 1).reshape(kv_heads, 1, -1, head_dim)
    found, weights = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        asks, keys.transpose(0, 1).unsqueeze(1), values.transpose(0, 1).unsqueeze(1), 0.0, False, scale=scale
    )
    shape = (kv_heads, rows, heads // kv_heads)
    return found.reshape(*shape, head_dim).numpy(), weights.reshape(shape).numpy()


def _triangle(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """As `_product`, of row i over keys 0 … i."""
    kv_heads = keys.shape[1]
    heads, head_dim = query.shape[1:]
    group = heads // kv_heads
    # The query heads of one KV head are a batch's heads, so that K and V are neither repeated nor copied.
    asks = query.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)
    shape = (kv_heads, group, keys.shape[0], head_dim)
    found, weights = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        asks,
        keys.transpose(0, 1).unsqueeze(1).expand(shape),
        values.transpose(0, 1).unsqueeze(1).expand(shape),
        0.0,
        True,
        scale=scale,
    )
    return found.transpose(1, 2).contiguous().numpy(), weights.transpose(1, 2).contiguous().numpy()

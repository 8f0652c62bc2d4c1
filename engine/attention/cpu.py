"""Attends on the CPU in float32: short chunks over the pool in place, longer ones and shared prefixes by products.

Every part of a row's context (its own chunk, what lies before it, a prefix that it shares) is attended apart and
leaves a result and the logarithm of its weight; parts are folded into what is there, so that no mask is ever made.
Gathering for a decode reads and writes all of a context to use it once; the kernel reads it once and takes all
sequences in one call. For many rows torch's matrix products win, also where the rows are decodes of many sequences.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from engine.attention.folding import fold
from engine.attention.paged_decode import segment_kernel
from engine.batch import PackedBatch, ShortRows
from engine.kv_memory import KvMemory


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


class CpuStep:
    """One step: `attend` is called once for each layer, in order."""

    def __init__(self, attention: CpuAttention, kv: KvMemory, batch: PackedBatch) -> None:
        tokens = kv.layout.tokens_per_block
        self._kv = kv
        self._token_rows = kv.token_rows(torch.from_numpy(batch.slot_mapping))
        self._attention = attention
        self._short: ShortRows | None = batch.short
        self._pool = kv.pool.numpy()
        self._shared = [
            (torch.from_numpy(one.blocks), len(one.blocks) * tokens, torch.from_numpy(one.rows), one.rows)
            for one in batch.shared
        ]
        # (first row, end row, rows, blocks before the chunk that no shared run covers, their tokens)
        self._spans = [
            (
                span.first_row,
                span.first_row + span.num_rows,
                np.arange(span.first_row, span.first_row + span.num_rows),
                torch.from_numpy(span.blocks[span.own_from // tokens : -(-span.start // tokens)]),
                span.start - span.own_from,
            )
            for span in batch.spans
        ]

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Only writes K and V."""
        self._kv.write(layer, self._token_rows, key, value)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Writes K and V of all tokens of the step, and only then reads any: a chunk may point at blocks that another
        chunk of this step fills (kv-semantics 3.2). All tensors are `[token, head, head_dim]`."""
        self.store(layer, key, value)
        num_rows, heads, head_dim = query.shape
        out = torch.empty((num_rows, heads, head_dim))
        # The logarithm of the weight of what is in `out` so far: nothing.
        weights = np.full((num_rows, heads), -np.inf, np.float32)

        for blocks, num_tokens, rows, row_numbers in self._shared:
            keys, values = self._kv.gather(layer, blocks, num_tokens)
            fold(*_product(query.index_select(0, rows), keys, values, scale), row_numbers, out.numpy(), weights)
        for begin, end, row_numbers, blocks, num_tokens in self._spans:
            asks = query[begin:end]
            own = _product(asks, key[begin:end], value[begin:end], scale, causal=True)
            fold(*own, row_numbers, out.numpy(), weights)
            if num_tokens > 0:
                keys, values = self._kv.gather(layer, blocks, num_tokens)
                fold(*_product(asks, keys, values, scale), row_numbers, out.numpy(), weights)
        if self._short is not None:
            self._attend_short(self._short, layer, query.contiguous(), scale, out, weights)
        return out

    def _attend_short(
        self, short: ShortRows, layer: int, query: torch.Tensor, scale: float, out: torch.Tensor, weights: np.ndarray
    ) -> None:
        heads, head_dim = query.shape[1:]
        shape = (len(short.item_row), heads, head_dim + 2)
        kernel = segment_kernel(head_dim, heads // self._pool.shape[4])
        kernel(
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
            weights,
            out.numpy(),
        )


def _product(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of all rows over all keys (or, causal, of row i over keys 0 … i): `[kv_head, row, group, head_dim]`, and
    the logarithms of the weights, `[kv_head, group, row]`."""
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
        causal,
        scale=scale,
    )
    return found.transpose(1, 2).contiguous().numpy(), weights.contiguous().numpy()

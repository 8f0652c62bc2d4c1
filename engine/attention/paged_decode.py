"""Attends short chunks over the paged pool in place, on the CPU, in float32; compiled by numba and kept on disk.

One item of work is one query token and one segment of its context, all heads of it, so that K and V are read as they
lie and two cores are busy even with a single sequence. Each item leaves a partial result (maximum, sum, weighted
values) for each query head; a second pass combines the segments of a token. Nothing is gathered and no mask is made: the cost is reading K and V once.

Who decides that a chunk is short is `engine/batch.py`; indices are checked there, not here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np

from engine.register_tiles import CACHE_LINE, prefetch
from engine.vector_exp import exp32

# Sums may be reordered, which is what lets LLVM use vectors. NaN and infinity keep their meaning: a broken sequence
# must be seen as broken by the sampler.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp", "afn"}


@cache
def segment_kernel(head_dim: int, group: int) -> Any:
    """`attend_segments` for heads of this size and this many query heads for each KV head: known to the compiler,
    they halve its time."""

    @numba.njit(parallel=True, fastmath=_FASTMATH, nogil=True, cache=True, error_model="numpy")
    def attend_segments(
        pool: Any,  # float32 [block, layer, 2, token, kv_head, head_dim]
        layer: int,
        query: Any,  # float32 [row, head, head_dim]; there may be more heads, which are not looked at
        scale: float,
        item_row: Any,  # int32 [item]: the packed row that asks
        item_table: Any,  # int32 [item]: where its block table begins in `tables`
        item_first: Any,  # int32 [item]: first position of the segment
        item_last: Any,  # int32 [item]: one past its last position
        tables: Any,  # int32: all block tables, one after another
        row_items: Any,  # int32 [short row + 1]: the items of a short row are row_items[i] … row_items[i + 1]
        partial: Any,  # float32 [item, head, head_dim + 2]: scratch
        is_fresh: bool,  # `out` holds nothing yet, and `weights` is not looked at
        weights: Any,  # float32 [row, head]: the logarithm of the weight of what `out` holds; −infinity: it holds nothing
        out: Any,  # float32 [row, head, head_dim]
    ) -> None:
        """Folds the attention of every short row into its row of `out`; other rows are left alone."""
        tokens_per_block = pool.shape[3]
        kv_heads = pool.shape[4]
        heads = kv_heads * group
        num_items = item_row.shape[0]
        factor = np.float32(scale)
        token_bytes = np.int64(kv_heads * head_dim * 4)
        half_bytes = np.int64(tokens_per_block) * token_bytes
        block_bytes = np.int64(pool.shape[1] * 2) * half_bytes
        layer_at = np.int64(pool.ctypes.data) + np.int64(layer * 2) * half_bytes

        for item in numba.prange(num_items):
            row = item_row[item]
            # Every vector below is one whole last axis: only then does the compiler know that it is contiguous.
            scores = np.empty((heads, tokens_per_block), np.float32)
            for h in range(heads):
                state = partial[item, h]
                for d in range(head_dim):
                    state[d] = 0.0
                state[head_dim] = -np.inf
                state[head_dim + 1] = 0.0
            position = item_first[item]
            while position < item_last[item]:
                offset = position % tokens_per_block
                block = tables[item_table[item] + position // tokens_per_block]
                count = min(tokens_per_block - offset, item_last[item] - position)
                # Blocks lie anywhere, and reading the next one begins only when it is asked for. So values are asked for
                # while keys are looked at, and the next keys while values are.
                values_at = layer_at + block * block_bytes + half_bytes + offset * token_bytes
                next_at = values_at
                if position + count < item_last[item]:
                    next_at = layer_at + tables[item_table[item] + (position + count) // tokens_per_block] * block_bytes
                for t in range(count):
                    for line in range(0, token_bytes, CACHE_LINE):
                        prefetch(values_at + t * token_bytes + line)
                    for kv_head in range(kv_heads):
                        key = pool[block, layer, 0, offset + t, kv_head]
                        for g in range(group):
                            asks = query[row, kv_head * group + g]
                            score = np.float32(0.0)
                            for d in range(head_dim):
                                score += asks[d] * key[d]
                            scores[kv_head * group + g, t] = score * factor
                for h in range(heads):
                    state = partial[item, h]
                    highest = state[head_dim]
                    row_scores = scores[h]
                    for t in range(count):
                        # Written so that NaN wins, and stays.
                        if not row_scores[t] <= highest:
                            highest = row_scores[t]
                    if highest != state[head_dim]:
                        shrink = exp32(state[head_dim] - highest)
                        state[head_dim] = highest
                        state[head_dim + 1] *= shrink
                        for d in range(head_dim):
                            state[d] *= shrink
                    total = np.float32(0.0)
                    for t in range(count):
                        weight = exp32(row_scores[t] - highest)
                        row_scores[t] = weight
                        total += weight
                    state[head_dim + 1] += total
                # Four tokens at a time, so that the sums of V are loaded and stored once for all of them.
                fours = count - count % 4
                for kv_head in range(kv_heads):
                    for t in range(0, fours, 4):
                        for ahead in range(t, t + 4):
                            for line in range(0, head_dim * 4, CACHE_LINE):
                                prefetch(next_at + ahead * token_bytes + kv_head * head_dim * 4 + line)
                        value_0 = pool[block, layer, 1, offset + t, kv_head]
                        value_1 = pool[block, layer, 1, offset + t + 1, kv_head]
                        value_2 = pool[block, layer, 1, offset + t + 2, kv_head]
                        value_3 = pool[block, layer, 1, offset + t + 3, kv_head]
                        for g in range(group):
                            h = kv_head * group + g
                            state = partial[item, h]
                            weight_0 = scores[h, t]
                            weight_1 = scores[h, t + 1]
                            weight_2 = scores[h, t + 2]
                            weight_3 = scores[h, t + 3]
                            for d in range(head_dim):
                                state[d] += (
                                    weight_0 * value_0[d]
                                    + weight_1 * value_1[d]
                                    + weight_2 * value_2[d]
                                    + weight_3 * value_3[d]
                                )
                    for t in range(fours, count):
                        value = pool[block, layer, 1, offset + t, kv_head]
                        for g in range(group):
                            state = partial[item, kv_head * group + g]
                            weight = scores[kv_head * group + g, t]
                            for d in range(head_dim):
                                state[d] += weight * value[d]
                position += count

        for work in numba.prange((row_items.shape[0] - 1) * heads):
            short = work // heads
            head = work % heads
            begin = row_items[short]
            end = row_items[short + 1]
            row = item_row[begin]
            # What shared prefixes gave is one more part, of weight 1 at its own logarithm.
            before = np.float32(-np.inf) if is_fresh else weights[row, head]
            highest = before
            for item in range(begin, end):
                if not partial[item, head, head_dim] <= highest:
                    highest = partial[item, head, head_dim]
            total = np.float32(0.0)
            result = out[row, head]
            if before == -np.inf:
                for d in range(head_dim):
                    result[d] = 0.0
            else:
                total = exp32(before - highest)
                for d in range(head_dim):
                    result[d] *= total
            for item in range(begin, end):
                state = partial[item, head]
                weight = exp32(state[head_dim] - highest)
                total += weight * state[head_dim + 1]
                for d in range(head_dim):
                    result[d] += weight * state[d]
            inverse = np.float32(1.0) / total
            for d in range(head_dim):
                result[d] *= inverse

    return attend_segments

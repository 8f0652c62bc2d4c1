"""Attends short chunks over the paged pool in place, on the CPU, in float32; compiled by numba and kept on disk.

One item of work is one query token, one KV head and one segment of its context, so that two cores are busy even with
a single sequence. Each item leaves a partial result (maximum, sum, weighted values) for its query heads; a second
pass combines the segments of a token. Nothing is gathered and no mask is made: the cost is reading K and V once.

Who decides that a chunk is short is `engine/batch.py`; indices are checked there, not here.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

# Sums may be reordered, which is what lets LLVM use vectors. NaN and infinity keep their meaning: a broken sequence
# must be seen as broken by the sampler.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp", "afn"}


@numba.njit(parallel=True, fastmath=_FASTMATH, nogil=True, cache=True, boundscheck=False)
def attend_segments(
    pool: Any,  # float32 [block, layer, 2, token, kv_head, head_dim]
    layer: int,
    query: Any,  # float32 [row, head, head_dim]
    scale: float,
    item_row: Any,  # int32 [item]: the packed row that asks
    item_table: Any,  # int32 [item]: where its block table begins in `tables`
    item_first: Any,  # int32 [item]: first position of the segment
    item_last: Any,  # int32 [item]: one past its last position
    tables: Any,  # int32: all block tables, one after another
    row_items: Any,  # int32 [short row + 1]: the items of a short row are row_items[i] … row_items[i + 1]
    partial: Any,  # float32 [item, head, head_dim + 2]: scratch
    out: Any,  # float32 [row, head, head_dim]
) -> None:
    """Writes the attention of every short row into its row of `out`; other rows are left alone."""
    tokens_per_block = pool.shape[3]
    kv_heads = pool.shape[4]
    head_dim = pool.shape[5]
    group = query.shape[1] // kv_heads
    num_items = item_row.shape[0]

    for work in numba.prange(num_items * kv_heads):
        item = work // kv_heads
        kv_head = work % kv_heads
        first_head = kv_head * group
        row = item_row[item]
        scores = np.empty((group, tokens_per_block), np.float32)
        for g in range(group):
            state = partial[item, first_head + g]
            for d in range(head_dim):
                state[d] = 0.0
            state[head_dim] = -np.inf
            state[head_dim + 1] = 0.0

        # Every vector below is one whole last axis: only then does the compiler know that it is contiguous.
        position = item_first[item]
        while position < item_last[item]:
            offset = position % tokens_per_block
            block = tables[item_table[item] + position // tokens_per_block]
            count = min(tokens_per_block - offset, item_last[item] - position)

            for t in range(count):
                key = pool[block, layer, 0, offset + t, kv_head]
                for g in range(group):
                    asks = query[row, first_head + g]
                    score = np.float32(0.0)
                    for d in range(head_dim):
                        score += asks[d] * key[d]
                    scores[g, t] = score * scale

            for g in range(group):
                state = partial[item, first_head + g]
                highest = state[head_dim]
                for t in range(count):
                    # Written so that NaN wins, and stays.
                    if not scores[g, t] <= highest:
                        highest = scores[g, t]
                if highest != state[head_dim]:
                    shrink = np.exp(state[head_dim] - highest)
                    state[head_dim] = highest
                    state[head_dim + 1] *= shrink
                    for d in range(head_dim):
                        state[d] *= shrink
                total = np.float32(0.0)
                for t in range(count):
                    weight = np.exp(scores[g, t] - highest)
                    scores[g, t] = weight
                    total += weight
                state[head_dim + 1] += total

            for t in range(count):
                value = pool[block, layer, 1, offset + t, kv_head]
                for g in range(group):
                    state = partial[item, first_head + g]
                    weight = scores[g, t]
                    for d in range(head_dim):
                        state[d] += weight * value[d]
            position += count

    heads = query.shape[1]
    for work in numba.prange((row_items.shape[0] - 1) * heads):
        short = work // heads
        head = work % heads
        begin = row_items[short]
        end = row_items[short + 1]
        highest = partial[begin, head, head_dim]
        for item in range(begin + 1, end):
            if not partial[item, head, head_dim] <= highest:
                highest = partial[item, head, head_dim]
        total = np.float32(0.0)
        result = out[item_row[begin], head]
        for d in range(head_dim):
            result[d] = 0.0
        for item in range(begin, end):
            weight = np.exp(partial[item, head, head_dim] - highest)
            total += weight * partial[item, head, head_dim + 1]
            for d in range(head_dim):
                result[d] += weight * partial[item, head, d]
        inverse = np.float32(1.0) / total
        for d in range(head_dim):
            result[d] *= inverse

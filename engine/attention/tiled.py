"""Attends many rows over the paged pool in place, on the CPU, in float32: products by tiles, one softmax as it goes.

A task is one KV head and a panel of queries: the rows of a chunk, or of all chunks that share a prefix, times the query
heads that read this KV head. Keys are taken from the pool where they lie, some at a time: scores of all queries of the
panel for each key, so that maximum, exponential and sum run over queries and need no shuffling; then the values, weighed.
Nothing is gathered, no mask is made, and what lies behind a panel's last row is never looked at.

What a task covers is decided once a step by `plan_parts`; indices are checked in `engine/batch.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from engine.attention.panel_softmax import soften
from engine.register_tiles import CACHE_LINE, LANES, MOST_ROWS, PANEL, multiply_scattered, prefetch
from engine.vector_exp import exp32

# Keys between two looks at the maximum: enough to forget what that costs, few enough for the first cache, whole tiles.
_ROUND: Final = 72
_FEW_PANELS: Final = 16
_FASTMATH = {"contract", "nsz", "arcp", "afn"}
_TASK_FIELDS: Final = 6


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that attend to the tokens of one block table from `first_key` on; row i to those before `ends[i]`."""

    rows: NDArray[np.int64]
    ends: NDArray[np.int64]
    table: NDArray[np.int64]
    first_key: int


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts that have no row in common, as arrays, cut into tasks."""

    rows: NDArray[np.int64]
    ends: NDArray[np.int64]
    tables: NDArray[np.int64]
    tasks: NDArray[np.int64]  # [task, (kv_head, first query, first row, number of rows, begin of table, first key)]


def plan_parts(parts: Sequence[Part], kv_heads: int, group: int, num_threads: int) -> Parts:
    """Tasks in the order in which they are dealt to threads: each thread takes an equal, contiguous share of them, and
    the dearest are dealt out first, one to each."""
    tasks: list[tuple[int, tuple[int, ...]]] = []
    first_row = first_block = 0
    for part in parts:
        count = len(part.rows)
        for query in range(0, count * group, PANEL):
            last_row = min(count, -(-(query + PANEL) // group)) - 1
            num_queries = min(PANEL, count * group - query)
            # Scores take all of a panel or half of it, values as many as there are.
            num_lanes = PANEL if num_queries > LANES else LANES
            cost = (int(part.ends[last_row]) - part.first_key) * (num_lanes + num_queries)
            for kv_head in range(kv_heads):
                tasks.append((cost, (kv_head, query, first_row, count, first_block, part.first_key)))
        first_row, first_block = first_row + count, first_block + len(part.table)
    tasks.sort(key=lambda task: -task[0])
    dealt = [task for thread in range(num_threads) for _, task in tasks[thread::num_threads]]
    return Parts(
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.ends for part in parts]),
        np.concatenate([part.table for part in parts]),
        np.array(dealt, np.int64).reshape(-1, _TASK_FIELDS),
    )


@cache
def tiled_kernel(head_dim: int, group: int) -> Any:
    """`attend_parts` for heads of this size and this many query heads for each KV head."""
    # Values are weighed a panel of their numbers at a time; what is left of them is not in any panel.
    num_panels = head_dim // PANEL
    rest = num_panels * PANEL

    @numba.njit(parallel=True, fastmath=_FASTMATH, nogil=True, cache=True, error_model="numpy")
    def attend_parts(
        pool: Any,  # float32 [block, layer, 2, token, kv_head, head_dim]
        layer: int,
        query: Any,  # float32 [row, head, head_dim]; there may be more heads, which are not looked at
        scale: float,
        rows: Any,  # int64: the packed rows of all parts
        ends: Any,  # int64: one past the last key that each sees
        tables: Any,  # int64: the block tables of all parts
        tasks: Any,
        weights: Any,  # float32 [row, head]: the logarithm of the weight of what `out` holds; −infinity: nothing
        out: Any,  # float32 [row, head, head_dim]
    ) -> None:
        """Folds what the parts give into `out` and `weights`."""
        tokens_per_block, kv_heads = pool.shape[3], pool.shape[4]
        token_bytes = np.int64(kv_heads * head_dim * 4)
        block_bytes = np.int64(pool.shape[1] * 2 * tokens_per_block) * token_bytes
        factor = np.float32(scale)
        pool_at = np.int64(pool.ctypes.data)

        for index in numba.prange(tasks.shape[0]):
            kv_head, first_query, first_row = tasks[index, 0], tasks[index, 1], tasks[index, 2]
            num_rows, table_begin, first_key = tasks[index, 3], tasks[index, 4], tasks[index, 5]
            count = min(PANEL, num_rows * group - first_query)
            # Queries as a panel, [number of the head, query]; scores likewise, [key, query].
            asks = np.empty((head_dim, PANEL), np.float32)
            scores = np.empty((_ROUND, PANEL), np.float32)
            sums = np.empty((PANEL, head_dim), np.float32)
            highest = np.empty(PANEL, np.float32)
            total = np.empty(PANEL, np.float32)
            seen_until = np.empty(PANEL, np.int64)
            shrink = np.empty(PANEL, np.float32)
            # Where things lie that are multiplied: numbers of the queries, keys and values of a round, weights of a query.
            asks_at = np.empty(head_dim, np.int64)
            keys_at = np.empty((2, _ROUND), np.int64)
            values_at = np.empty(_ROUND, np.int64)
            weights_at = np.empty(PANEL, np.int64)
            # By loops: whole arrays at once would be parallel parts of their own to numba, and take seconds to compile.
            for q in range(PANEL):
                highest[q] = -np.inf
                total[q] = 0.0
                seen_until[q] = 0
                for d in range(head_dim):
                    asks[d, q] = 0.0
                    sums[q, d] = 0.0
            for t in range(_ROUND):
                for q in range(LANES, PANEL):
                    scores[t, q] = 0.0  # Where few ask, nothing else is written there.
            soonest, latest = ends[first_row + (first_query + count - 1) // group], np.int64(0)
            for q in range(count):
                of_part = first_row + (first_query + q) // group
                head = kv_head * group + (first_query + q) % group
                asked = query[rows[of_part], head]
                for d in range(head_dim):
                    asks[d, q] = asked[d] * factor
                seen_until[q] = ends[of_part]
                soonest, latest = min(soonest, ends[of_part]), max(latest, ends[of_part])
            head_at = pool_at + (layer * 2 * tokens_per_block * kv_heads + kv_head) * head_dim * 4
            for d in range(head_dim):
                asks_at[d] = np.int64(asks.ctypes.data) + d * PANEL * 4
            for q in range(PANEL):
                weights_at[q] = np.int64(scores.ctypes.data) + q * 4
            # Few queries wait for memory: for them, what a round reads is asked for one round before.
            is_asked_for = num_rows * group <= _FEW_PANELS * PANEL

            key, following, turn = first_key, first_key, 0
            while key < latest:
                # The places of the next keys, and before the first round those of the first.
                while following <= min(key + _ROUND, latest - 1):
                    of_round = keys_at[(turn + 1) % 2 if following > key else turn % 2]
                    num_following = min(_ROUND, latest - following)
                    done, block, offset = 0, following // tokens_per_block, following % tokens_per_block
                    while done < num_following:
                        here = min(tokens_per_block - offset, num_following - done)
                        at = head_at + tables[table_begin + block] * block_bytes + offset * token_bytes
                        for t in range(here):
                            of_round[done + t] = at + t * token_bytes
                        done, block, offset = done + here, block + 1, 0
                    following += num_following
                num_keys = min(_ROUND, latest - key)
                for t in range(num_keys):
                    values_at[t] = keys_at[turn % 2, t] + tokens_per_block * token_bytes
                asks_at[0] = np.int64(asks.ctypes.data)
                num_asked = min(_ROUND, following - key - num_keys) if is_asked_for else 0
                of_next = keys_at[(turn + 1) % 2]
                done = 0
                while done < num_keys:
                    here = min(MOST_ROWS, num_keys - done)
                    for t in range(done, min(done + here, num_asked)):
                        for line in range(0, head_dim * 4, CACHE_LINE):
                            prefetch(of_next[t] + line)
                    # Places are named here, and not by addresses taken before: numba frees an array behind its last
                    # mention.
                    multiply_scattered(
                        here,
                        np.int64(keys_at.ctypes.data) + (turn % 2 * _ROUND + done) * 8,
                        np.int64(4),
                        np.int64(asks_at.ctypes.data),
                        np.int64(0),
                        np.int64(head_dim),
                        np.int64(scores.ctypes.data) + done * PANEL * 4,
                        np.int64(PANEL * 4),
                        False,
                        count <= LANES,
                    )
                    done += here
                if key + num_keys > soonest:
                    for t in range(max(np.int64(0), soonest - key), num_keys):
                        of_key = scores[t]
                        for q in range(PANEL):
                            if key + t >= seen_until[q]:
                                of_key[q] = -np.inf
                soften(
                    np.int64(scores.ctypes.data),
                    num_keys,
                    np.int64(highest.ctypes.data),
                    np.int64(total.ctypes.data),
                    np.int64(shrink.ctypes.data),
                )
                for q in range(count):
                    if shrink[q] != np.float32(1.0):
                        of_query = sums[q]
                        for d in range(head_dim):
                            of_query[d] *= shrink[q]
                for panel in range(num_panels):
                    for t in range(panel, num_asked, num_panels):
                        for line in range(0, head_dim * 4, CACHE_LINE):
                            prefetch(of_next[t] + tokens_per_block * token_bytes + line)
                    multiply_scattered(
                        count,
                        np.int64(weights_at.ctypes.data),
                        np.int64(PANEL * 4),
                        np.int64(values_at.ctypes.data),
                        panel * PANEL * 4,
                        num_keys,
                        np.int64(sums.ctypes.data) + panel * PANEL * 4,
                        np.int64(head_dim * 4),
                        True,
                        False,
                    )
                if rest < head_dim:
                    for t in range(num_keys):
                        block, offset = (key + t) // tokens_per_block, (key + t) % tokens_per_block
                        values = pool[tables[table_begin + block], layer, 1, offset, kv_head]
                        for q in range(count):
                            for d in range(rest, head_dim):
                                sums[q, d] += scores[t, q] * values[d]
                key, turn = key + num_keys, turn + 1

            for q in range(count):
                if seen_until[q] <= first_key:
                    continue
                row = rows[first_row + (first_query + q) // group]
                head = kv_head * group + (first_query + q) % group
                result, of_query = out[row, head], sums[q]
                there, new = weights[row, head], highest[q] + np.log(total[q])
                weights[row, head] = new
                share_there, share_new = np.float32(0.0), np.float32(1.0) / total[q]
                if there != -np.inf:
                    # NaN, on whichever side, reaches the result through the shares.
                    most = there if there >= new else new
                    weight_there, weight_new = exp32(there - most), exp32(new - most)
                    weights[row, head] = most + np.log(weight_there + weight_new)
                    share_there = weight_there / (weight_there + weight_new)
                    share_new *= weight_new / (weight_there + weight_new)
                    for d in range(head_dim):
                        result[d] = result[d] * share_there + of_query[d] * share_new
                else:
                    for d in range(head_dim):
                        result[d] = of_query[d] * share_new

    return attend_parts

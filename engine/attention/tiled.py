"""Attends many rows over the paged pool in place, on the CPU, in float32: products by tiles, one softmax as it goes.

A task is one KV head and a panel of queries: the rows of a chunk, or of all chunks that share a prefix, times the query
heads that read this KV head. Keys are taken from the pool where they lie, some at a time: scores of all queries of the
panel for each key, so that maximum, exponential and sum run over queries and need no shuffling; then the values, weighed.
Nothing is gathered, no mask is made, and what lies behind a panel's last row is never looked at.

What a task covers is decided once a step by `plan_parts`, which cuts a panel's keys where a thread's share ends; indices are
checked in `engine/batch.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from engine.attention.panel_softmax import soften
from engine.claims import claim
from engine.register_tiles import ADD, CACHE_LINE, LANES, MOST_ROWS, PANEL, PUT, multiply_scattered, prefetch
from engine.vector_exp import exp32

# Keys between two looks at the maximum: enough to forget what that costs, few enough for the first cache, whole tiles.
_ROUND: Final = 72
_FEW_PANELS: Final = 16
_FASTMATH = {"contract", "nsz", "arcp", "afn"}
_TASK_FIELDS: Final = 8
_LEAST_CUT: Final = 2 * _ROUND
"""Keys for which it pays to have a task of their own."""


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
    tasks: NDArray[np.int64]  # [task, (kv_head, first query, first row, number of rows, begin of table, keys, slot)]
    """Keys are two numbers, from which on and before which; a slot of −1 is where results go that are not put aside."""
    bounds: NDArray[np.int64]
    """Thread i has the tasks from `bounds[i]` to before `bounds[i + 1]`."""
    num_slots: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As the kernel takes them."""
        return self.rows, self.ends, self.tables, self.tasks, self.bounds, self.num_slots


def plan_parts(parts: Sequence[Part], kv_heads: int, group: int, num_threads: int) -> Parts:
    """Tasks, cut so that all threads have the same to do; who is done early helps the others (`engine/claims.py`).

    A head's tasks follow one another, so that what one of them read is in the cache for the next. They are laid end to end
    and cut into as many equal pieces as there are threads (McNaughton, "Scheduling with deadlines and loss functions",
    1959): a task that is cut becomes several, over some of its keys each, of which all but the first put what they find
    aside, to be folded in afterwards.
    """
    whole = [task for kv_head in range(kv_heads) for task in _tasks_of_head(parts, kv_head, group)]
    share = sum(task.cost for task in whole) / num_threads
    dealt: list[list[tuple[int, ...]]] = [[] for _ in range(num_threads)]
    thread, free, num_slots = 0, share, 0
    for task in whole:
        begin, slot = task.first_key, -1
        while begin < task.end_key:
            end = task.end_key
            if thread < num_threads - 1:
                end = _cut(begin, task.end_key, free / task.cost_of_key)
            if end > begin:
                dealt[thread].append((*task.place, begin, end, slot))
                free -= (end - begin) * task.cost_of_key
                begin = end
                if begin < task.end_key:
                    slot, num_slots = num_slots, num_slots + 1
            if begin < task.end_key:
                thread, free = thread + 1, free + share
    return Parts(
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.ends for part in parts]),
        np.concatenate([part.table for part in parts]),
        np.array([task for of_thread in dealt for task in of_thread], np.int64).reshape(-1, _TASK_FIELDS),
        np.cumsum([0, *map(len, dealt)], dtype=np.int64),
        num_slots,
    )


@dataclass(frozen=True, slots=True)
class _Task:
    place: tuple[int, int, int, int, int]
    first_key: int
    end_key: int
    cost_of_key: int

    @property
    def cost(self) -> int:
        return (self.end_key - self.first_key) * self.cost_of_key


def _tasks_of_head(parts: Sequence[Part], kv_head: int, group: int) -> Iterator[_Task]:
    first_row = first_block = 0
    for part in parts:
        count = len(part.rows)
        for query in range(0, count * group, PANEL):
            end_key = int(part.ends[query // group : -(-(query + PANEL) // group)].max())
            num_queries = min(PANEL, count * group - query)
            # Scores take all of a panel or half of it, values as many as there are.
            num_lanes = PANEL if num_queries > LANES else LANES
            place = (kv_head, query, first_row, count, first_block)
            yield _Task(place, part.first_key, end_key, num_lanes + num_queries)
        first_row, first_block = first_row + count, first_block + len(part.table)


def _cut(begin: int, end: int, num_keys: float) -> int:
    """Where to cut a task where there is room for so many of its keys: behind whole rounds, and not for a few of them."""
    cut = begin + round(num_keys / _ROUND) * _ROUND
    if min(cut - begin, end - cut) >= _LEAST_CUT:
        return cut
    return end if 2 * num_keys >= end - begin else begin


@numba.njit(fastmath=_FASTMATH, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _attend_task(
    pool: Any,
    layer: int,
    query: Any,
    group: Any,
    factor: Any,
    rows: Any,
    ends: Any,
    tables: Any,
    task: Any,
    scratch: Any,
) -> None:
    """Leaves in `scratch` what a task gives: sums of values, and of each query the highest score, the total of the
    weights against it, and how far it sees."""
    asks, scores, sums, highest, total, seen_until, shrink, asks_at, keys_at, values_at, weights_at = scratch
    tokens_per_block, kv_heads, head_dim = pool.shape[3:]
    # Values are weighed a panel of their numbers at a time; what is left of them is not in any panel.
    num_panels = head_dim // PANEL
    rest = num_panels * PANEL
    token_bytes = np.int64(kv_heads * head_dim * 4)
    block_bytes = np.int64(pool.shape[1] * 2 * tokens_per_block) * token_bytes
    pool_at = np.int64(pool.ctypes.data)
    kv_head, first_query, first_row = task[0], task[1], task[2]
    num_rows, table_begin, first_key = task[3], task[4], task[5]
    end_key = task[6]
    count = min(PANEL, num_rows * group - first_query)
    # By loops: whole arrays at once would be parallel parts of their own to numba, and take seconds to compile.
    for q in range(PANEL):
        highest[q] = -np.inf
        total[q] = 0.0
        seen_until[q] = 0
        of_query = sums[q]
        for d in range(head_dim):
            of_query[d] = 0.0
    # What no query asks is computed all the same, and must be harmless.
    for d in range(head_dim if count < PANEL else 0):
        for q in range(count, PANEL):
            asks[d, q] = 0.0
    for t in range(_ROUND if count <= LANES else 0):
        for q in range(LANES, PANEL):
            scores[t, q] = 0.0  # Where few ask, nothing else is written there.
    soonest, latest = ends[first_row + (first_query + count - 1) // group], np.int64(0)
    of_part, head = first_row + first_query // group, first_query % group
    for q in range(count):
        asked = query[rows[of_part], kv_head * group + head]
        for d in range(head_dim):
            asks[d, q] = asked[d] * factor
        seen_until[q] = ends[of_part]
        soonest, latest = min(soonest, ends[of_part]), max(latest, ends[of_part])
        head += 1
        if head == group:
            of_part, head = of_part + 1, np.int64(0)
    head_at = pool_at + (layer * 2 * tokens_per_block * kv_heads + kv_head) * head_dim * 4
    for d in range(head_dim):
        asks_at[d] = np.int64(asks.ctypes.data) + d * PANEL * 4
    for q in range(PANEL):
        weights_at[q] = np.int64(scores.ctypes.data) + q * 4
    # Few queries wait for memory: for them, what a round reads is asked for one round before.
    is_asked_for = num_rows * group <= _FEW_PANELS * PANEL

    latest = min(latest, end_key)
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
                np.int64(PUT),
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
            share = shrink[q]
            if share != np.float32(1.0):
                of_query = sums[q]
                for d in range(head_dim):
                    of_query[d] *= share
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
                np.int64(ADD),
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


@numba.njit(parallel=True, fastmath=_FASTMATH, nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _attend_parts(
    pool: Any,  # float32 [block, layer, 2, token, kv_head, head_dim]
    layer: int,
    query: Any,  # float32 [row, head, head_dim]; there may be more heads, which are not looked at
    scale: float,
    rows: Any,  # int64: the packed rows of all parts
    ends: Any,  # int64: one past the last key that each sees
    tables: Any,  # int64: the block tables of all parts
    tasks: Any,  # of all threads, as `Parts` has them
    bounds: Any,
    num_slots: int,
    weights: Any,  # float32 [row, head]: the logarithm of the weight of what `out` holds; −infinity: nothing
    out: Any,  # float32 [row, head, head_dim]
) -> None:
    """Folds what the parts give into `out` and `weights`."""
    kv_heads, head_dim = pool.shape[4:]
    group = out.shape[1] // kv_heads
    factor = np.float32(scale)
    # What is put aside: sums, and highest score and total of each query.
    sums_aside = np.empty((num_slots, PANEL, head_dim), np.float32)
    scales_aside = np.empty((num_slots, 2, PANEL), np.float32)

    num_threads = len(bounds) - 1
    claims = np.empty(len(tasks), np.uint8)
    for each in range(len(claims)):
        claims[each] = 0

    for thread in numba.prange(num_threads):
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
        scratch = (asks, scores, sums, highest, total, seen_until, shrink, asks_at, keys_at, values_at, weights_at)
        for helped in range(num_threads):
            owner = (thread + helped) % num_threads
            for place in range(bounds[owner + 1] - bounds[owner]):
                # Its own from the beginning, others' from the end.
                index = bounds[owner] + place if helped == 0 else bounds[owner + 1] - 1 - place
                if not claim(claims, index):
                    continue
                task = tasks[index]
                _attend_task(pool, layer, query, group, factor, rows, ends, tables, task, scratch)
                kv_head, first_query, first_row, num_rows = task[0], task[1], task[2], task[3]
                first_key, slot = task[5], task[7]
                count = min(PANEL, num_rows * group - first_query)
                if slot >= 0:
                    for q in range(count):
                        scales_aside[slot, 0, q], scales_aside[slot, 1, q] = highest[q], total[q]
                        for d in range(head_dim):
                            sums_aside[slot, q, d] = sums[q, d]
                    continue
                of_part, head = first_row + first_query // group, first_query % group
                for q in range(count):
                    if seen_until[q] > first_key:
                        of_all = kv_head * group + head
                        _fold_in(out, weights, rows[of_part], of_all, sums[q], highest[q], total[q])
                    head += 1
                    if head == group:
                        of_part, head = of_part + 1, np.int64(0)

    for index in range(len(tasks) if num_slots else 0):
        kv_head, first_query, first_row = tasks[index, 0], tasks[index, 1], tasks[index, 2]
        num_rows, first_key, slot = tasks[index, 3], tasks[index, 5], tasks[index, 7]
        for q in range(min(PANEL, num_rows * group - first_query) if slot >= 0 else 0):
            of_part, head = first_row + (first_query + q) // group, kv_head * group + (first_query + q) % group
            if ends[of_part] > first_key:
                highest_aside, total_aside = scales_aside[slot, 0, q], scales_aside[slot, 1, q]
                _fold_in(out, weights, rows[of_part], head, sums_aside[slot, q], highest_aside, total_aside)


attend_parts: Any = _attend_parts  # mypy takes a kernel for a function of one argument.


@numba.njit(nogil=True, error_model="numpy", fastmath=_FASTMATH)  # type: ignore[untyped-decorator]
def _fold_in(out: Any, weights: Any, row: Any, head: Any, sums: Any, highest: Any, total: Any) -> None:
    """Folds sums of values, weighed against the highest score, into what `out` holds of a row's head."""
    result, there, new = out[row, head], weights[row, head], highest + np.log(total)
    weights[row, head] = new
    share_there, share_new = np.float32(0.0), np.float32(1.0) / total
    if there == -np.inf:
        for d in range(len(sums)):
            result[d] = sums[d] * share_new
        return
    # NaN, on whichever side, reaches the result through the shares.
    most = there if there >= new else new
    weight_there, weight_new = exp32(there - most), exp32(new - most)
    weights[row, head] = most + np.log(weight_there + weight_new)
    share_there = weight_there / (weight_there + weight_new)
    share_new *= weight_new / (weight_there + weight_new)
    for d in range(len(sums)):
        result[d] = result[d] * share_there + sums[d] * share_new

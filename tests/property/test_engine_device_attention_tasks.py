"""How attention by tiles is cut into tasks: everything once, all threads alike, and the pieces give what the whole does."""

from __future__ import annotations

import engine.environment  # noqa: F401  isort: skip

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.tiled import Part, Parts, attend_parts, plan_parts
from engine.register_tiles import PANEL

WHOLE_ROUNDS = 144
"""Keys below which no task is cut."""


@st.composite
def several_parts(draw: st.DrawFn) -> list[Part]:
    found, first_row = [], 0
    for _ in range(draw(st.integers(1, 4))):
        count, first_key = draw(st.integers(1, 60)), draw(st.integers(0, 500))
        is_shared = draw(st.booleans())
        length = draw(st.integers(1, 3000))
        ends = np.full(count, first_key + length) if is_shared else np.arange(count) + first_key + length
        table = np.arange(-(-int(ends.max()) // 16))
        found.append(Part(np.arange(first_row, first_row + count), ends, table, first_key))
        first_row += count
    return found


@given(several_parts(), st.integers(1, 4), st.integers(1, 5), st.integers(1, 16))
def test_every_query_meets_every_key_of_its_part_in_one_task(
    parts: list[Part], kv_heads: int, group: int, num_threads: int
) -> None:
    plan = plan_parts(parts, kv_heads, group, num_threads)

    assert plan.bounds[0] == 0
    assert plan.bounds[-1] == len(plan.tasks)
    assert len(plan.bounds) == num_threads + 1
    assert (np.diff(plan.bounds) >= 0).all()
    pieces: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for *place, begin, end, slot in plan.tasks.tolist():
        pieces.setdefault(tuple(place), []).append((begin, end, slot))
    wanted, first_row, first_block = {}, 0, 0
    for part in parts:
        count = len(part.rows)
        for query in range(0, count * group, PANEL):
            last_row = (min(query + PANEL, count * group) - 1) // group
            for kv_head in range(kv_heads):
                place = (kv_head, query, first_row, count, first_block)
                wanted[place] = (part.first_key, int(part.ends[last_row]))
        first_row, first_block = first_row + count, first_block + len(part.table)
    assert pieces.keys() == wanted.keys()
    for place, found in pieces.items():
        assert (found[0][0], found[-1][1]) == wanted[place]
        assert all(before[1] == after[0] for before, after in pairwise(found))
        assert [slot < 0 for _, _, slot in found] == [True, *[False] * (len(found) - 1)]
        assert len(found) == 1 or min(end - begin for begin, end, _ in found) >= WHOLE_ROUNDS
    slots = [slot for found in pieces.values() for _, _, slot in found if slot >= 0]
    assert sorted(slots) == list(range(plan.num_slots))


@given(several_parts(), st.integers(1, 4), st.integers(1, 5), st.integers(1, 16))
def test_no_thread_has_more_than_its_share_but_for_what_is_not_worth_a_cut(
    parts: list[Part], kv_heads: int, group: int, num_threads: int
) -> None:
    plan = plan_parts(parts, kv_heads, group, num_threads)
    loads = [sum(_costs(plan, thread, group)) for thread in range(num_threads)]

    assert max(loads) <= sum(loads) / num_threads + 2 * WHOLE_ROUNDS * 2 * PANEL


def test_few_queries_over_a_long_context_are_shared_out_by_keys() -> None:
    # Three KV heads and one panel are three tasks: of two threads one had two of them, and the other waited.
    part = Part(np.arange(8), np.arange(3501, 3509), np.arange(220), 0)
    loads = [sum(_costs(plan_parts([part], 3, 3, 2), thread, 3)) for thread in range(2)]
    assert math.isclose(*loads, rel_tol=0.05)


@pytest.mark.parametrize("num_threads", [1, 3, 7, 40])
def test_pieces_give_what_the_whole_gives(num_threads: int) -> None:
    kv_heads, head_dim, group, tokens = 2, 64, 3, 16
    torch.manual_seed(num_threads)
    pool = torch.randn(130, 1, 2, tokens, kv_heads, head_dim)
    shared, alone = 700, 900
    # Thirteen rows that share 700 tokens, and a chunk of eleven behind 900 of its own.
    tables = torch.randperm(130).numpy()
    chunk = Part(np.arange(13, 24), np.arange(alone + 1, alone + 12), tables[50:110], 0)
    parts = [Part(np.arange(13), np.full(13, shared), tables[:44], 0), chunk]
    plan = plan_parts(parts, kv_heads, group, num_threads)
    query = torch.randn(24, kv_heads * group, head_dim)
    weights = np.full((24, kv_heads * group), -np.inf, np.float32)
    out = np.full((24, kv_heads * group, head_dim), np.nan, np.float32)

    attend_parts(pool.numpy(), 0, query.numpy(), 0.3, *plan.arguments, weights, out)

    num_panels = sum(-(-len(part.rows) * group // PANEL) for part in parts)
    assert np.count_nonzero(plan.tasks[:, 7] < 0) == kv_heads * num_panels
    assert (plan.num_slots > 0) is (num_threads > 1)
    for part in parts:
        keys, values = (
            pool[part.table, 0, which].reshape(-1, kv_heads, head_dim).double().repeat_interleave(group, 1)
            for which in (0, 1)
        )
        for row, end in zip(part.rows.tolist(), part.ends.tolist(), strict=True):
            scores = torch.einsum("hd,khd->hk", query[row].double(), keys[:end]) * 0.3
            wanted = torch.einsum("hk,khd->hd", torch.softmax(scores, 1), values[:end])
            assert (torch.from_numpy(out[row]).double() - wanted).abs().max() < 1e-5
            assert (torch.from_numpy(weights[row]).double() - torch.logsumexp(scores, 1)).abs().max() < 1e-4


def _costs(plan: Parts, thread: int, group: int) -> list[int]:
    costs = []
    for _, query, _, count, _, begin, end, _ in plan.tasks[plan.bounds[thread] : plan.bounds[thread + 1]].tolist():
        num_queries = min(PANEL, count * group - query)
        num_lanes = PANEL if num_queries > PANEL // 2 else PANEL // 2
        costs.append((end - begin) * (num_queries + num_lanes))
    return costs

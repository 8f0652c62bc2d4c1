"""Prefixes that chunks share: which runs are found, and that attending them once gives what float64 gives."""

from __future__ import annotations

import engine.environment  # noqa: F401  isort: skip

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import shared_runs
from engine.attention.cpu import CpuAttention
from engine.attention.gather import GatherAttention
from engine.batch import pack
from engine.kv_memory import KvMemory
from engine.layout import BlockLayout
from engine.plan import Chunk, StepPlan
from engine.shared_runs import Member
from engine.shared_runs import shared_runs as find_runs


@st.composite
def families(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Block tables, each the beginning of an earlier one and blocks of its own, in any order."""
    tables: list[tuple[int, ...]] = [()]
    fresh = iter(range(1000))
    for _ in range(draw(st.integers(1, 7))):
        parent = draw(st.sampled_from(tables))
        kept = draw(st.integers(0, len(parent)))
        tables.append((*parent[:kept], *(next(fresh) for _ in range(draw(st.integers(0, 5))))))
    return draw(st.permutations(tables[1:]))


@given(
    tables=families(),
    rows=st.lists(st.sampled_from((1, 3, 40)), min_size=7, max_size=7),
    calls=st.sampled_from((0, 700)),
)
def test_runs_follow_one_another_and_hold_what_their_members_share(
    tables: list[tuple[int, ...]], rows: list[int], calls: int
) -> None:
    members = [Member(table, count, count <= 4) for table, count in zip(tables, rows, strict=False)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_runs, "_PRODUCT_CALL", calls)

        runs = find_runs(members, 16)

    for run in runs:
        assert len(run.members) >= 2
        assert run.begin < run.end
        assert len({tables[member][run.begin : run.end] for member in run.members}) == 1
        assert all(len(tables[member]) >= run.end for member in run.members)
    for index in range(len(members)):
        ends = sorted((run.begin, run.end) for run in runs if index in run.members)
        assert [begin for begin, _ in ends] == [0, *(end for _, end in ends)][: len(ends)], "a gap, or an overlap"


def test_many_decodes_on_a_long_prefix_share_it_and_two_on_a_short_one_do_not() -> None:
    long, short = tuple(range(64)), tuple(range(100, 104))
    many = [Member((*long, 1000 + i), 1, True) for i in range(16)]
    few = [Member((*short, 2000 + i), 1, True) for i in range(2)]

    (run,) = find_runs([*many, *few], 16)

    assert (run.begin, run.end, sorted(run.members)) == (0, 64, list(range(16)))


def test_a_short_common_beginning_joins_the_longer_runs_behind_it() -> None:
    first, second = (0, *range(1, 60)), (0, *range(101, 160))
    members = [Member(table, 1, True) for table in [first] * 12 + [second] * 12]

    runs = find_runs(members, 16)

    assert sorted((run.begin, run.end, len(run.members)) for run in runs) in (
        [(0, 60, 12), (0, 60, 12)],
        [(0, 1, 24), (1, 60, 12), (1, 60, 12)],
    )


@settings(max_examples=80, deadline=None)
@given(
    tables=families(),
    tokens_per_block=st.sampled_from((2, 4, 8, 16, 32, 64, 128)),
    kv_heads=st.integers(1, 3),
    heads=st.sampled_from(((1, 2), (7, 1), (16, 4), (33, 3))),
    data=st.data(),
)
def test_shared_attention_equals_float64(
    tables: list[tuple[int, ...]], tokens_per_block: int, kv_heads: int, heads: tuple[int, int], data: st.DataObject
) -> None:
    head_dim, group = heads
    layout = BlockLayout(1, tokens_per_block, kv_heads, head_dim, "float32")
    names = {name: place for place, name in enumerate(sorted({block for table in tables for block in table}))}
    kv = KvMemory(layout, len(names) + 8 * len(tables) + 1, torch.device("cpu"))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    kv.pool.fill_(math.nan)
    kv.pool[: len(names)] = torch.randn(len(names), *layout.shape)
    chunks, free = [], len(names)
    for index, table in enumerate(tables):
        length = data.draw(st.integers(1, 9))
        own = -(-length // tokens_per_block)
        chunks.append(
            Chunk(index, len(table) * tokens_per_block, (0,) * length,
                  (*(names[block] for block in table), *range(free, free + own)), None)
        )  # fmt: skip
        free += own
    count = sum(len(chunk.tokens) for chunk in chunks)
    query = torch.randn(count, kv_heads * group, head_dim)
    key, value = torch.randn(2, count, kv_heads, head_dim)
    plan = StepPlan(1, (), tuple(chunks))

    found = {}
    for attention in (CpuAttention(kv, 2), GatherAttention(kv)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_runs, "_pays", lambda members, num_tokens: True)
            batch = pack(plan, tokens_per_block, kv.num_blocks, attention.max_short_tokens, attention.shares_prefixes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", _poisoned_empty)
            found[attention.name] = attention.begin(batch).attend(0, query, key, value, 0.4)
        if attention.shares_prefixes:
            assert len(batch.shared) > 0 or not _any_shared(tables)

    row = 0
    for chunk in chunks:
        whole = kv.pool[list(chunk.block_table), 0].double().transpose(0, 1).reshape(2, -1, kv_heads, head_dim)
        for place in range(len(chunk.tokens)):
            seen = whole[:, : chunk.start + place + 1].repeat_interleave(group, dim=2)
            scores = torch.einsum("thd,hd->ht", seen[0], query[row].double()) * 0.4
            wanted = torch.einsum("ht,thd->hd", scores.softmax(-1), seen[1])
            for name, out in found.items():
                assert (out[row].double() - wanted).abs().max() < 1e-5, name
            row += 1


_EMPTY = torch.empty


def _poisoned_empty(*args: object, **kwargs: object) -> torch.Tensor:
    return _EMPTY(*args, **kwargs).fill_(math.nan)  # type: ignore[call-overload]


def _any_shared(tables: list[tuple[int, ...]]) -> bool:
    firsts = [table[0] for table in tables if table]
    return len(set(firsts)) < len(firsts)

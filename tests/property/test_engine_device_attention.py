"""Every way to attend against float64, on random shapes, over a pool full of NaN where nothing was written."""

from __future__ import annotations

import engine.environment  # noqa: F401  isort: skip

import ctypes
import math
from functools import partial

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import cpu
from engine.attention.cpu import CpuAttention
from engine.attention.gather import GatherAttention
from engine.attention.tiled import Part, attend_parts, plan_parts
from engine.batch import pack
from engine.kv_memory import KvMemory
from engine.layout import BlockLayout
from engine.plan import Chunk, StepPlan

PATHS = {"gather": GatherAttention, "cpu": partial(CpuAttention, num_threads=2)}
# (head_dim, query heads for each KV head): the decode kernel is compiled for each pair, which takes some 6 s, so they are few, and
# the other tests below have no others.
HEADS = ((1, 2), (7, 1), (33, 3), (64, 3), (80, 40))


@st.composite
def steps(draw: st.DrawFn) -> tuple[BlockLayout, list[tuple[int, int]], int, int]:
    """A layout, chunks as (start, length), query heads for each KV head, a seed."""
    head_dim, group = draw(st.sampled_from(HEADS))
    tokens_per_block = draw(st.sampled_from((2, 4, 8, 16, 32, 64, 128)))
    layout = BlockLayout(
        num_layers=2,
        tokens_per_block=tokens_per_block,
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=head_dim,
        dtype="float32",
    )
    longest = draw(st.sampled_from((5, 40, 300)))
    lengths = st.one_of(st.integers(1, 9), st.integers(1, 150))
    chunks = draw(st.lists(st.tuples(st.integers(0, longest), lengths), min_size=1, max_size=5))
    return layout, chunks, group, draw(st.integers(0, 2**31))


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=60, deadline=None)
@given(step=steps())
def test_attention_equals_float64_whatever_the_shape(path: str, step: tuple) -> None:
    layout, chunks, group, seed = step
    generator = torch.Generator().manual_seed(seed)
    rig = _Rig(layout, chunks, group, generator)
    attention = PATHS[path](rig.kv)

    batch = pack(rig.plan, layout.tokens_per_block, rig.kv.num_blocks, attention.max_short_tokens)
    running = attention.begin(batch)
    # The second layer is asked first: layers must not disturb one another.
    for layer in (1, 0):
        out = running.attend(layer, rig.query, rig.key[layer], rig.value[layer], rig.scale)

        expected = rig.expected(layer)
        assert out.shape == expected.shape
        assert torch.isfinite(out).all()
        assert (out.double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("path", PATHS)
def test_a_chunk_reads_blocks_that_another_chunk_of_the_step_fills(path: str) -> None:
    layout = BlockLayout(num_layers=1, tokens_per_block=4, num_kv_heads=2, head_dim=1, dtype="float32")
    kv = _poisoned(layout, 8)
    attention = PATHS[path](kv)
    producer = Chunk(1, 0, tuple(range(8)), (5, 2), None)
    consumer = Chunk(2, 8, (8, 9), (5, 2, 7), None)
    torch.manual_seed(0)
    query, key, value = torch.randn(10, 4, 1), torch.randn(10, 2, 1), torch.randn(10, 2, 1)

    batch = pack(StepPlan(1, (), (consumer, producer)), 4, 8, attention.max_short_tokens)
    order = [8, 9, 0, 1, 2, 3, 4, 5, 6, 7]
    out = attention.begin(batch).attend(0, query[order], key[order], value[order], 0.3)

    expected = _attend_float64(query[8:], key, value, start=8, scale=0.3)
    assert (out[:2].double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("path", PATHS)
def test_a_nan_in_one_sequence_stays_in_it(path: str) -> None:
    layout = BlockLayout(num_layers=1, tokens_per_block=4, num_kv_heads=1, head_dim=7, dtype="float32")
    kv = _poisoned(layout, 4)
    attention = PATHS[path](kv)
    plan = StepPlan(1, (), (Chunk(1, 0, (0,), (0,), None), Chunk(2, 0, (0,), (1,), None)))
    query, key, value = torch.ones(2, 1, 7), torch.ones(2, 1, 7), torch.ones(2, 1, 7)
    key[0, 0, 3] = value[0] = math.nan

    out = attention.begin(pack(plan, 4, 4, attention.max_short_tokens)).attend(0, query, key, value, 1.0)

    assert torch.isnan(out[0]).all()
    assert torch.equal(out[1], torch.ones(1, 7))


@pytest.mark.parametrize("path", PATHS)
def test_scores_of_any_size_do_not_overflow(path: str) -> None:
    layout = BlockLayout(num_layers=1, tokens_per_block=2, num_kv_heads=1, head_dim=7, dtype="float32")
    kv = _poisoned(layout, 2)
    attention = PATHS[path](kv)
    query, key, value = torch.full((3, 1, 7), 1e4), torch.zeros(3, 1, 7), torch.zeros(3, 1, 7)
    key[:, 0, 0] = torch.tensor([-1e4, 1e4, -1e4])
    value[:, 0, :] = torch.tensor([[1.0], [2.0], [3.0]])

    batch = pack(StepPlan(1, (), (Chunk(1, 0, (0, 0, 0), (1, 0), None),)), 2, 2, attention.max_short_tokens)
    out = attention.begin(batch).attend(0, query, key, value, 1.0)

    assert torch.equal(out[:, 0, 0], torch.tensor([1.0, 2.0, 2.0]))


def test_tiles_hold_what_they_read_by_address_until_they_are_done() -> None:
    """Queries were freed behind their last mention while tiles still read them by address; in the parallel kernel only
    an optimisation, which takes allocations out of loops, kept them. So it is compiled without, and free memory spoilt."""
    head_dim, group, start, count = 33, 3, 20, 9
    kernel = numba.njit(error_model="numpy")(attend_parts.py_func)
    pool = torch.randn(4, 1, 2, 16, 1, head_dim)
    query = torch.randn(count, group, head_dim)
    ends = np.arange(start + 1, start + count + 1)
    parts = plan_parts([Part(np.arange(count), ends, np.array([3, 1]), 0)], 1, group, 1)
    weights, out = np.full((count, group), -np.inf, np.float32), np.empty((count, group, head_dim), np.float32)
    perturb = getattr(
        ctypes.CDLL(None), "mallopt", lambda option, value: None
    )  # Where glibc is not, nothing is spoilt.

    perturb(_M_PERTURB, 165)
    try:
        kernel(pool.numpy(), 0, query.numpy(), 0.3, *parts.arguments, weights, out)
    finally:
        perturb(_M_PERTURB, 0)

    key, value = pool[[3, 1], 0].transpose(0, 1).reshape(2, -1, 1, head_dim)
    wanted = _attend_float64(query, key, value, start, 0.3)
    assert (torch.from_numpy(out).double() - wanted).abs().max() < 1e-5


_M_PERTURB = -6


class _Rig:
    """Chunks with scattered blocks whose earlier tokens are already in the pool, and nothing else in it."""

    def __init__(
        self, layout: BlockLayout, chunks: list[tuple[int, int]], group: int, generator: torch.Generator
    ) -> None:
        tokens = layout.tokens_per_block
        sizes = [-(-(start + length) // tokens) for start, length in chunks]
        self.kv = _poisoned(layout, sum(sizes) + 3)
        blocks = torch.randperm(self.kv.num_blocks, generator=generator).tolist()
        self.scale = 0.37
        self.chunks = chunks
        planned, self._context, query, key, value = [], [], [], [], []
        for index, ((start, length), size) in enumerate(zip(chunks, sizes, strict=True)):
            table = tuple(blocks.pop() for _ in range(size))
            shape = (layout.num_layers, start + length, layout.num_kv_heads, layout.head_dim)
            k, v = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
            for position in range(start):
                place = self.kv.pool[table[position // tokens], :, :, position % tokens]
                place[:, 0], place[:, 1] = k[:, position], v[:, position]
            query.append(torch.randn(length, layout.num_kv_heads * group, layout.head_dim, generator=generator))
            key.append(k[:, start:])
            value.append(v[:, start:])
            self._context.append((k, v))
            planned.append(Chunk(index, start, (0,) * length, table, None))
        self.plan = StepPlan(1, (), tuple(planned))
        self.query, self.key, self.value = torch.cat(query), torch.cat(key, 1), torch.cat(value, 1)

    def expected(self, layer: int) -> torch.Tensor:
        results, row = [], 0
        for (start, length), (k, v) in zip(self.chunks, self._context, strict=True):
            results.append(_attend_float64(self.query[row : row + length], k[layer], v[layer], start, self.scale))
            row += length
        return torch.cat(results)


def _attend_float64(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, scale: float
) -> torch.Tensor:
    """The definition, head by head and token by token."""
    out = torch.empty(query.shape, dtype=torch.float64)
    group = query.shape[1] // key.shape[1]
    for token in range(query.shape[0]):
        seen = start + token + 1
        for head in range(query.shape[1]):
            k, v = key[:seen, head // group].double(), value[:seen, head // group].double()
            weights = torch.softmax(k @ query[token, head].double() * scale, dim=0)
            out[token, head] = weights @ v
    return out


def _poisoned(layout: BlockLayout, num_blocks: int) -> KvMemory:
    kv = KvMemory(layout, num_blocks, torch.device("cpu"))
    kv.pool.fill_(math.nan)
    return kv


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh outputs and scratch hold NaN, so that a place that nobody writes is seen."""
    empty_like = torch.empty_like

    def nan_like(*args: object, **kwargs: object) -> torch.Tensor:
        return empty_like(*args, **kwargs).fill_(math.nan)  # type: ignore[arg-type,call-overload]

    monkeypatch.setattr(torch, "empty_like", nan_like)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(math.nan))
    scratch = CpuAttention.scratch

    def nan_scratch(self: CpuAttention, num_floats: int) -> np.ndarray:
        found = scratch(self, num_floats)
        found.fill(math.nan)
        return found

    monkeypatch.setattr(cpu.CpuAttention, "scratch", nan_scratch)

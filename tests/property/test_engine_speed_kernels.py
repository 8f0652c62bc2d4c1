"""The compiled parts of a layer against float64, on random shapes, for few rows and for many, into poisoned outputs."""

from __future__ import annotations

import engine.environment  # noqa: F401  isort: skip

import math
from functools import partial

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import panel_linear
from engine.attention.panel_softmax import soften
from engine.layer_kernels import PARALLEL_ROWS, add_normalise, gate, normalise, normalise_heads, rotate_and_store
from engine.linears import pieces_of
from engine.panel_block import between_attentions
from engine.panel_linear import PanelLinear, can_gate, paired
from engine.panel_products import multiply
from engine.register_tiles import ADD, GATE, LANES, MOST_ROWS, PANEL
from engine.vector_exp import exp32

PANELS = partial(PanelLinear, panel_linear.WeightMemory())
ROWS = st.sampled_from((1, 2, 3, 5, PARALLEL_ROWS - 1, PARALLEL_ROWS, 61))
WIDTHS = st.sampled_from((2, 6, 16, 34, 64, 130))
SEEDS = st.integers(0, 2**31)
TOLERANCE = 2e-5


@numba.njit
def _exponentials(given: np.ndarray, found: np.ndarray) -> None:
    for i in range(len(given)):
        found[i] = exp32(given[i])


@settings(deadline=None)  # The first example compiles.
@given(x=st.floats(-86, 88, width=32))
def test_the_exponential_is_that_of_float64(x: float) -> None:
    given_ = np.full(19, x, np.float32)
    found = np.full_like(given_, np.nan)

    _exponentials(given_, found)

    wanted = math.exp(x)
    assert np.abs(found - wanted).max() <= wanted * (3e-7 + abs(x) * 1e-7)


def test_the_exponential_of_what_is_not_finite() -> None:
    given_ = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0, -0.0], np.float32)
    found = np.empty_like(given_)

    _exponentials(given_, found)

    np.testing.assert_array_equal(found, [np.nan, np.inf, 0, np.inf, 0, 1, 1])


@numba.njit
def _soften(scores: np.ndarray, highest: np.ndarray, total: np.ndarray, shrink: np.ndarray) -> None:
    soften(scores.ctypes.data, len(scores), highest.ctypes.data, total.ctypes.data, shrink.ctypes.data)


@settings(max_examples=40, deadline=None)
@given(
    rounds=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    scale=st.sampled_from((0.1, 3.0, 60.0)),
    unseen=st.floats(0, 1),
    seed=SEEDS,
)
def test_a_softmax_round_by_round_is_that_of_all_keys_at_once(
    rounds: list[int], scale: float, unseen: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    highest, total = np.full(PANEL, -np.inf, np.float32), np.zeros(PANEL, np.float32)
    shrink, so_far, seen = np.full(PANEL, np.nan, np.float32), np.zeros(PANEL), []
    for num_keys in rounds:
        scores = (random.standard_normal((num_keys, PANEL)) * scale).astype(np.float32)
        scores[random.random(scores.shape) < unseen] = -np.inf
        seen.append(scores.copy())
        _soften(scores, highest, total, shrink)
        so_far = so_far * shrink + scores.sum(axis=0)

    whole = np.concatenate(seen).astype(np.float64)
    most = whole.max(axis=0)
    np.testing.assert_array_equal(highest, most)
    wanted = np.exp(whole - np.where(np.isneginf(most), 0, most)).sum(axis=0)
    np.testing.assert_allclose(total, wanted, rtol=1e-4)
    np.testing.assert_allclose(so_far, wanted, rtol=1e-4)


def test_a_softmax_keeps_what_is_not_a_number_to_its_query() -> None:
    scores = np.zeros((3, PANEL), np.float32)
    scores[1, 5] = np.nan
    highest, total = np.full(PANEL, -np.inf, np.float32), np.zeros(PANEL, np.float32)

    _soften(scores, highest, total, np.empty(PANEL, np.float32))

    assert np.flatnonzero(np.isnan(total)).tolist() == [5]


@settings(max_examples=30, deadline=None)
@given(rows=ROWS, width=WIDTHS, seed=SEEDS)
def test_norms_equal_float64(rows: int, width: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    residual, delta, weight = _random(random, rows, width), _random(random, rows, width), _random(random, width)
    only, both = np.full((2, rows, width), np.nan, np.float32)
    summed = residual.astype(np.float64) + delta

    normalise(residual, weight, 1e-5, only)
    np.testing.assert_allclose(only, _norm(residual, weight), rtol=TOLERANCE, atol=TOLERANCE)

    add_normalise(residual, delta, weight, 1e-5, both)
    np.testing.assert_allclose(both, _norm(summed, weight), rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(residual, summed, rtol=TOLERANCE, atol=TOLERANCE)


@settings(max_examples=30, deadline=None)
@given(rows=ROWS, head_dim=WIDTHS, group=st.integers(1, 3), kv_heads=st.integers(1, 3), seed=SEEDS)
def test_heads_are_rotated_and_stored_and_rows_that_pad_left_alone(
    rows: int, head_dim: int, group: int, kv_heads: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    heads = group * kv_heads
    given_ = _random(random, rows + 2, heads + 2 * kv_heads, head_dim)
    half = _random(random, rows, head_dim // 2), _random(random, rows, head_dim // 2)
    cos, sin = (np.concatenate([one, one], axis=1) for one in half)
    found = given_.copy()
    pool = np.full((rows + 1, 2, 2, 4, kv_heads, head_dim), np.nan, np.float32)
    blocks, offsets = random.permutation(rows + 1)[:rows], random.integers(0, 4, rows)

    rotate_and_store(found, cos, sin, pool, 1, blocks, offsets)

    turned = np.concatenate([-given_[:rows, :, head_dim // 2 :], given_[:rows, :, : head_dim // 2]], axis=-1)
    wanted = given_[:rows] * cos[:, None].astype(np.float64) + turned * sin[:, None].astype(np.float64)
    values = given_[:rows, heads + kv_heads :]
    np.testing.assert_allclose(
        found[:rows, : heads + kv_heads], wanted[:, : heads + kv_heads], rtol=TOLERANCE, atol=TOLERANCE
    )
    np.testing.assert_array_equal(found[:rows, heads + kv_heads :], values)
    np.testing.assert_array_equal(found[rows:], given_[rows:])
    np.testing.assert_array_equal(pool[blocks, 1, 0, offsets], found[:rows, heads : heads + kv_heads])
    np.testing.assert_array_equal(pool[blocks, 1, 1, offsets], values)
    assert np.isfinite(pool).sum() == 2 * rows * kv_heads * head_dim


@settings(max_examples=30, deadline=None)
@given(rows=ROWS, head_dim=WIDTHS, heads=st.integers(1, 4), others=st.integers(0, 3), seed=SEEDS)
def test_heads_are_normed_and_the_others_left_alone(
    rows: int, head_dim: int, heads: int, others: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    given_ = _random(random, rows, heads + others, head_dim)
    weight = _random(random, head_dim)
    normed = given_.copy()

    normalise_heads(normed, weight, 1e-6, 0, heads)

    np.testing.assert_allclose(normed[:, :heads], _norm(given_, weight, 1e-6)[:, :heads], rtol=1e-4, atol=TOLERANCE)
    np.testing.assert_array_equal(normed[:, heads:], given_[:, heads:])


@settings(max_examples=30, deadline=None)
@given(rows=ROWS, pieces=st.integers(1, 3), width=WIDTHS, seed=SEEDS)
def test_gating_equals_float64(rows: int, pieces: int, width: int, seed: int) -> None:
    given_ = _random(np.random.default_rng(seed), rows, 2 * pieces * width) * 8
    found = np.full((pieces, rows, width), np.nan, np.float32)

    gate(given_, found)

    gates, ups = given_.astype(np.float64).reshape(rows, 2, pieces, width).transpose(1, 2, 0, 3)
    np.testing.assert_allclose(found, gates / (1 + np.exp(-gates)) * ups, rtol=TOLERANCE, atol=TOLERANCE)


@settings(max_examples=30, deadline=None)
@given(rows=ROWS, inputs=WIDTHS, outputs=st.lists(st.integers(1, 40), min_size=1, max_size=3), seed=SEEDS)
@pytest.mark.parametrize("biased", ["none", "some", "all"])
def test_joined_linears_equal_their_parts(biased: str, rows: int, inputs: int, outputs: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    linears = [
        torch.nn.Linear(inputs, size, bias=biased == "all" or (biased == "some" and i == 0))
        for i, size in enumerate(outputs)
    ]
    given_ = torch.randn(rows, inputs)

    with torch.inference_mode():
        found = PANELS(linears)(given_)
        wanted = torch.cat([linear.double()(given_.double()) for linear in linears], dim=1)

    assert (found.double() - wanted).abs().max() < 1e-4


@settings(max_examples=20, deadline=None)
@given(rows=ROWS, pieces=st.integers(1, 4), width=WIDTHS, seed=SEEDS)
def test_a_linear_in_pieces_equals_the_whole(rows: int, pieces: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    linear = torch.nn.Linear(pieces * width, 37)
    given_ = torch.randn(rows, pieces * width)

    with torch.inference_mode():
        cut = torch.stack(given_.chunk(pieces, dim=1)).contiguous()
        found = PANELS([linear], pieces)(cut)
        wanted = linear.double()(given_.double())

    assert (found.double() - wanted).abs().max() < 1e-4


def test_what_is_not_finite_in_one_row_stays_in_it() -> None:
    linear = torch.nn.Linear(16, 70)
    given_ = torch.randn(31, 16)
    given_[3, 5], given_[17, 0] = math.nan, math.inf

    with torch.inference_mode():
        found = PANELS([linear])(given_)

    spoilt = ~found.isfinite().all(dim=1)
    assert spoilt.nonzero().flatten().tolist() == [3, 17]
    assert not found[spoilt].isfinite().any()


def test_weights_lie_on_cache_lines_and_none_in_another() -> None:
    memory = panel_linear.WeightMemory()

    arrays = [memory.array(3, 5, 32), memory.array(1), memory.array(2**22, 5), memory.array(7, 7)]

    for number, array in enumerate(arrays):
        assert array.ctypes.data % 64 == 0
        array.fill(number)
    assert all((array == number).all() for number, array in enumerate(arrays))


@given(num_inputs=st.integers(1, 40_000))
def test_pieces_divide_what_they_are_pieces_of(num_inputs: int) -> None:
    assert num_inputs % pieces_of(num_inputs) == 0


def _random(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(np.float32)


def _norm(rows: np.ndarray, weight: np.ndarray, epsilon: float = 1e-5) -> np.ndarray:
    exact = rows.astype(np.float64)
    return exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + epsilon) * weight


@settings(max_examples=20, deadline=None)
@given(rows=ROWS, pieces=st.sampled_from((1, 2)), has_bias=st.booleans(), seed=SEEDS)
def test_what_lies_between_two_attentions_equals_float64(rows: int, pieces: int, has_bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    hidden, heads, width, output = 48, 64, 96, 72
    attention_out, down, following = (
        torch.nn.Linear(*sizes, bias=has_bias) for sizes in ((heads, hidden), (width, hidden), (hidden, output))
    )
    gates, up = (torch.nn.Linear(hidden, width, bias=False) for _ in range(2))
    products = (PANELS([attention_out]), PANELS([paired(gates, up)]), PANELS([down], pieces), PANELS([following]))
    mlp_norm, next_norm = (torch.rand(hidden).numpy() for _ in range(2))
    attended, residual = torch.randn(rows, heads), torch.randn(rows, hidden)
    with torch.no_grad():
        for layer in (attention_out, down, following, gates, up):
            layer.double()
        expected = residual.double() + attention_out(attended.double())
        normed = torch.from_numpy(_norm(expected.numpy(), mlp_norm))
        expected += down(torch.nn.functional.silu(gates(normed)) * up(normed))
        wanted = following(torch.from_numpy(_norm(expected.numpy(), next_norm))).numpy()
    shapes = ((1, rows, hidden), (pieces, rows, width // pieces), (1, rows, output))
    poison = [np.full(shape, np.nan, np.float32) for shape in shapes]

    between_attentions(
        attended.numpy()[np.newaxis],
        residual.numpy()[np.newaxis],
        *poison,
        *(product.held for product in products),
        mlp_norm,
        next_norm,
        np.float32(1e-5),
        numba.get_num_threads(),
    )

    np.testing.assert_allclose(residual.numpy(), expected.numpy(), rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(poison[-1][0], wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("rows", [1, 4, 11, 12, 29])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 200.0, -200.0])
def test_a_gated_product_does_with_what_is_not_finite_as_the_gate_alone(rows: int, value: float) -> None:
    torch.manual_seed(0)
    gates, up = (torch.nn.Linear(1, LANES, bias=False) for _ in range(2))
    torch.nn.init.ones_(gates.weight)
    torch.nn.init.ones_(up.weight)
    given_ = np.zeros((1, rows, 1), np.float32)
    given_[0, -1] = value
    wanted, found = (np.full((1, rows, LANES), 7.0, np.float32) for _ in range(2))
    gate(np.repeat(given_[0], 2 * LANES, 1), wanted)

    multiply(given_, *PANELS([paired(gates, up)]).held, found, GATE, numba.get_num_threads())

    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("rows", [1, 4, 5, MOST_ROWS, 3 * MOST_ROWS + 7])
@pytest.mark.parametrize(("outputs", "pieces", "has_bias"), [(96, 1, False), (PANEL - 1, 3, True), (71, 3, False)])
def test_a_product_is_added_to_what_is_there(rows: int, outputs: int, pieces: int, has_bias: bool) -> None:
    """Also where the last panel has room for more, sums come in pieces, and there is a bias."""
    torch.manual_seed(rows)
    layer = torch.nn.Linear(60, outputs, bias=has_bias)
    panels = PANELS([layer], pieces)
    given_, there = torch.randn(rows, 60), torch.randn(rows, outputs)
    in_pieces = given_.view(rows, pieces, -1).transpose(0, 1).contiguous()
    with torch.no_grad():
        wanted = there.double() + layer.double()(given_.double())

    multiply(in_pieces.numpy(), *panels.held, there.numpy()[np.newaxis], ADD, numba.get_num_threads())

    np.testing.assert_allclose(there.numpy(), wanted.numpy(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("width", "up_width", "pieces", "bias_on", "can"),
    [
        (4 * LANES, 4 * LANES, 2, None, True),
        (4 * LANES, 4 * LANES, 1, "up", False),
        (4 * LANES, 4 * LANES, 1, "gate", False),
        (3 * LANES, 3 * LANES, 2, None, False),
        (LANES + 1, LANES + 1, 1, None, False),
        (2 * LANES, 4 * LANES, 1, None, False),
    ],
)
def test_gating_with_the_product_is_for_whole_panels_without_bias(
    width: int, up_width: int, pieces: int, bias_on: str | None, can: bool
) -> None:
    gates = torch.nn.Linear(8, width, bias=bias_on == "gate")
    up = torch.nn.Linear(8, up_width, bias=bias_on == "up")

    assert can_gate(gates, up, pieces) is can

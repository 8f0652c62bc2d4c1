"""Weights in two or three bytes where that loses nothing: products with them are those with four, to the bit."""

from __future__ import annotations

import engine.environment  # noqa: F401  isort: skip

import ctypes
import mmap

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import panel_linear
from engine.narrow_weights import WIDE, bytes_behind, fewest_bytes, narrowed
from engine.panel_linear import PanelLinear
from engine.panel_products import multiply
from engine.register_tiles import ADD, LANES, MOST_ROWS, PANEL, PUT

MEMORY = panel_linear.WeightMemory()
MASKS = {2: 0xFFFF0000, 3: 0xFFFFFF00, WIDE: 0xFFFFFFFF}
WIDTHS = st.sampled_from(tuple(MASKS))
ROWS = st.sampled_from((1, 2, 3, 4, 5, MOST_ROWS - 1, MOST_ROWS, MOST_ROWS + 1, 2 * MOST_ROWS + 7))
NO_BIAS = np.empty(0, np.float32)


@settings(max_examples=60, deadline=None)
@given(
    widths=st.lists(WIDTHS, min_size=1, max_size=3),
    rows=ROWS,
    pieces=st.sampled_from((1, 3)),
    inputs=st.integers(1, 40),
    outputs=st.integers(1, 90),
    adds=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_product_with_narrow_weights_is_the_same_number(
    widths: list[int], rows: int, pieces: int, inputs: int, outputs: int, adds: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layers = [_layer(pieces * inputs, outputs, width) for width in widths]
    whole = _wide_panels([layer.weight.detach().numpy() for layer in layers], pieces)
    given_ = torch.randn(pieces, rows, inputs).numpy()
    found = torch.randn(1, rows, len(layers) * outputs).numpy()
    wanted = found.copy()
    narrow = PanelLinear(MEMORY, layers, pieces)
    use, threads = ADD if adds else PUT, numba.get_num_threads()

    multiply(given_, *narrow.held, found, use, threads)
    multiply(given_, whole, NO_BIAS, narrow.held[2], wanted, use, threads)

    assert narrow.held[0].shape == (len(whole), whole.shape[1] // WIDE * max(widths))
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("width", MASKS)
@pytest.mark.parametrize("rows", [1, 4, MOST_ROWS])
def test_every_kind_of_number_comes_back(width: int, rows: int) -> None:
    """Denormal ones, both zeros, the largest, infinity: by one, a product with itself alone."""
    bits = np.array([0, 1, 0x7FFF, 0x8000, 0x7F7F, 0x7F80, 0xFF80, 0x8001, 0x3F80], np.uint32) << 16
    bits |= np.uint32(0x00A5C3E7 & MASKS[width]) * (np.arange(len(bits)) % 2 == 1).astype(np.uint32)
    layer = torch.nn.Linear(1, len(bits), bias=False)
    layer.weight.detach().numpy()[:, 0] = bits.view(np.float32)

    found = PanelLinear(MEMORY, [layer])(torch.ones(rows, 1)).numpy()

    np.testing.assert_array_equal(found, np.broadcast_to(bits.view(np.float32), found.shape))


@given(words=st.lists(st.integers(0, 2**32 - 1), max_size=9), mask=st.sampled_from(tuple(MASKS.values())))
def test_no_byte_is_left_out_that_is_not_zero(words: list[int], mask: int) -> None:
    weight = (np.array(words, np.uint32) & np.uint32(mask)).view(np.float32)

    width = fewest_bytes(weight)

    left_out = weight.view(np.uint8).reshape(-1, WIDE)[:, : WIDE - width]
    assert not left_out.any()
    assert width == 2 or weight.view(np.uint8).reshape(-1, WIDE)[:, WIDE - width].any()


def test_one_weight_among_many_that_needs_all_its_bytes_is_seen() -> None:
    weight = np.ones((300, 400), np.float32)
    assert fewest_bytes(weight) == 2

    weight[-1, -1] = 0.1

    assert fewest_bytes(weight) == WIDE


@pytest.mark.parametrize("width", MASKS)
@pytest.mark.parametrize("rows", [1, 4, MOST_ROWS])
def test_nothing_is_read_beyond_what_memory_for_weights_has_behind_them(width: int, rows: int) -> None:
    """Behind it lies a page that nobody may read."""
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    everything = np.frombuffer(memory, np.uint8)
    libc, guard = ctypes.CDLL(None, use_errno=True), everything.ctypes.data + mmap.PAGESIZE
    assert libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    wide = (
        np.random.default_rng(0).standard_normal((5, PANEL)).astype(np.float32).view(np.uint32) & MASKS[width]
    ).view(np.float32)
    held = narrowed(wide, width)
    begin = mmap.PAGESIZE - len(held) - bytes_behind(LANES)  # On no boundary but that of a word.
    panel = everything[begin : begin + len(held)]
    panel[:] = held
    given_ = np.random.default_rng(1).standard_normal((1, rows, 5)).astype(np.float32)
    found = np.full((1, rows, PANEL), np.nan, np.float32)

    multiply(given_, panel[np.newaxis], NO_BIAS, MOST_ROWS, found, PUT, 1)

    np.testing.assert_allclose(found[0], given_[0].astype(np.float64) @ wide, rtol=2e-5, atol=2e-5)


def test_memory_for_weights_has_room_behind_them() -> None:
    memory = panel_linear.WeightMemory()

    first, second = (memory.array(1, 3 * 64) for _ in range(2))  # Whole cache lines.

    assert second.ctypes.data - (first.ctypes.data + first.nbytes) >= bytes_behind(LANES)


@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_widen_panels_each_for_itself(num_threads: int) -> None:
    """Long ones, so that two are at it at once."""
    layer = _layer(1537, 9 * PANEL, 2)
    narrow = PanelLinear(MEMORY, [layer])
    whole = _wide_panels([layer.weight.detach().numpy()], 1)
    given_ = torch.randn(1, MOST_ROWS + 1, 1537).numpy()
    found, wanted = (np.empty((1, MOST_ROWS + 1, 9 * PANEL), np.float32) for _ in range(2))
    multiply(given_, whole, NO_BIAS, 2 * MOST_ROWS, wanted, PUT, 1)

    for _ in range(100):
        found.fill(np.nan)
        multiply(given_, narrow.held[0], NO_BIAS, 2 * MOST_ROWS, found, PUT, num_threads)
        assert found.tobytes() == wanted.tobytes()


def _layer(inputs: int, outputs: int, width: int) -> torch.nn.Linear:
    layer = torch.nn.Linear(inputs, outputs, bias=False)
    weight = layer.weight.detach().numpy().view(np.uint32)
    weight &= np.uint32(MASKS[width])
    weight[0, 0] |= np.uint32(1) << np.uint32(8 * (WIDE - width))  # It does need so many.
    return layer


def _wide_panels(weights: list[np.ndarray], pieces: int) -> np.ndarray:
    """As `narrow_weights.py` says of four bytes: `[panel, byte]`."""
    joined = np.concatenate(weights)
    num_panels = -(-len(joined) // PANEL)
    padded = np.zeros((num_panels * PANEL, joined.shape[1]), np.float32)
    padded[: len(joined)] = joined
    panels = padded.reshape(num_panels, PANEL, -1).transpose(0, 2, 1)
    return np.ascontiguousarray(panels).view(np.uint8).reshape(num_panels, -1)

"""Copies past the caches give the same bytes as any other copy, wherever they begin and end."""

from __future__ import annotations

import numpy as np
import pytest

from cached.streaming_copy import SMALLEST_STREAMED_BYTES, compiled

LIMIT = SMALLEST_STREAMED_BYTES


@pytest.mark.parametrize("shift", [0, 1, 63, 64])
@pytest.mark.parametrize("size", [0, 1, 63, 5000, LIMIT - 1, LIMIT, LIMIT + 1, 3 * LIMIT + 17])
def test_exactly_the_span_is_copied_whatever_its_alignment(size: int, shift: int) -> None:
    source = np.random.default_rng(size).integers(1, 255, size + 200, dtype=np.uint8)
    target = np.zeros(size + 200, np.uint8)

    compiled()(np.array([target.ctypes.data + shift]), np.array([source.ctypes.data + 3]), np.array([size]))

    assert (target[shift : shift + size] == source[3 : 3 + size]).all()
    assert not target[:shift].any()
    assert not target[shift + size :].any()


def test_many_spans_are_copied_in_one_call_each_to_its_place() -> None:
    sizes = [LIMIT + 5, 7, 2 * LIMIT, 0, 100]
    source = np.random.default_rng(1).integers(0, 255, sum(sizes), dtype=np.uint8)
    target = np.zeros_like(source)
    begins = np.cumsum([0, *sizes[:-1]])
    places = len(source) - begins - np.array(sizes)

    compiled()(target.ctypes.data + places, source.ctypes.data + begins, np.array(sizes))

    for begin, place, size in zip(begins, places, sizes, strict=True):
        assert (target[place : place + size] == source[begin : begin + size]).all()

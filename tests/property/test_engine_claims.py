"""Threads that take over one another's work do each task once, whatever their number and whoever is held up."""

from __future__ import annotations

import engine.environment  # noqa: F401  isort: skip

from typing import Any

import numba
import numpy as np
import pytest

from engine.claims import claim
from engine.panel_products import multiply
from engine.register_tiles import MOST_ROWS, PANEL, PUT


@numba.njit(parallel=True, error_model="numpy")  # type: ignore[untyped-decorator]
def race(num_threads: int, claims: Any, done: Any) -> None:
    """All threads want all tasks, from both ends."""
    for thread in numba.prange(num_threads):
        for turn in range(len(claims)):
            task = turn if thread % 2 == 0 else len(claims) - 1 - turn
            if claim(claims, task):
                done[thread, task] += 1


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_each_task_is_claimed_once_however_many_want_it(num_threads: int) -> None:
    for _ in range(200):
        claims, done = np.zeros(999, np.uint8), np.zeros((num_threads, 999), np.int64)

        race(num_threads, claims, done)

        assert (done.sum(0) == 1).all()
        assert (claims == 1).all()


@pytest.mark.parametrize(("num_rows", "num_panels"), [(1, 1), (1, 7), (5, 2), (3 * MOST_ROWS + 1, 5)])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_a_product_is_whole_also_with_more_threads_than_panels(
    num_rows: int, num_panels: int, num_threads: int
) -> None:
    rng = np.random.default_rng(num_panels)
    inputs, outputs = 33, num_panels * PANEL - 3
    rows = rng.standard_normal((1, num_rows, inputs), np.float32)
    panels = rng.standard_normal((num_panels, inputs, PANEL), np.float32)
    out = np.full((1, num_rows, outputs), np.nan, np.float32)

    held = panels.view(np.uint8).reshape(num_panels, -1)
    multiply(rows, held, np.empty(0, np.float32), MOST_ROWS, out, PUT, num_threads)

    wanted = np.concatenate([rows[0].astype(np.float64) @ panel for panel in panels], 1)[:, :outputs]
    assert np.abs(out[0] - wanted).max() < 1e-4

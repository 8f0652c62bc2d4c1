"""Multiplies rows by weights that lie in panels (`engine/panel_linear.py`); compiled by numba."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.claims import claim
from engine.narrow_weights import WIDE
from engine.register_tiles import ADD, CACHE_LINE, GATE, LANES, MOST_ROWS, PANEL, WIDE_BYTES, multiply_panel


@numba.njit(parallel=True, nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def multiply(
    rows: Any,  # float32 [piece, row, input of a piece]
    panels: Any,  # uint8 [panel, byte]: pieces, of each of them inputs, as narrow_weights.py says
    bias: Any,  # float32 [output], or empty
    block_rows: int,
    out: Any,  # float32 [piece, row, output of a piece]
    use: Any,  # int64
    num_threads: int,
) -> None:
    """The product of all rows and all panels: `PUT` into `out`, which is one piece, `ADD`ed to it, or as `GATE` says, where
    rows are one piece, there is no bias, and pieces of `out` are whole panels of half the width."""
    num_rows, num_panels = rows.shape[1], panels.shape[0]
    width = panels.shape[1] // (rows.shape[0] * rows.shape[2] * PANEL)
    num_blocks = (num_rows + block_rows - 1) // block_rows
    # A task is one panel for one block of rows. Of its share of the panels, a thread takes all for one block after another.
    claims = np.empty(num_blocks * num_panels, np.uint8)
    for each in range(len(claims)):  # A whole array at once would be a parallel part of its own.
        claims[each] = 0
    wide_bytes = rows.shape[2] * WIDE_BYTES if width != WIDE and num_rows >= MOST_ROWS else 0
    wide = np.empty((num_threads, wide_bytes + CACHE_LINE), np.uint8)
    for thread in numba.prange(num_threads):
        widened = np.int64(wide.ctypes.data) + thread * wide.shape[1] + CACHE_LINE - 1
        widened -= widened % CACHE_LINE
        for helped in range(num_threads):
            owner = (thread + helped) % num_threads
            first_panel, end_panel = owner * num_panels // num_threads, (owner + 1) * num_panels // num_threads
            some_panels = end_panel - first_panel
            num_tasks = num_blocks * some_panels
            for turn in range(num_tasks):
                # Its own from the beginning, others' from the end.
                task = turn if helped == 0 else num_tasks - 1 - turn
                block, panel = task // some_panels, first_panel + task % some_panels
                if claim(claims, block * num_panels + panel):
                    first_row = block * block_rows
                    count = min(block_rows, num_rows - first_row)
                    _multiply_task(rows, panels, bias, out, use, panel, first_row, count, width, widened)


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _multiply_task(
    rows: Any,
    panels: Any,
    bias: Any,
    out: Any,
    use: Any,  # int64
    panel: int,
    first_row: int,
    count: int,
    width: int,
    widened: int,
) -> None:
    """One panel for `count` rows; there is room for a piece of it at `widened`."""
    pieces, num_rows, inputs = rows.shape
    panel_bytes = panels.shape[1]
    piece_bytes = panel_bytes // pieces
    out_pieces, _, out_width = out.shape
    row_bytes = inputs * 4
    rows_at = np.int64(rows.ctypes.data) + first_row * row_bytes
    panel_at = np.int64(panels.ctypes.data) + panel * panel_bytes
    ahead = panel_at + (panel_bytes if panel + 1 < len(panels) else 0)
    first = panel * (LANES if use == GATE else PANEL)
    piece_of_out, place = first // out_width, first % out_width
    target, target_bytes = np.int64(out.ctypes.data), out_width * 4
    target += ((piece_of_out * num_rows + first_row) * out_width + place) * 4
    if len(bias) > 0:
        for row in range(first_row, first_row + count):
            for output in range(first, min(first + PANEL, out_width)):
                out[0, row, output] = bias[output] + (out[0, row, output] if use == ADD else np.float32(0.0))
        use = ADD
    # The last panel may have more outputs than there are; what it gives is copied as far as it counts.
    left = out_pieces * out_width - first
    beside = np.empty((count if left < PANEL and use != GATE else 0, PANEL), np.float32)
    if len(beside) > 0:
        target, target_bytes = np.int64(beside.ctypes.data), WIDE_BYTES
        for row in range(count):
            for output in range(left):
                beside[row, output] = out[0, first_row + row, first + output]
    for piece in range(pieces):
        multiply_panel(
            count,
            rows_at + piece * num_rows * row_bytes,
            row_bytes,
            np.int64(4),
            panel_at + piece * piece_bytes,
            np.int64(width),
            inputs,
            target,
            target_bytes,
            np.int64(use if piece == 0 else ADD),
            ahead + piece * piece_bytes,
            np.int64(widened),
        )
    for row in range(len(beside)):
        for output in range(left):
            out[0, first_row + row, first + output] = beside[row, output]

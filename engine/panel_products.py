"""Multiplies rows by weights that lie in panels (`engine/panel_linear.py`); compiled by numba."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np

from engine.claims import claim
from engine.register_tiles import PANEL, multiply_panel

_PANEL_BYTES: Final = 4 * PANEL


@numba.njit(parallel=True, nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def multiply(
    rows: Any,  # float32 [piece, row, input of a piece]
    panels: Any,  # float32 [panel, input, output of the panel]
    bias: Any,  # float32 [output], or empty
    block_rows: int,
    out: Any,  # float32 [row, output]
    num_threads: int,
) -> None:
    """The product of all rows and all panels, into `out`."""
    pieces, num_rows, inputs = rows.shape
    num_panels = panels.shape[0]
    num_outputs = out.shape[1]
    num_blocks = (num_rows + block_rows - 1) // block_rows
    row_bytes = inputs * 4
    has_bias = len(bias) > 0
    rows_at, panels_at, out_at = np.int64(rows.ctypes.data), np.int64(panels.ctypes.data), np.int64(out.ctypes.data)
    # A task is one panel for one block of rows. Of its share of the panels, a thread takes all for one block after another.
    claims = np.empty(num_blocks * num_panels, np.uint8)
    for each in range(len(claims)):  # A whole array at once would be a parallel part of its own.
        claims[each] = 0
    for thread in numba.prange(num_threads):
        for helped in range(num_threads):
            owner = (thread + helped) % num_threads
            first_panel, end_panel = owner * num_panels // num_threads, (owner + 1) * num_panels // num_threads
            some_panels = end_panel - first_panel
            num_tasks = num_blocks * some_panels
            for turn in range(num_tasks):
                # Its own from the beginning, others' from the end.
                task = turn if helped == 0 else num_tasks - 1 - turn
                block, panel = task // some_panels, first_panel + task % some_panels
                if not claim(claims, block * num_panels + panel):
                    continue
                first_row = block * block_rows
                count = min(block_rows, num_rows - first_row)
                first_output = panel * PANEL
                width = min(PANEL, num_outputs - first_output)
                target, target_bytes = out_at + (first_row * num_outputs + first_output) * 4, num_outputs * 4
                # The last panel may have more outputs than there are; what it gives is copied as far as it counts.
                beside = np.empty((count if width < PANEL else 0, PANEL), np.float32)
                if width < PANEL:
                    target, target_bytes = np.int64(beside.ctypes.data), _PANEL_BYTES
                if has_bias:
                    for row in range(count):
                        for output in range(width):
                            if width < PANEL:
                                beside[row, output] = bias[first_output + output]
                            else:
                                out[first_row + row, first_output + output] = bias[first_output + output]
                for piece in range(pieces):
                    multiply_panel(
                        count,
                        rows_at + (piece * num_rows + first_row) * row_bytes,
                        row_bytes,
                        np.int64(4),
                        panels_at + (panel * pieces + piece) * inputs * _PANEL_BYTES,
                        np.int64(_PANEL_BYTES),
                        inputs,
                        target,
                        target_bytes,
                        has_bias or piece > 0,
                    )
                if width < PANEL:
                    for row in range(count):
                        for output in range(width):
                            out[first_row + row, first_output + output] = beside[row, output]

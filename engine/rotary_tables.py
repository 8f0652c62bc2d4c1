"""RoPE's cosines and sines by position, from transformers' own module, so that every kind of scaling is its.

For most kinds they depend on the position alone: they are computed once, and a step looks them up. The module takes
a dozen calls of torch for each step, which beside a decode of one row is as long as a third of a layer.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

_OF_POSITION: Final = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds that do not change with how long the context is."""
_FEWEST: Final = 1024
_MOST: Final = 32 * 1024
"""Positions that are kept; whoever goes beyond them has steps that take longer anyway."""


class RotaryTables:
    """`module` is a rotary embedding of transformers."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._is_of_position = getattr(module, "rope_type", None) in _OF_POSITION
        self._cos = self._sin = np.empty((0, 0), np.float32)

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines (float32, `[position, head_dim]`) at these positions (int64)."""
        end = int(positions.max()) + 1
        if not self._is_of_position or end > _MOST:
            return self._compute(positions)
        if end > len(self._cos):
            self._cos, self._sin = self._compute(np.arange(min(_MOST, max(_FEWEST, 2 * end))))
        return self._cos[positions], self._sin[positions]

    def _compute(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        cos, sin = self._module(torch.empty(0), torch.from_numpy(positions).unsqueeze(0))
        return cos[0].contiguous().numpy(), sin[0].contiguous().numpy()

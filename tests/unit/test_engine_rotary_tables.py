"""RoPE's tables are what transformers' module gives, wherever they come from."""

from __future__ import annotations

import engine.environment  # noqa: F401  isort: skip

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine import rotary_tables
from engine.rotary_tables import RotaryTables
from tests.support.tiny_model import tiny_config


@pytest.mark.parametrize("family", ["llama", "llama_rope3", "llama_linear", "llama_yarn"])
def test_positions_are_those_of_the_module_in_whatever_order_they_come(family: str) -> None:
    module = _Counted(LlamaRotaryEmbedding(tiny_config(family)))
    tables = RotaryTables(module)

    for positions in ([3], [0, 1, 2], [5000, 7, 7, 900], [1023, 1024], [40_000, 2], [1]):
        _assert_equal(tables, module.wrapped, positions)

    # As far as was asked and as far again, and for what lies beyond all that is kept.
    assert module.lengths == [rotary_tables._FEWEST, 10_002, 2]


def test_what_depends_on_the_length_is_computed_each_time() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = LlamaConfig(max_position_embeddings=64, rope_parameters=rope)
    tables, reference = RotaryTables(LlamaRotaryEmbedding(config)), LlamaRotaryEmbedding(config)

    for positions in ([3], [500, 2], [2], [3]):
        _assert_equal(tables, reference, positions)


def _assert_equal(tables: RotaryTables, module: Any, positions: list[int]) -> None:
    cos, sin = tables.at(np.array(positions))
    for found, wanted in zip((cos, sin), module(torch.empty(0), torch.tensor([positions])), strict=True):
        assert found.dtype == np.float32
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found, wanted[0].numpy())


class _Counted:
    def __init__(self, module: LlamaRotaryEmbedding) -> None:
        self.wrapped = module
        self.rope_type = module.rope_type
        self.lengths: list[int] = []

    def __call__(self, like: torch.Tensor, positions: torch.Tensor) -> Any:
        self.lengths.append(positions.shape[1])
        return self.wrapped(like, positions)

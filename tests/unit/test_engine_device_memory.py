"""The pool, the packing of steps, and the limits of memory."""

from __future__ import annotations

import engine.environment  # noqa: F401  isort: skip

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from engine import runner
from engine.batch import FEW_TOKENS, SEGMENT_TOKENS, pack
from engine.config import LEGAL_TOKENS_PER_BLOCK, EngineConfig
from engine.errors import EngineConfigError
from engine.kv_memory import KvMemory
from engine.layout import BlockLayout
from engine.memory_limits import MemoryLimit, available_memory
from engine.plan import BlockCopy, Chunk, SampleRequest, StepPlan
from engine.protocol import Sampling

LAYOUT = BlockLayout(num_layers=3, tokens_per_block=4, num_kv_heads=2, head_dim=5, dtype="float32")
CPU = torch.device("cpu")
SAMPLE = SampleRequest(Sampling(), 0, 0, (), (), True)


def test_a_block_is_one_run_of_bytes_layer_by_layer() -> None:
    kv = KvMemory(LAYOUT, 3, CPU)
    values = torch.arange(LAYOUT.block_bytes // 4, dtype=torch.float32)
    kv.pool[1] = values.view(LAYOUT.shape)
    out = bytearray(LAYOUT.block_bytes)

    kv.read_block(1, memoryview(out))

    assert bytes(out) == values.numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_written_into_a_block_is_read_from_it_and_from_no_other(dtype: str) -> None:
    layout = BlockLayout(3, 4, 2, 5, dtype)
    kv = KvMemory(layout, 3, CPU)
    kv.pool.zero_()
    data = np.random.default_rng(0).bytes(layout.block_bytes)
    out = bytearray(layout.block_bytes)

    kv.write_block(1, memoryview(data))
    kv.read_block(1, memoryview(out))

    assert bytes(out) == data
    assert not kv.pool[0].any()
    assert not kv.pool[2].any()


def test_written_tokens_are_gathered_in_order() -> None:
    kv = KvMemory(LAYOUT, 4, CPU)
    kv.pool.fill_(float("nan"))
    key, value = torch.randn(6, 2, 5), torch.randn(6, 2, 5)
    slots = torch.tensor([3 * 4 + 0, 3 * 4 + 1, 3 * 4 + 2, 3 * 4 + 3, 1 * 4 + 0, 1 * 4 + 1])

    kv.write(2, kv.token_rows(slots), key, value)
    keys, values = kv.gather(2, torch.tensor([3, 1]), 6)

    assert torch.equal(keys, key)
    assert torch.equal(values, value)
    assert torch.isnan(kv.pool[:, :2]).all()


def test_a_copy_takes_the_beginning_and_leaves_the_rest() -> None:
    kv = KvMemory(LAYOUT, 3, CPU)
    kv.pool[:] = torch.arange(3.0).view(3, 1, 1, 1, 1, 1)

    kv.copy_tokens((BlockCopy(1, 2, 3),))

    assert (kv.pool[2, :, :, :3] == 1).all()
    assert (kv.pool[2, :, :, 3:] == 2).all()
    assert (kv.pool[1] == 1).all()


def test_blocks_of_another_size_and_places_outside_the_pool_are_our_bug() -> None:
    kv = KvMemory(LAYOUT, 3, CPU)

    with pytest.raises(AssertionError):
        kv.read_block(3, memoryview(bytearray(LAYOUT.block_bytes)))
    with pytest.raises(AssertionError):
        kv.write_block(-1, memoryview(bytes(LAYOUT.block_bytes)))
    with pytest.raises(AssertionError):
        kv.write_block(0, memoryview(bytes(LAYOUT.block_bytes - 1)))
    with pytest.raises(AssertionError):
        kv.copy_tokens((BlockCopy(0, 3, 1),))


def test_a_step_is_packed_into_one_row() -> None:
    plan = StepPlan(
        1,
        (),
        (
            Chunk(7, 2, (10, 11, 12), (5, 6), None),
            Chunk(8, 0, (20,), (1,), SAMPLE),
            Chunk(9, 4, (30, 31), (0, 3, 9), SAMPLE),
        ),
    )

    batch = pack(plan, 4, 10, max_short_tokens=1)

    assert batch.token_ids.tolist() == [10, 11, 12, 20, 30, 31]
    assert batch.positions.tolist() == [2, 3, 4, 0, 4, 5]
    assert batch.slot_mapping.tolist() == [22, 23, 24, 4, 12, 13]
    assert batch.logit_rows.tolist() == [3, 5]
    assert [(span.first_row, span.num_rows, span.start, span.blocks.tolist()) for span in batch.spans] == [
        (0, 3, 2, [5, 6]),
        (4, 2, 4, [0, 3]),
    ]
    assert batch.short is not None
    assert batch.short.item_row.tolist() == [3]


@pytest.mark.parametrize(
    ("num_segments", "segment"), [(2, SEGMENT_TOKENS // 2), (FEW_TOKENS // SEGMENT_TOKENS, SEGMENT_TOKENS)]
)
def test_items_cover_each_context_once_in_segments(num_segments: int, segment: int) -> None:
    """Half as long where there is little context in all, so that threads end together."""
    length = num_segments * segment + 3
    table = tuple(range(-(-length // 4)))

    short = pack(StepPlan(1, (), (Chunk(1, length - 2, (1, 2), table, None),)), 4, 1000, max_short_tokens=2).short

    assert short is not None
    count = num_segments + 1
    starts = [segment * at for at in range(count)]
    assert short.item_row.tolist() == [0] * count + [1] * count
    assert short.item_first.tolist() == starts * 2
    assert short.item_last.tolist() == [*starts[1:], length - 1, *starts[1:], length]
    assert short.row_items.tolist() == [0, count, 2 * count]


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(1, 0, (), (0,), None),
        Chunk(1, 4, (1,), (0,), None),
        Chunk(1, 0, (1,), (10,), None),
        Chunk(1, 0, (1,), (-1,), None),
        Chunk(1, -1, (1,), (0,), None),
    ],
)
def test_a_plan_that_points_outside_the_pool_is_our_bug(chunk: Chunk) -> None:
    with pytest.raises(AssertionError):
        pack(StepPlan(1, (), (chunk,)), 4, 10, 1)


def test_two_chunks_may_not_write_one_place() -> None:
    with pytest.raises(AssertionError):
        pack(StepPlan(1, (), (Chunk(1, 0, (1,), (3,), None), Chunk(2, 0, (1,), (3,), None))), 4, 10, 1)


def test_every_legal_block_size_is_accepted_and_no_other() -> None:
    for size in range(-1, 300):
        if size in LEGAL_TOKENS_PER_BLOCK:
            assert _config(tokens_per_block=size).tokens_per_block == size
        else:
            with pytest.raises(ValidationError, match="2, 4, 8, 16, 32, 64, 128"):
                _config(tokens_per_block=size)


@pytest.mark.parametrize(
    "settings",
    [
        {"no_such_setting": 1},
        {"max_num_tokens": 8, "max_batch_size": 9},
        {"device_cache_size": 0},
        {"secondary_offload_min_priority": 101},
        {"free_gpu_memory_fraction": 1.0},
        {"socket": "/tmp/" + "x" * 103},
        {"device": "cpu", "dtype": "float16"},
    ],
)
def test_settings_that_cannot_be_meant_stop_the_start(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        _config(**settings)


def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "available_memory", lambda: MemoryLimit(3 * 2**30, "memory available on this machine"))

    assert runner._num_blocks(_config(), LAYOUT, CPU) == 2**30 // LAYOUT.block_bytes
    with pytest.raises(EngineConfigError) as refused:
        runner._num_blocks(_config(device_cache_size="3GiB"), LAYOUT, CPU)

    for words in ("device_cache_size", str(3 * 2**30), str(3 * 2**30 - 2**28), "memory available on this machine"):
        assert words in str(refused.value)


def test_a_pool_too_small_for_two_blocks_is_refused() -> None:
    with pytest.raises(EngineConfigError, match="at least 2"):
        runner._num_blocks(_config(device_cache_size=LAYOUT.block_bytes), LAYOUT, CPU)


def test_the_tightest_limit_of_memory_counts(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    group = root / "a" / "b"
    (proc / "self").mkdir(parents=True)
    group.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/a/b\n")

    for directory, limit, used in ((group, "max", 10), (root / "a", "5000000", 3000000)):
        (directory / "memory.max").write_text(limit + "\n")
        (directory / "memory.current").write_text(f"{used}\n")
        (directory / "memory.stat").write_text("anon 5\ninactive_file 1000000\n")

    found = available_memory(proc, root)
    assert found is not None
    assert found.available_bytes == 3_000_000
    assert "limit of 5000000 bytes" in found.source
    (root / "a" / "memory.max").write_text("max\n")
    machine = available_memory(proc, root)
    assert machine is not None
    assert machine.available_bytes == 8000 * 1024
    assert available_memory(tmp_path / "nowhere", root) is None


def _config(**settings: Any) -> EngineConfig:
    return EngineConfig(**{"socket": "/tmp/e.sock", "model_dir": "/tmp/m", "state_dir": "/tmp/s"} | settings)

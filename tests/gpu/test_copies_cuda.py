"""On a GPU: registration, copies and their order are what the device in threads said they are.

A kernel that takes long stands before each copy that has to wait for it, and behind each that it has to wait for. Skipped, and
told so, where there is no CUDA device.
"""

from __future__ import annotations

import engine.environment  # noqa: F401  isort: skip

import mmap

import pytest
import torch
import xxhash

from cached.client import Lease
from engine.fences import StepBlocks
from engine.kv_memory import KvMemory
from engine.layout import BlockLayout
from engine.stream_transfer import StreamTransfer
from engine.transfer import Arrived, Mismatched
from tests.support.cached_daemon import wait_until
from tests.support.fake_payload import FakePayload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
LAYOUT = BlockLayout(num_layers=4, tokens_per_block=16, num_kv_heads=8, head_dim=64, dtype="bfloat16")
BLOCK = LAYOUT.block_bytes
NUM_BLOCKS = 8
LONG_CYCLES = 100_000_000
"""Some 50 ms of a kernel that does nothing."""


class Rig:
    """A pool on the device, a payload, and the way between them."""

    def __init__(self, pin_chunk_bytes: int) -> None:
        self.kv = KvMemory(LAYOUT, NUM_BLOCKS, torch.device("cuda"))
        self.bytes = self.kv.pool.view(torch.uint8).view(NUM_BLOCKS, BLOCK)
        self.bytes.zero_()
        torch.cuda.synchronize()
        self.payload = FakePayload(NUM_BLOCKS, BLOCK, BLOCK)
        found = self.kv.transfer(pin_chunk_bytes)
        assert isinstance(found, StreamTransfer)
        self.transfer = found
        self.streams = found._streams
        self.transfer.look(self.payload)
        if pin_chunk_bytes:
            wait_until(lambda: self.transfer.statistics()["pinned_bytes"] == NUM_BLOCKS * BLOCK)


@pytest.fixture(params=[0, 3 * BLOCK], ids=["through staging", "pinned"])
def rig(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    made = Rig(request.param)
    yield made
    made.transfer.close()


def test_a_store_waits_for_the_kernels_that_write_its_block(rig: Rig) -> None:
    rig.streams.begin_step(StepBlocks(frozenset({3}), ()))
    torch.cuda._sleep(LONG_CYCLES)
    rig.bytes[3] = 7
    end = rig.streams.end_step()

    sums = rig.transfer.store(rig.payload, [(3, rig.payload.reserved(2))])

    assert sums == [xxhash.xxh3_64_intdigest(bytes([7]) * BLOCK)]
    assert (rig.payload.slot(2) == 7).all()
    rig.streams.finish_step(end)


def test_a_load_waits_for_the_kernels_that_read_its_block(rig: Rig) -> None:
    rig.bytes[3] = 5
    rig.payload.slot(2)[:] = 9
    rig.streams.begin_step(StepBlocks(frozenset(), ((3,),)))
    torch.cuda._sleep(LONG_CYCLES)
    seen = rig.bytes[3].clone()
    end = rig.streams.end_step()

    outcome = rig.transfer.load(rig.payload, Lease(1, 1, ()), [(3, rig.payload.leased(2))], verify=True)

    assert outcome == Arrived()
    rig.streams.finish_step(end)
    assert (seen == 5).all()
    assert (rig.bytes[3] == 9).all()


def test_kernels_wait_for_the_load_of_what_they_read(rig: Rig) -> None:
    from engine.copy_runs import Run

    rig.payload.slot(2)[:] = 9
    with torch.cuda.stream(rig.streams._device._stream("loads")):
        torch.cuda._sleep(LONG_CYCLES)
    load = rig.streams.load([3], [(Run(3, 2 * BLOCK, 1), rig.payload.payload)])

    rig.streams.begin_step(StepBlocks(frozenset(), ((3,),)))
    seen = rig.bytes[3].clone()
    rig.streams.finish_step(rig.streams.end_step())

    assert (seen == 9).all()
    rig.streams.finish(load)


def test_a_block_that_was_scribbled_over_is_a_mismatch(rig: Rig) -> None:
    rig.payload.slot(2)[:] = 9
    leased = rig.payload.leased(2)
    rig.payload.slot(2)[17] = 1

    assert rig.transfer.load(rig.payload, Lease(1, 1, ()), [(3, leased)], verify=True) == Mismatched(0)


def test_only_what_is_not_pinned_goes_through_the_processor(rig: Rig) -> None:
    for first in range(0, NUM_BLOCKS, rig.transfer.batch_blocks):
        batch = range(first, min(NUM_BLOCKS, first + rig.transfer.batch_blocks))
        rig.transfer.store(rig.payload, [(block, rig.payload.reserved(block)) for block in batch])

    is_pinned = rig.transfer.statistics()["pinned_bytes"] > 0
    assert sorted(rig.payload.copied_by_host) == ([] if is_pinned else list(range(NUM_BLOCKS)))


def test_a_hole_under_a_registration_is_noticed_and_a_refused_registration_spoils_no_kernel() -> None:
    rig = Rig(3 * BLOCK)
    rig.payload.mapping.madvise(mmap.MADV_REMOVE, 0, 4096)

    rig.transfer.store(rig.payload, [(0, rig.payload.reserved(0))])

    assert rig.payload.copied_by_host == [0]
    assert rig.transfer.statistics()["pinned_bytes"] == 0
    cudart = rig.transfer._pins._cudart
    assert cudart is not None
    assert cudart.cudaHostUnregister(rig.payload.array.ctypes.data) != 0
    assert (torch.zeros(3, device="cuda") + 1).sum().item() == 3
    rig.transfer.close()

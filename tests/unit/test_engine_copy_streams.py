"""Copies on streams of their own: right in any order that a device may choose, and wrong as soon as one wait is left out."""

from __future__ import annotations

import itertools
import mmap
import random
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cached.client import Lease
from engine.copy_runs import Run, runs_of
from engine.copy_streams import CopyStreams
from engine.fences import StepBlocks, blocks_of
from engine.pinning import PayloadPins, StagingBuffer
from engine.plan import BlockCopy, Chunk, StepPlan
from engine.stream_transfer import StreamTransfer
from engine.transfer import Arrived, Mismatched, Unreadable
from tests.support.async_device import HOST, STREAMS, AsyncDevice, Event
from tests.support.fake_cudart import FakeCudart
from tests.support.fake_payload import FakePayload

NUM_BLOCKS = 12
BLOCK = 4096
NUM_SLOTS = 16
SLOT = 8192
STAGED = 4
TOUCHED = 3
"""The device block that everything in a scenario meets at."""


class Rig:
    """A device, its streams, a payload, and how blocks go between them."""

    def __init__(self, device: AsyncDevice, cudart: FakeCudart | None = None, chunk_bytes: int = 3 * SLOT) -> None:
        self.device = device
        self.streams = CopyStreams(device, BLOCK)
        self.host = np.zeros((NUM_BLOCKS, BLOCK), np.uint8)
        self.payload = FakePayload(NUM_SLOTS, SLOT, BLOCK)
        self.pins = PayloadPins(cudart, chunk_bytes)
        buffer = StagingBuffer(cudart, STAGED * BLOCK)
        self.staging = np.frombuffer(buffer.memory, np.uint8)
        self.transfer = StreamTransfer(self.streams, self.pins, buffer, BLOCK)
        if cudart is not None:
            self.transfer.look(self.payload)
            self.pins.wait_registered()

    def refuse_pageable(self, cudart: FakeCudart) -> None:
        """As a device does that copies by itself."""
        self.device.refuses = lambda host: not cudart.is_registered(_address(host), len(host))

    def step(self, kernel: Callable[[np.ndarray], None], writes: set[int], reads: set[int] = frozenset()) -> Event:  # type: ignore[assignment]
        self.streams.begin_step(StepBlocks(frozenset(writes), (tuple(reads),)))
        self.device.launch(kernel)
        return self.streams.end_step()

    def store(self, block: int) -> Event:
        """Into the row of `host` with the block's number."""
        return self.streams.store([block], [(Run(block, block * BLOCK, 1), self.host.reshape(-1).data)])

    def load(self, block: int, value: int) -> Event:
        content = np.full(BLOCK, value, np.uint8)
        return self.streams.load([block], [(Run(block, 0, 1), content.data)])


def _address(host: memoryview) -> int:
    return int(np.frombuffer(host, np.uint8).ctypes.data)


def writing(block: int, value: int) -> Callable[[np.ndarray], None]:
    def kernel(memory: np.ndarray) -> None:
        memory[block] = value

    return kernel


def reading(block: int, into: list[int]) -> Callable[[np.ndarray], None]:
    def kernel(memory: np.ndarray) -> None:
        into.append(int(memory[block, 0]))

    return kernel


# --- One scenario for each wait: what comes out, and what should. ---


def a_store_of_what_a_step_writes(rig: Rig) -> tuple[object, object]:
    end = rig.step(writing(TOUCHED, 7), {TOUCHED})
    rig.streams.finish(rig.store(TOUCHED))
    rig.streams.finish_step(end)
    return int(rig.host[TOUCHED, 0]), 7


def a_load_over_what_a_step_reads(rig: Rig) -> tuple[object, object]:
    rig.device.memory[TOUCHED] = 5
    seen: list[int] = []
    end = rig.step(reading(TOUCHED, seen), set(), {TOUCHED})
    rig.streams.finish(rig.load(TOUCHED, 9))
    rig.streams.finish_step(end)
    return seen, [5]


def a_step_that_reads_what_is_being_loaded(rig: Rig) -> tuple[object, object]:
    seen: list[int] = []
    load = rig.load(TOUCHED, 9)
    rig.streams.finish_step(rig.step(reading(TOUCHED, seen), set(), {TOUCHED}))
    rig.streams.finish(load)
    return seen, [9]


def a_step_that_writes_over_what_is_being_stored(rig: Rig) -> tuple[object, object]:
    rig.device.memory[TOUCHED] = 5
    store = rig.store(TOUCHED)
    rig.streams.finish_step(rig.step(writing(TOUCHED, 7), {TOUCHED}))
    rig.streams.finish(store)
    return int(rig.host[TOUCHED, 0]), 5


def a_load_over_what_is_being_stored(rig: Rig) -> tuple[object, object]:
    rig.device.memory[TOUCHED] = 5
    store = rig.store(TOUCHED)
    rig.streams.finish(rig.load(TOUCHED, 9))
    rig.streams.finish(store)
    return int(rig.host[TOUCHED, 0]), 5


def a_store_of_what_is_being_loaded(rig: Rig) -> tuple[object, object]:
    load = rig.load(TOUCHED, 9)
    rig.streams.finish(rig.store(TOUCHED))
    rig.streams.finish(load)
    return int(rig.host[TOUCHED, 0]), 9


def a_checksum_and_a_commit_after_a_store(rig: Rig) -> tuple[object, object]:
    rig.device.memory[TOUCHED] = 5
    sums = rig.transfer.store(rig.payload, [(TOUCHED, rig.payload.reserved(2))])
    stored = rig.payload.slot(2).tolist()
    return (sums, stored), ([xxhash.xxh3_64_intdigest(bytes([5]) * BLOCK)], [5] * BLOCK)


def a_slot_and_a_buffer_that_change_after_a_load(rig: Rig) -> tuple[object, object]:
    rig.payload.slot(2)[:] = 9
    rig.transfer.load(rig.payload, Lease(1, 1, ()), [(TOUCHED, rig.payload.leased(2))], False)
    rig.payload.slot(2)[:] = 1  # The lease was released, and the slot is another's.
    rig.staging[:] = 2
    rig.device.settle()
    return int(rig.device.memory[TOUCHED, 0]), 9


def an_answer_after_a_step(rig: Rig) -> tuple[object, object]:
    rig.streams.finish_step(rig.step(writing(TOUCHED, 7), {TOUCHED}))
    return int(rig.device.memory[TOUCHED, 0]), 7


Scenario = Callable[[Rig], tuple[object, object]]
WAITS: dict[tuple[str, str], Scenario] = {
    ("stores", "steps"): a_store_of_what_a_step_writes,
    ("loads", "steps"): a_load_over_what_a_step_reads,
    ("steps", "loads"): a_step_that_reads_what_is_being_loaded,
    ("steps", "stores"): a_step_that_writes_over_what_is_being_stored,
    ("loads", "stores"): a_load_over_what_is_being_stored,
    ("stores", "loads"): a_store_of_what_is_being_loaded,
    (HOST, "stores"): a_checksum_and_a_commit_after_a_store,
    (HOST, "loads"): a_slot_and_a_buffer_that_change_after_a_load,
    (HOST, "steps"): an_answer_after_a_step,
}
LAGS = [frozenset(), *(frozenset({one}) for one in STREAMS), *(frozenset(STREAMS) - {one} for one in STREAMS)]


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    devices: list[AsyncDevice] = []

    def make(cudart: FakeCudart | None = None, **settings: object) -> Rig:
        devices.append(AsyncDevice(NUM_BLOCKS, BLOCK, **settings))  # type: ignore[arg-type]
        return Rig(devices[-1], cudart)

    yield make
    for device in devices:
        device.close()


@pytest.mark.parametrize("pinned", [False, True], ids=["through staging", "direct"])
@pytest.mark.parametrize("lags", LAGS, ids=lambda lags: "late: " + "+".join(sorted(lags)))
@pytest.mark.parametrize("scenario", WAITS.values(), ids=lambda scenario: scenario.__name__)
def test_whatever_the_device_does_late_what_comes_out_is_right(
    make_rig: Callable[..., Rig], scenario: Scenario, lags: frozenset[str], pinned: bool
) -> None:
    found, expected = scenario(make_rig(FakeCudart() if pinned else None, lags=lags))

    assert found == expected


@pytest.mark.parametrize("wait", WAITS, ids=" for ".join)
def test_a_wait_that_is_left_out_gives_something_wrong(make_rig: Callable[..., Rig], wait: tuple[str, str]) -> None:
    """So that the test above says something: it fails for each wait that the streams could do without."""
    rig = make_rig(lags=frozenset({wait[1]}), omits=frozenset({wait}))

    found, expected = WAITS[wait](rig)

    assert found != expected


# --- Any sequence of steps, stores and loads, against the same in the order in which it was told. ---


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), lags=st.sampled_from(LAGS))
def test_any_sequence_gives_what_it_would_give_one_after_another(seed: int, lags: frozenset[str]) -> None:
    dice, pauses = random.Random(seed), random.Random(seed + 1)
    device = AsyncDevice(NUM_BLOCKS, BLOCK, lags, pace=lambda: time.sleep(pauses.choice([0.0, 0.0, 0.0005])))
    rig = Rig(device)
    model = np.zeros(NUM_BLOCKS, np.int64)
    stored: dict[int, tuple[Event, int]] = {}
    loads: list[Event] = []
    steps: list[Event] = []
    seen: list[int] = []
    expected: list[int] = []
    for value in range(1, 31):
        block = dice.randrange(NUM_BLOCKS)
        deed = dice.choice(["write", "read", "store", "load", "finish"])
        if deed == "write":
            model[block] = value
            end = rig.step(writing(block, value), {block})
        elif deed == "read":
            expected.append(int(model[block]))
            end = rig.step(reading(block, seen), set(), {block})
        elif deed == "store" and block not in stored:
            stored[block] = rig.store(block), int(model[block])
        elif deed == "load":
            model[block] = value
            loads.append(rig.load(block, value))
        elif deed == "finish" and stored:
            block, (store, content) = stored.popitem()
            rig.streams.finish(store)
            assert (rig.host[block] == content).all()
        if deed in ("write", "read"):
            steps.append(end)
        if steps and dice.random() < 0.2:
            rig.streams.finish_step(steps.pop(dice.randrange(len(steps))))
    for block, (store, content) in stored.items():
        rig.streams.finish(store)
        assert (rig.host[block] == content).all()
    for load in loads:
        rig.streams.finish(load)
    device.settle()

    assert seen == expected
    assert (device.memory == model[:, None]).all()
    device.close()


# --- What goes which way. ---


@given(
    blocks=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12, unique=True),
    gap=st.sampled_from([0, 100]),
)
def test_runs_are_the_blocks_in_their_order_and_as_long_as_they_can_be(blocks: list[tuple[int, int]], gap: int) -> None:
    pairs = [(block, place * (BLOCK + gap)) for block, place in blocks]

    runs = runs_of(pairs, BLOCK)

    assert [(run.device_block + at, run.offset + at * BLOCK) for run in runs for at in range(run.num_blocks)] == pairs
    for first, second in itertools.pairwise(runs):
        end = first.device_block + first.num_blocks, first.offset + first.num_blocks * BLOCK
        assert end != (second.device_block, second.offset)


def test_neighbours_travel_in_one_call(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()

    rig.transfer.store(rig.payload, [(5 + at, rig.payload.reserved(2 * at)) for at in range(STAGED)])

    assert rig.device.num_calls == 1


def test_only_slots_in_pinned_chunks_are_copied_by_the_device(make_rig: Callable[..., Rig]) -> None:
    """The device refuses everything else; the slots of the chunk that CUDA refused are copied by the processor."""
    cudart = FakeCudart(fails_at=(2,))
    rig = make_rig(cudart)
    rig.refuse_pageable(cudart)
    rig.device.memory[:] = np.arange(NUM_BLOCKS)[:, None]
    for first in range(0, 12, STAGED):
        blocks = range(first, first + STAGED)

        sums = rig.transfer.store(rig.payload, [(block, rig.payload.reserved(block)) for block in blocks])

        assert sums == [xxhash.xxh3_64_intdigest(bytes([block]) * BLOCK) for block in blocks]
    assert sorted(rig.payload.copied_by_host) == [3, 4, 5]

    rig.device.memory[:] = 0
    for first in range(0, 12, STAGED):
        leased = [(block, rig.payload.leased(block)) for block in range(first, first + STAGED)]
        assert rig.transfer.load(rig.payload, Lease(1, 1, ()), leased, True) == Arrived()
    assert (rig.device.memory == np.arange(NUM_BLOCKS)[:, None]).all()
    assert sorted(rig.payload.copied_by_host) == [3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize("bad", range(STAGED))
@pytest.mark.parametrize("first_slot", [0, 2, 4], ids=["pinned", "some of each", "not pinned"])
def test_a_block_that_is_not_what_was_stored_ends_the_good_run(
    make_rig: Callable[..., Rig], first_slot: int, bad: int
) -> None:
    rig = make_rig(FakeCudart(fails_at=(2, 3)))
    slots = range(first_slot, first_slot + STAGED)
    for slot in slots:
        rig.payload.slot(slot)[:] = slot + 1
    leased = [(block, rig.payload.leased(slot, 1 if block == bad else None)) for block, slot in enumerate(slots)]

    outcome = rig.transfer.load(rig.payload, Lease(1, 1, ()), leased, True)

    assert outcome == Mismatched(bad)
    assert rig.device.memory[:bad, 0].tolist() == [slot + 1 for slot in slots][:bad]


def test_what_a_peer_scribbles_between_two_looks_is_not_served_as_what_was_compared(
    make_rig: Callable[..., Rig],
) -> None:
    """What arrived on the device is what is compared: a slot that changes during the copy is a mismatch or was copied whole."""
    rig = make_rig(FakeCudart(), lags=frozenset({"loads"}))
    rig.payload.slot(0)[:] = 9
    leased = rig.payload.leased(0)
    copy_in = rig.device.copy_in

    def copy_and_scribble(stream: str, block: int, num_blocks: int, host: memoryview) -> None:
        copy_in(stream, block, num_blocks, host)  # type: ignore[arg-type]
        rig.payload.slot(0)[100] = 1  # The device comes to it only later.

    rig.device.copy_in = copy_and_scribble  # type: ignore[method-assign, assignment]

    assert rig.transfer.load(rig.payload, Lease(1, 1, ()), [(0, leased)], True) == Mismatched(0)


@pytest.mark.parametrize("ends_after", [0, 1])
def test_a_session_that_ends_before_or_during_a_store_gives_no_checksum(
    make_rig: Callable[..., Rig], ends_after: int
) -> None:
    rig = make_rig(FakeCudart())
    rig.payload.ends_after = ends_after

    assert rig.transfer.store(rig.payload, [(0, rig.payload.reserved(0))]) is None


def test_a_load_after_the_end_of_its_session_copies_nothing(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(FakeCudart())
    rig.payload.ends_after = 0

    outcome = rig.transfer.load(rig.payload, Lease(1, 1, ()), [(0, rig.payload.leased(0))], True)

    assert outcome == Unreadable()
    assert rig.device.num_calls == 0


@pytest.mark.parametrize("verb", ["store", "load"])
def test_pages_taken_away_during_a_copy_spoil_it_though_nothing_faults(make_rig: Callable[..., Rig], verb: str) -> None:
    rig = make_rig(FakeCudart())
    name = "copy_out" if verb == "store" else "copy_in"

    def cut(*arguments: object) -> None:
        """A device goes on with the pages that it had registered, and touches none of this process's."""
        rig.payload.mapping.madvise(mmap.MADV_REMOVE, 0, 4096)

    setattr(rig.device, name, cut)

    if verb == "store":
        assert rig.transfer.store(rig.payload, [(0, rig.payload.reserved(0))]) is None
    else:
        leased = [(0, rig.payload.leased(0))]
        assert rig.transfer.load(rig.payload, Lease(1, 1, ()), leased, False) == Unreadable()


@pytest.mark.parametrize("verb", ["store", "load"])
def test_when_a_copy_cannot_be_told_those_before_it_are_over_before_anybody_hears(
    make_rig: Callable[..., Rig], verb: str
) -> None:
    """The worker gives the slots back then, and the daemon gives them to others."""
    stream, name = ("stores", "copy_out") if verb == "store" else ("loads", "copy_in")
    rig = make_rig(FakeCudart(), lags=frozenset({stream}))
    copy, told = getattr(rig.device, name), []

    def copy_once(*arguments: object) -> None:
        if told:
            raise RuntimeError("injected")
        told.append(arguments)
        copy(*arguments)

    setattr(rig.device, name, copy_once)

    def do() -> None:
        if verb == "store":
            rig.transfer.store(rig.payload, [(0, rig.payload.reserved(0)), (5, rig.payload.reserved(5))])
        else:
            leased = [(0, rig.payload.leased(0)), (5, rig.payload.leased(5))]
            rig.transfer.load(rig.payload, Lease(1, 1, ()), leased, False)

    with pytest.raises(RuntimeError, match="injected"):
        do()

    assert all(queue.done == queue.told for queue in rig.device._queues.values())
    seen: list[int] = []
    rig.streams.finish_step(rig.step(reading(0, seen), {0, 5}, {0, 5}))
    assert seen == [0]


def test_the_end_waits_for_copies_and_then_unregisters(make_rig: Callable[..., Rig]) -> None:
    cudart = FakeCudart()
    rig = make_rig(cudart, lags=frozenset({"stores"}))
    rig.device.memory[0] = 5
    rig.streams.store([0], [(Run(0, 0, 1), rig.payload.payload)])

    rig.transfer.close()

    assert rig.payload.slot(0)[0] == 5
    assert cudart.registered == {}
    assert cudart.errors == []


def test_the_blocks_of_a_plan_are_those_it_reads_and_those_it_writes() -> None:
    plan = StepPlan(1, (BlockCopy(8, 9, 2),), (Chunk(1, 6, (1, 2, 3), (0, 1, 2), None), Chunk(2, 0, (1,), (5,), None)))

    blocks = blocks_of(plan, 4)

    assert blocks.writes == {9, 1, 2, 5}
    assert all(blocks.is_touching(frozenset({block})) for block in (8, 9, 0, 1, 2, 5))
    assert not blocks.is_touching(frozenset({3, 4, 6, 7}))

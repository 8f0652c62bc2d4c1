"""Registering the payload with CUDA: in chunks, all or nothing each, taken back in time, and never believed beyond that."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cached.client import RegistrableMemory
from cached.places import SlotPlaces
from engine.pin_chunks import pin_chunks
from engine.pinning import PayloadPins, PinnedMemory, StagingBuffer, pages_are_present
from tests.support.fake_cudart import ALREADY_REGISTERED, FakeCudart

SLOT = 8192
NUM_SLOTS = 10
BLOCK = 5000
CHUNK = 3 * SLOT + 100


@dataclass
class Payload:
    """A payload as the tier's client shows it."""

    memory: mmap.mmap
    fd: int
    is_populated: bool = True

    def __post_init__(self) -> None:
        self.array = np.frombuffer(self.memory, np.uint8)
        self.array[:] = 1

    @property
    def payload(self) -> memoryview:
        return self.array.data

    @property
    def registrable(self) -> RegistrableMemory | None:
        return RegistrableMemory(self.payload, SLOT, NUM_SLOTS, 2**30) if self.is_populated else None

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)


def make_payload() -> Payload:
    fd = os.memfd_create("payload")
    os.truncate(fd, SLOT * NUM_SLOTS)
    return Payload(mmap.mmap(fd, SLOT * NUM_SLOTS), fd)


@pytest.fixture
def payload() -> Iterator[Payload]:
    made = make_payload()
    yield made
    os.close(made.fd)


def pinned(cudart: FakeCudart, payload: Payload, chunk_bytes: int = CHUNK) -> PayloadPins:
    pins = PayloadPins(cudart, chunk_bytes)
    pins.look(payload)
    pins.wait_registered()
    return pins


def usable_slots(pins: PayloadPins, payload: Payload) -> set[int]:
    found = pins.usable(payload, [slot * SLOT for slot in range(NUM_SLOTS)], BLOCK)
    return {slot for slot, is_usable in enumerate(found) if is_usable}


@given(
    num_slots=st.integers(0, 300),
    slot_bytes=st.integers(1, 50),
    slots_per_part=st.integers(1, 40),
    left_over=st.integers(0, 49),
    chunk_bytes=st.integers(1, 500),
)
def test_chunks_cover_all_slots_once_and_no_slot_lies_in_two(
    num_slots: int, slot_bytes: int, slots_per_part: int, left_over: int, chunk_bytes: int
) -> None:
    places = SlotPlaces(slot_bytes, slots_per_part * slot_bytes + left_over % slot_bytes)

    chunks = pin_chunks(num_slots, slot_bytes, places.registration_bytes, chunk_bytes)

    covered = [offset for chunk in chunks for offset in range(chunk.offset, chunk.offset + chunk.num_bytes, slot_bytes)]
    assert covered == places.offsets(range(num_slots))
    for chunk in chunks:
        assert chunk.num_bytes % slot_bytes == 0
        assert 0 < chunk.num_bytes <= max(chunk_bytes, slot_bytes)


def test_a_driver_that_refuses_large_ranges_gets_small_ones(payload: Payload) -> None:
    cudart = FakeCudart(limit=CHUNK)

    pins = pinned(cudart, payload)

    assert usable_slots(pins, payload) == set(range(NUM_SLOTS))
    assert pins.statistics() == {"pinned_bytes": SLOT * NUM_SLOTS, "unpinned_bytes": 0, "pin_failures": 0}
    assert cudart.calls == 4


def test_nothing_is_used_when_the_driver_refuses_every_chunk(payload: Payload) -> None:
    pins = pinned(FakeCudart(limit=SLOT - 1), payload)

    assert usable_slots(pins, payload) == set()
    assert pins.statistics() == {"pinned_bytes": 0, "unpinned_bytes": SLOT * NUM_SLOTS, "pin_failures": 4}


@pytest.mark.parametrize("failed", range(4))
def test_slots_of_a_chunk_that_could_not_be_pinned_are_never_used_as_if_they_were(
    payload: Payload, failed: int
) -> None:
    cudart = FakeCudart(fails_at=(failed,))

    pins = pinned(cudart, payload)

    lost = set(range(3 * failed, min(3 * failed + 3, NUM_SLOTS)))
    assert usable_slots(pins, payload) == set(range(NUM_SLOTS)) - lost
    assert pins.statistics()["unpinned_bytes"] == len(lost) * SLOT
    assert pins.statistics()["pin_failures"] == 1
    for slot in usable_slots(pins, payload):
        assert cudart.is_registered(payload.address + slot * SLOT, BLOCK)
    pins.close()
    assert cudart.registered == {}
    assert len(cudart.errors) == 1  # What was not registered is not unregistered either.


def test_no_place_across_two_chunks_is_usable_though_both_are_pinned(payload: Payload) -> None:
    pins = pinned(FakeCudart(), payload)

    assert pins.usable(payload, [3 * SLOT - 100], BLOCK) == [False]


def test_a_defect_halfway_takes_back_what_was_registered(payload: Payload) -> None:
    cudart = FakeCudart(raises_at=2)
    memory = PinnedMemory(cudart, payload.payload, pin_chunks(NUM_SLOTS, SLOT, 2**30, CHUNK))

    with pytest.raises(RuntimeError, match="injected"):
        memory.register()

    assert cudart.registered == {}
    assert cudart.errors == []
    assert memory.pinned_bytes == 0


def test_after_a_defect_nothing_is_pinned_and_everything_goes_on(payload: Payload) -> None:
    cudart = FakeCudart(raises_at=2)

    pins = pinned(cudart, payload)

    assert usable_slots(pins, payload) == set()
    assert pins.statistics()["unpinned_bytes"] == SLOT * NUM_SLOTS
    pins.close()
    assert cudart.errors == []


def test_what_somebody_else_has_registered_is_not_taken_for_ours(payload: Payload) -> None:
    cudart = FakeCudart()
    cudart.registered[payload.address + 4 * SLOT] = SLOT

    pins = pinned(cudart, payload)

    assert usable_slots(pins, payload) == {0, 1, 2, 6, 7, 8, 9}
    pins.close()
    assert cudart.registered == {payload.address + 4 * SLOT: SLOT}
    assert cudart.errors == [ALREADY_REGISTERED]


def test_slots_are_usable_as_soon_as_their_chunk_is_registered(payload: Payload) -> None:
    cudart = FakeCudart()
    memory = PinnedMemory(cudart, payload.payload, pin_chunks(NUM_SLOTS, SLOT, 2**30, CHUNK))
    assert not memory.covers(0, BLOCK)
    register = cudart.cudaHostRegister

    def watched(address: int, num_bytes: int, flags: int) -> int:
        seen.append([slot for slot in range(NUM_SLOTS) if memory.covers(slot * SLOT, BLOCK)])
        return register(address, num_bytes, flags)

    seen: list[list[int]] = []
    cudart.cudaHostRegister = watched  # type: ignore[method-assign]

    memory.register()

    assert seen == [[], list(range(3)), list(range(6)), list(range(9))]


def test_a_payload_that_comes_in_the_place_of_another_is_registered_after_that_one_was_let_go(payload: Payload) -> None:
    cudart = FakeCudart()
    pins = pinned(cudart, payload)
    other = make_payload()

    assert usable_slots(pins, other) == set()
    pins.look(other)
    pins.wait_registered()

    assert usable_slots(pins, other) == set(range(NUM_SLOTS))
    assert usable_slots(pins, payload) == set()
    assert all(other.address <= address < other.address + SLOT * NUM_SLOTS for address in cudart.registered)
    assert cudart.errors == []
    os.close(other.fd)


def test_the_same_payload_keeps_its_registration(payload: Payload) -> None:
    cudart = FakeCudart()
    pins = pinned(cudart, payload)

    pins.look(payload)
    pins.wait_registered()

    assert cudart.calls == 4


def test_a_payload_whose_memory_is_not_there_yet_is_left_alone(payload: Payload) -> None:
    payload.is_populated = False

    assert usable_slots(pinned(FakeCudart(), payload), payload) == set()


def test_an_end_in_the_middle_of_registering_leaves_nothing_registered(payload: Payload) -> None:
    cudart = FakeCudart()
    cudart.gate = threading.Event()
    pins = PayloadPins(cudart, CHUNK)
    pins.look(payload)

    closing = threading.Thread(target=pins.close)
    closing.start()
    cudart.gate.set()
    closing.join(30)

    assert cudart.registered == {}
    assert cudart.errors == []


@pytest.mark.parametrize(("cudart", "chunk_bytes"), [(None, CHUNK), (FakeCudart(), 0)])
def test_without_cuda_or_chunks_nothing_is_pinned(
    payload: Payload, cudart: FakeCudart | None, chunk_bytes: int
) -> None:
    pins = PayloadPins(cudart, chunk_bytes)
    pins.look(payload)

    assert usable_slots(pins, payload) == set()


@pytest.mark.parametrize("deed", ["cut short and made whole", "holed"])
def test_pages_taken_from_under_a_registration_are_noticed_before_a_copy(payload: Payload, deed: str) -> None:
    """A device would go on copying from and to pages that are nobody's any more, and nothing would fault."""
    cudart = FakeCudart()
    pins = pinned(cudart, payload)
    assert usable_slots(pins, payload) == set(range(NUM_SLOTS))

    if deed == "holed":
        payload.memory.madvise(mmap.MADV_REMOVE, 4 * SLOT, 4096)
    else:
        os.truncate(payload.fd, SLOT)
        os.truncate(payload.fd, SLOT * NUM_SLOTS)

    assert pins.usable(payload, [4 * SLOT], BLOCK) == [False]
    assert cudart.registered == {}
    pins.look(payload)
    pins.wait_registered()
    payload.array[:] = 2  # As CUDA does, which finds every page that it registers.
    assert usable_slots(pins, payload) == set(range(NUM_SLOTS))


def test_the_staging_buffer_is_as_large_as_asked_pinned_and_no_childs() -> None:
    cudart = FakeCudart()
    buffer = StagingBuffer(cudart, 3 * SLOT)
    address = int(np.frombuffer(buffer.memory, np.uint8).ctypes.data)

    assert len(buffer.memory) == 3 * SLOT
    assert cudart.registered == {address: 3 * SLOT}
    pid = os.fork()
    if pid == 0:
        os._exit(1 if pages_are_present(address, SLOT) else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    buffer.close()
    assert cudart.registered == {}


@pytest.mark.parametrize("cudart", [None, FakeCudart(limit=1)])
def test_a_staging_buffer_that_cannot_be_pinned_is_memory_all_the_same(cudart: FakeCudart | None) -> None:
    buffer = StagingBuffer(cudart, SLOT)

    buffer.memory[:] = bytes(SLOT)
    buffer.close()

    assert cudart is None or cudart.registered == {}


def test_pages_are_present_once_touched_and_not_before() -> None:
    memory = mmap.mmap(-1, 4 * 4096)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    memory[4096] = 1

    assert pages_are_present(address + 4096, 4096)
    assert not pages_are_present(address, 8192)


def test_a_forked_child_takes_back_nothing_and_uses_nothing(payload: Payload) -> None:
    """CUDA does not live on in a child; its parent's registration is not the child's to end."""
    cudart = FakeCudart()
    pins = pinned(cudart, payload)

    pid = os.fork()
    if pid == 0:
        calls = cudart.calls
        is_nothing_used = usable_slots(pins, payload) == set()
        pins.close()
        os._exit(0 if is_nothing_used and len(cudart.registered) == 4 and cudart.calls == calls else 1)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert usable_slots(pins, payload) == set(range(NUM_SLOTS))

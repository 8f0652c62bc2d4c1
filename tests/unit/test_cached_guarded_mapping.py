"""Copies through a guarded mapping: the right bytes and hashes, many at once, and nothing that counts once pages are gone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from cached.guarded_mapping import GuardedMapping

SLOT = 64 * 1024
NUM_SLOTS = 8


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("payload")
    os.truncate(made, SLOT * NUM_SLOTS)
    yield made
    os.close(made)


def blocks(size: int, number: int) -> list[memoryview]:
    dice = np.random.default_rng(size)
    return [memoryview(dice.integers(0, 255, size, dtype=np.uint8)) for _ in range(number)]


@pytest.mark.parametrize("size", [64, 1000, 1024, 5000, 4096, SLOT - 64, SLOT], ids=lambda size: f"{size} bytes")
def test_many_blocks_go_in_and_come_out_with_their_hashes(fd: int, size: int) -> None:
    """Of sizes that are hashed on the way, and of those that are not."""
    mapping = GuardedMapping(fd, SLOT * NUM_SLOTS)
    data = blocks(size, 4)
    offsets = [SLOT * slot for slot in (5, 0, 3, 7)]
    outs, plain_outs = ([memoryview(bytearray(size)) for _ in data] for _ in range(2))
    sums = [xxh3_64_intdigest(block) for block in data]

    assert mapping.copy_in_hashed(offsets, data) == sums
    assert mapping.copy_out_hashed(offsets, outs) == sums
    assert mapping.copy_out(offsets, plain_outs)

    assert [bytes(out) for out in outs] == [bytes(out) for out in plain_outs] == [bytes(block) for block in data]
    assert mapping.copy_in(offsets, data[::-1])
    assert os.pread(fd, size, offsets[0]) == bytes(data[-1])


@pytest.mark.parametrize("size", [1000, SLOT])
def test_copies_of_a_payload_cut_short_do_not_count_and_kill_nobody(fd: int, size: int) -> None:
    mapping = GuardedMapping(fd, SLOT * NUM_SLOTS)
    data, outs = blocks(size, 2), [memoryview(bytearray(size)) for _ in range(2)]
    assert mapping.copy_in([0, 4 * SLOT], data)

    os.truncate(fd, SLOT)

    assert mapping.copy_out_hashed([0, 4 * SLOT], outs) is None
    assert mapping.is_spoiled
    another = GuardedMapping(fd, SLOT)
    assert another.copy_out_hashed([0], outs[:1]) == [xxh3_64_intdigest(data[0])]
    assert GuardedMapping(fd, SLOT).copy_in([0], data[:1])


@pytest.mark.parametrize("verb", ["copy_out", "copy_in_hashed"])
def test_a_store_into_a_payload_cut_short_does_not_count(fd: int, verb: str) -> None:
    mapping = GuardedMapping(fd, SLOT * NUM_SLOTS)
    os.truncate(fd, SLOT)

    assert not getattr(mapping, verb)([4 * SLOT], blocks(SLOT, 1))


@pytest.mark.parametrize("offset", [-1, SLOT * NUM_SLOTS - 999])
def test_a_place_outside_the_payload_is_our_bug(fd: int, offset: int) -> None:
    mapping = GuardedMapping(fd, SLOT * NUM_SLOTS)

    with pytest.raises(AssertionError, match="outside"):
        mapping.copy_in([0, offset], blocks(1000, 2))


def test_a_mapping_is_populated_once_all_pieces_are(fd: int) -> None:
    mapping = GuardedMapping(fd, SLOT * NUM_SLOTS)
    assert not mapping.is_populated

    while mapping.populate_next(allocated=SLOT):
        pass
    assert not mapping.is_populated
    while mapping.populate_next(allocated=SLOT * NUM_SLOTS):
        pass

    assert mapping.is_populated

"""A copy that hashes gives the same bytes as any other copy, and the same hash as `xxhash`."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from cached.hashing_copy import LINE_BYTES, SMALLEST_BYTES, can_hash, compiled


def aligned(size: int, shift: int = 0) -> np.ndarray:
    room = np.zeros(size + 2 * LINE_BYTES, np.uint8)
    begin = -room.ctypes.data % LINE_BYTES + shift
    return room[begin : begin + size]


def copy(targets: list[np.ndarray], sources: list[np.ndarray]) -> list[int]:
    columns = [[each.ctypes.data for each in column] for column in (targets, sources)]
    return [int(each) for each in compiled()(*map(np.array, (*columns, [each.nbytes for each in sources])))]


@pytest.mark.parametrize("lines", [*range(16, 50), 1023, 1024, 1025, 16384])
@pytest.mark.parametrize("shift", [0, 1, 24])
def test_every_line_is_copied_and_the_hash_is_xxh3(lines: int, shift: int) -> None:
    source = aligned(lines * LINE_BYTES, shift)
    source[:] = np.random.default_rng(lines).integers(0, 256, len(source), dtype=np.uint8)
    target = aligned(len(source))

    hashes = copy([target], [source])

    assert hashes == [xxhash.xxh3_64_intdigest(source.tobytes())]
    assert (target == source).all()


def test_many_spans_have_a_hash_each() -> None:
    sources = [np.random.default_rng(at).integers(0, 256, 4096 * (at + 1), dtype=np.uint8) for at in range(5)]
    targets = [aligned(each.nbytes) for each in sources]

    hashes = copy(targets, sources)

    assert hashes == [xxhash.xxh3_64_intdigest(each.tobytes()) for each in sources]
    assert all((target == source).all() for target, source in zip(targets, sources, strict=True))


@pytest.mark.parametrize(
    ("target", "size", "expected"),
    [(64, 1024, True), (64, 4096, True), (65, 4096, False), (64, 4097, False), (64, SMALLEST_BYTES - 64, False)],
)
def test_only_whole_lines_to_an_aligned_place_are_hashed(target: int, size: int, expected: bool) -> None:
    assert can_hash(np.array([target, 128]), np.array([size, 2048])) is expected

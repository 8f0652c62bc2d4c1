"""Shares in bytes become shares in blocks: promises that fit into the tier's bytes fit into its slots."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cached.protocol import OwnerShare
from cached.shares import NO_TABLE, ShareTable, fault_of, judge

SIZES = st.integers(0, 2**40)


@given(
    tier_bytes=st.integers(4096, 2**40),
    num_slots=st.integers(1, 2**20),
    shares=st.lists(st.tuples(SIZES, st.none() | SIZES), max_size=8),
)
def test_floors_that_fit_into_the_bytes_fit_into_the_slots(
    tier_bytes: int, num_slots: int, shares: list[tuple[int, int | None]]
) -> None:
    table = ShareTable(
        1,
        tuple(
            OwnerShare(bytes([number]) * 16, 1.0, floor, None if room is None else floor + room)
            for number, (floor, room) in enumerate(shares)
        ),
    )

    found = table.in_blocks(tier_bytes, num_slots)

    assert fault_of(found) is None
    for before, after in zip(table.shares, found.shares, strict=True):
        assert (before.owner, before.weight, before.ceiling is None) == (
            after.owner,
            after.weight,
            after.ceiling is None,
        )
        # Less than one slot is lost, and none is won.
        assert after.floor <= before.floor * num_slots / tier_bytes < after.floor + 1
    if table.floors_total <= tier_bytes:
        assert judge(found, NO_TABLE, num_slots) == "taken"
    elif table.floors_total * num_slots >= (num_slots + 1 + len(shares)) * tier_bytes:
        assert judge(found, NO_TABLE, num_slots) == "floors_exceed_capacity"

"""Tenants' shares on their way to the engine, and what its figures say became of them."""

from __future__ import annotations

from typing import Any

import pytest

from cached.keys import owner_id
from cached.protocol import MAX_OWNERS
from cached.shares import MAX_SHARE
from engine.protocol import MAX_FRAME_BYTES, TO_ENGINE, OwnerShare
from engine.server import MAX_HOST_BYTES
from gateway.shares import owner_table, shares_state
from tenants.snapshot import ShareTable
from tenants.values import MAX_CACHE_BYTES, MAX_CACHE_SHARES, CacheShare, TenantId


def test_the_table_names_owners_as_requests_do_and_is_the_same_whatever_the_order() -> None:
    acme, beta = TenantId("tn_1"), TenantId("tn_2")
    shares = {acme: CacheShare(2.0, 5, None), beta: CacheShare(1.0, 0, 7)}

    table = owner_table(ShareTable(9, shares))

    assert table.version == 9
    assert set(table.shares) == {OwnerShare(owner_id(acme), 2.0, 5, None), OwnerShare(owner_id(beta), 1.0, 0, 7)}
    assert table == owner_table(ShareTable(9, dict(reversed(shares.items()))))


def test_the_largest_table_that_the_store_allows_is_one_that_engine_and_daemon_take() -> None:
    shares = {TenantId(f"tn_{number}"): CacheShare(100.0, 0, MAX_CACHE_BYTES) for number in range(MAX_CACHE_SHARES)}

    assert MAX_CACHE_SHARES <= MAX_OWNERS
    assert min(MAX_HOST_BYTES, MAX_SHARE) >= MAX_CACHE_BYTES
    assert len(TO_ENGINE.encode(owner_table(ShareTable(2**40, shares)))) < MAX_FRAME_BYTES


def tier(told: int, outcome: str | None, state: str = "ready") -> dict[str, Any]:
    return {"tier": {"state": state, "owners_version": told, "owners_outcome": outcome}}


@pytest.mark.parametrize(
    ("stats", "state"),
    [
        (None, "unknown"),
        ({"blocks_used": 0}, "unknown"),
        ({"tier": {"state": "none"}}, "in_force"),
        (tier(0, None, "absent"), "pending"),
        (tier(4, "taken"), "pending"),
        (tier(5, "taken"), "in_force"),
        (tier(5, "known"), "in_force"),
        (tier(6, "known"), "superseded"),
        (tier(5, "older"), "superseded"),
        (tier(5, "floors_exceed_capacity"), "refused"),
        (tier(4, "floors_exceed_capacity"), "pending"),
    ],
)
def test_the_engines_figures_tell_what_became_of_version_5(stats: dict[str, Any] | None, state: str) -> None:
    assert shares_state(5, stats) == state


def test_without_shares_there_is_nothing_to_tell() -> None:
    assert shares_state(0, None) == "even"

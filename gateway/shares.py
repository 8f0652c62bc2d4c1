"""What the engine is told of tenants' shares of the caches, and what its figures say became of that (kv-semantics 5.9).

The tenant store says who has which share, and its version; the engine forwards the table to the cache daemon, which may
refuse it. When to send a table is the shell's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from cached.keys import owner_id
from engine.protocol import OwnerShare, OwnerTable
from tenants.snapshot import ShareTable

SharesState = Literal["even", "unknown", "pending", "in_force", "refused", "superseded"]
SHARES_STATES: tuple[SharesState, ...] = ("even", "unknown", "pending", "in_force", "refused", "superseded")
"""even: nobody has a share of their own; pending: the host tier was not told yet; superseded: it keeps a newer table."""


def owner_table(table: ShareTable) -> OwnerTable:
    """The table as the engine takes it. Tenants that are not in it have weight 1, no floor and no ceiling there."""
    shares = (
        OwnerShare(owner_id(tenant_id), share.weight, share.floor_bytes, share.ceiling_bytes)
        for tenant_id, share in table.shares.items()
    )
    # In the order of owners, so that two gateways send one table in the same bytes.
    return OwnerTable(table.version, tuple(sorted(shares, key=lambda share: share.owner)))


def shares_state(version: int, stats: Mapping[str, Any] | None) -> SharesState:
    """What became of the table of that version, by the engine's figures; None: it gave none."""
    if version == 0:
        return "even"
    tier = None if stats is None else stats.get("tier")
    if not isinstance(tier, Mapping):
        return "unknown"
    if tier.get("state") == "none":
        return "in_force"  # On the device, and there is no other tier.
    told = tier.get("owners_version", 0)
    match tier.get("owners_outcome"):
        case "older":
            return "superseded"
        case "taken" | "known":
            return "in_force" if told == version else "superseded" if told > version else "pending"
        case "floors_exceed_capacity" | "invalid" if told == version:
            return "refused"
    return "pending"

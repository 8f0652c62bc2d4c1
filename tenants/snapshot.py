"""Whether a text is a good API key, and whose: decided from memory, without a query, in a few microseconds.

A snapshot is all that authentication needs of the store at one version of it. It never changes; the watcher puts a
newer one in its place. Reading the store and opening its secrets is left to `store`, the HTTP status to the gateway.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from tenants.keys import parse_key, secret_digest
from tenants.values import CacheShare, Identity, TenantId, has_expired

# Compared with when the public id is unknown, so that a guess at an id costs and takes what a wrong secret does.
_DUMMY_DIGEST = bytes(32)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A good key of an active tenant."""

    identity: Identity


@dataclass(frozen=True, slots=True)
class Denied:
    """No key, or not a good one. There is one kind only: whoever asks must not learn how near a guess was."""


@dataclass(frozen=True, slots=True)
class Suspended:
    """A good key of a tenant that is suspended; who holds it may be told so."""

    identity: Identity


Verdict = Accepted | Denied | Suspended

DENIED = Denied()


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One key that was not revoked, with the tenant it belongs to."""

    identity: Identity
    digest: bytes = field(repr=False)
    expires_at: float | None
    is_suspended: bool


@dataclass(frozen=True, slots=True)
class ShareTable:
    """The shares of all tenants that have one of their own, at one version; 0: nobody ever had one."""

    version: int = 0
    shares: Mapping[TenantId, CacheShare] = field(default_factory=dict)


NO_SHARES = ShareTable()


@dataclass(frozen=True, slots=True)
class TenantSnapshot:
    """The keys of all tenants by public id, and their shares, at one version of the store.

    `unreadable_tenants` names tenants whose salt secret did not open: their keys are left out, because without the
    salt there is no safe answer, and everybody else is served.
    """

    version: int
    pepper: bytes = field(repr=False)
    keys: Mapping[str, KeyRecord] = field(repr=False)
    unreadable_tenants: tuple[str, ...] = ()
    shares: ShareTable = NO_SHARES

    def authenticate(self, text: str, now: float) -> Verdict:
        """Who presents `text` at `now` (Unix seconds)."""
        parsed = parse_key(text)
        if parsed is None:
            return DENIED
        record = self.keys.get(parsed.public_id)
        digest = secret_digest(self.pepper, parsed.secret)
        # Digest and comparison come before every other question: nothing is answered faster for want of a match.
        is_match = hmac.compare_digest(digest, _DUMMY_DIGEST if record is None else record.digest)
        if record is None or not is_match or has_expired(record.expires_at, now):
            return DENIED
        return Suspended(record.identity) if record.is_suspended else Accepted(record.identity)

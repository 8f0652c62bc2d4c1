"""The nouns of the tenant store and the rules for their names: tenants, API keys, and who a request turned out to be.

Holds no way to change any of them; the store does that. What is secret is kept out of every repr.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NewType

from tenants.errors import InvalidValue

TenantId = NewType("TenantId", str)
"""Made once and never used again, not even by a later tenant of the same name."""

TenantState = Literal["active", "suspended"]
KeyState = Literal["active", "expired", "revoked"]

SALT_SECRET_BYTES = 32
FIRST_SALT_EPOCH = 1
MAX_LABEL_CHARS = 100
MIN_CACHE_WEIGHT, MAX_CACHE_WEIGHT = 0.01, 100.0
MAX_CACHE_BYTES = 2**60
"""More than any tier has; bounds what is stored and added up."""
MAX_CACHE_SHARES = 4096
"""Most tenants with a share of their own; all of them travel in one message."""

_TENANT_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """What an operator has decided about how long a tenant's blocks stay; None: nothing decided.

    `default` is a `kv_cache_retention_config` as JSON. It is opaque here, as is which ceilings make sense: what a
    configuration may say is known to the cache, of which this package knows nothing. Whoever changes rules brings a
    check along (`Store.change_retention`), whoever uses them reads them by the same rules.
    """

    default: str | None = None
    max_priority: int | None = None
    max_duration_s: float | None = None


NO_RETENTION_RULES = RetentionRules()


@dataclass(frozen=True, slots=True)
class CacheShare:
    """What a tenant may count on of the caches that all tenants use.

    `weight` is its part of the device's blocks beside the others'. Of the host tier `floor_bytes` are never given to
    others, and above `ceiling_bytes` (None: all that is there) the tenant never goes. What floor and ceiling amount to in
    blocks is the tier's to say, which knows how large one is.
    """

    weight: float = 1.0
    floor_bytes: int = 0
    ceiling_bytes: int | None = None


EVEN_SHARE = CacheShare()


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whoever has a cache of their own; the salt hangs here and not on a key, so that a new key keeps the cache."""

    id: TenantId
    name: str
    state: TenantState
    salt_epoch: int
    created_at: float
    retention: RetentionRules = NO_RETENTION_RULES
    share: CacheShare = EVEN_SHARE


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What may be shown of a key: everything but its secret, which nobody has once it was handed out."""

    public_id: str
    tenant_id: TenantId
    label: str
    created_at: float
    expires_at: float | None
    revoked_at: float | None

    @property
    def state(self) -> Literal["active", "revoked"]:
        """What was decided about the key; `state_at` also knows what time has done to it."""
        return "active" if self.revoked_at is None else "revoked"

    def state_at(self, now: float) -> KeyState:
        """What an answer to a request with this key would be based on; a revoked key stays revoked after its end."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if has_expired(self.expires_at, now) else "active"


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose request this is, what its salt is derived from, and what its blocks may ask for."""

    tenant_id: TenantId
    tenant_name: str
    public_id: str
    salt_secret: bytes = field(repr=False)
    salt_epoch: int
    retention: RetentionRules = NO_RETENTION_RULES


def has_expired(expires_at: float | None, now: float) -> bool:
    """A key works up to the instant before its end, and not at it."""
    return expires_at is not None and now >= expires_at


def is_tenant_name(name: str) -> bool:
    """Whether `name` could be a tenant's: usable in a file name, a metric label and a shell without quoting."""
    return _TENANT_NAME.fullmatch(name) is not None


def checked_tenant_name(name: str) -> str:
    """`name` itself; raises InvalidValue with the rule when no tenant may have it."""
    if not is_tenant_name(name):
        raise InvalidValue(
            "this tenant name is not allowed: use 1 to 63 of the characters a-z, 0-9 and '-', "
            "beginning with a letter or a digit, for example 'acme-2'"
        )
    return name


def checked_label(label: str) -> str:
    """`label` itself; raises InvalidValue when it is long, or would break a line, a column or a terminal."""
    if len(label) > MAX_LABEL_CHARS:
        raise InvalidValue(f"the label has {len(label)} characters; at most {MAX_LABEL_CHARS} are allowed")
    if not label.isprintable():
        raise InvalidValue("the label holds a tab, a line break or another character that does not print; leave it out")
    return label


def checked_share(share: CacheShare) -> CacheShare:
    """`share` itself; raises InvalidValue with the value and the rule when no tenant may have it."""
    if not (math.isfinite(share.weight) and MIN_CACHE_WEIGHT <= share.weight <= MAX_CACHE_WEIGHT):
        raise InvalidValue(
            f"the weight is {share.weight:g}; it must be from {MIN_CACHE_WEIGHT:g} to {MAX_CACHE_WEIGHT:g} (1 is everybody's)"
        )
    for name, size in (("floor", share.floor_bytes), ("ceiling", share.ceiling_bytes)):
        if size is not None and not 0 <= size <= MAX_CACHE_BYTES:
            raise InvalidValue(f"the {name} is {size} bytes; it must be from 0 to 1 EiB")
    if share.ceiling_bytes is not None and share.floor_bytes > share.ceiling_bytes:
        raise InvalidValue(
            f"the floor ({share.floor_bytes} bytes) is above the ceiling ({share.ceiling_bytes} bytes); "
            "lower the floor, or raise the ceiling in the same command"
        )
    return share


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """The name that somebody who typed `name` may have meant, if one is near enough to say so."""
    matches = difflib.get_close_matches(name.lower(), list(names), n=1, cutoff=0.6)
    return matches[0] if matches else None

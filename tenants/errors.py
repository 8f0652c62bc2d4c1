"""The errors of the tenant store; each says what happened, to which object, and what to do about it.

The type says whose fault it was: `InvalidValue`, `TenantNotFound`, `KeyNotFound` and `TenantExists` are the asker's,
`MasterKeyError` and `AccessDenied` are the operator's to mend, `StoreError` is the world's. No message ever holds a
secret, a digest or a parameter of a query.
"""

from __future__ import annotations

from typing import ClassVar


class TenantsError(Exception):
    """Something about tenants, their keys or their secrets went wrong."""

    retryable: ClassVar[bool] = False


class InvalidValue(TenantsError, ValueError):
    """A name, a label, a date or a subject breaks its rule; the message tells the rule."""


class TenantNotFound(TenantsError):
    """There is no tenant of that name; `suggestion` is the nearest one there is."""

    def __init__(self, message: str, suggestion: str | None = None) -> None:
        super().__init__(message)
        self.suggestion = suggestion


class KeyNotFound(TenantsError):
    """There is no key of that public id; `halocline key list` shows those there are."""


class TenantExists(TenantsError):
    """There is a tenant of that name already; names are unique."""


class AccessDenied(TenantsError):
    """This user may not read or write a file that is needed, or others may who should not."""


class MasterKeyError(TenantsError):
    """The master key file cannot be used; the message names the file and the remedy."""


class WrongMasterKey(MasterKeyError):
    """The master key is not the one under which the store was sealed."""


class SealBroken(TenantsError):
    """A sealed record did not open: it was altered or moved, or sealed under another master key."""


class StoreError(TenantsError):
    """The tenant store could not answer."""


class StoreBusy(StoreError):
    """Another process held the store's lock for longer than the time allowed; try again."""

    retryable = True


class StoreFull(StoreError):
    """There is no room to write; nothing was changed."""

    retryable = True


class StoreUnavailable(StoreError):
    """The store cannot be reached or opened."""

    retryable = True


class StoreCorrupt(StoreError):
    """The store's file is damaged, or is no tenant store."""


class StoreTooNew(StoreError):
    """A newer version of Halocline has changed the store's schema; migrations only go forward."""

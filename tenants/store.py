"""Tenants and their keys in the database: each verb is one transaction, and all SQL there is lies in this module.

Every change raises the store's version, by which watchers in other processes notice it. Refused calls change nothing.
The verbs take names, for people; what the gateway needs comes out whole, as a snapshot, and is asked there.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import sqlalchemy as sa

from tenants.database import Database
from tenants.errors import InvalidValue, KeyNotFound, MasterKeyError, SealBroken, TenantExists, TenantNotFound
from tenants.keys import KEY_RANDOM_BYTES, base62, generate_key, is_public_id, secret_digest
from tenants.schema import api_keys, check_master_key, prepare, read_schema_version, store_state, tenants
from tenants.secrets import Vault, load_or_create_master_key
from tenants.snapshot import KeyRecord, ShareTable, TenantSnapshot
from tenants.values import (
    EVEN_SHARE,
    FIRST_SALT_EPOCH,
    MAX_CACHE_SHARES,
    SALT_SECRET_BYTES,
    ApiKey,
    CacheShare,
    Identity,
    RetentionRules,
    Tenant,
    TenantId,
    TenantState,
    checked_label,
    checked_share,
    checked_tenant_name,
    has_expired,
    is_tenant_name,
    nearest_name,
)

BUSY_TIMEOUT_S = 5.0


def open_store(url: str, master_key_file: Path, busy_timeout_s: float = BUSY_TIMEOUT_S) -> Store:
    """The store at `url` with the master key in `master_key_file`; both are made on first use.

    A store that exists while its master key does not is refused: a new key could open nothing in it.
    """
    # Looked for again behind the store: another process may have made both between the two looks, the key first.
    if _is_absent(master_key_file) and _has_been_made(url, busy_timeout_s) and _is_absent(master_key_file):
        raise MasterKeyError(
            f"the master key {master_key_file} is missing, but the tenant store that needs it exists; restore the key "
            "from a backup (HALOCLINE_MASTER_KEY_FILE names its file), or move the store away and begin anew"
        )
    return Store(url, Vault(load_or_create_master_key(master_key_file)), busy_timeout_s)


def _is_absent(path: Path) -> bool:
    # Whatever else is wrong with the path is for `load_or_create_master_key` to say.
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _has_been_made(url: str, busy_timeout_s: float) -> bool:
    with contextlib.closing(Database(url, busy_timeout_s)) as database:
        return not database.file_is_missing() and read_schema_version(database) > 0


class Store:
    """The tenant store; safe to use from several threads, and from several processes at once."""

    def __init__(self, url: str, vault: Vault, busy_timeout_s: float = BUSY_TIMEOUT_S) -> None:
        self._database = Database(url, busy_timeout_s)
        self._vault = vault
        prepare(self._database, vault)

    def __repr__(self) -> str:
        return f"Store({self._database.label!r})"

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._database.close()

    # Tenants.

    def create_tenant(self, name: str, now: float) -> Tenant:
        """A new, active tenant with an id and a salt secret that no tenant had before, of whatever name."""
        checked_tenant_name(name)
        tenant_id = TenantId("tn_" + base62(int.from_bytes(secrets.token_bytes(32), "big"), 22))
        sealed = self._vault.seal(secrets.token_bytes(SALT_SECRET_BYTES), "tenants", "salt_secret", tenant_id)
        with self._changing() as connection:
            if connection.execute(sa.select(tenants.c.id).where(tenants.c.name == name)).first():
                raise TenantExists(f"there is a tenant named '{name}' already; `halocline tenant show {name}` shows it")
            row: dict[str, Any] = {"id": tenant_id, "name": name, "state": "active", "created_at": now}
            connection.execute(tenants.insert().values(**row, salt_epoch=FIRST_SALT_EPOCH, salt_secret=sealed))
        return Tenant(tenant_id, name, "active", FIRST_SALT_EPOCH, now)

    def list_tenants(self) -> list[Tenant]:
        """All tenants, by name."""
        with self._database.reading() as connection:
            # Sorted here: databases differ about the order of '-' and digits.
            return sorted(map(_tenant, connection.execute(_SELECT_TENANTS)), key=lambda tenant: tenant.name)

    def get_tenant(self, name: str) -> Tenant:
        """The tenant of that name; raises TenantNotFound with the nearest name there is."""
        with self._database.reading() as connection:
            return _find_tenant(connection, name)

    def suspend_tenant(self, name: str) -> Tenant:
        """Answer the tenant's keys with 403 from now on; keys, salt and cache stay. Twice is as good as once."""
        return self._set_state(name, "suspended")

    def resume_tenant(self, name: str) -> Tenant:
        """Undo a suspension; a tenant that is active stays so."""
        return self._set_state(name, "active")

    def delete_tenant(self, name: str) -> Tenant:
        """Remove the tenant, its keys and its salt secret for good; its cached blocks can never be found again."""
        with self._changing() as connection:
            tenant = _find_tenant(connection, name)
            # Said here and not left to the schema's cascade alone: what must be gone is named.
            connection.execute(api_keys.delete().where(api_keys.c.tenant_id == tenant.id))
            connection.execute(tenants.delete().where(tenants.c.id == tenant.id))
            if tenant.share != EVEN_SHARE:
                connection.execute(store_state.update().values(shares_version=store_state.c.shares_version + 1))
        self._database.forget_deleted()
        return tenant

    def change_retention(self, name: str, change: Callable[[RetentionRules], RetentionRules]) -> Tenant:
        """Give the tenant the rules that `change` makes of those it has.

        What rules are legal is for `change` to say, by raising: then nothing is changed. Both happen in one
        transaction, so of two that change different rules at once neither is lost.
        """
        with self._changing() as connection:
            tenant = _find_tenant(connection, name)
            rules = change(tenant.retention)
            row: dict[str, Any] = {"default_retention": rules.default, "max_priority": rules.max_priority}
            row["max_duration_s"] = rules.max_duration_s
            connection.execute(tenants.update().where(tenants.c.id == tenant.id).values(**row))
        return replace(tenant, retention=rules)

    def change_share(self, name: str, change: Callable[[CacheShare], CacheShare], now: float) -> Tenant:
        """Give the tenant the share of the caches that `change` makes of its present one; raises InvalidValue.

        The shares' version follows the clock: cache daemons keep the newest they ever saw, also over the life of this
        store, and one that was made anew, or restored from a backup, must not begin below it.
        """
        with self._changing() as connection:
            tenant = _find_tenant(connection, name)
            share = checked_share(change(tenant.share))
            row: dict[str, Any] = dict.fromkeys(("cache_weight", "cache_floor_bytes", "cache_ceiling_bytes"))
            if share != EVEN_SHARE:
                row = {"cache_weight": share.weight, "cache_floor_bytes": share.floor_bytes}
                row["cache_ceiling_bytes"] = share.ceiling_bytes
            connection.execute(tenants.update().where(tenants.c.id == tenant.id).values(**row))
            if connection.execute(_COUNT_SHARES).scalar_one() > MAX_CACHE_SHARES:
                raise InvalidValue(
                    f"{MAX_CACHE_SHARES} tenants have a share of their own already, which is the most there may be; "
                    "`halocline tenant share OTHER --clear` frees one"
                )
            version = max(_shares_version(connection) + 1, int(now))
            connection.execute(store_state.update().values(shares_version=version))
        return replace(tenant, share=share)

    def _set_state(self, name: str, state: TenantState) -> Tenant:
        with self._changing() as connection:
            tenant = _find_tenant(connection, name)
            connection.execute(tenants.update().where(tenants.c.id == tenant.id).values(state=state))
        return replace(tenant, state=state)

    # Keys.

    def create_key(self, tenant: str, label: str, expires_at: float | None, now: float) -> str:
        """The text of a new key for the tenant of that name. It is handed out here and never again."""
        checked_label(label)
        if expires_at is not None and has_expired(expires_at, now):
            raise InvalidValue("the key would have expired already; give a time in the future")
        new = generate_key(secrets.token_bytes(KEY_RANDOM_BYTES))
        with self._changing() as connection:
            row: dict[str, Any] = {"public_id": new.public_id, "tenant_id": _find_tenant(connection, tenant).id}
            row |= {"label": label, "digest": secret_digest(self._vault.pepper, new.secret)}
            connection.execute(api_keys.insert().values(**row, created_at=now, expires_at=expires_at, revoked_at=None))
        return new.text

    def list_keys(self, tenant: str | None = None) -> list[ApiKey]:
        """The keys of one tenant or of all, oldest first; revoked and expired ones too."""
        query = _SELECT_KEYS.order_by(api_keys.c.created_at, api_keys.c.public_id)
        with self._database.reading() as connection:
            if tenant is not None:
                query = query.where(api_keys.c.tenant_id == _find_tenant(connection, tenant).id)
            return [_api_key(row) for row in connection.execute(query)]

    def get_key(self, public_id: str) -> ApiKey:
        """The key of that public id; raises KeyNotFound."""
        with self._database.reading() as connection:
            return _find_key(connection, public_id)

    def revoke_key(self, public_id: str, now: float) -> ApiKey:
        """Make a key useless for ever; revoking it again changes nothing, the first time stands."""
        with self._changing() as connection:
            _find_key(connection, public_id)
            is_this_and_live = (api_keys.c.public_id == public_id) & api_keys.c.revoked_at.is_(None)
            connection.execute(api_keys.update().where(is_this_and_live).values(revoked_at=now))
            return _find_key(connection, public_id)

    # What watchers and the gateway read.

    def version(self) -> int:
        """A number that every change raises; one row, so asking often is cheap."""
        with self._database.reading() as connection:
            return _version(connection)

    def shares(self) -> ShareTable:
        """The shares of all tenants that have one of their own, with their version."""
        with self._database.reading() as connection:
            return _shares(connection)

    def snapshot(self) -> TenantSnapshot:
        """All that authentication needs, read at once.

        The version is read before the keys: on a server a change between the two makes the snapshot newer than it
        says, and the watcher reads again; the other way round it would miss the change.
        """
        with self._database.reading() as connection:
            check_master_key(connection, self._database, self._vault)
            version = _version(connection)
            rows = connection.execute(_SELECT_SNAPSHOT).all()
            shares = _shares(connection)
        opened: dict[str, bytes | None] = {}
        # One for all keys of a tenant: a default may have some kilobytes.
        rules_of: dict[str, RetentionRules] = {}
        unreadable: list[str] = []
        keys: dict[str, KeyRecord] = {}
        # Unpacked, because looking columns up by name is slower, and revocations wait for this loop.
        for public_id, digest, expires_at, tenant_id, name, state, salt_epoch, sealed, *rules in rows:
            if tenant_id not in opened:
                opened[tenant_id] = self._open_salt_secret(tenant_id, sealed)
                rules_of[tenant_id] = RetentionRules(*rules)
                if opened[tenant_id] is None:
                    unreadable.append(name)
            salt_secret = opened[tenant_id]
            if salt_secret is not None:
                identity = Identity(tenant_id, name, public_id, salt_secret, salt_epoch, rules_of[tenant_id])
                keys[public_id] = KeyRecord(identity, digest, expires_at, is_suspended=state == "suspended")
        return TenantSnapshot(version, self._vault.pepper, keys, tuple(sorted(unreadable)), shares)

    def _open_salt_secret(self, tenant_id: TenantId, sealed: bytes) -> bytes | None:
        """The salt secret, or None when it does not open: that tenant is denied, and nobody else."""
        try:
            return self._vault.open(sealed, "tenants", "salt_secret", tenant_id)
        except SealBroken:
            return None

    # Rules.

    @contextlib.contextmanager
    def _changing(self) -> Iterator[sa.Connection]:
        """The one door for changes. The version comes first: its row is the lock on which all writers queue."""
        with self._database.writing() as connection:
            connection.execute(store_state.update().values(version=store_state.c.version + 1))
            check_master_key(connection, self._database, self._vault)
            yield connection

    def check_invariants(self) -> None:
        """Slow and complete: the file is sound, every key has its tenant, every salt secret opens and is unique."""
        problems = self._database.integrity_problems()
        assert not problems, problems
        with self._database.reading() as connection:
            sealed = {row.id: row.salt_secret for row in connection.execute(sa.select(tenants))}
            keys = connection.execute(sa.select(api_keys)).all()
        opened = [self._vault.open(secret, "tenants", "salt_secret", row_id) for row_id, secret in sealed.items()]
        assert all(len(secret) == SALT_SECRET_BYTES for secret in opened)
        assert len(set(opened)) == len(opened), "two tenants share a salt secret"
        assert all(key.tenant_id in sealed for key in keys), "a key without its tenant"
        assert all(len(key.digest) == 32 for key in keys)


# In the order of `RetentionRules`.
_RULES = (tenants.c.default_retention, tenants.c.max_priority, tenants.c.max_duration_s)

_SHARE = (tenants.c.cache_weight, tenants.c.cache_floor_bytes, tenants.c.cache_ceiling_bytes)
_HAS_SHARE = tenants.c.cache_weight.is_not(None)

_SELECT_TENANTS = sa.select(
    tenants.c.id, tenants.c.name, tenants.c.state, tenants.c.salt_epoch, tenants.c.created_at, *_RULES, *_SHARE
)

_COUNT_SHARES = sa.select(sa.func.count()).select_from(tenants).where(_HAS_SHARE)

# One statement, so that a version names one table on every database: two gateways must never send two of one version.
_SELECT_SHARES = sa.select(store_state.c.shares_version, tenants.c.id, *_SHARE).join_from(
    store_state, tenants, _HAS_SHARE, isouter=True
)

# No digest: what is listed must not hold one.
_SELECT_KEYS = sa.select(*(column for column in api_keys.c if column.name != "digest"))

# One statement, so that tenants and keys are of one moment on every database. Revoked keys are simply not there.
_SELECT_SNAPSHOT = (
    sa.select(api_keys.c.public_id, api_keys.c.digest, api_keys.c.expires_at)
    .add_columns(tenants.c.id, tenants.c.name, tenants.c.state, tenants.c.salt_epoch, tenants.c.salt_secret)
    .add_columns(*_RULES)
    .join_from(api_keys, tenants)
    .where(api_keys.c.revoked_at.is_(None))
)


def _version(connection: sa.Connection) -> int:
    return int(connection.execute(sa.select(store_state.c.version)).scalar_one())


def _shares_version(connection: sa.Connection) -> int:
    return int(connection.execute(sa.select(store_state.c.shares_version)).scalar_one())


def _shares(connection: sa.Connection) -> ShareTable:
    rows = connection.execute(_SELECT_SHARES).all()
    return ShareTable(rows[0].shares_version, {row.id: _share(row) for row in rows if row.id is not None})


def _find_tenant(connection: sa.Connection, name: str) -> Tenant:
    row = (
        connection.execute(_SELECT_TENANTS.where(tenants.c.name == name)).one_or_none()
        if is_tenant_name(name)
        else None
    )
    if row is not None:
        return _tenant(row)
    suggestion = nearest_name(name, connection.execute(sa.select(tenants.c.name)).scalars())
    # A text that cannot be a name is not repeated: it may be a key that was pasted into the wrong place.
    shown = f"named '{name}'" if is_tenant_name(name) else "of that name"
    hint = f"did you mean '{suggestion}'?" if suggestion else "`halocline tenant list` shows those there are"
    raise TenantNotFound(f"there is no tenant {shown}; {hint}", suggestion)


def _find_key(connection: sa.Connection, public_id: str) -> ApiKey:
    is_legal = is_public_id(public_id)
    row = connection.execute(_SELECT_KEYS.where(api_keys.c.public_id == public_id)).one_or_none() if is_legal else None
    if row is None:
        # Nor is a text repeated that cannot be a public id: it may be a secret.
        shown = f"with the public id {public_id}" if is_legal else "of that public id"
        raise KeyNotFound(f"there is no key {shown}; `halocline key list` shows those there are")
    return _api_key(row)


def _tenant(row: Any) -> Tenant:
    rules = RetentionRules(row.default_retention, row.max_priority, row.max_duration_s)
    return Tenant(row.id, row.name, row.state, row.salt_epoch, row.created_at, rules, _share(row))


def _share(row: Any) -> CacheShare:
    if row.cache_weight is None:
        return EVEN_SHARE
    return CacheShare(row.cache_weight, row.cache_floor_bytes, row.cache_ceiling_bytes)


def _api_key(row: Any) -> ApiKey:
    return ApiKey(row.public_id, row.tenant_id, row.label, row.created_at, row.expires_at, row.revoked_at)

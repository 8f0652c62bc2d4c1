"""The tables of the tenant store, and how a database comes to have them: made on first use, migrated only forward.

A new database gets the tables as they stand here; an older one is brought to them step by step. A change of schema
changes the tables, adds one function to `_STEPS` and never edits an earlier one; a test holds both ways to one result.
What is read from the tables and written to them is the store's.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import sqlalchemy as sa

from tenants.database import Database
from tenants.errors import SealBroken, StoreCorrupt, StoreTooNew, WrongMasterKey
from tenants.secrets import Vault

metadata = sa.MetaData()

store_state = sa.Table(
    "store_state",
    metadata,
    sa.Column("id", sa.Integer, sa.CheckConstraint("id = 1"), primary_key=True, autoincrement=False),
    sa.Column("schema_version", sa.Integer, nullable=False),
    # Raised by every change, first thing in its transaction: watchers compare it, and writers queue on its row.
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("store_id", sa.Text, nullable=False),
    # Sealed at birth: opens under the right master key only, so a wrong one is found before it does harm.
    sa.Column("master_key_check", sa.LargeBinary, nullable=False),
    # Raised by every change of a share, and by nothing else: the version of the table that cache daemons keep.
    sa.Column("shares_version", sa.BigInteger, nullable=False, server_default="0"),
)

tenants = sa.Table(
    "tenants",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("state", sa.Text, sa.CheckConstraint("state IN ('active', 'suspended')"), nullable=False),
    sa.Column("salt_epoch", sa.BigInteger, nullable=False),
    sa.Column("salt_secret", sa.LargeBinary, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    # All three null: nothing decided. The first is JSON that only its reader understands (`values.RetentionRules`).
    sa.Column("default_retention", sa.Text),
    sa.Column("max_priority", sa.Integer),
    sa.Column("max_duration_s", sa.Double),
    # All three null: an even share (`values.CacheShare`); a null ceiling beside others: no ceiling.
    sa.Column("cache_weight", sa.Double),
    sa.Column("cache_floor_bytes", sa.BigInteger),
    sa.Column("cache_ceiling_bytes", sa.BigInteger),
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("public_id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False, index=True),
    sa.Column("label", sa.Text, nullable=False),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("expires_at", sa.Double),
    sa.Column("revoked_at", sa.Double),
)


def _add_retention(connection: sa.Connection) -> None:
    """From schema 1 to 2: tenants may have retention rules; those that are there have none."""
    for name, kind in (
        ("default_retention", sa.Text()),
        ("max_priority", sa.Integer()),
        ("max_duration_s", sa.Double()),
    ):
        connection.exec_driver_sql(f"ALTER TABLE tenants ADD COLUMN {name} {kind.compile(connection.dialect)}")


def _add_shares(connection: sa.Connection) -> None:
    """From schema 2 to 3: tenants may have a share of the caches of their own; those that are there have an even one."""
    for name, kind in (
        ("cache_weight", sa.Double()),
        ("cache_floor_bytes", sa.BigInteger()),
        ("cache_ceiling_bytes", sa.BigInteger()),
    ):
        connection.exec_driver_sql(f"ALTER TABLE tenants ADD COLUMN {name} {kind.compile(connection.dialect)}")
    connection.exec_driver_sql("ALTER TABLE store_state ADD COLUMN shares_version BIGINT DEFAULT '0' NOT NULL")


_STEPS: tuple[Callable[[sa.Connection], None], ...] = (_add_retention, _add_shares)
SCHEMA_VERSION = 1 + len(_STEPS)

_CHECK_TEXT = b"halocline master key check"


def prepare(database: Database, vault: Vault) -> None:
    """Bring `database` to this schema, making it when it is empty, and check that `vault` is the one it knows."""
    database.create_file()
    if read_schema_version(database) != SCHEMA_VERSION:
        with database.migrating() as connection:
            _migrate(connection, database, vault)
    with database.reading() as connection:
        check_master_key(connection, database, vault)


def read_schema_version(database: Database) -> int:
    """The schema that `database` has; 0 when it has none yet."""
    with database.reading() as connection:
        return _schema_version(connection, database)


def check_master_key(connection: sa.Connection, database: Database, vault: Vault) -> None:
    """Raise WrongMasterKey, naming both files, unless `vault` sealed this store."""
    row = connection.execute(sa.select(store_state.c.store_id, store_state.c.master_key_check)).one_or_none()
    if row is None:
        raise _lost_state(database)
    try:
        vault.open(row.master_key_check, "store_state", "master_key_check", row.store_id)
    except SealBroken as error:
        raise WrongMasterKey(
            f"the master key in {vault.origin} is not the one that the tenant store {database.label} was made with; "
            "put that key back (HALOCLINE_MASTER_KEY_FILE names its file). Without it every API key and salt in the "
            "store is lost: move the store away and create the tenants anew"
        ) from error


def _schema_version(connection: sa.Connection, database: Database) -> int:
    if not sa.inspect(connection).has_table(store_state.name):
        return 0
    version = connection.execute(sa.select(store_state.c.schema_version)).scalar_one_or_none()
    if version is None:
        # Never taken for a new store: that would adopt its tenants under whatever master key is at hand.
        raise _lost_state(database)
    return int(version)


def _lost_state(database: Database) -> StoreCorrupt:
    return StoreCorrupt(f"the tenant store {database.label} has lost its state row; restore it from a backup")


def _migrate(connection: sa.Connection, database: Database, vault: Vault) -> None:
    # Asked again under the lock: another process may have been faster.
    current = _schema_version(connection, database)
    if current > SCHEMA_VERSION:
        raise StoreTooNew(
            f"the tenant store {database.label} has schema {current}, this Halocline knows {SCHEMA_VERSION}; "
            "run the newer Halocline, or restore the store from before the upgrade"
        )
    if current == 0:
        metadata.create_all(connection)
        connection.execute(store_state.insert().values(**_first_state(vault)))
        return
    for step in _STEPS[current - 1 :]:
        step(connection)
    connection.execute(store_state.update().values(schema_version=SCHEMA_VERSION))


def _first_state(vault: Vault) -> dict[str, object]:
    store_id = secrets.token_hex(16)
    return {
        "id": 1,
        "schema_version": SCHEMA_VERSION,
        "version": 1,
        "store_id": store_id,
        "master_key_check": vault.seal(_CHECK_TEXT, "store_state", "master_key_check", store_id),
    }

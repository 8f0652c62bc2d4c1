"""What the store promises, on every database it can be kept in.

PostgreSQL takes part when HALOCLINE_TEST_POSTGRES_URL names an empty database that may be filled and emptied, and
psycopg is installed; it is skipped, visibly, otherwise.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tenants.errors import (
    InvalidValue,
    KeyNotFound,
    StoreBusy,
    StoreTooNew,
    TenantExists,
    TenantNotFound,
    WrongMasterKey,
)
from tenants.keys import parse_key
from tenants.secrets import Vault
from tenants.snapshot import DENIED, Accepted, Suspended
from tenants.store import Store
from tenants.values import CacheShare, RetentionRules
from tenants.watch import SnapshotWatcher

NOW = 1_000_000.0


def make_store(url: str, fill: bytes = b"m") -> Store:
    return Store(url, Vault(fill * 32))


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/tenants.db"
        return
    server = os.environ.get("HALOCLINE_TEST_POSTGRES_URL")
    if not server:
        pytest.skip("HALOCLINE_TEST_POSTGRES_URL names no PostgreSQL")
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    yield server
    _empty(server)


def _empty(url: str) -> None:
    import sqlalchemy as sa

    from tenants.schema import metadata

    engine = sa.create_engine(url)
    metadata.drop_all(engine)
    engine.dispose()


@pytest.fixture
def store(url: str):
    with make_store(url) as store:
        yield store
        store.check_invariants()


def test_a_tenant_and_its_keys_live_and_end_as_documented(store):
    tenant = store.create_tenant("acme", NOW)
    text = store.create_key("acme", "laptop", NOW + 100, NOW)
    public_id = parse_key(text).public_id

    assert isinstance(store.snapshot().authenticate(text, NOW), Accepted)
    assert store.snapshot().authenticate(text, NOW + 100) is DENIED
    store.suspend_tenant("acme")
    assert isinstance(store.snapshot().authenticate(text, NOW), Suspended)
    store.resume_tenant("acme")
    assert store.get_tenant("acme") == tenant
    assert store.revoke_key(public_id, NOW + 1).revoked_at == NOW + 1
    assert store.revoke_key(public_id, NOW + 2).revoked_at == NOW + 1
    assert store.snapshot().authenticate(text, NOW) is DENIED
    store.delete_tenant("acme")
    assert (store.list_tenants(), store.list_keys()) == ([], [])


def test_times_are_kept_to_the_microsecond(store):
    now = 1_900_000_000.123456

    assert store.create_tenant("acme", now) == store.get_tenant("acme")


def test_refusals_are_the_same_everywhere_and_change_nothing(store):
    store.create_tenant("acme", NOW)
    version = store.version()

    with pytest.raises(TenantExists):
        store.create_tenant("acme", NOW)
    with pytest.raises(TenantNotFound):
        store.create_key("nobody", "", None, NOW)
    with pytest.raises(TenantNotFound):
        store.get_tenant("a\0b")
    with pytest.raises(KeyNotFound):
        store.revoke_key("nonexistent0", NOW)
    with pytest.raises(KeyNotFound):
        store.revoke_key("a\0b", NOW)
    with pytest.raises(InvalidValue):
        store.create_key("acme", "", NOW - 1, NOW)

    assert store.version() == version


def test_names_are_told_apart_and_sorted_the_same_everywhere(store):
    for name in ("b", "a-1", "a", "a1", "a-0"):
        store.create_tenant(name, NOW)

    assert [tenant.name for tenant in store.list_tenants()] == ["a", "a-0", "a-1", "a1", "b"]


def test_a_change_through_one_store_is_followed_through_another(url, store):
    store.create_tenant("acme", NOW)
    text = store.create_key("acme", "", None, NOW)
    with make_store(url) as other:
        watcher = SnapshotWatcher(other)

        store.revoke_key(parse_key(text).public_id, NOW)

        assert watcher.check_now()
        assert watcher.current.authenticate(text, NOW) is DENIED


def test_stores_that_are_opened_first_at_the_same_time_agree(url):
    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(lambda _: make_store(url), range(4)))

    assert len({store.version() for store in stores}) == 1
    for number, store in enumerate(stores):
        store.create_tenant(f"tenant-{number}", NOW)
    assert len(stores[0].list_tenants()) == 4
    for store in stores:
        store.close()


def test_concurrent_writers_queue_and_lose_nothing(url, store):
    store.create_tenant("acme", NOW)
    version = store.version()

    def write(_: int) -> None:
        with make_store(url) as mine:
            for _turn in range(5):
                mine.create_key("acme", "", None, NOW)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))

    assert store.version() == version + 20
    assert len(store.list_keys("acme")) == 20


def test_a_tenant_made_twice_at_once_exists_once(url, store):
    def make(_: int) -> bool:
        with make_store(url) as mine:
            try:
                mine.create_tenant("acme", NOW)
            except TenantExists:
                return False
            return True

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(make, range(4)))

    assert sum(made) == 1


def test_another_master_key_is_refused(url, store):
    with pytest.raises(WrongMasterKey):
        make_store(url, fill=b"n")


def test_retention_rules_are_kept(store):
    store.create_tenant("acme", NOW)
    rules = RetentionRules('{"decode_priority": 1}', 60, 0.1)

    store.change_retention("acme", lambda _: rules)

    assert store.get_tenant("acme").retention == rules


def test_shares_of_the_caches_are_kept_to_the_byte_and_raise_their_own_version(store):
    tenant = store.create_tenant("acme", NOW)
    store.create_tenant("beta", NOW)
    share = CacheShare(0.1, 2**59 + 1, 2**60)

    store.change_share("acme", lambda _: share, NOW)
    first = store.shares()
    store.create_key("acme", "", None, NOW)

    assert store.get_tenant("acme").share == share
    assert (first.version, first.shares) == (NOW, {tenant.id: share})
    assert store.snapshot().shares == first
    with pytest.raises(InvalidValue):
        store.change_share("acme", lambda _: CacheShare(floor_bytes=2, ceiling_bytes=1), NOW)
    assert store.shares() == first
    store.delete_tenant("acme")
    assert (store.shares().version, store.shares().shares) == (NOW + 1, {})


def test_a_store_of_the_schema_before_shares_is_migrated(url, store):
    store.create_tenant("acme", NOW)
    with store._database.writing() as connection:
        for statement in (
            "ALTER TABLE tenants DROP COLUMN cache_weight",
            "ALTER TABLE tenants DROP COLUMN cache_floor_bytes",
            "ALTER TABLE tenants DROP COLUMN cache_ceiling_bytes",
            "ALTER TABLE store_state DROP COLUMN shares_version",
            "UPDATE store_state SET schema_version = 2",
        ):
            connection.exec_driver_sql(statement)

    with make_store(url) as again:
        again.change_share("acme", lambda _: CacheShare(2.0), NOW)
        assert again.get_tenant("acme").share == CacheShare(2.0)


def test_a_newer_schema_is_refused(url, store):
    with store._database.writing() as connection:
        connection.exec_driver_sql("UPDATE store_state SET schema_version = 99")

    with pytest.raises(StoreTooNew):
        make_store(url)


def test_a_writer_that_finds_the_store_locked_gives_up_and_says_so(url, store):
    impatient = Store(url, Vault(b"m" * 32), busy_timeout_s=0.05)
    with store._changing(), pytest.raises(StoreBusy, match="locked by another process"):
        impatient.create_tenant("acme", NOW)
    impatient.close()

    assert store.list_tenants() == []

"""The tenant store on SQLite: its verbs, its file, and what it says when something is wrong."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tenants.config import TenantsConfig
from tenants.errors import (
    AccessDenied,
    InvalidValue,
    KeyNotFound,
    MasterKeyError,
    StoreBusy,
    StoreCorrupt,
    StoreFull,
    StoreTooNew,
    StoreUnavailable,
    TenantExists,
    TenantNotFound,
    WrongMasterKey,
)
from tenants.keys import parse_key
from tenants.salts import derive_salt
from tenants.secrets import Vault
from tenants.snapshot import DENIED, NO_SHARES, Accepted, Suspended
from tenants.store import Store, open_store
from tenants.values import EVEN_SHARE, NO_RETENTION_RULES, CacheShare, RetentionRules

NOW = 1_000_000.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "tenants.db"


@pytest.fixture
def store(path: Path):
    with make_store(path) as store:
        yield store
        store.check_invariants()


def make_store(path: Path, *, fill: bytes = b"m", busy_timeout_s: float = 5.0) -> Store:
    return Store(f"sqlite:///{path}", Vault(fill * 32), busy_timeout_s)


def authenticate(store: Store, text: str, now: float = NOW):
    return store.snapshot().authenticate(text, now)


# Tenants.


def test_a_tenant_is_found_again_as_it_was_made(store):
    made = store.create_tenant("acme", NOW)

    assert store.get_tenant("acme") == made
    assert (made.name, made.state, made.salt_epoch, made.created_at) == ("acme", "active", 1, NOW)


def test_tenants_are_listed_by_name(store):
    for name in ("b", "a-1", "a", "a1"):
        store.create_tenant(name, NOW)

    assert [tenant.name for tenant in store.list_tenants()] == ["a", "a-1", "a1", "b"]


def test_a_second_tenant_of_one_name_is_refused_and_changes_nothing(store):
    made = store.create_tenant("acme", NOW)
    version = store.version()

    with pytest.raises(TenantExists, match="acme"):
        store.create_tenant("acme", NOW + 1)

    assert store.list_tenants() == [made]
    assert store.version() == version


@pytest.mark.parametrize(
    "name", ["", "-a", "A", "a_b", "a b", "a" * 64, "é", "a\n", "a/b", "../a", "a\0", "\ud800", "hl_live_x"]
)
def test_an_illegal_name_is_refused_with_the_rule(store, name):
    with pytest.raises(InvalidValue, match="1 to 63 of the characters"):
        store.create_tenant(name, NOW)


@pytest.mark.parametrize("name", ["a", "0", "a-", "a--b", "0-9", "a" * 63])
def test_a_legal_name_is_taken(store, name):
    assert store.create_tenant(name, NOW).name == name


def test_an_unknown_tenant_is_answered_with_the_nearest_name(store):
    store.create_tenant("production", NOW)

    with pytest.raises(TenantNotFound, match="did you mean 'production'") as caught:
        store.get_tenant("prodction")

    assert caught.value.suggestion == "production"


@pytest.mark.parametrize("verb", ["get_tenant", "suspend_tenant", "resume_tenant", "delete_tenant", "list_keys"])
@pytest.mark.parametrize("name", ["nobody", "\ud800", "a\0b", "x" * 10_000])
def test_every_verb_says_that_there_is_no_such_tenant(store, verb, name):
    with pytest.raises(TenantNotFound):
        getattr(store, verb)(name)


def test_a_key_in_the_place_of_a_name_is_not_repeated_in_the_error(store):
    store.create_tenant("acme", NOW)
    text = store.create_key("acme", "", None, NOW)

    with pytest.raises(TenantNotFound) as caught:
        store.get_tenant(text)

    assert parse_key(text).secret not in str(caught.value)


def test_a_suspended_tenant_is_told_so_and_resumes_with_the_same_keys_and_salt(store):
    store.create_tenant("acme", NOW)
    text = store.create_key("acme", "", None, NOW)
    before = authenticate(store, text)

    assert store.suspend_tenant("acme").state == "suspended"
    assert authenticate(store, text) == Suspended(before.identity)

    assert store.resume_tenant("acme").state == "active"
    assert authenticate(store, text) == before


def test_suspending_and_resuming_twice_is_as_good_as_once(store):
    store.create_tenant("acme", NOW)

    assert store.suspend_tenant("acme") == store.suspend_tenant("acme")
    assert store.resume_tenant("acme") == store.resume_tenant("acme") == store.get_tenant("acme")


def test_a_deleted_tenant_takes_its_keys_and_its_salt_secret_along(store, path):
    store.create_tenant("acme", NOW)
    text = store.create_key("acme", "", None, NOW)
    with contextlib.closing(sqlite3.connect(path)) as raw:
        sealed = raw.execute("SELECT salt_secret FROM tenants").fetchone()[0]

    store.delete_tenant("acme")

    assert authenticate(store, text) is DENIED
    assert store.list_keys() == []
    everything = b"".join(file.read_bytes() for file in path.parent.iterdir())
    assert sealed not in everything, "the sealed secret lingers in a free page or in the write-ahead log"


def test_a_tenant_made_again_has_another_id_and_another_salt_and_no_old_key(store):
    first = store.create_tenant("acme", NOW)
    old_text = store.create_key("acme", "", None, NOW)
    old = authenticate(store, old_text).identity

    store.delete_tenant("acme")
    second = store.create_tenant("acme", NOW)
    new = authenticate(store, store.create_key("acme", "", None, NOW)).identity

    assert second.id != first.id
    assert new.salt_secret != old.salt_secret
    assert authenticate(store, old_text) is DENIED
    salts = {derive_salt(one.salt_secret, one.tenant_id, one.salt_epoch, None) for one in (old, new)}
    assert len(salts) == 2


# Retention.


def test_retention_rules_travel_with_tenant_and_identity(store):
    store.create_tenant("acme", NOW)
    store.create_tenant("beta", NOW)
    text, other = store.create_key("acme", "", None, NOW), store.create_key("beta", "", None, NOW)
    before = store.version()

    changed = store.change_retention("acme", lambda rules: RetentionRules('{"decode_priority": 1}', 60, 0.5))

    rules = RetentionRules('{"decode_priority": 1}', 60, 0.5)
    assert changed.retention == store.get_tenant("acme").retention == rules
    assert store.version() > before
    assert authenticate(store, text).identity.retention == rules
    assert authenticate(store, other).identity.retention == NO_RETENTION_RULES
    assert store.suspend_tenant("acme").retention == rules


def test_a_refused_change_of_rules_changes_nothing(store):
    store.create_tenant("acme", NOW)
    store.change_retention("acme", lambda rules: RetentionRules(max_priority=60))
    before = store.version()

    def refuse(rules: RetentionRules) -> RetentionRules:
        assert rules.max_priority == 60
        raise InvalidValue("no")

    with pytest.raises(InvalidValue, match="no"):
        store.change_retention("acme", refuse)
    with pytest.raises(TenantNotFound):
        store.change_retention("acne", lambda rules: rules)

    assert store.version() == before
    assert store.get_tenant("acme").retention == RetentionRules(max_priority=60)


# Keys.


def test_a_new_key_works_and_its_secret_is_nowhere_in_the_files(store, path):
    tenant = store.create_tenant("acme", NOW)
    text = store.create_key("acme", "laptop", None, NOW)

    verdict = authenticate(store, text)

    assert isinstance(verdict, Accepted)
    assert (verdict.identity.tenant_id, verdict.identity.tenant_name) == (tenant.id, "acme")
    everything = b"".join(file.read_bytes() for file in path.parent.iterdir())
    assert parse_key(text).secret.encode() not in everything
    assert verdict.identity.salt_secret not in everything


def test_keys_of_one_tenant_share_its_salt(store):
    store.create_tenant("acme", NOW)
    one, other = (authenticate(store, store.create_key("acme", "", None, NOW)).identity for _ in range(2))

    assert one.public_id != other.public_id
    assert one.salt_secret == other.salt_secret


def test_a_revoked_key_is_denied_and_stays_listed(store):
    store.create_tenant("acme", NOW)
    text = store.create_key("acme", "old", None, NOW)
    other = store.create_key("acme", "new", None, NOW)
    public_id = parse_key(text).public_id

    revoked = store.revoke_key(public_id, NOW + 5)

    assert authenticate(store, text) is DENIED
    assert isinstance(authenticate(store, other), Accepted)
    assert (revoked.state, revoked.revoked_at) == ("revoked", NOW + 5)
    assert revoked in store.list_keys("acme")


def test_revoking_twice_keeps_the_first_time(store):
    store.create_tenant("acme", NOW)
    public_id = parse_key(store.create_key("acme", "", None, NOW)).public_id

    store.revoke_key(public_id, NOW + 5)

    assert store.revoke_key(public_id, NOW + 9).revoked_at == NOW + 5


@pytest.mark.parametrize("public_id", ["nonexistent0", "", "' OR 1=1 --", "a\0b"])
def test_an_unknown_key_is_not_found(store, public_id):
    with pytest.raises(KeyNotFound):
        store.revoke_key(public_id, NOW)


def test_a_key_stops_at_its_end(store):
    store.create_tenant("acme", NOW)
    text = store.create_key("acme", "", NOW + 10, NOW)

    assert isinstance(authenticate(store, text, NOW + 9.9), Accepted)
    assert authenticate(store, text, NOW + 10) is DENIED
    assert [key.state_at(NOW + 10) for key in store.list_keys()] == ["expired"]


def test_a_key_that_would_have_ended_already_is_refused(store):
    store.create_tenant("acme", NOW)

    with pytest.raises(InvalidValue, match="in the future"):
        store.create_key("acme", "", NOW, NOW)


@pytest.mark.parametrize("label", ["a\tb", "a\nb", "\x1b[31m", "x" * 101, "\ud800", "\u202e", "a\0"])
def test_a_label_that_would_spoil_a_list_is_refused(store, label):
    store.create_tenant("acme", NOW)

    with pytest.raises(InvalidValue, match="label"):
        store.create_key("acme", label, None, NOW)

    assert store.list_keys() == []


def test_keys_are_listed_of_one_tenant_or_of_all(store):
    for name in ("a", "b"):
        store.create_tenant(name, NOW)
    store.create_key("a", "first", None, NOW)
    store.create_key("b", "second", None, NOW + 1)

    assert [key.label for key in store.list_keys()] == ["first", "second"]
    assert [key.label for key in store.list_keys("b")] == ["second"]


# The version.


def test_every_change_raises_the_version_and_no_question_does(store):
    versions = [store.version()]
    changes = (
        lambda: store.create_tenant("acme", NOW),
        lambda: store.create_key("acme", "", None, NOW),
        lambda: store.suspend_tenant("acme"),
        lambda: store.resume_tenant("acme"),
        lambda: store.revoke_key(store.list_keys()[0].public_id, NOW),
        lambda: store.delete_tenant("acme"),
    )

    for change in changes:
        change()
        store.list_tenants(), store.list_keys(), store.snapshot()
        versions.append(store.version())

    assert versions == sorted(set(versions))


def test_a_snapshot_knows_its_version(store):
    store.create_tenant("acme", NOW)

    assert store.snapshot().version == store.version()


# The file.


def test_the_file_and_what_sqlite_puts_beside_it_are_private(path):
    before = os.umask(0)
    try:
        with make_store(path) as store:
            store.create_tenant("acme", NOW)
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    finally:
        os.umask(before)

    assert modes == {"tenants.db": 0o600, "tenants.db-wal": 0o600, "tenants.db-shm": 0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_file_that_others_can_read_is_refused_with_the_command_that_mends_it(path):
    make_store(path).close()
    path.chmod(0o644)

    with pytest.raises(AccessDenied, match=f"chmod 600 {path}"):
        make_store(path)


def test_a_store_outlives_its_process(path):
    with make_store(path) as store:
        store.create_tenant("acme", NOW)
        text = store.create_key("acme", "", None, NOW)

    with make_store(path) as store:
        assert isinstance(authenticate(store, text), Accepted)


def test_a_path_with_odd_characters_is_taken_literally(tmp_path):
    path = tmp_path / "a b%20#c?d=e" / "tenants.db"

    with make_store(path) as store:
        store.create_tenant("acme", NOW)

    assert path.exists()


def test_another_master_key_is_refused_at_the_door_with_both_files(path):
    make_store(path, fill=b"m").close()

    with pytest.raises(WrongMasterKey) as caught:
        make_store(path, fill=b"n")

    assert str(path) in str(caught.value)
    assert "HALOCLINE_MASTER_KEY_FILE" in str(caught.value)


def test_a_store_without_its_master_key_is_refused_and_no_new_key_is_made(tmp_path):
    url, master_key_file = f"sqlite:///{tmp_path}/state/tenants.db", tmp_path / "state" / "master.key"
    open_store(url, master_key_file).close()
    master_key_file.unlink()

    with pytest.raises(MasterKeyError, match=r"master\.key is missing.*restore"):
        open_store(url, master_key_file)

    assert not master_key_file.exists()


def test_opening_makes_both_files_on_first_use(tmp_path):
    url, master_key_file = f"sqlite:///{tmp_path}/state/tenants.db", tmp_path / "keys" / "master.key"

    with open_store(url, master_key_file) as store:
        store.create_tenant("acme", NOW)

    with open_store(url, master_key_file) as store:
        assert [tenant.name for tenant in store.list_tenants()] == ["acme"]


def test_a_locked_store_says_so_when_its_patience_is_over(path):
    with (
        make_store(path, busy_timeout_s=0.05) as store,
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as raw,
    ):
        raw.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy, match="locked by another process") as caught:
            store.create_tenant("acme", NOW)
        assert caught.value.retryable
        assert store.list_tenants() == [], "readers do not wait for a writer"
        raw.execute("ROLLBACK")

        assert store.create_tenant("acme", NOW).name == "acme"


def test_a_full_disk_says_so_and_changes_nothing(path, monkeypatch):
    with make_store(path) as store:
        store.create_tenant("acme", NOW)
        version = store.version()
    monkeypatch.setattr("tenants.database._PRAGMAS", ("foreign_keys=ON", "max_page_count=20"))

    with make_store(path) as small:
        with pytest.raises(StoreFull, match="make room"):
            fill_with_keys(small)
        written = small.version() - version

        assert len(small.list_keys()) == written > 0
        small.check_invariants()


def fill_with_keys(store: Store) -> None:
    for number in range(1000):
        store.create_key("acme", f"{number} " + "x" * 90, None, NOW)


def test_a_file_that_is_no_database_says_so(path):
    path.parent.mkdir(parents=True)
    path.write_bytes(b"this is a text and no database\n" * 1000)
    path.chmod(0o600)

    with pytest.raises(StoreCorrupt, match="not an SQLite database"):
        make_store(path)


def test_a_damaged_file_says_so(path):
    with make_store(path) as store:
        for number in range(200):
            store.create_tenant(f"tenant-{number}", NOW)
    content = bytearray(path.read_bytes())
    content[4096:] = b"\x5a" * (len(content) - 4096)
    path.write_bytes(content)

    with pytest.raises(StoreCorrupt, match="damaged; stop Halocline and restore"), make_store(path) as store:
        store.snapshot()


def test_a_store_that_is_removed_meanwhile_says_so_and_is_not_silently_made_anew(path):
    with make_store(path) as store:
        store.create_tenant("acme", NOW)
        shutil.rmtree(path.parent)

        for verb in (store.version, store.snapshot, store.list_tenants, lambda: store.create_tenant("b", NOW)):
            with pytest.raises(StoreUnavailable, match="is gone"):
                verb()

    assert not path.exists()


def test_a_store_restored_from_a_backup_is_the_one_that_answers(path):
    """Connections opened before would go on reading the file that was replaced."""
    backup = path.parent / "backup.db"
    with make_store(path) as store:
        store.create_tenant("acme", NOW)
        text = store.create_key("acme", "", None, NOW)
        store.revoke_key(parse_key(text).public_id, NOW)
    shutil.copy2(path, backup)

    with make_store(path) as store:
        late = store.create_key("acme", "", None, NOW)
        assert isinstance(authenticate(store, late), Accepted)

        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        backup.rename(path)

        assert authenticate(store, late) is DENIED
        assert authenticate(store, text) is DENIED


def make_first_schema(path: Path) -> None:
    """A store that an earlier Halocline made; its tenants are acme, with keys, and beta, suspended."""
    path.parent.mkdir(mode=0o700)
    script = (Path(__file__).parents[1] / "golden" / "tenants_schema_1.sql").read_text(encoding="utf-8")
    with contextlib.closing(sqlite3.connect(path)) as raw:
        raw.executescript(script)
    path.chmod(0o600)


def columns(path: Path) -> dict[str, set[tuple[str, str, int]]]:
    with contextlib.closing(sqlite3.connect(path)) as raw:
        tables = [name for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {table: {row[1:4] for row in raw.execute(f"PRAGMA table_info({table})")} for table in tables}


def test_a_store_of_the_first_schema_is_migrated_when_it_is_opened_and_loses_nothing(path):
    make_first_schema(path)

    with make_store(path) as store:
        store.check_invariants()
        assert [(one.name, one.state, one.retention) for one in store.list_tenants()] == [
            ("acme", "active", NO_RETENTION_RULES),
            ("beta", "suspended", NO_RETENTION_RULES),
        ]
        assert {one.share for one in store.list_tenants()} == {EVEN_SHARE}
        assert store.shares() == NO_SHARES
        assert [(key.label, key.state) for key in store.list_keys("acme")] == [("old", "active"), ("gone", "revoked")]
        (record,) = store.snapshot().keys.values()
        assert (record.identity.tenant_name, record.identity.retention) == ("acme", NO_RETENTION_RULES)
        assert store.change_retention("acme", lambda rules: RetentionRules("{}", 60, 1.5)).retention.max_priority == 60
        store.change_share("acme", lambda _: CacheShare(2.0, 10, None), NOW)

    with make_store(path) as again:
        assert again.get_tenant("acme").retention == RetentionRules("{}", 60, 1.5)
        assert again.get_tenant("acme").share == CacheShare(2.0, 10, None)


def test_a_migrated_store_and_a_new_one_have_the_same_tables(path, tmp_path):
    make_first_schema(path)
    make_store(path).close()
    make_store(tmp_path / "new" / "tenants.db").close()

    assert columns(path) == columns(tmp_path / "new" / "tenants.db")


def test_shares_have_a_version_of_their_own_that_no_later_store_falls_below(path, tmp_path):
    """Daemons keep the newest table they ever saw. A store that counted from 1 was made anew after a loss, and its shares
    were ignored as older than those of the store that was lost."""
    with make_store(path) as store:
        store.create_tenant("acme", NOW)
        store.create_key("acme", "", None, NOW)
        assert store.shares() == NO_SHARES
        store.change_share("acme", lambda share: replace(share, weight=2.0), NOW)
        store.change_share("acme", lambda share: replace(share, weight=3.0), NOW)
        lost = store.shares()
        assert lost.version == NOW + 1
        assert list(lost.shares.values()) == [CacheShare(3.0)]

    with make_store(tmp_path / "anew" / "tenants.db") as anew:
        anew.create_tenant("acme", NOW + 5)
        anew.change_share("acme", lambda share: replace(share, weight=4.0), NOW + 5)
        assert anew.shares().version > lost.version


def test_an_even_share_is_none_and_a_deleted_tenant_has_none(path):
    with make_store(path) as store:
        for name in ("acme", "beta", "gone"):
            store.create_tenant(name, NOW)
            store.change_share(name, lambda _: CacheShare(floor_bytes=5), NOW)
        versions = [store.shares().version]
        store.change_share("beta", lambda _: EVEN_SHARE, NOW)
        versions.append(store.shares().version)
        store.delete_tenant("gone")
        versions.append(store.shares().version)

        assert versions == sorted(set(versions))
        assert store.shares().shares == {store.get_tenant("acme").id: CacheShare(floor_bytes=5)}
        assert store.snapshot().shares == store.shares()


def test_no_more_tenants_have_a_share_of_their_own_than_travel_in_one_message(path, monkeypatch):
    monkeypatch.setattr("tenants.store.MAX_CACHE_SHARES", 1)
    with make_store(path) as store:
        for name in ("acme", "beta"):
            store.create_tenant(name, NOW)
        store.change_share("acme", lambda _: CacheShare(2.0), NOW)
        before = store.shares()

        with pytest.raises(InvalidValue, match="tenant share OTHER --clear"):
            store.change_share("beta", lambda _: CacheShare(2.0), NOW)

        assert store.shares() == before
        store.change_share("acme", lambda _: CacheShare(3.0), NOW)


def test_several_processes_may_open_an_old_store_at_once(path):
    make_first_schema(path)

    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(make_store, [path] * 4))

    for store in stores:
        assert store.get_tenant("acme").retention == NO_RETENTION_RULES
        store.close()


def test_a_newer_schema_is_refused_and_left_alone(path):
    make_store(path).close()
    with contextlib.closing(sqlite3.connect(path)) as raw:
        raw.execute("UPDATE store_state SET schema_version = 99")
        raw.commit()

    with pytest.raises(StoreTooNew, match="schema 99"):
        make_store(path)

    with contextlib.closing(sqlite3.connect(path)) as raw:
        assert raw.execute("SELECT schema_version FROM store_state").fetchone() == (99,)


def test_a_store_that_lost_its_state_is_not_taken_for_a_new_one(path):
    make_store(path).close()
    with contextlib.closing(sqlite3.connect(path)) as raw:
        raw.execute("DELETE FROM store_state")
        raw.commit()

    with pytest.raises(StoreCorrupt, match="lost its state row"):
        make_store(path, fill=b"n")


def test_no_secret_is_logged_however_much_is_logged(path, caplog):
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="sqlalchemy")

    with make_store(path) as store:
        store.create_tenant("acme", NOW)
        text = store.create_key("acme", "", None, NOW)
        identity = authenticate(store, text).identity

    assert "api_keys" in caplog.text, "the statements were logged, so that this test can fail"
    for secret in (parse_key(text).secret, repr(identity.salt_secret)[2:-1], identity.salt_secret.hex()):
        assert secret not in caplog.text


def test_one_unreadable_salt_secret_denies_its_tenant_and_nobody_else(path):
    with make_store(path) as store:
        texts = {}
        for name in ("good", "bad"):
            store.create_tenant(name, NOW)
            texts[name] = store.create_key(name, "", None, NOW)
        with contextlib.closing(sqlite3.connect(path)) as raw:
            # What somebody with write access might try: the salt of another tenant.
            raw.execute(
                "UPDATE tenants SET salt_secret = (SELECT salt_secret FROM tenants WHERE name='good') WHERE name='bad'"
            )
            raw.commit()

        snapshot = store.snapshot()

        assert isinstance(snapshot.authenticate(texts["good"], NOW), Accepted)
        assert snapshot.authenticate(texts["bad"], NOW) is DENIED
        assert snapshot.unreadable_tenants == ("bad",)


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///:memory:", "sqlite:///relative.db", "mysql://h/d", "nonsense", ""]
)
def test_a_url_that_cannot_serve_several_processes_is_refused(url):
    with pytest.raises(InvalidValue):
        Store(url, Vault(b"m" * 32))


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///:memory:", "sqlite:///relative.db", "mysql://h/d", "nonsense", ""]
)
def test_the_configuration_refuses_it_as_well_and_never_repeats_it(url):
    with pytest.raises(ValueError, match="legal are sqlite:////absolute"):
        TenantsConfig(url=url, master_key_file="/state/master.key")


@pytest.mark.parametrize("url", ["sqlite:////var/lib/halocline/tenants.db", "postgresql+psycopg://user:pw@host/db"])
def test_the_configuration_takes_the_two_kinds_of_store(url):
    assert TenantsConfig(url=url, master_key_file="/state/master.key").url == url


def test_a_server_that_does_not_answer_is_named_without_its_password():
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    with pytest.raises(StoreUnavailable) as caught:
        Store("postgresql+psycopg://user:topsecret@127.0.0.1:1/db?password=topsecret", Vault(b"m" * 32))

    assert "topsecret" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)

"""The watcher: follows the store, survives its absence, and says how old its knowledge is."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from tenants.errors import StoreBusy
from tenants.keys import parse_key
from tenants.secrets import Vault
from tenants.snapshot import DENIED, Accepted
from tenants.store import Store
from tenants.watch import SnapshotWatcher

NOW = 1_000_000.0


def make_store(path: Path) -> Store:
    return Store(f"sqlite:///{path}", Vault(b"m" * 32))


@pytest.fixture
def store(tmp_path: Path):
    with make_store(tmp_path / "tenants.db") as store:
        yield store


def wait_until(condition) -> None:
    """Returns when `condition` holds; the test's own timeout ends a wait for what never comes."""
    while not condition():
        threading.Event().wait(0.01)


def test_a_watcher_has_a_snapshot_from_the_first_moment(store):
    store.create_tenant("acme", NOW)
    text = store.create_key("acme", "", None, NOW)

    assert isinstance(SnapshotWatcher(store).current.authenticate(text, NOW), Accepted)


def test_a_watcher_that_cannot_read_the_store_is_not_made(store, tmp_path):
    (tmp_path / "tenants.db").chmod(0o644)

    with pytest.raises(Exception, match="chmod 600"):
        SnapshotWatcher(store)


def test_a_revocation_through_another_connection_is_followed(store, tmp_path):
    store.create_tenant("acme", NOW)
    text = store.create_key("acme", "", None, NOW)

    with make_store(tmp_path / "tenants.db") as other, SnapshotWatcher(store, interval_s=0.01) as watcher:
        other.revoke_key(parse_key(text).public_id, NOW)
        wait_until(lambda: watcher.current.authenticate(text, NOW) is DENIED)


def test_nothing_is_read_again_while_nothing_changes(store):
    watcher = SnapshotWatcher(store)
    first = watcher.current

    assert watcher.check_now()

    assert watcher.current is first
    assert watcher.statistics().num_loads == 1


def test_the_last_snapshot_stays_while_the_store_does_not_answer_and_the_trouble_is_told_once(
    store, monkeypatch, caplog
):
    store.create_tenant("acme", NOW)
    text = store.create_key("acme", "", None, NOW)
    watcher = SnapshotWatcher(store)
    caplog.set_level(logging.INFO, logger="tenants.watch")

    def no_answer():
        raise StoreBusy("the tenant store is locked by another process")

    with monkeypatch.context() as patch:
        patch.setattr(store, "version", no_answer)
        assert not watcher.check_now()
        assert not watcher.check_now()
        assert isinstance(watcher.current.authenticate(text, NOW), Accepted)
        assert watcher.statistics().num_failures == 2
        assert "locked" in watcher.statistics().error
        age_s = watcher.age_s

    assert len(caplog.records) == 1
    assert watcher.age_s >= age_s, "no success, so the age went on growing"

    store.revoke_key(parse_key(text).public_id, NOW)
    assert watcher.check_now()
    assert watcher.current.authenticate(text, NOW) is DENIED
    assert watcher.statistics().error is None
    assert "answers again" in caplog.text


def test_the_thread_survives_any_error(store, monkeypatch):
    failed = threading.Event()

    def broken():
        failed.set()
        raise RuntimeError("a driver's invention")

    with SnapshotWatcher(store, interval_s=0.01) as watcher:
        with monkeypatch.context() as patch:
            patch.setattr(store, "version", broken)
            assert failed.wait(60)
        store.create_tenant("acme", NOW)
        wait_until(lambda: watcher.current.version == store.version())


def test_an_error_of_unknown_kind_is_named_by_its_type_alone(store, monkeypatch, caplog):
    watcher = SnapshotWatcher(store)

    def leaky():
        raise RuntimeError("parameters: secret")

    monkeypatch.setattr(store, "version", leaky)
    watcher.check_now()

    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text


def test_a_stopped_watcher_leaves_no_thread_and_keeps_its_snapshot(store):
    watcher = SnapshotWatcher(store, interval_s=60).start()
    watcher.stop()

    assert not any(thread.name == "tenants-watch" for thread in threading.enumerate())
    assert watcher.current.version == store.version()


def test_a_key_that_was_just_made_is_known_after_a_look_that_was_asked_for(store, tmp_path):
    looked = threading.Event()
    with make_store(tmp_path / "tenants.db") as other, SnapshotWatcher(store, interval_s=3600) as watcher:
        other.create_tenant("acme", NOW)
        text = other.create_key("acme", "", None, NOW)

        begun = watcher.look_soon(looked.set)
        looked.wait()

        assert watcher.looks_begun == begun + 1
        assert isinstance(watcher.current.authenticate(text, NOW), Accepted)


def test_however_many_looks_are_asked_for_at_once_there_is_one(store):
    done: list[int] = []
    with SnapshotWatcher(store, interval_s=3600) as watcher:
        tags = {watcher.look_soon(lambda: done.append(watcher.looks_begun)) for _ in range(1000)}
        wait_until(lambda: len(done) == 1000)

        # Asked for within the gap before a look may begin: those who came before it share it.
        assert watcher.looks_begun <= len(tags) + 1
        assert max(done) - min(done) <= 1


def test_who_asks_while_a_look_is_under_way_gets_another(store, monkeypatch):
    """The look that runs may have read the store before the key was made."""
    began, go, answers = threading.Event(), threading.Event(), []
    version = store.version

    def slow_version() -> int:
        began.set()
        go.wait()
        return version()

    with SnapshotWatcher(store, interval_s=3600) as watcher:
        monkeypatch.setattr(store, "version", slow_version)
        watcher.look_soon(lambda: answers.append("first"))
        began.wait()

        tag = watcher.look_soon(lambda: answers.append("second"))

        assert watcher.looks_begun == tag == 1
        go.set()
        wait_until(lambda: answers == ["first", "second"])
        assert watcher.looks_begun == 2


def test_who_waits_for_a_look_is_told_also_when_the_watcher_stops_or_the_store_cannot_answer(store, tmp_path):
    looked = threading.Event()
    with SnapshotWatcher(store, interval_s=3600) as watcher:
        (tmp_path / "tenants.db").rename(tmp_path / "elsewhere.db")
        watcher.look_soon(looked.set)
        looked.wait()
        assert watcher.statistics().num_failures == 1

        looked.clear()
        watcher.look_soon(looked.set)

    assert looked.is_set()

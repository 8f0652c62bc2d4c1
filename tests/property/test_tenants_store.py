"""The store against a naive model: the same random verbs into both, then everything that can be asked is compared."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tenants.errors import InvalidValue, KeyNotFound, TenantExists, TenantNotFound
from tenants.keys import parse_key
from tenants.secrets import Vault
from tenants.snapshot import DENIED, Accepted, Suspended
from tenants.store import Store
from tenants.values import EVEN_SHARE, NO_RETENTION_RULES, CacheShare, RetentionRules

NAMES = st.sampled_from(["a", "b", "acme", "acme-2"])
STEP_S = 10.0


@dataclass
class ModelKey:
    text: str
    label: str
    expires_at: float | None
    revoked_at: float | None = None


@dataclass
class ModelTenant:
    id: str
    state: str = "active"
    retention: RetentionRules = NO_RETENTION_RULES
    share: CacheShare = EVEN_SHARE
    keys: list[ModelKey] = field(default_factory=list)


class StoreMachine(RuleBasedStateMachine):
    """Two stores over one file take turns, as the gateway and the command line do."""

    @initialize()
    def open(self):
        self.directory = Path(tempfile.mkdtemp(dir="/tmp"))
        vault = Vault(b"m" * 32)
        self.stores = [Store(f"sqlite:///{self.directory}/tenants.db", vault) for _ in range(2)]
        self.tenants: dict[str, ModelTenant] = {}
        self.dead_texts: list[str] = []
        self.salt_secrets: dict[str, bytes] = {}
        self.now = 1_000.0
        self.turn = 0
        self.version = self.stores[0].version()
        self.shares_version = 0

    def teardown(self):
        for store in getattr(self, "stores", []):
            store.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def store(self) -> Store:
        self.turn += 1
        return self.stores[self.turn % 2]

    def changed(self):
        version = self.store.version()
        assert version > self.version
        self.version = version

    @rule(seconds=st.sampled_from([1.0, STEP_S, 3 * STEP_S]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(name=NAMES)
    def create_tenant(self, name):
        if name in self.tenants:
            with pytest.raises(TenantExists):
                self.store.create_tenant(name, self.now)
            return
        self.tenants[name] = ModelTenant(self.store.create_tenant(name, self.now).id)
        self.changed()

    @rule(name=NAMES, verb=st.sampled_from(["suspend_tenant", "resume_tenant"]))
    def suspend_or_resume(self, name, verb):
        if name not in self.tenants:
            with pytest.raises(TenantNotFound):
                getattr(self.store, verb)(name)
            return
        self.tenants[name].state = "suspended" if verb == "suspend_tenant" else "active"
        assert getattr(self.store, verb)(name).state == self.tenants[name].state
        self.changed()

    @rule(name=NAMES, field=st.sampled_from(["max_priority", "max_duration_s"]), value=st.none() | st.integers(1, 99))
    def change_retention(self, name, field, value):
        def change(rules):
            return replace(rules, **{field: value})

        if name not in self.tenants:
            with pytest.raises(TenantNotFound):
                self.store.change_retention(name, change)
            return
        self.tenants[name].retention = change(self.tenants[name].retention)
        self.store.change_retention(name, change)
        self.changed()

    @rule(name=NAMES, field=st.sampled_from(["floor_bytes", "ceiling_bytes"]), value=st.integers(0, 5))
    def change_share(self, name, field, value):
        def change(share):
            return replace(share, **{field: value})

        if name not in self.tenants:
            with pytest.raises(TenantNotFound):
                self.store.change_share(name, change, self.now)
            return
        share = change(self.tenants[name].share)
        if share.ceiling_bytes is not None and share.floor_bytes > share.ceiling_bytes:
            with pytest.raises(InvalidValue):
                self.store.change_share(name, change, self.now)
            return
        self.tenants[name].share = share
        self.store.change_share(name, change, self.now)
        self.changed()
        assert self.store.shares().version > self.shares_version
        self.shares_version = self.store.shares().version

    @rule(name=NAMES)
    def delete_tenant(self, name):
        if name not in self.tenants:
            with pytest.raises(TenantNotFound):
                self.store.delete_tenant(name)
            return
        assert self.store.delete_tenant(name).id == self.tenants[name].id
        gone = self.tenants.pop(name)
        self.dead_texts += [key.text for key in gone.keys]
        self.shares_version += gone.share != EVEN_SHARE
        self.changed()

    @rule(name=NAMES, label=st.sampled_from(["", "x"]), life_s=st.none() | st.sampled_from([-1.0, 0.0, 1.0, STEP_S]))
    def create_key(self, name, label, life_s):
        expires_at = None if life_s is None else self.now + life_s
        expected = (
            InvalidValue if life_s is not None and life_s <= 0 else TenantNotFound if name not in self.tenants else None
        )
        if expected is not None:
            with pytest.raises(expected):
                self.store.create_key(name, label, expires_at, self.now)
            return
        text = self.store.create_key(name, label, expires_at, self.now)
        self.tenants[name].keys.append(ModelKey(text, label, expires_at))
        self.changed()

    @precondition(lambda self: any(tenant.keys for tenant in self.tenants.values()))
    @rule(data=st.data())
    def revoke_key(self, data):
        key = data.draw(st.sampled_from([key for tenant in self.tenants.values() for key in tenant.keys]))
        key.revoked_at = self.now if key.revoked_at is None else key.revoked_at
        assert self.store.revoke_key(parse_key(key.text).public_id, self.now).revoked_at == key.revoked_at
        self.changed()

    @precondition(lambda self: self.dead_texts)
    @rule(data=st.data())
    def revoke_a_key_that_went_with_its_tenant(self, data):
        text = data.draw(st.sampled_from(self.dead_texts))
        with pytest.raises(KeyNotFound):
            self.store.revoke_key(parse_key(text).public_id, self.now)

    @invariant()
    def refused_verbs_change_nothing(self):
        if hasattr(self, "stores"):
            assert self.store.version() == self.version

    @invariant()
    def lists_equal_the_model(self):
        if not hasattr(self, "stores"):
            return
        assert {(t.name, t.id, t.state, t.retention) for t in self.store.list_tenants()} == {
            (name, tenant.id, tenant.state, tenant.retention) for name, tenant in self.tenants.items()
        }
        for name, tenant in self.tenants.items():
            assert {(k.public_id, k.label, k.expires_at, k.revoked_at) for k in self.store.list_keys(name)} == {
                (parse_key(k.text).public_id, k.label, k.expires_at, k.revoked_at) for k in tenant.keys
            }

    @invariant()
    def the_snapshot_equals_the_model(self):
        if not hasattr(self, "stores"):
            return
        snapshot = self.store.snapshot()
        assert snapshot.version == self.version
        assert snapshot.shares.version == self.shares_version
        assert snapshot.shares.shares == {t.id: t.share for t in self.tenants.values() if t.share != EVEN_SHARE}
        for text in self.dead_texts:
            assert snapshot.authenticate(text, self.now) is DENIED
        for name, tenant in self.tenants.items():
            for key in tenant.keys:
                self.check_verdict(snapshot.authenticate(key.text, self.now), name, tenant, key)

    def check_verdict(self, verdict, name: str, tenant: ModelTenant, key: ModelKey):
        is_over = key.expires_at is not None and self.now >= key.expires_at
        if key.revoked_at is not None or is_over:
            assert verdict is DENIED
            return
        assert type(verdict) is (Suspended if tenant.state == "suspended" else Accepted)
        assert (verdict.identity.tenant_id, verdict.identity.tenant_name) == (tenant.id, name)
        assert verdict.identity.retention == tenant.retention
        # One secret for a tenant's whole life, and never one that another tenant has or had.
        assert self.salt_secrets.setdefault(tenant.id, verdict.identity.salt_secret) == verdict.identity.salt_secret
        assert len(set(self.salt_secrets.values())) == len(self.salt_secrets)

    @invariant()
    def the_store_is_sound(self):
        if hasattr(self, "stores"):
            self.store.check_invariants()


StoreMachine.TestCase.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
test_the_store_behaves_as_the_model = StoreMachine.TestCase

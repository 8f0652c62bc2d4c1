"""What the gateway makes of changes in the tenant store: new keys at once, shares of the caches to every engine."""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import gateway.engines
from cached.keys import owner_id
from gateway.freshness import Freshness
from tenants.keys import base62, parse_key
from tenants.values import CacheShare
from tests.support.gateway_stand import Stand, standing


@pytest.fixture
async def stand(demo_model_dir: Path) -> AsyncIterator[Stand]:
    async with standing(demo_model_dir) as running:
        yield running


async def models(stand: Stand, key: str) -> int:
    async with stand.http.get(stand.url + "/v1/models", headers=stand.headers(key)) as response:
        return response.status


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


# Keys.


async def test_a_key_works_from_the_moment_it_is_made(stand: Stand) -> None:
    """For up to a quarter of a second it was answered 401, and who had made it looked for their mistake."""
    for number in range(5):
        stand.store.create_tenant(f"t-{number}", time.time())
        assert await models(stand, stand.store.create_key(f"t-{number}", "", None, time.time())) == 200


def forged(public_id: str) -> str:
    """A text of good form: anybody can compute the checksum."""
    body = f"hl_live_{public_id}_{'0' * 43}"
    return body + base62(zlib.crc32(body.encode()), 6)


def public_id_of(key: str) -> str:
    named = parse_key(key)
    assert named is not None
    return named.public_id


@pytest.fixture
def looks(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever somebody asks for a look at the store."""
    look_soon, asked = stand.watcher.look_soon, []

    def counted(then: Callable[[], None]) -> int:
        asked.append(look_soon(then))
        return asked[-1]

    monkeypatch.setattr(stand.watcher, "look_soon", counted)
    return asked


@pytest.mark.parametrize("kind", ["unknown id", "wrong secret", "expired", "revoked"])
async def test_every_denied_key_of_good_form_waits_for_a_look_so_that_the_wait_tells_nothing(
    stand: Stand, looks: list[int], kind: str
) -> None:
    now = time.time()
    key = stand.store.create_key("alpha", "", now + 0.01 if kind == "expired" else None, now)
    text = {"unknown id": forged("0" * 12), "wrong secret": forged(public_id_of(key))}.get(kind, key)
    if kind == "revoked":
        stand.store.revoke_key(public_id_of(key), now)
    await until(lambda: stand.watcher.check_now() and time.time() > now + 0.01)

    assert await models(stand, text) == 401

    assert len(looks) == 1


async def test_what_has_not_the_form_of_a_key_is_denied_without_a_look(stand: Stand, looks: list[int]) -> None:
    for text in ("nonsense", "hl_live_nonsense", stand.key[:-1] + ("0" if stand.key[-1] != "0" else "1")):
        assert await models(stand, text) == 401

    assert looks == []


async def test_many_guesses_at_once_share_their_looks(stand: Stand, looks: list[int]) -> None:
    begun = stand.watcher.looks_begun

    assert set(await asyncio.gather(*(models(stand, forged(public_id_of(stand.key))) for _ in range(200)))) == {401}

    # One question for each look that began, and one for the next: none for each guess.
    assert 1 <= len(looks) <= stand.watcher.looks_begun - begun + 1


class SilentWatcher:
    """A store that does not answer: looks are asked for and never end."""

    looks_begun = 0

    def __init__(self) -> None:
        self.num_asked = 0

    def look_soon(self, then: Callable[[], None]) -> int:
        self.num_asked += 1
        return self.looks_begun


async def test_a_store_that_does_not_answer_is_waited_for_once_and_not_for_long() -> None:
    watcher = SilentWatcher()
    freshness = Freshness(watcher, wait_s=0.01)

    await asyncio.gather(*(freshness.wait() for _ in range(50)))
    await freshness.wait()

    assert watcher.num_asked == 1


# Shares.


async def test_shares_go_to_the_engine_when_they_change_and_again_to_every_engine_that_comes(stand: Stand) -> None:
    stub = stand.stub
    assert stub.seen.owner_tables == []
    alpha = stand.store.change_share("alpha", lambda _: CacheShare(2.0, 2**20, 2**30), time.time())
    await until(lambda: len(stub.seen.owner_tables) == 1)
    (first,) = stub.seen.owner_tables
    assert [(s.owner, s.weight, s.host_floor_bytes, s.host_ceiling_bytes) for s in first.shares] == [
        (owner_id(alpha.id), 2.0, 2**20, 2**30)
    ]

    stand.store.create_key("alpha", "", None, time.time())  # A change, and none of shares.
    stand.store.change_share("beta", lambda _: CacheShare(3.0), time.time())
    await until(lambda: len(stub.seen.owner_tables) == 2)
    assert stub.seen.owner_tables[1].version > first.version
    assert len(stub.seen.owner_tables[1].shares) == 2

    stub.crash()
    await stub.start()
    await until(lambda: len(stub.seen.owner_tables) == 3)
    assert stub.seen.owner_tables[2] == stub.seen.owner_tables[1]

    stand.store.delete_tenant("beta")
    await until(lambda: len(stub.seen.owner_tables) == 4)
    assert [share.owner for share in stub.seen.owner_tables[3].shares] == [owner_id(alpha.id)]


async def readyz(stand: Stand) -> dict[str, object]:
    async with stand.http.get(stand.url + "/readyz") as response:
        found: dict[str, object] = json.loads(await response.read())
        return found


async def test_a_refusal_of_shares_is_seen_in_readyz_metrics_and_once_in_the_log(
    demo_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.engines, "HEARTBEAT_INTERVAL_S", 0.02)
    async with standing(demo_model_dir) as stand:
        assert (await readyz(stand))["shares"] == "even"
        stand.store.change_share("alpha", lambda _: CacheShare(floor_bytes=2**50), time.time())
        version = stand.store.shares().version
        answer = {"state": "ready", "owners_version": version, "owners_outcome": "floors_exceed_capacity"}
        stand.stub.stats = {"tier": answer}

        await until(lambda: stand.server.engines.shares == "refused")

        shown = await readyz(stand)
        assert (shown["status"], shown["shares"]) == ("ready", "refused")
        assert b'halocline_gateway_shares{state="refused"} 1.0' in stand.server.metrics.exposition(None)
        told = [line for line in stand.log_lines() if line["event"] == "shares_refused"]
        assert len(told) == 1
        assert (told[0]["version"], "lower a floor" in told[0]["remedy"]) == (version, True)

        stand.stub.stats = {"tier": {**answer, "owners_outcome": "taken"}}
        await until(lambda: stand.server.engines.shares == "in_force")


async def test_a_store_that_went_back_to_older_shares_is_said_to_be_superseded(
    demo_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restored from a backup: the daemon keeps the newer table, and its operator has to hear of it."""
    monkeypatch.setattr(gateway.engines, "HEARTBEAT_INTERVAL_S", 0.02)
    async with standing(demo_model_dir) as stand:
        stand.store.change_share("alpha", lambda _: CacheShare(2.0), 1000.0)
        stand.stub.stats = {"tier": {"state": "ready", "owners_version": 1000, "owners_outcome": "older"}}

        await until(lambda: stand.server.engines.shares == "superseded")

        assert any(line["event"] == "shares_superseded" for line in stand.log_lines())
        stand.store.change_share("alpha", lambda _: CacheShare(2.0), 2000.0)
        await until(lambda: any(table.version == 2000 for table in stand.stub.seen.owner_tables))

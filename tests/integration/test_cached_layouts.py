"""Two engines of different models on one daemon: both store and load, through kills, and neither takes from the other."""

from __future__ import annotations

import hashlib
import json
import os
import random
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from xxhash import xxh3_64_intdigest

from cached.cli import cache
from cached.client import TierClient
from cached.keys import fingerprint, owner_id
from cached.protocol import OwnerShare, Reserved, TierHello
from tests.support.cached_daemon import Daemon, chain, daemon_directory, free_port, offers, wait_until

SMALL = TierHello(b"a small model", 5000, 16, "small")
LARGE = TierHello(b"a large model", 20000, 32, "large")
SHARES = ("small=0.5", f"{fingerprint(b'a large model')}=0.5")
SMALL_SLOTS, LARGE_SLOTS = 64, 25
"""Half of a MiB in slots of 8192 bytes, and a half in slots of 20480."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with daemon_directory() as path:
        yield path


@pytest.fixture
def daemon(directory: Path) -> Iterator[Daemon]:
    daemon = Daemon(directory, layouts=SHARES)
    daemon.start()
    yield daemon
    daemon.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    """The same, for tests that leave nothing behind which another one would see."""
    with daemon_directory() as path:
        daemon = Daemon(path, layouts=SHARES)
        daemon.start()
        yield daemon
        daemon.close()


def bytes_of(hello: TierHello, name: bytes) -> bytes:
    """What belongs to a name in a layout."""
    return (hashlib.sha512(name + hello.layout_fingerprint).digest() * (hello.block_bytes // 64 + 1))[
        : hello.block_bytes
    ]


def put(client: TierClient, hello: TierHello, names: list[bytes], priority: int = 35) -> int:
    """Store a chain; how many of its blocks were taken."""
    commits = []
    for name, outcome in zip(names, client.reserve(offers(names, priority)), strict=True):  # type: ignore[arg-type]
        if isinstance(outcome, Reserved):
            data = bytes_of(hello, name)
            client.write(outcome, memoryview(data))
            commits.append((outcome.reservation, xxh3_64_intdigest(data)))
    return client.commit(commits).count("stored")


def got(client: TierClient, hello: TierHello, names: list[bytes]) -> int:
    """Load a chain; how many of its blocks came, all of them right."""
    lease = client.lease(names)
    if lease is None:
        return 0
    copies = [bytearray(hello.block_bytes) for _ in lease.blocks]
    is_read = client.read_many(lease, lease.blocks, list(map(memoryview, copies)))
    if not client.release(lease) or not is_read:
        return 0  # The daemon has died: whatever was copied does not count.
    assert copies == [bytes_of(hello, name) for name in names[: len(copies)]]
    return len(copies)


def lines(daemon: Daemon) -> dict[str, dict[str, object]]:
    """The daemon's layouts by label."""
    found = daemon.stats()["layouts"]
    assert isinstance(found, list | tuple)
    return {line["label"]: line for line in found}


def test_two_models_store_and_load_at_once_and_both_survive_a_kill(daemon: Daemon) -> None:
    small, large = daemon.client(hello=SMALL), daemon.client(hello=LARGE)
    mine, yours = chain("small", 10), chain("large", 10)
    assert (small.poll(), large.poll()) == ("ready", "ready")
    assert (small.num_slots, large.num_slots) == (SMALL_SLOTS, LARGE_SLOTS)
    assert (put(small, SMALL, mine), put(large, LARGE, yours)) == (10, 10)
    assert (got(small, SMALL, mine), got(large, LARGE, yours)) == (10, 10)

    for _ in range(2):
        daemon.kill()
        daemon.start()
        wait_until(lambda: got(small, SMALL, mine) == 10)
        wait_until(lambda: got(large, LARGE, yours) == 10)

    assert daemon.stats()["restored"] == 20
    assert daemon.stats()["corrupt"] == 0
    assert got(small, SMALL, yours) == 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_models_live_through_thirty_kills(daemon: Daemon) -> None:
    """Both store and load without pause while the daemon dies at random moments; neither ever gets a wrong byte."""
    stop, dice = threading.Event(), random.Random(7)
    served = {SMALL: 0, LARGE: 0}

    def engine(hello: TierHello) -> None:
        client, number = TierClient(daemon.socket, hello, 2.0), 0
        while not stop.is_set():
            if client.poll() != "ready":
                stop.wait(0.01)
                continue
            number += 1
            put(client, hello, chain((hello.label, number % 8), 3))
            served[hello] += got(client, hello, chain((hello.label, (number - 3) % 8), 3))
        client.close()

    with ThreadPoolExecutor(2) as pool:
        engines = [pool.submit(engine, hello) for hello in served]
        try:
            for _ in range(30):
                before = dict(served)
                wait_until(lambda before=before: all(served[hello] > before[hello] for hello in served))  # type: ignore[misc]
                stop.wait(dice.uniform(0.0, 0.1))
                daemon.kill()
                daemon.start()
        finally:
            stop.set()
        for each in engines:
            each.result()
    wait_until(lambda: daemon.stats()["unverified"] == 0)
    assert daemon.stats()["corrupt"] == 0
    assert lines(daemon)["small"]["used"] == lines(daemon)["large"]["used"] == 24


def test_a_model_that_floods_its_part_evicts_nothing_of_another(daemon: Daemon) -> None:
    small, large = daemon.client(hello=SMALL), daemon.client(hello=LARGE)
    yours = chain("large", LARGE_SLOTS)
    put(large, LARGE, yours, priority=0)

    for number in range(5):
        assert put(small, SMALL, chain(("flood", number), 40), priority=100) == 40

    assert got(large, LARGE, yours) == LARGE_SLOTS
    assert lines(daemon)["large"]["evicted"] == 0
    assert (lines(daemon)["small"]["used"], lines(daemon)["small"]["evicted"]) == (SMALL_SLOTS, 200 - SMALL_SLOTS)


def test_an_engine_gets_its_own_payload_and_tells_nothing_of_others(daemon: Daemon) -> None:
    small, large = daemon.client(hello=SMALL), daemon.client(hello=LARGE)
    put(small, SMALL, chain("small", 2))
    put(large, LARGE, chain("large", 3))

    payloads = small.payload, large.payload
    pages = small.list_blocks(), large.list_blocks()
    events = small.events(0), large.events(0)

    assert all(payload is not None and len(payload) == 2**19 for payload in payloads)
    assert [len(page.blocks) for page in pages if page is not None] == [2, 3]
    assert [len(found.events) for found in events if found is not None] == [2, 3]
    assert (
        len({(daemon.arena_dir / name).stat().st_ino for name in os.listdir(daemon.arena_dir) if "payload" in name})
        == 2
    )


def test_a_drop_takes_an_owners_blocks_of_every_layout(shared: Daemon) -> None:
    for hello in (SMALL, LARGE):
        client = shared.client(hello=hello)
        client.commit(
            [
                (each.reservation, 0)
                for each in client.reserve(offers(chain(hello.label, 2), owner=owner_id("acme")))
                if isinstance(each, Reserved)
            ]
        )

    assert shared.observer().drop_owner(owner_id("acme")) == 4


def test_an_owners_floor_is_granted_in_each_part_in_its_proportion(shared: Daemon) -> None:
    """What fits into the tier fits into its parts: a quarter of the tier is a quarter of each."""
    small, large = shared.client(hello=SMALL), shared.client(hello=LARGE)
    table = [OwnerShare(owner_id("acme"), 1.0, 2**18, None)]

    assert (small.set_owners(1, table), large.set_owners(1, table)) == ("taken", "taken")

    floors = [found.owners[0].floor for part in range(2) if (found := shared.observer().owners(part)) is not None]
    assert floors == [SMALL_SLOTS // 4, LARGE_SLOTS // 4]


def test_a_model_without_a_share_is_told_its_name(shared: Daemon) -> None:
    stranger = shared.client(hello=TierHello(b"a third model", 4096, 16, "third"))

    assert stranger.poll() == "absent"
    assert stranger.refusal is not None
    assert stranger.refusal.reason == "no_share"
    assert f"{fingerprint(b'a third model')} (third)" in stranger.refusal.message


def test_one_layout_with_two_sizes_of_block_is_refused(shared: Daemon) -> None:
    assert shared.client(hello=SMALL).poll() == "ready"
    liar = shared.client(hello=TierHello(b"a small model", 6000, 16, "liar"))

    assert liar.poll() == "absent"
    assert liar.refusal is not None
    assert liar.refusal.reason == "layout_contradicts"


def test_shares_that_change_leave_what_still_fits(daemon: Daemon) -> None:
    small, large = daemon.client(hello=SMALL), daemon.client(hello=LARGE)
    put(small, SMALL, chain("small", SMALL_SLOTS))
    put(large, LARGE, chain("large", 5))
    daemon.stop()
    daemon.settings["layouts"] = ("small=0.25", f"{fingerprint(b'a large model')}=0.75")

    daemon.start()

    wait_until(lambda: daemon.stats()["unverified"] == 0 and small.poll() == large.poll() == "ready")
    assert got(small, SMALL, chain("small", SMALL_SLOTS)) == SMALL_SLOTS // 2
    assert got(large, LARGE, chain("large", 5)) == 5


def test_common_parts_go_to_whoever_comes_first_and_give_way_when_left(directory: Path) -> None:
    daemon = Daemon(directory, common_layouts=2, layout_linger_s=0)
    daemon.start()
    small, large = daemon.client(hello=SMALL), daemon.client(hello=LARGE)
    put(small, SMALL, chain("small", 3))
    put(large, LARGE, chain("large", 3))
    third = TierHello(b"a third model", 4096, 16)
    refused = daemon.client(hello=third)
    assert refused.poll() == "absent"
    assert refused.refusal is not None
    assert refused.refusal.reason == "layout_in_use"

    small.close()
    wait_until(lambda: daemon.stats()["sessions"] == 1)

    assert daemon.client(hello=third).poll() == "ready"
    assert got(large, LARGE, chain("large", 3)) == 3
    assert daemon.client(hello=SMALL).poll() == "absent"
    daemon.close()


def test_no_slot_crosses_a_registration_and_the_welcome_says_where_it_ends(directory: Path) -> None:
    daemon = Daemon(directory, registration_bytes=5 * 4096)
    daemon.start()
    small = daemon.client(hello=SMALL)
    names = chain("small", 100)

    taken = put(small, SMALL, names)

    lease = small.lease(names)
    assert lease is not None
    offsets = [block.slot_offset for block in lease.blocks]
    assert small.num_slots == 2 * (2**20 // 20480)  # Two slots of 8192 bytes in each chunk of 20480.
    assert taken == len(offsets) == 100
    assert all(offset // 20480 == (offset + 8191) // 20480 for offset in offsets)
    assert small.release(lease)
    daemon.kill()
    daemon.start()
    wait_until(lambda: got(small, SMALL, names) == 100)
    daemon.close()


# --- What operators see ---


def run(daemon: Daemon, *arguments: str):
    context = SimpleNamespace(cached=SimpleNamespace(socket=daemon.socket))
    return CliRunner().invoke(cache, list(arguments), obj=context)


def test_every_view_shows_the_layouts(directory: Path) -> None:
    port = free_port()
    daemon = Daemon(directory, layouts=("small=0.5",), metrics_listen=f"127.0.0.1:{port}")
    daemon.start()
    small, large = daemon.client(hello=SMALL), daemon.client(hello=LARGE)
    put(small, SMALL, chain("small", 2))
    put(large, LARGE, chain("large", 3))
    names = {"small": fingerprint(b"a small model"), "large": fingerprint(b"a large model")}

    stats, listed, owners = (run(daemon, verb).output for verb in ("stats", "ls", "owners"))
    blocks = json.loads(run(daemon, "ls", "--json").stdout)["blocks"]
    looks = json.loads(run(daemon, "top", "--rounds", "1", "--interval", "0.1", "--json").stdout)
    verified = json.loads(run(daemon, "verify", "--json").stdout)

    for label, name in names.items():
        assert f"{name} ({label})" in stats
        assert name in listed
        assert name in owners
    assert "in the part of small" in stats
    assert [block["layout"] for block in blocks] == [names["small"]] * 2 + [names["large"]] * 3
    assert [(look["label"], look["used"]) for look in looks["layouts"]] == [("small", 2), ("large", 3)]
    assert [(line["label"], line["verified"]) for line in verified["layouts"]] == [("small", 2), ("large", 3)]

    def served() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return answer.read().decode()

    line = f'halocline_tier_host_layout_used{{label="large",layout="{names["large"]}",part=""}} 3.0'
    wait_until(lambda: line in served())
    daemon.close()

"""Bits that flip anywhere in a table or a payload, files cut short, peers that scribble: a miss and a counter, never wrong
bytes, never a crash (kv-semantics 5.10).

The daemon's loop runs in a thread here and is asked through its socket, so that a start costs milliseconds.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cached.arena import Arena
from cached.client import TierClient, prepare_copies
from cached.config import CachedConfig
from cached.keys import owner_id
from cached.protocol import LeasedBlock, Reserved, TierHello
from cached.records import HEADER_BYTES, RECORD_BYTES
from cached.server import Server
from tests.support.cached_daemon import (
    BLOCK_BYTES,
    chain,
    content_of,
    daemon_directory,
    load,
    offers,
    store,
    wait_until,
)

NUM_SLOTS = 32
SLOT_BYTES = 8192
HELLO = TierHello(b"damage", BLOCK_BYTES, 16)
OWNER = owner_id("damage")
CHAINS = [chain(("damage", number), length) for number, length in enumerate((1, 2, 3, 4, 6))]
ABANDONED = chain("abandoned", 3)
NAMES = [name for names in CHAINS for name in names]
FOLLOWED_BY = {name: names[at:] for names in CHAINS for at, name in enumerate(names)}
TABLE_BYTES = HEADER_BYTES + NUM_SLOTS * RECORD_BYTES
HEADER_IN_USE = 240

masks = st.integers(1, 255)
payload_flips = st.lists(st.tuples(st.integers(0, NUM_SLOTS * SLOT_BYTES - 1), masks), max_size=8)
# Half of them where there is something: in the header, and in the records of the blocks that are there.
table_offsets = st.one_of(
    st.integers(0, TABLE_BYTES - 1),
    st.integers(0, HEADER_IN_USE),
    st.integers(HEADER_BYTES, HEADER_BYTES + (len(NAMES) + len(ABANDONED)) * RECORD_BYTES - 1),
)
table_flips = st.lists(st.tuples(table_offsets, masks), max_size=8)
# A few examples a run suffice for the normal suite; `--hypothesis-profile` and the long part ask for more.
few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
many = settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Scene:
    """An arena full of known blocks, to be damaged and looked at, as often as one likes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = CachedConfig(
            socket=directory / "c.sock", arena_dir=directory / "arena", host_cache_size=NUM_SLOTS * SLOT_BYTES
        )
        self.pristine = directory / "pristine"
        self.place_of: dict[bytes, int] = {}
        with self.serving() as client:
            for names in CHAINS:
                assert store(client, names, priority=60, owner=OWNER) == ["stored"] * len(names)
                self.place_of.update(zip(names, (block.slot_offset for block in leased(client, names)), strict=True))
            assert all(isinstance(each, Reserved) for each in client.reserve(offers(ABANDONED)))
            shutil.copytree(self.config.arena_dir, self.pristine)
            client.abort([])

    @contextmanager
    def serving(self) -> Iterator[TierClient]:
        """A daemon on what is there, and a client of it; nothing that goes wrong in the daemon's thread goes unseen."""
        arena = Arena.open(self.config.arena_dir, int(self.config.host_cache_size))
        server, ready = Server(self.config, arena, frozenset({os.geteuid()})), threading.Event()
        fault: list[BaseException] = []

        def serve() -> None:
            try:
                server.run(ready.set)
            except BaseException as error:
                fault.append(error)
                ready.set()

        thread = threading.Thread(target=serve)
        thread.start()
        client = TierClient(self.config.socket, HELLO, 20.0)
        try:
            ready.wait(20)
            yield client
        finally:
            client.close()
            server.stop()
            thread.join(20)
            arena.close(keep=True)
            assert not fault, fault
            assert not thread.is_alive()

    def restore(self) -> None:
        shutil.rmtree(self.config.arena_dir)
        shutil.copytree(self.pristine, self.config.arena_dir)

    def damage(self, name: str, flips: list[tuple[int, int]]) -> None:
        with (self.config.arena_dir / name).open("r+b") as file:
            for offset, mask in flips:
                byte = os.pread(file.fileno(), 1, offset)
                os.pwrite(file.fileno(), bytes([byte[0] ^ mask]), offset)

    def served(self, client: TierClient) -> set[bytes]:
        """Names that are served, each with its own bytes and retention; what was never committed is not."""
        wait_until(lambda: client.lookup(NAMES[:1]) >= 0 and (client.stats() or {"unverified": 1})["unverified"] == 0)
        assert client.lookup(ABANDONED) == 0
        found: set[bytes] = set()
        for names in CHAINS:
            copies = load(client, names)
            assert copies == [content_of(name) for name in names][: len(copies)]
            assert all(block.priority == 60 and block.deadline is None for block in leased(client, names))
            found.update(names[: len(copies)])
        return found

    def still_works(self, client: TierClient) -> None:
        fresh = chain("afterwards", 2)
        assert store(client, fresh, owner=OWNER) == ["stored"] * 2
        assert load(client, fresh) == [content_of(name) for name in fresh]

    def hit_by(self, flips: list[tuple[int, int]]) -> set[bytes]:
        """Blocks that have a flipped byte, when two flips of one byte did not undo each other."""
        masks_by_offset: dict[int, int] = {}
        for offset, mask in flips:
            masks_by_offset[offset] = masks_by_offset.get(offset, 0) ^ mask
        places = {offset for offset, mask in masks_by_offset.items() if mask}
        return {
            name
            for name, place in self.place_of.items()
            if any(place <= offset < place + BLOCK_BYTES for offset in places)
        }


def leased(client: TierClient, names: list[bytes]) -> tuple[LeasedBlock, ...]:
    lease = client.lease(names)
    if lease is None:
        return ()
    client.release(lease)
    return lease.blocks


def descendants(names: set[bytes]) -> set[bytes]:
    return {each for name in names for each in FOLLOWED_BY[name]}


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    prepare_copies()
    with daemon_directory() as directory:
        yield Scene(directory)


def check_payload(scene: Scene, flips: list[tuple[int, int]]) -> None:
    scene.restore()
    scene.damage("payload", flips)
    gone = descendants(scene.hit_by(flips))
    with scene.serving() as client:
        assert scene.served(client) == set(NAMES) - gone
        statistics = client.stats()
        assert statistics is not None
        assert bool(statistics["corrupt"]) == bool(gone)
        scene.still_works(client)


def check_table(scene: Scene, flips: list[tuple[int, int]], cut_to: int | None) -> None:
    scene.restore()
    scene.damage("table", flips)
    if cut_to is not None:
        os.truncate(scene.config.arena_dir / "table", cut_to)
    with scene.serving() as client:
        found = scene.served(client)
        statistics = client.stats()
        assert statistics is not None
        assert statistics["restored"] >= len(found)
        if not flips and cut_to is None:
            assert found == set(NAMES)
        scene.still_works(client)


def check_scribbles(scene: Scene, flips: list[tuple[int, int]], cut_to: int | None) -> None:
    scene.restore()
    with scene.serving() as client:
        assert scene.served(client) == set(NAMES)
        scene.damage("payload", flips)
        if cut_to is not None:
            os.truncate(scene.config.arena_dir / "payload", cut_to)
        found = scene.served(client)
        assert found <= set(NAMES) - scene.hit_by(flips)
        if cut_to is None:
            assert found == set(NAMES) - descendants(scene.hit_by(flips))
            statistics = client.stats()
            assert statistics is not None
            assert bool(statistics["corrupt"]) == bool(found != set(NAMES))


sizes = st.one_of(st.none(), st.integers(0, NUM_SLOTS * SLOT_BYTES))
table_sizes = st.one_of(st.none(), st.none(), st.integers(0, TABLE_BYTES + 4096))


@given(payload_flips)
@few
def test_a_payload_flipped_at_rest_is_a_miss_and_a_counter(scene: Scene, flips: list[tuple[int, int]]) -> None:
    check_payload(scene, flips)


@given(table_flips, table_sizes)
@few
def test_a_table_flipped_or_cut_at_rest_is_a_miss(
    scene: Scene, flips: list[tuple[int, int]], cut_to: int | None
) -> None:
    check_table(scene, flips, cut_to)


@given(payload_flips, sizes)
@few
def test_a_peer_that_scribbles_over_the_payload_or_cuts_it_harms_nobodys_answers(
    scene: Scene, flips: list[tuple[int, int]], cut_to: int | None
) -> None:
    check_scribbles(scene, flips, cut_to)


@pytest.mark.long
@pytest.mark.timeout(3600)
@given(payload_flips)
@many
def test_many_payloads_flipped_at_rest(scene: Scene, flips: list[tuple[int, int]]) -> None:
    check_payload(scene, flips)


@pytest.mark.long
@pytest.mark.timeout(3600)
@given(table_flips, table_sizes)
@many
def test_many_tables_flipped_or_cut_at_rest(scene: Scene, flips: list[tuple[int, int]], cut_to: int | None) -> None:
    check_table(scene, flips, cut_to)


@pytest.mark.long
@pytest.mark.timeout(3600)
@given(payload_flips, sizes)
@many
def test_many_peers_that_scribble(scene: Scene, flips: list[tuple[int, int]], cut_to: int | None) -> None:
    check_scribbles(scene, flips, cut_to)

"""A real daemon, real processes, real signals: what is committed is served byte for byte or missed, never wrong."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cached.client import TierClient
from cached.keys import owner_id
from cached.protocol import OwnerShare, Pending, Present, Refused, Reserved, TierHello
from cached.records import HEADER_BYTES, RECORD_BYTES
from tests.support.cached_daemon import (
    BLOCK_BYTES,
    HELLO,
    SLOT_BYTES,
    Daemon,
    chain,
    content_of,
    daemon_directory,
    load,
    offers,
    store,
    wait_until,
)

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def directory() -> Iterator[Path]:
    with daemon_directory() as path:
        yield path


@pytest.fixture
def daemon(directory: Path) -> Iterator[Daemon]:
    daemon = Daemon(directory)
    daemon.start()
    yield daemon
    daemon.close()


def contents(names: list[bytes]) -> list[bytes]:
    return [content_of(name) for name in names]


def peer(daemon: Daemon, program: str) -> subprocess.Popen[str]:
    """Another process that speaks to the daemon; its program finds `client` and the helpers made."""
    preamble = f"""
        import os, sys, time
        sys.path.insert(0, {str(REPOSITORY)!r})
        from tests.support.cached_daemon import *
        client = TierClient({str(daemon.socket)!r}, HELLO, 5.0)
    """
    text = textwrap.dedent(preamble) + textwrap.dedent(program)
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)


# --- Storing, loading, sharing ---


def test_what_one_engine_stores_another_loads(daemon: Daemon) -> None:
    names = chain("shared", 6)

    assert store(daemon.client(), names) == ["stored"] * 6

    assert load(daemon.client(), names) == contents(names)


def test_two_engines_storing_the_same_block_store_it_once(daemon: Daemon) -> None:
    first, second = daemon.client(), daemon.client()
    names = chain("twice", 2)

    [granted, _] = first.reserve(offers(names))
    answers = second.reserve(offers(names))
    assert isinstance(granted, Reserved)

    assert answers == [Pending(), Pending()]
    store_rest = first.commit([(granted.reservation, 0)])
    assert store_rest == ["stored"]
    assert second.reserve(offers(names))[0] == Present()


def test_an_offer_larger_than_the_tier_is_taken_as_far_as_it_fits(daemon: Daemon) -> None:
    client = daemon.client()
    names = chain("long", 140)

    outcomes = store(client, names)

    assert outcomes[:128] == ["stored"] * 128
    assert set(outcomes[128:]) == {"refused"}
    assert client.lookup(names) == 128
    assert daemon.stats()["refused_by_reason"]["full"] == 1
    assert daemon.stats()["refused_by_reason"]["orphan"] == 11


def test_a_drop_removes_one_owner_and_nobody_else(daemon: Daemon) -> None:
    client = daemon.client()
    mine, yours = chain("mine", 3), chain("yours", 3)
    store(client, mine, owner=owner_id("mine"))
    store(client, yours, owner=owner_id("yours"))

    gone = daemon.client(hello=None).drop_owner(owner_id("mine"))

    assert gone == 3
    assert client.lookup(mine) == 0
    assert load(client, yours) == contents(yours)


# --- The daemon dies, stops, comes back ---


def test_without_a_daemon_every_verb_answers_a_miss(directory: Path) -> None:
    client = Daemon(directory).client()
    names = chain("absent", 2)

    assert client.lookup(names) == 0
    assert client.lease(names) is None
    assert client.reserve(offers(names)) == [Refused("absent")] * 2
    assert client.commit([(1, 2)]) == ["expired"]
    client.abort([1])
    client.touch([(names[0], 35, None, "demote")])
    assert client.stats() is None
    assert client.state == "absent"
    assert client.payload is None


def test_a_stopped_daemon_is_a_miss_and_its_late_answer_is_nobodys(daemon: Daemon) -> None:
    client = daemon.client(timeout_s=0.1)
    names = chain("stopped", 4)
    store(client, names)
    assert daemon.process is not None

    daemon.process.send_signal(signal.SIGSTOP)
    assert client.lookup(names) == 0
    assert client.state == "absent"
    assert client.lookup(names) == 0
    daemon.process.send_signal(signal.SIGCONT)

    wait_until(lambda: client.lookup(names[:2]) == 2)
    assert client.lookup(names) == 4
    assert load(client, names) == contents(names)


def test_a_copy_under_a_lease_of_a_dead_daemon_is_a_miss(daemon: Daemon) -> None:
    client = daemon.client()
    names = chain("lease", 3)
    store(client, names)
    lease = client.lease(names)
    assert lease is not None

    daemon.kill()
    daemon.start()

    assert client.release(lease) is False
    wait_until(lambda: load(client, names) == contents(names))


def test_an_orderly_stop_leaves_no_socket_and_keeps_the_blocks(daemon: Daemon) -> None:
    names = chain("kept", 3)
    store(daemon.client(), names)

    assert daemon.stop() == 0

    assert not daemon.socket.exists()
    daemon.start()
    wait_until(lambda: load(daemon.client(), names) == contents(names))


def test_a_daemon_that_keeps_no_arena_leaves_nothing(directory: Path) -> None:
    daemon = Daemon(directory, keep_arena=False)
    daemon.start()
    store(daemon.client(), chain("gone", 3))

    assert daemon.stop() == 0

    assert list(directory.iterdir()) == []


# --- Bytes that go bad ---


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def test_a_flipped_payload_at_rest_is_a_miss_and_a_counter(daemon: Daemon) -> None:
    """kv-semantics 5.10."""
    names = chain("payload", 5)
    client = daemon.client()
    store(client, names)
    lease = client.lease(names)
    assert lease is not None
    place = lease.blocks[2].slot_offset
    daemon.stop()

    flip(daemon.arena_dir / "payload", place + 77)
    daemon.start()

    wait_until(lambda: daemon.stats()["unverified"] == 0)
    assert load(daemon.client(), names) == contents(names)[:2]
    assert daemon.stats()["corrupt"] == 1


def test_a_flip_anywhere_in_the_table_is_never_served(directory: Path) -> None:
    """kv-semantics 1.4 and 5.10."""
    daemon = Daemon(directory)
    daemon.start()
    names = chain("table", 6)
    store(daemon.client(), names)
    daemon.stop()
    dice = random.Random(5)
    pristine = (daemon.arena_dir / "table").read_bytes()

    for _ in range(4):
        (daemon.arena_dir / "table").write_bytes(pristine)
        flip(daemon.arena_dir / "table", dice.randrange(HEADER_BYTES, HEADER_BYTES + 6 * RECORD_BYTES))
        flip(daemon.arena_dir / "table", dice.randrange(0, 120))
        daemon.start()
        copies = load(daemon.client(), names)
        assert copies == contents(names)[: len(copies)]
        daemon.stop()
    daemon.close()


def test_a_scribbled_block_is_reported_and_goes(daemon: Daemon) -> None:
    client = daemon.client()
    names = chain("scribble", 3)
    store(client, names)
    lease = client.lease(names)
    assert lease is not None
    assert client.payload is not None
    client.payload[lease.blocks[1].slot_offset] ^= 1
    client.release(lease)

    assert load(client, names) == contents(names)[:1]

    assert client.lookup(names) == 1
    assert daemon.stats()["corrupt"] == 1


def test_a_payload_cut_short_under_a_copy_is_a_miss_and_mended(daemon: Daemon) -> None:
    """Touching a mapping of a file that was cut short raises SIGBUS, which used to take the engine down."""
    client, peer_client = daemon.client(), daemon.client()
    names = chain("cut", 6)
    store(client, names)
    assert load(client, names) == contents(names)
    assert peer_client.poll() == "ready"

    os.ftruncate(peer_client._link.payload._fd, 2 * SLOT_BYTES)

    copies = load(client, names)
    assert copies == contents(names)[: len(copies)]
    assert len(copies) <= 2
    wait_until(lambda: daemon.stats()["payload_mended"] == 1)
    wait_until(lambda: daemon.stats()["unverified"] == 0)
    assert daemon.stats()["corrupt"] >= 1
    again = chain("after the cut", 6)
    assert store(client, again) == ["stored"] * 6
    assert load(client, again) == contents(again)


def test_a_hole_punched_into_the_payload_is_noticed_and_filled(daemon: Daemon) -> None:
    client = daemon.client()
    names = chain("hole", 4)
    store(client, names)
    libc = ctypes.CDLL(None, use_errno=True)
    keep_size_and_punch = 3

    assert libc.fallocate(client._link.payload._fd, keep_size_and_punch, ctypes.c_long(0), ctypes.c_long(2**20)) == 0

    wait_until(lambda: daemon.stats()["payload_mended"] == 1)
    wait_until(lambda: daemon.stats()["unverified"] == 0)
    assert client.lookup(names) == 0
    assert (daemon.arena_dir / "payload").stat().st_blocks * 512 >= 2**20


# --- The owners' shares ---


def test_a_flood_cannot_take_an_owner_below_its_floor_and_the_table_outlives_the_daemon(daemon: Daemon) -> None:
    """kv-semantics 5.9."""
    quiet, noisy = owner_id("quiet"), owner_id("noisy")
    client = daemon.client()
    mine = chain("mine", 8)
    store(client, mine, owner=quiet)
    table = [OwnerShare(quiet, 1.0, 8 * SLOT_BYTES, None), OwnerShare(noisy, 1.0, 0, 100 * SLOT_BYTES)]
    assert client.set_owners(7, table) == "taken"

    daemon.kill()
    daemon.start()
    wait_until(lambda: client.poll() == "ready")
    assert client.set_owners(6, []) == "older"
    assert client.set_owners(7, table) == "known"
    for number in range(4):
        store(client, chain(("flood", number), 60), priority=100, owner=noisy)

    wait_until(lambda: client.lookup(mine) == 8)
    found = daemon.observer().owners()
    assert found is not None
    assert (found.version, {line.owner: line.held for line in found.owners}) == (7, {quiet: 8, noisy: 100})
    assert {line.owner: line.ceiling for line in found.owners} == {quiet: None, noisy: 100}


def test_floors_beyond_the_capacity_are_refused_whole(daemon: Daemon) -> None:
    client = daemon.client()
    one = OwnerShare(owner_id("one"), 1.0, 100 * SLOT_BYTES, None)
    assert client.set_owners(1, [one]) == "taken"

    refused = client.set_owners(2, [one, OwnerShare(owner_id("two"), 1.0, 29 * SLOT_BYTES, None)])

    assert refused == "floors_exceed_capacity"
    assert (daemon.stats()["shares_version"], daemon.stats()["floors_total"]) == (1, 100)


# --- Events ---


def test_what_happens_in_the_tier_can_be_followed_by_any_number_of_readers(daemon: Daemon) -> None:
    client = daemon.client()
    names = chain("events", 2)
    store(client, names, owner=owner_id("x"))
    client.touch([(names[1], 80, None, "demote")])
    daemon.observer().drop_owner(owner_id("x"))

    first, second = client.events(0), daemon.observer().events(0)

    assert first is not None
    assert first == second
    assert [(event.event_id, event.kind, event.block_hash) for event in first.events] == [
        (1, "stored", names[0]),
        (2, "stored", names[1]),
        (3, "updated", names[1]),
        (4, "removed", names[1]),
        (5, "removed", names[0]),
    ]
    assert [event.parent for event in first.events[:2]] == [None, names[0]]
    assert (first.events[2].old_priority, first.events[2].priority) == (35, 80)
    assert client.events(first.last) == replace(first, events=())


def test_a_reader_that_fell_behind_is_told_and_can_list_what_is_there(directory: Path) -> None:
    daemon = Daemon(directory, event_buffer_max_size=4)
    daemon.start()
    names = chain("behind", 9)
    store(daemon.client(), names)

    found = daemon.observer().events(2)

    assert found is not None
    assert (found.lost, found.last, len(found.events)) == (True, 9, 4)
    assert {block.block_hash: block.parent for block in daemon.observer().blocks()} == dict(
        zip(names, [None, *names[:-1]], strict=True)
    )
    assert list(daemon.observer().blocks("ffffffff")) == []
    daemon.close()


def test_verifying_on_demand_finds_what_went_bad(daemon: Daemon) -> None:
    client = daemon.client()
    names = chain("demand", 5)
    store(client, names)
    assert client.payload is not None
    client.payload[3 * SLOT_BYTES + 1] ^= 1

    assert daemon.observer().verify() == 5

    wait_until(lambda: daemon.stats()["unverified"] == 0)
    assert daemon.stats()["corrupt"] == 1
    assert client.lookup(names) == 3


# --- Engines that die, fork, or say nothing ---


def test_a_key_is_storable_again_at_once_after_its_writer_was_killed(daemon: Daemon) -> None:
    writer = peer(
        daemon,
        """
        print(client.reserve(offers(chain("killed", 3)))[0], flush=True)
        time.sleep(60)
        """,
    )
    assert writer.stdout is not None
    assert "Reserved" in writer.stdout.readline()
    client = daemon.client()
    assert client.reserve(offers(chain("killed", 3)))[0] == Pending()

    writer.kill()
    writer.wait()

    wait_until(lambda: daemon.stats()["sessions"] == 1)
    assert store(client, chain("killed", 3)) == ["stored"] * 3
    wait_until(lambda: daemon.stats()["quarantined"] == 0)


def test_a_key_is_storable_again_at_once_after_two_writers_of_it_were_killed_one_after_the_other(
    daemon: Daemon,
) -> None:
    """Elsewhere a key whose first writer had died stayed taken for ever."""
    client = daemon.client()
    names = chain("killed twice", 3)
    for _ in range(2):
        writer = peer(
            daemon,
            """
            print(client.reserve(offers(chain("killed twice", 3))), flush=True)
            time.sleep(60)
            """,
        )
        assert writer.stdout is not None
        assert writer.stdout.readline().count("Reserved") == 3
        assert client.reserve(offers(names)) == [Pending()] * 3
        writer.kill()
        writer.wait()
        wait_until(lambda: daemon.stats()["sessions"] == 1)

    assert store(client, names) == ["stored"] * 3
    assert load(client, names) == contents(names)
    wait_until(lambda: daemon.stats()["quarantined"] == 0)


def test_slots_of_a_process_that_lives_on_without_its_session_stay_in_quarantine(daemon: Daemon) -> None:
    writer = peer(
        daemon,
        """
        outcomes = client.reserve(offers(chain("alive", 3)))
        client._link._sock.close()
        print("closed", flush=True)
        sys.stdin.readline()
        time.sleep(60)
        """,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "closed\n"
    wait_until(lambda: daemon.stats()["sessions"] == 0)

    assert daemon.stats()["quarantined"] == 3
    assert store(daemon.client(), chain("alive", 3)) == ["stored"] * 3

    writer.kill()
    writer.wait()
    wait_until(lambda: daemon.stats()["quarantined"] == 0)


def test_quarantine_outlives_a_kill_of_the_daemon_and_ends_when_the_engine_says_so(daemon: Daemon) -> None:
    client = daemon.client()
    outcomes = client.reserve(offers(chain("survivor", 3)))
    numbers = [each.reservation for each in outcomes if isinstance(each, Reserved)]

    daemon.kill()
    daemon.start()
    client.lookup(chain("other", 1))
    assert daemon.stats()["quarantined"] == 3

    assert client.commit([(number, 1) for number in numbers]) == ["expired"] * 3
    wait_until(lambda: client.poll() == "ready" and daemon.stats()["quarantined"] == 0)


def test_engines_that_come_and_die_cost_the_daemon_no_descriptor(daemon: Daemon) -> None:
    assert daemon.process is not None
    folder = f"/proc/{daemon.process.pid}/fd"
    client = daemon.client()
    client.lookup(chain("x", 1))
    before = len(os.listdir(folder))

    for number in range(4):
        outcomes = client.reserve(offers(chain(number, 1)))
        client._link.lose(is_breach=False)
        wait_until(lambda: client.poll() == "ready")
        client.commit([(each.reservation, 1) for each in outcomes if isinstance(each, Reserved)])
    for number in range(3):
        killed = peer(daemon, f"client.reserve(offers(chain('killed {number}', 2))); os.kill(os.getpid(), 9)")
        killed.wait()

    wait_until(lambda: daemon.stats()["quarantined"] == 0)
    client.lookup(chain("x", 1))
    wait_until(lambda: len(os.listdir(folder)) == before)


def test_metrics_are_served_where_asked(directory: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    daemon = Daemon(directory, metrics_listen=f"127.0.0.1:{port}")
    daemon.start()
    store(daemon.client(), chain("measured", 3))

    def served() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return answer.read().decode()

    wait_until(lambda: "halocline_tier_host_stored_total 3.0" in served())
    assert daemon.stop() == 0
    daemon.close()


def test_a_clean_goodbye_needs_no_quarantine(daemon: Daemon) -> None:
    client = daemon.client()
    client.reserve(offers(chain("bye", 3)))

    client.close()

    wait_until(lambda: daemon.stats()["sessions"] == 0)
    assert daemon.stats()["quarantined"] == 0
    assert daemon.stats()["reserved"] == 0


def test_a_forked_child_has_a_session_of_its_own_and_leaves_its_parents_alone(daemon: Daemon) -> None:
    client = daemon.client()
    names = chain("fork", 3)
    store(client, names)
    lease = client.lease(names)
    assert lease is not None

    pid = os.fork()
    if pid == 0:
        held = client.release(lease)
        found = client.lookup(names)
        os._exit(0 if (held, found) == (False, 3) else 1)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert client.release(lease) is True


def test_half_a_frame_and_garbage_harm_nobody_else(daemon: Daemon) -> None:
    client = daemon.client()
    names = chain("unharmed", 2)
    store(client, names)
    strangers = []
    for data in (b"\x00\x00", b"\x00\x00\x00\x05hello", b"\xff" * 64, os.urandom(200)):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.connect(str(daemon.socket))
        stranger.sendall(data)
        strangers.append(stranger)

    assert load(client, names) == contents(names)
    for stranger in strangers:
        stranger.close()


def test_more_peers_than_allowed_are_told_so(directory: Path) -> None:
    daemon = Daemon(directory, max_sessions=2)
    daemon.start()
    first, second, third = daemon.client(), daemon.client(), daemon.client()
    assert (first.poll(), second.poll()) == ("ready", "ready")

    assert third.poll() == "absent"

    assert third.refusal is not None
    assert third.refusal.reason == "sessions_full"
    daemon.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_stranger_is_refused_by_name_even_where_the_socket_lets_him_in(daemon: Daemon) -> None:
    daemon.directory.chmod(0o755)
    daemon.socket.chmod(0o666)

    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        stranger = TierClient(daemon.socket, HELLO, 2.0)
        state = stranger.poll()
        refusal = stranger.refusal
        os._exit(0 if state == "absent" and refusal is not None and refusal.reason == "user" else 1)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert daemon.client().poll() == "ready"


# --- Layouts and arenas ---


def test_another_layout_is_refused_while_blocks_of_the_first_are_there(daemon: Daemon) -> None:
    client = daemon.client()
    store(client, chain("first", 2))
    other = daemon.client(hello=TierHello(b"other layout", 9000, 16))

    assert other.poll() == "absent"
    assert other.refusal is not None
    assert other.refusal.reason == "layout_in_use"

    client.close()
    wait_until(lambda: daemon.stats()["sessions"] == 0)
    again = daemon.client(hello=TierHello(b"other layout", 9000, 16))
    assert again.poll() == "absent"
    assert again.refusal is not None
    assert again.refusal.reason == "layout_lingers"


def test_another_layout_takes_over_what_nobody_came_back_for(directory: Path) -> None:
    daemon = Daemon(directory, layout_linger_s=0)
    daemon.start()
    client = daemon.client()
    names = chain("first", 2)
    store(client, names)
    client.close()
    wait_until(lambda: daemon.stats()["sessions"] == 0)

    other = daemon.client(hello=TierHello(b"other layout", 9000, 16))

    assert other.poll() == "ready"
    assert other.lookup(names) == 0
    assert store(other, chain("second", 2)) == ["stored"] * 2
    daemon.close()


def test_a_second_daemon_on_the_same_arena_is_refused_by_name(daemon: Daemon) -> None:
    other = Daemon(daemon.directory)
    other.settings["socket"] = str(daemon.directory / "other.sock")

    process = other.spawn(stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=20)

    assert process.returncode == 1
    assert daemon.process is not None
    assert f"held by a running cache daemon (process {daemon.process.pid})" in said.decode()


def test_an_arena_that_does_not_fit_is_refused_with_the_numbers(directory: Path) -> None:
    found = os.statvfs(directory)
    daemon = Daemon(directory, host_cache_size=found.f_blocks * found.f_frsize * 2)

    process = daemon.spawn(stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=20)

    assert process.returncode == 1
    assert f"arena of {daemon.settings['host_cache_size']} bytes" in said.decode()
    assert "are free" in said.decode()


@pytest.mark.parametrize("slots", [32, 512])
def test_a_start_with_another_size_keeps_what_fits(daemon: Daemon, slots: int) -> None:
    names = chain("resized", 40)
    store(daemon.client(), names)
    daemon.stop()
    daemon.settings["host_cache_size"] = slots * SLOT_BYTES

    daemon.start()

    wait_until(lambda: daemon.stats()["unverified"] == 0)
    copies = load(daemon.client(), names)
    assert copies == contents(names)[: min(40, slots)]
    assert (daemon.arena_dir / "payload").stat().st_size == slots * SLOT_BYTES
    assert daemon.stats()["capacity_slots"] == slots


def test_arena_and_socket_are_private(daemon: Daemon) -> None:
    assert daemon.arena_dir.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in daemon.arena_dir.rglob("*") if path.is_file()} == {0o600}
    assert (daemon.arena_dir / "peers").stat().st_mode & 0o777 == 0o700
    assert daemon.socket.stat().st_mode & 0o777 == 0o660


def test_kills_leave_no_more_memory_behind_than_one_arena(directory: Path) -> None:
    daemon = Daemon(directory, host_cache_size=64 * SLOT_BYTES)
    daemon.start()
    daemon.kill()
    before = sorted(path.name for path in daemon.arena_dir.iterdir())

    for _ in range(3):
        daemon.start()
        store(daemon.client(), chain("again", 4))
        daemon.kill()

    assert sorted(path.name for path in daemon.arena_dir.iterdir()) == before
    assert (daemon.arena_dir / "payload").stat().st_blocks * 512 <= 64 * SLOT_BYTES + 4096
    assert BLOCK_BYTES < SLOT_BYTES

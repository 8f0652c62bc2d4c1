"""Engines that stop, fork or die with blocks in their hands: what becomes of the blocks, of the keys, and of everybody else."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from cached.client import prepare_copies
from cached.protocol import Pending
from tests.support.cached_daemon import (
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
SLOT_BYTES = 8192
NUM_SLOTS = 12
TTL_S = 2.0


@pytest.fixture
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    settings = getattr(request, "param", {})
    prepare_copies()
    with daemon_directory() as directory:
        made = Daemon(directory, host_cache_size=NUM_SLOTS * SLOT_BYTES, **settings)
        made.start()
        yield made
        made.close()


class Engine:
    """Another process that speaks to the daemon; its program finds `client` and the helpers made."""

    def __init__(self, daemon: Daemon, program: str) -> None:
        preamble = f"""
            import os, sys, time
            sys.path.insert(0, {str(REPOSITORY)!r})
            from tests.support.cached_daemon import *
            from cached.client import prepare_copies
            prepare_copies()
            client = TierClient({str(daemon.socket)!r}, HELLO, 5.0)
        """
        text = textwrap.dedent(preamble) + textwrap.dedent(program)
        self.process = subprocess.Popen(
            [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go on\n")
        self.process.stdin.flush()

    def end(self) -> int:
        return self.process.wait(30)


HOLDING = """
    names, new = chain("held", 3), chain("new", 3)
    store(client, names)
    lease = client.lease(names)
    out = memoryview(bytearray(BLOCK_BYTES))
    assert client.read(lease, lease.blocks[0], out)
    slots = client.reserve(offers(new))
    print("holding", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("daemon", [{"lease_ttl_s": TTL_S, "reservation_ttl_s": TTL_S}], indirect=True, ids=["short"])
def test_an_engine_stopped_with_a_lease_and_reservations_holds_nobody_up_and_finds_them_lapsed(daemon: Daemon) -> None:
    """The lease and the reservations lapse; keys and blocks are everybody's again; the slots that the stopped engine may yet
    write into are nobody's until it lets go of them; and what it then says is a miss, and an expired commit."""
    engine = Engine(
        daemon,
        HOLDING
        + """
    wrote = all(client.write(slot, memoryview(b"?" * BLOCK_BYTES)) for slot in slots)
    print(client.commit([(slot.reservation, 1) for slot in slots]), client.release(lease), flush=True)
    sys.stdin.readline()
        """,
    )
    assert engine.says() == "holding"
    client = daemon.client()
    new = chain("new", 3)
    assert client.reserve(offers(new)) == [Pending()] * 3

    engine.process.send_signal(signal.SIGSTOP)

    wait_until(lambda: store(client, new) == ["stored"] * 3, 30)
    # What was leased can be evicted; the stopped engine's three slots are not given out.
    assert store(client, chain("flood", NUM_SLOTS), priority=90).count("stored") == NUM_SLOTS - 3
    assert load(client, chain("held", 3)) == []

    engine.process.send_signal(signal.SIGCONT)
    engine.go_on()

    assert engine.says() == "['expired', 'orphan', 'orphan'] False"
    flood = chain("flood", NUM_SLOTS - 3)
    assert load(client, flood) == [content_of(name) for name in flood]
    assert store(client, chain("flood", NUM_SLOTS), priority=90)[-3:] == ["stored"] * 3
    engine.go_on()
    assert engine.end() == 0


def test_an_engine_killed_in_the_middle_of_its_copies_leaves_its_keys_storable_at_once(daemon: Daemon) -> None:
    engine = Engine(
        daemon,
        """
        slots = client.reserve(offers(chain("killed", 3)))
        assert client.write_many(slots[:2], [memoryview(b"?" * BLOCK_BYTES)] * 2)
        print("copying", flush=True)
        time.sleep(60)
        """,
    )
    assert engine.says() == "copying"
    names = chain("killed", 3)
    client = daemon.client()
    assert client.lookup(names) == 0

    engine.process.kill()
    engine.end()

    wait_until(lambda: daemon.stats()["sessions"] == 1)
    assert store(client, names) == ["stored"] * 3
    assert load(client, names) == [content_of(name) for name in names]
    wait_until(lambda: daemon.stats()["quarantined"] == 0)
    assert store(client, chain("all", NUM_SLOTS)).count("stored") == NUM_SLOTS


def test_a_child_forked_after_mapping_touches_nothing_of_its_parents_and_its_end_ends_nothing(daemon: Daemon) -> None:
    """However the child ends: at once, through the interpreter's own end, or after an orderly goodbye of its own session."""
    engine = Engine(
        daemon,
        """
        names = chain("parents", 3)
        store(client, names)
        for end in ("at once", "by itself", "orderly"):
            lease = client.lease(names)
            out = memoryview(bytearray(BLOCK_BYTES))
            assert client.read(lease, lease.blocks[0], out)
            [new] = chain(end, 1)
            [slot] = client.reserve(offers([new]))
            pid = os.fork()
            if pid == 0:
                assert client.payload is None and client.registrable is None
                assert not client.may_copy([lease.lease_id]) and not client.may_copy([slot.reservation])
                assert not client.read_many(lease, lease.blocks, [out] * 3)
                assert not client.write(slot, memoryview(b"?" * BLOCK_BYTES))
                assert client.commit([(slot.reservation, 1)]) == ["expired"]
                assert client.release(lease) is False
                assert load(client, names) == [content_of(name) for name in names]
                if end == "orderly":
                    client.close()
                os._exit(0) if end == "at once" else sys.exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert client.write(slot, memoryview(content_of(new)))
            checksum = xxh3_64_intdigest(content_of(new))
            print(end, client.commit([(slot.reservation, checksum)]), client.release(lease), flush=True)
        """,
    )

    for end in ("at once", "by itself", "orderly"):
        assert engine.says() == f"{end} ['stored'] True"
        assert load(daemon.client(), chain(end, 1)) == [content_of(chain(end, 1)[0])]
    assert engine.end() == 0

"""The client against a daemon that misbehaves: whatever it says or does not say, a verb answers a miss in time."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cached.client import TierClient
from cached.protocol import (
    PROTOCOL_VERSION,
    TABLE,
    HelloRefused,
    LeaseReply,
    LookupReply,
    Refused,
    ReserveReply,
    TierHello,
    Welcome,
    f64s,
    u32s,
    u64s,
)
from cached.wire import FrameReader
from tests.support.cached_daemon import chain, offers

NAMES = chain("client", 3)
PAYLOAD_BYTES = 4 * 4096
Answer = Callable[[object], bytes | None]


class FakeDaemon:
    """Welcomes like a real one, then answers each request with what `answer` makes of it; None: says nothing."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "c.sock"
        self.answer: Answer = lambda request: None
        self.greeting: Callable[[socket.socket, object], None] = self.welcome
        self.heard: list[object] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen(8)
        self._payload = os.memfd_create("payload")
        os.truncate(self._payload, PAYLOAD_BYTES)
        self._lock = os.memfd_create("lock")
        threading.Thread(target=self._accept, daemon=True).start()

    def welcome(self, sock: socket.socket, hello: object) -> None:
        welcome = Welcome(hello.request_id, PROTOCOL_VERSION, 1, 4096, 4, PAYLOAD_BYTES, 2**30, 10, 30)  # type: ignore[attr-defined]
        socket.send_fds(sock, [TABLE.encode(welcome)], [self._payload, self._lock])

    def _accept(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        reader = FrameReader(2**20)
        greeted = False
        while data := sock.recv(65536):
            for request in TABLE.decode_all(reader.receive(data)):
                self.heard.append(request)
                if not greeted:
                    greeted = True
                    self.greeting(sock, request)
                    continue
                said = self.answer(request)
                if said == b"":
                    sock.close()
                    return
                if said is not None:
                    sock.sendall(said)


@pytest.fixture
def fake() -> Iterator[FakeDaemon]:
    with tempfile.TemporaryDirectory(prefix="hl", dir="/tmp") as directory:
        yield FakeDaemon(Path(directory))


def make_client(fake: FakeDaemon) -> TierClient:
    """It waits long: on a busy machine the threads of the fake need more than a moment to say what they are to say."""
    return TierClient(fake.path, TierHello(b"layout", 4096, 16), 30.0)


def lease_of(request: object, slots: list[int]) -> bytes:
    count = len(slots)
    columns = u32s(slots), u64s([1] * count), u64s([2] * count), bytes(count), f64s([0.0] * count), bytes(count)
    return TABLE.encode(LeaseReply(request.request_id, 7, *columns))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: None,
        lambda request: b"",
        lambda request: b"\x00\x00",
        lambda request: b"\xff" * 16,
        lambda request: b"\x00\x00\x00\x03abc",
        lambda request: TABLE.encode(LookupReply(request.request_id + 1, 3)),
        lambda request: TABLE.encode(HelloRefused(request.request_id, "no", "no")),
        lambda request: 2 * TABLE.encode(LookupReply(request.request_id, 3)),
    ],
    ids=["silence", "end", "half a frame", "too long", "garbage", "another's", "another kind", "twice"],
)
def test_a_lookup_that_is_not_answered_properly_is_a_miss(fake: FakeDaemon, answer: Answer) -> None:
    fake.answer = answer
    client = make_client(fake)
    assert client.poll() == "ready"
    client._link._timeout_s = 0.1  # From here on a late answer is as good a miss as any of these.

    assert client.lookup(NAMES) == 0

    assert client.state == "absent"
    assert client.payload is None


def test_more_blocks_than_asked_are_not_believed(fake: FakeDaemon) -> None:
    fake.answer = lambda request: TABLE.encode(LookupReply(request.request_id, 99))  # type: ignore[attr-defined]

    assert make_client(fake).lookup(NAMES) == 3


def test_a_lease_beyond_the_payload_is_a_miss(fake: FakeDaemon) -> None:
    fake.answer = lambda request: lease_of(request, [0, 4])
    client = make_client(fake)

    assert client.lease(NAMES) is None
    assert client.state == "absent"


def test_a_reservation_beyond_the_payload_is_refused(fake: FakeDaemon) -> None:
    fake.answer = lambda request: TABLE.encode(
        ReserveReply(request.request_id, bytes(3), u64s([1, 2, 3]), u32s([0, 1, 9]))  # type: ignore[attr-defined]
    )

    assert make_client(fake).reserve(offers(NAMES)) == [Refused("absent")] * 3


def test_a_welcome_without_a_payload_is_no_welcome(fake: FakeDaemon) -> None:
    fake.greeting = lambda sock, hello: sock.sendall(
        TABLE.encode(Welcome(hello.request_id, PROTOCOL_VERSION, 1, 4096, 4, PAYLOAD_BYTES, 2**30, 10, 30))  # type: ignore[attr-defined]
    )
    client = make_client(fake)

    assert client.lookup(NAMES) == 0
    assert client.state == "absent"


def test_after_a_breach_the_breaker_keeps_the_daemon_unasked(fake: FakeDaemon) -> None:
    fake.answer = lambda request: b"\xff" * 16
    client = make_client(fake)
    assert client.lookup(NAMES) == 0
    heard = len(fake.heard)

    assert [client.lookup(NAMES) for _ in range(5)] == [0] * 5

    assert len(fake.heard) == heard


def test_a_lease_of_a_lost_session_is_not_asked_about_again(fake: FakeDaemon) -> None:
    fake.answer = lambda request: lease_of(request, [0, 1]) if type(request).__name__ == "Lease" else None
    client = make_client(fake)
    lease = client.lease(NAMES)
    assert lease is not None
    client._link.lose(is_breach=False)
    client._link._not_before = 0.0
    assert client.poll() == "ready"

    assert client.release(lease) is False

    kinds = [type(request).__name__ for request in fake.heard]
    assert "Release" not in kinds


def test_settled_is_said_when_all_that_was_handed_out_is_given_back(fake: FakeDaemon) -> None:
    fake.answer = lambda request: (
        lease_of(request, [0, 1])
        if type(request).__name__ == "Lease"
        else TABLE.encode(LookupReply(request.request_id, 0))
        if type(request).__name__ == "Lookup"
        else None
    )
    client = make_client(fake)
    lease = client.lease(NAMES)
    assert lease is not None
    client._link.lose(is_breach=False)
    client._link._not_before = 0.0
    assert client.poll() == "ready"
    assert "Settled" not in [type(request).__name__ for request in fake.heard]

    client.release(lease)
    client.lookup(NAMES)

    assert "Settled" in [type(request).__name__ for request in fake.heard]


def test_the_same_payload_keeps_its_mapping_over_a_reconnect(fake: FakeDaemon) -> None:
    client = make_client(fake)
    client.poll()
    before = client.payload
    assert before is not None
    client._link.lose(is_breach=False)
    client._link._not_before = 0.0

    client.poll()

    assert client.payload is not None
    assert client.payload.obj is before.obj
    assert before is not None
    assert len(before) == PAYLOAD_BYTES


def test_what_comes_with_a_welcome_is_not_passed_on_to_other_programs(fake: FakeDaemon) -> None:
    """A program that an engine had started held its lock, and so what it had been writing into, after its death."""
    before = set(os.listdir("/proc/self/fd"))
    client = TierClient(fake.path, TierHello(b"fp", 4096, 16), 1.0)
    client.poll()
    assert client.state == "ready"

    held = [int(fd) for fd in set(os.listdir("/proc/self/fd")) - before if os.path.exists(f"/proc/self/fd/{fd}")]
    ours = [fd for fd in held if "memfd" in os.readlink(f"/proc/self/fd/{fd}")]

    assert len(ours) == 2
    assert not any(map(os.get_inheritable, ours))
    client.close()


def test_a_welcome_with_slots_smaller_than_a_block_is_no_welcome(fake: FakeDaemon) -> None:
    """The last block would have been copied to beyond the payload's end."""
    client = TierClient(fake.path, TierHello(b"fp", 4097, 16), 1.0)

    assert client.poll() == "absent"
    assert client.num_slots == 0

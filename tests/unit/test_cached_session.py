"""The protocol of one peer, without sockets: what is legal when, and that bytes may arrive however they like."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cached.arena import Arena
from cached.errors import ArenaError, PeerError
from cached.keys import self_test_vector
from cached.protocol import (
    FIRST_REFUSAL,
    MAX_HASHES,
    NO_PARENT,
    PROTOCOL_VERSION,
    RESERVED,
    TABLE,
    Bye,
    Commit,
    Hello,
    Layout,
    ListRequest,
    Lookup,
    Reserve,
    SetOwners,
    Settled,
    Stats,
    StatsRequest,
    Touch,
    f64s,
    u32s,
    u64s,
)
from cached.session import MAX_FRAMES_AT_ONCE, Peer, Session, State
from cached.shares import unpack
from cached.tier import Tier, TierSettings
from cached.wire import HEADER_BYTES

SETTINGS = TierSettings(10, 30, 60)
LAYOUT = Layout(b"layout", 4096, 16)
HELLO = Hello(1, PROTOCOL_VERSION, bytes(16), self_test_vector(), LAYOUT, "")
NAME = b"n" * 32
RESERVE = Reserve(2, NAME, NO_PARENT, u32s([1]), bytes([35]), f64s([float("inf")]), bytes(1), bytes(16))


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    arena = Arena.open(tmp_path / "arena", 2**17)
    yield Tier(arena.parts, SETTINGS, 1, 0.0)
    arena.close(keep=False)


def say(session: Session, *messages: object) -> list[object]:
    replies = session.receive(b"".join(TABLE.encode(message) for message in messages), 0.0)
    return [TABLE.decode(each.frame[HEADER_BYTES:]) for each in replies]


def open_session(tier: Tier) -> Session:
    session = Session(tier, SETTINGS, Peer(1, 1))
    say(session, HELLO)
    return session


def test_a_welcome_to_an_engine_comes_with_the_payload(tier: Tier) -> None:
    session = Session(tier, SETTINGS, Peer(1, 1))

    [outgoing] = session.receive(TABLE.encode(HELLO), 0.0)

    assert outgoing.with_payload
    welcome = TABLE.decode(outgoing.frame[HEADER_BYTES:])
    assert (welcome.slot_bytes, welcome.num_slots, welcome.payload_bytes) == (4096, 32, 2**17)
    assert welcome.registration_bytes == 64 * 2**30


def test_an_observer_gets_no_payload_and_may_not_store(tier: Tier) -> None:
    session = Session(tier, SETTINGS, Peer(1, 1))

    [outgoing] = session.receive(TABLE.encode(Hello(1, PROTOCOL_VERSION, bytes(16), self_test_vector(), None, "")), 0.0)

    assert not outgoing.with_payload
    assert isinstance(say(session, StatsRequest(2))[0], Stats)
    with pytest.raises(PeerError, match="Reserve is not legal in state observer"):
        say(session, RESERVE)


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (Hello(1, 99, bytes(16), self_test_vector(), LAYOUT, ""), "version"),
        (Hello(1, PROTOCOL_VERSION, bytes(16), bytes(32), LAYOUT, ""), "hash"),
        (Hello(1, PROTOCOL_VERSION, bytes(16), self_test_vector(), Layout(b"x", 2**20, 16), ""), "block_too_large"),
    ],
)
def test_a_peer_that_does_not_fit_is_told_why(tier: Tier, hello: Hello, reason: str) -> None:
    session = Session(tier, SETTINGS, Peer(1, 1))

    [refused] = say(session, hello)

    assert refused.reason == reason  # type: ignore[attr-defined]
    assert session.state is State.CLOSED


@pytest.mark.parametrize(
    "layout", [Layout(b"", 4096, 16), Layout(b"x" * 65, 4096, 16), Layout(b"x", 0, 16), Layout(b"x", 4096, -1)]
)
def test_a_layout_that_is_none_is_the_peers_fault(tier: Tier, layout: Layout) -> None:
    session = Session(tier, SETTINGS, Peer(1, 1))

    with pytest.raises(PeerError, match="layout"):
        say(session, Hello(1, PROTOCOL_VERSION, bytes(16), self_test_vector(), layout, ""))


def test_one_byte_at_a_time_says_the_same(tier: Tier) -> None:
    session = Session(tier, SETTINGS, Peer(1, 1))
    stream = b"".join(TABLE.encode(message) for message in (HELLO, RESERVE, Lookup(3, NAME), Bye()))

    replies = [reply for byte in stream for reply in session.receive(bytes([byte]), 0.0)]

    names = [type(TABLE.decode(reply.frame[HEADER_BYTES:])).__name__ for reply in replies]
    assert names == ["Welcome", "ReserveReply", "LookupReply"]
    assert session.state is State.CLOSED


@pytest.mark.parametrize(
    "message",
    [
        Lookup(1, b"n" * 33),
        Lookup(1, bytes(32 * (MAX_HASHES + 1))),
        Reserve(2, NAME, NO_PARENT, u32s([1, 2]), bytes([35]), f64s([1.0]), bytes(1), bytes(16)),
        Reserve(2, NAME, NO_PARENT, u32s([1]), bytes([101]), f64s([1.0]), bytes(1), bytes(16)),
        Reserve(2, NAME, NO_PARENT, u32s([1]), bytes([35]), f64s([float("nan")]), bytes(1), bytes(16)),
        Reserve(2, NAME, NAME, u32s([1]), bytes([35]), f64s([1.0]), bytes(1), bytes(16)),
        Touch(2, NAME, bytes([35]), b"", bytes(1)),
        Commit(2, u64s([1, 2]), u64s([1])),
        Commit(2, b"abc", b""),
    ],
)
def test_columns_that_contradict_each_other_are_the_peers_fault(tier: Tier, message: object) -> None:
    session = open_session(tier)

    with pytest.raises(PeerError):
        say(session, message)


def test_nothing_is_legal_before_a_hello_and_a_second_hello_never(tier: Tier) -> None:
    with pytest.raises(PeerError, match="Lookup is not legal in state new"):
        say(Session(tier, SETTINGS, Peer(1, 1)), Lookup(1, NAME))
    with pytest.raises(PeerError, match="Hello is not legal in state engine"):
        say(open_session(tier), HELLO)


def test_the_end_of_a_session_undoes_what_it_reserved(tier: Tier) -> None:
    session = open_session(tier)
    [reply] = say(session, RESERVE)
    assert reply.outcomes == bytes([RESERVED])  # type: ignore[attr-defined]

    assert session.end(0.0) is True

    store = tier.parts[0].require_store()
    assert len(store.blocks.index) == 0
    store.check_invariants()


def test_a_client_that_has_settled_before_its_old_session_was_seen_to_end_leaves_no_quarantine(tier: Tier) -> None:
    """A client that lost patience reconnects and settles; a slow daemon may read that before the old connection's end."""
    old, new = Session(tier, SETTINGS, Peer(1, 1)), Session(tier, SETTINGS, Peer(1, 1))
    say(old, HELLO)
    say(old, RESERVE)
    say(new, HELLO)

    new.receive(TABLE.encode(Settled()), 0.0)
    unsettled = old.end(0.0)

    assert unsettled is False
    assert tier.quarantined() == {}
    assert tier.statistics().reserved == 0


def test_an_orphan_is_refused_by_name(tier: Tier) -> None:
    session = open_session(tier)
    orphan = Reserve(2, NAME, b"p" * 32, u32s([1]), bytes([35]), f64s([1.0]), bytes(1), bytes(16))

    [reply] = say(session, orphan)

    assert reply.outcomes == bytes([FIRST_REFUSAL])  # type: ignore[attr-defined]


def test_a_peer_that_does_not_wait_for_replies_is_closed_before_it_keeps_everybody_waiting(tier: Tier) -> None:
    """One read of 6,000 requests for lists took seconds, and a gigabyte for the replies."""
    session = open_session(tier)

    with pytest.raises(PeerError, match="at once"):
        say(session, *[ListRequest(number, b"", -1, 0) for number in range(MAX_FRAMES_AT_ONCE + 1)])


def test_shares_that_could_not_be_kept_when_they_were_taken_are_kept_when_they_come_again(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time they were known, which was answered, and the next daemon had never heard of them."""
    shares = SetOwners(3, 7, b"o" * 16, f64s([1.0]), u64s([4096]), u64s([8192]))
    session = open_session(tier)
    files = tier.parts[0].files

    def no_room(data: bytes) -> None:
        raise ArenaError("no room")

    with monkeypatch.context() as full:
        full.setattr(files, "write_shares", no_room)
        with pytest.raises(ArenaError):
            say(session, shares)
    [told] = say(session, shares)

    assert (told.outcome, told.version) == ("known", 7)  # type: ignore[attr-defined]
    kept = unpack(files.read_shares())
    assert kept is not None
    assert kept.version == 7

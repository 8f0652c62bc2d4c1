"""Frames and messages: however the bytes are cut the same, and whatever the bytes are never another exception."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cached.errors import WireError
from cached.keys import OwnerId
from cached.retention import Retention, RetentionConfig, TokenRange
from cached.wire import FrameReader
from engine import protocol

messages = st.one_of(
    st.builds(protocol.Cancel, st.integers(0, 2**63 - 1)),
    st.builds(protocol.Confirm, st.integers(0, 2**63 - 1), st.integers(0, 10**6)),
    st.builds(
        protocol.Submit,
        request_id=st.integers(0, 2**63 - 1),
        prompt=st.binary(max_size=64),
        max_tokens=st.integers(1, 100),
        sampling=st.builds(
            protocol.Sampling,
            temperature=st.floats(0, 2),
            seed=st.none() | st.integers(0, 2**63 - 1),
            logit_bias=st.lists(st.builds(protocol.LogitBias, st.integers(0, 9), st.floats(-100, 100))).map(tuple),
        ),
        cache_salt=st.none() | st.text(min_size=1),
        owner=st.binary(min_size=16, max_size=16).map(OwnerId),
        retention=st.builds(
            RetentionConfig,
            st.lists(
                st.builds(
                    TokenRange,
                    st.integers(0, 9),
                    st.none() | st.integers(10, 20),
                    st.builds(Retention, st.integers(0, 100), st.none() | st.floats(0.1, 9), st.just("drop")),
                )
            ).map(tuple),
        ),
    ),
)


@given(st.lists(messages, max_size=5), st.data())
def test_messages_survive_however_the_stream_is_cut(sent: list, data: st.DataObject) -> None:
    stream = b"".join(protocol.TO_ENGINE.encode(message) for message in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader = FrameReader(protocol.MAX_FRAME_BYTES)

    frames = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        frames += reader.receive(stream[start:end])

    assert protocol.TO_ENGINE.decode_all(frames) == sent
    assert reader.pending_bytes == 0


@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_wire_error(junk: bytes) -> None:
    with contextlib.suppress(WireError):
        protocol.TO_ENGINE.decode(junk)


@given(messages, st.data())
def test_a_mutated_message_gives_a_message_or_a_wire_error(message: object, data: st.DataObject) -> None:
    frame = bytearray(protocol.TO_ENGINE.encode(message)[4:])
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        protocol.TO_ENGINE.decode(bytes(frame))


@pytest.mark.parametrize(
    "body",
    [
        [],
        7,
        {"a": 1},
        [99],
        ["2", 1],
        [True, 1],
        [3],
        [3, "1"],
        [3, 1, 1],
        [3, None],
        [4, 1, 2.5],
        [2, 1, "text", 5, [], None, b"", [[], [35, None, "demote"]], False],
        msgpack.ExtType(1, b"x"),
        [3, [[[[[[[[[[]]]]]]]]]]],
    ],
)
def test_a_frame_of_the_wrong_shape_is_a_wire_error(body: object) -> None:
    with pytest.raises(WireError):
        protocol.TO_ENGINE.decode(msgpack.packb(body))


def test_a_frame_over_the_maximum_is_refused_from_its_header_alone() -> None:
    reader = FrameReader(1000)

    with pytest.raises(WireError, match="1001 bytes is over the maximum of 1000"):
        reader.receive((1001).to_bytes(4, "big"))


def test_a_salt_is_not_in_the_repr_of_a_submit() -> None:
    assert "hunter2" not in repr(protocol.Submit(1, b"", 1, cache_salt="hunter2"))

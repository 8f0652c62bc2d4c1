"""Frames and messages without I/O: a u32 big-endian length, then a msgpack array `[tag, field, …]`.

`FrameReader` turns bytes into frames, however they are cut; `MessageTable` turns frames into frozen dataclasses and
back, checking every field's type from its annotation. Sockets and what to do with a bad peer are the shells' business.
"""

from __future__ import annotations

import dataclasses
import operator
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

import msgpack

from cached.errors import WireError

HEADER_BYTES = 4
MAX_ARRAY_ITEMS = 2**20

_Check = Callable[[Any], Any]
_PLAIN = (int, bool, str, bytes)


class FrameReader:
    """Collects bytes and hands out whole frames; raises WireError as soon as a length is over the maximum."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._max = max_frame_bytes
        self._buffer = bytearray()

    def receive(self, data: bytes) -> list[bytes]:
        """The frames that `data` completes, in order, without their length header."""
        if not self._buffer and self._is_one_frame(data):
            return [bytes(data[HEADER_BYTES:])]
        self._buffer += data
        frames: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= HEADER_BYTES:
            length = int.from_bytes(self._buffer[start : start + HEADER_BYTES], "big")
            if length > self._max:
                raise WireError(f"a frame of {length} bytes is over the maximum of {self._max}")
            if len(self._buffer) - start - HEADER_BYTES < length:
                break
            begin = start + HEADER_BYTES
            frames.append(bytes(self._buffer[begin : begin + length]))
            start = begin + length
        if start:
            del self._buffer[:start]
        return frames

    def _is_one_frame(self, data: bytes) -> bool:
        """Whether there is one frame and no more, as mostly: then nothing has to be kept."""
        length = len(data) - HEADER_BYTES
        return 0 <= length <= self._max and length == int.from_bytes(data[:HEADER_BYTES], "big")

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that has begun and not ended."""
        return len(self._buffer)


def encode_frame(payload: bytes, max_frame_bytes: int) -> bytes:
    """`payload` behind its length; raises WireError when it is over the maximum."""
    if len(payload) > max_frame_bytes:
        raise WireError(f"a frame of {len(payload)} bytes is over the maximum of {max_frame_bytes}")
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


class MessageTable:
    """The messages of one link: `tag → dataclass`. Field types: int, float, bool, str, bytes, `X | None`,
    `tuple[X, ...]`, and frozen dataclasses of those (which travel as arrays without a tag)."""

    def __init__(self, messages: dict[int, type], max_frame_bytes: int) -> None:
        self.messages = dict(messages)
        self.max_frame_bytes = max_frame_bytes
        self._decoders = {tag: _dataclass_check(cls) for tag, cls in messages.items()}
        self._encoders = {cls: _encoder(tag, cls) for tag, cls in messages.items()}

    def encode(self, message: Any) -> bytes:
        """One frame with its length header; raises WireError when it is too large to send."""
        body = self._encoders[type(message)](message)
        return encode_frame(msgpack.packb(body, use_bin_type=True), self.max_frame_bytes)

    def decode(self, frame: bytes) -> Any:
        """The message in one frame (without header); raises WireError for anything that is not exactly one."""
        limit = max(len(frame), 1)
        try:
            body = msgpack.unpackb(
                frame,
                raw=False,
                use_list=True,
                strict_map_key=True,
                max_str_len=limit,
                max_bin_len=limit,
                max_array_len=min(limit, MAX_ARRAY_ITEMS),
                max_map_len=0,
                max_ext_len=0,
            )
        except (ValueError, msgpack.UnpackException, RecursionError, UnicodeDecodeError) as error:
            raise WireError(f"a frame is not msgpack: {type(error).__name__}") from None
        if not isinstance(body, list) or not body or type(body[0]) is not int:
            raise WireError("a frame is not an array that begins with a message number")
        decoder = self._decoders.get(body[0])
        if decoder is None:
            raise WireError(f"message number {body[0]} is unknown")
        del body[0]
        return decoder(body)

    def decode_all(self, frames: Iterable[bytes]) -> list[Any]:
        """`decode` for each frame, in order."""
        return [self.decode(frame) for frame in frames]


def _encoder(tag: int, cls: type) -> Callable[[Any], list[Any]]:
    """What makes an array of a message."""
    names = [field.name for field in dataclasses.fields(cls)]
    are_plain = all(hint in (*_PLAIN, float) for hint in typing.get_type_hints(cls).values())
    if not are_plain or len(names) < 2:
        return lambda message: [tag, *_fields(message)]
    fields_of = operator.attrgetter(*names)
    return lambda message: [tag, *fields_of(message)]


def _fields(message: Any) -> list[Any]:
    return [_plain(getattr(message, field.name)) for field in dataclasses.fields(message)]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        return _fields(value)
    return value


def _dataclass_check(cls: type) -> _Check:
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    checks = [_check_for(hints[name]) for name in names]
    kinds = tuple(hints[name] for name in names)
    are_plain = all(kind in _PLAIN for kind in kinds)

    def check(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(checks):
            raise WireError(f"{cls.__name__} needs {len(checks)} fields")
        if are_plain and tuple(map(type, value)) == kinds:
            return cls(*value)
        return cls(*[_checked(one, item, cls, name) for one, item, name in zip(checks, value, names, strict=True)])

    return check


def _checked(check: _Check, value: Any, cls: type, name: str) -> Any:
    try:
        return check(value)
    except WireError as error:
        raise WireError(f"{cls.__name__}.{name}: {error}") from None


def _check_for(hint: Any) -> _Check:
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return _literal_check(typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        assert len(inner) == 1, f"only `X | None` is supported, not {hint}"
        return _optional_check(_check_for(inner[0]))
    if origin is tuple:
        return _tuple_check(_check_for(typing.get_args(hint)[0]))
    while hasattr(hint, "__supertype__"):  # NewType
        hint = hint.__supertype__
    if dataclasses.is_dataclass(hint):
        return _dataclass_check(typing.cast(type, hint))
    if hint is float:
        return _float_check
    return _plain_check(hint)


def _plain_check(kind: type) -> _Check:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise WireError(f"must be {kind.__name__}, not {type(value).__name__}")
        return value

    return check


def _float_check(value: Any) -> float:
    if type(value) not in (float, int):
        raise WireError(f"must be a number, not {type(value).__name__}")
    return float(value)


def _literal_check(allowed: tuple[Any, ...]) -> _Check:
    def check(value: Any) -> Any:
        if value not in allowed:
            raise WireError(f"must be one of {', '.join(map(str, allowed))}")
        return value

    return check


def _optional_check(inner: _Check) -> _Check:
    return lambda value: None if value is None else inner(value)


def _tuple_check(inner: _Check) -> _Check:
    def check(value: Any) -> Any:
        if not isinstance(value, list):
            raise WireError(f"must be an array, not {type(value).__name__}")
        return tuple([inner(item) for item in value])

    return check

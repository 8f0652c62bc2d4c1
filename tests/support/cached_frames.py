"""Frames for the cache daemon as nobody in his right mind sends them: every message of the table, mostly sensible, often mutated."""

from __future__ import annotations

import dataclasses
import random
import types
import typing
from typing import Any

import msgpack

from cached import protocol
from cached.keys import self_test_vector
from cached.protocol import TABLE, f64s, u32s, u64s

LAYOUT = protocol.Layout(b"layout", 4096, 16)
NUM_NAMES = 48
OWNERS = [bytes([number]) * 16 for number in range(4)]
CLIENTS = [bytes([number]) * 16 for number in range(3)]
NUMBERS = [0, 1, 2, 3, 7, 255, 2**31, 2**32 - 1, 2**63, 2**64 - 1, -1]


def name(number: int) -> bytes:
    return bytes([number]) * 31 + b"f"


class FrameMaker:
    """Makes frames; learns ids from replies, so that commits, aborts and releases find something to end."""

    def __init__(self, dice: random.Random, layout: protocol.Layout = LAYOUT) -> None:
        self._dice = dice
        self._layout = layout
        self._reservations: list[int] = []
        self._leases: list[int] = []

    def learn(self, reply: object) -> None:
        """Remember what a reply gave out."""
        match reply:
            case protocol.ReserveReply(_, _, reservations, _):
                self._reservations = [*self._reservations, *protocol.read_u64s(reservations)][-64:]
            case protocol.LeaseReply(_, lease_id) if lease_id:
                self._leases = [*self._leases, lease_id][-16:]

    def hello(self) -> bytes:
        """A greeting that is mostly welcome."""
        dice = self._dice
        layout = dice.choice([self._layout] * 8 + [None, dataclasses.replace(self._layout, fingerprint=b"other")])
        client = dice.choice(CLIENTS)
        return TABLE.encode(protocol.Hello(1, protocol.PROTOCOL_VERSION, client, self_test_vector(), layout, ""))

    def message(self, kind: type) -> Any:
        """One message of a kind, with columns that fit together."""
        dice = self._dice
        number, count = dice.choice(NUMBERS), dice.choice([0, 1, 1, 2, 3, 5])
        first = dice.randrange(NUM_NAMES)
        chain = [name((first + depth) % NUM_NAMES) for depth in range(count)]
        hashes = b"".join(chain)
        priorities = bytes(dice.choice([0, 20, 35, 99, 100]) for _ in chain)
        deadlines = f64s([dice.choice([float("inf"), -1.0, 5.0, 1e9]) for _ in chain])
        drops = bytes(dice.randrange(2) for _ in chain)
        owners = [dice.choice(OWNERS) for _ in range(count)]
        taken = u64s([dice.choice([*self._reservations, 5]) for _ in chain])
        match kind:
            case protocol.Lookup | protocol.Lease | protocol.Suspect:
                return kind(number, hashes)
            case protocol.Reserve:
                parents = b"".join([protocol.NO_PARENT, *chain][:count])
                spaces = u32s([7] * count)
                return kind(number, hashes, parents, spaces, priorities, deadlines, drops, b"".join(owners))
            case protocol.Commit:
                return kind(number, taken, u64s([1] * count))
            case protocol.Abort:
                return kind(number, taken)
            case protocol.Touch:
                return kind(number, hashes, priorities, deadlines, drops)
            case protocol.Release:
                return kind(number, dice.choice([*self._leases, 5]))
            case protocol.Drop:
                return kind(number, dice.choice(OWNERS))
            case protocol.SetOwners:
                columns = f64s([1.0] * count), u64s([4096] * count), u64s([dice.choice([8192, 2**64 - 1])] * count)
                return kind(number, dice.randrange(1, 2**40), b"".join(OWNERS[:count]), *columns)
            case protocol.ListRequest:
                namespace, after, part = (
                    dice.choice([b"", u32s([7])]),
                    dice.choice([-1, 0, 5, 2**31]),
                    dice.choice([0, 0, 1, -1]),
                )
                return kind(number, namespace, after, part)
        return self._any(kind)

    def frame(self, kind: type) -> bytes:
        """One frame of a kind, which one time in four is not what it was."""
        dice = self._dice
        frame = bytearray(TABLE.encode(self.message(kind)))
        choice = dice.random()
        if choice < 0.16:
            for _ in range(dice.randrange(1, 4)):
                frame[dice.randrange(len(frame))] = dice.randrange(256)
        elif choice < 0.18:
            del frame[dice.randrange(1, len(frame)) :]
        elif choice < 0.20:
            at = dice.randrange(len(frame))
            frame[at:at] = dice.randbytes(dice.randrange(1, 9))
        elif choice < 0.22:
            body = dice.randbytes(dice.randrange(40))
            frame[:] = len(body).to_bytes(4, "big") + body
        elif choice < 0.25:
            body = msgpack.packb(
                [dice.choice([*protocol.MESSAGES, 99]), *[self._thing(0) for _ in range(dice.randrange(9))]]
            )
            frame[:] = len(body).to_bytes(4, "big") + body
        return bytes(frame)

    def _any(self, hint: Any) -> Any:
        """A value of a type, whatever it means."""
        dice = self._dice
        while hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        if dataclasses.is_dataclass(hint):
            hints = typing.get_type_hints(hint)
            return hint(*[self._any(hints[field.name]) for field in dataclasses.fields(hint)])  # type: ignore[operator]
        if typing.get_origin(hint) is typing.Literal:
            return dice.choice(typing.get_args(hint))
        if typing.get_origin(hint) is tuple:
            return tuple(self._any(typing.get_args(hint)[0]) for _ in range(dice.randrange(3)))
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            return self._any(dice.choice(list(typing.get_args(hint))))
        return {
            int: lambda: dice.choice(NUMBERS),
            float: lambda: dice.choice([0.0, 1.5, float("inf"), float("nan")]),
            bool: lambda: dice.random() < 0.5,
            str: lambda: dice.choice(["", "word", "é" * 9]),
            bytes: lambda: dice.choice([b"", dice.randbytes(dice.randrange(70)), name(3)]),
            type(None): lambda: None,
        }[hint]()

    def _thing(self, depth: int) -> Any:
        """Anything msgpack can say."""
        dice = self._dice
        kind = dice.randrange(7 if depth < 4 else 5)
        if kind == 5:
            return [self._thing(depth + 1) for _ in range(dice.randrange(4))]
        if kind == 6:
            return {dice.choice(["a", 1, b"k"]): self._thing(depth + 1)}
        return [dice.choice(NUMBERS), dice.random(), dice.randbytes(dice.randrange(40)), "text", None][kind]

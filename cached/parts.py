"""How the arena is divided between layouts: the parts a configuration makes of it, and which part a layout gets.

A part holds blocks of one layout at a time. Named parts wait for the layout whose label or fingerprint they name, whoever
else comes; common parts take whatever has no name, one layout each. Nothing moves between parts: what a layout stores can
evict nothing of another's (cached/README rule 15).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cached.keys import fingerprint
from cached.protocol import Layout

PART_ALIGNMENT = 4096
MIN_PREFIX = 4
"""Hex digits from which on a name may be the beginning of a fingerprint."""


@dataclass(frozen=True, slots=True)
class LayoutShare:
    """`share` of the arena, 0 to 1, for the layout that bears `name`: an engine's label, or the beginning of a fingerprint."""

    name: str
    share: float


@dataclass(frozen=True, slots=True)
class PartPlan:
    """One part: its number of bytes and the name it is kept for; no name: it is common."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PartState:
    """A part as it stands when a layout asks for one. `left_s`: how long its blocks may still wait for their engines."""

    name: str
    layout: Layout | None
    is_in_use: bool
    is_vacant: bool
    left_s: float


@dataclass(frozen=True, slots=True)
class NoPart:
    """No part can be had; `reason` is one word, `message` says what to do."""

    reason: str
    message: str


def read_share(text: str) -> LayoutShare:
    """`NAME=SHARE` taken apart; raises ValueError that says what is wrong."""
    name, mark, number = text.rpartition("=")
    try:
        share = float(number)
    except ValueError:
        share = -1.0
    if not mark or not name.strip() or not 0 < share <= 1:
        raise ValueError(f"{text!r} is no NAME=SHARE with a share above 0 and at most 1, such as 'demo=0.5'")
    return LayoutShare(name.strip(), share)


def fault_of_shares(shares: Sequence[LayoutShare]) -> str | None:
    """What is wrong with them together; None when nothing is."""
    if len({share.name for share in shares}) != len(shares):
        return "one layout is named twice"
    total = sum(share.share for share in shares)
    return f"the shares add up to {total:g}; at most 1 can be given away" if total > 1 + 1e-9 else None


def plan_parts(total_bytes: int, shares: Sequence[LayoutShare], num_common: int) -> tuple[PartPlan, ...]:
    """The parts of an arena, named ones first; what no name takes is cut into `num_common` equal ones, while each of
    those has room for anything at all."""
    named = [PartPlan(each.name, _aligned(total_bytes * each.share)) for each in shares]
    rest = _aligned((total_bytes - sum(part.num_bytes for part in named)) / num_common)
    return (*named, *([PartPlan("", rest)] * num_common if rest else []))


def is_named(name: str, layout: Layout, label: str) -> bool:
    """Whether a part of this name is kept for a layout."""
    if not name:
        return False
    return name == label or (len(name) >= MIN_PREFIX and fingerprint(layout.fingerprint).startswith(name.lower()))


def choose_part(parts: Sequence[PartState], layout: Layout, label: str) -> int | NoPart:
    """The number of the part a layout gets: the one that bears its name; else the common one that holds it already, then
    an empty one, then the one whose engines have been away longest and longer than blocks wait for them."""
    mine = [number for number, part in enumerate(parts) if is_named(part.name, layout, label)]
    # A fingerprint is of one layout, a label may be of several: a model's with other weights or another block size.
    mine = sorted(mine, key=lambda number: parts[number].name == label)[:1]
    candidates = mine or [number for number, part in enumerate(parts) if not part.name]
    shown = f"{fingerprint(layout.fingerprint)} ({label})" if label else fingerprint(layout.fingerprint)
    if not candidates:
        return NoPart(
            "no_share",
            f"the arena is given away to named layouts and {shown} is none of them; add it to `layouts`, or leave a part "
            "of the arena without a name",
        )
    for number in candidates:
        if parts[number].layout == layout:
            return number
    free = [number for number in candidates if parts[number].layout is None or parts[number].is_vacant]
    free += sorted(
        (n for n in candidates if n not in free and not parts[n].is_in_use and parts[n].left_s <= 0),
        key=lambda n: parts[n].left_s,
    )
    return free[0] if free else _why_not([parts[number] for number in candidates])


def _why_not(parts: Sequence[PartState]) -> NoPart:
    names = ", ".join(fingerprint(part.layout.fingerprint) for part in parts if part.layout is not None)
    waiting = [part.left_s for part in parts if not part.is_in_use]
    if not waiting:
        return NoPart(
            "layout_in_use",
            f"the part of the arena it could have is cut for layout {names}, which an engine is using; give both their "
            "shares in `layouts`, raise `common_layouts`, stop that engine, or run a second daemon",
        )
    return NoPart(
        "layout_lingers",
        f"the part of the arena it could have holds blocks of layout {names}; if no engine comes back for them, "
        f"they give way in {max(0.0, min(waiting)):.0f} s (layout_linger_s)",
    )


def _aligned(num_bytes: float) -> int:
    return int(num_bytes) // PART_ALIGNMENT * PART_ALIGNMENT

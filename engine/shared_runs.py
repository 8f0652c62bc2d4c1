"""Finds the runs of blocks that several chunks of a step have in common, and where attending them once pays.

Sequences that share a prefix share its blocks, so equal block ids at equal places say all. Runs form a tree: those of
one application share its system prompt, those of one conversation also what follows. How a run is attended is for
`engine/attention/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# What attending costs, in the time in which the kernel for short chunks reads one token's K and V for one row: tiles read
# it once for some rows, and take less for each; and they take a call, however small.
_READ_TOKEN: Final = 0.5
_PRODUCT_ROW_TOKEN: Final = 0.3
_PRODUCT_CALL: Final = 300.0


@dataclass(frozen=True, slots=True)
class Member:
    """One chunk: the blocks that all its tokens see whole, its number of tokens, and whether the kernel attends it."""

    blocks: tuple[int, ...]
    num_rows: int
    is_short: bool


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks `begin … end` of each of `members` (indices) are the same and are attended once."""

    begin: int
    end: int
    members: tuple[int, ...]


def shared_runs(members: Sequence[Member], tokens_per_block: int) -> list[Run]:
    """The runs that pay. Those of one member follow one another without a gap from its block 0, so that what is left
    to attend alone is one piece."""
    found: list[Run] = []
    open_groups = [(0, 0, [index for index, member in enumerate(members) if member.blocks])]
    while open_groups:
        begin, depth, indices = open_groups.pop()
        by_block: dict[int, list[int]] = {}
        for index in indices:
            if len(members[index].blocks) > depth:
                by_block.setdefault(members[index].blocks[depth], []).append(index)
        for group in by_block.values():
            if len(group) < 2:
                continue
            end = _common_length([members[index].blocks for index in group], depth + 1)
            if _pays([members[index] for index in group], (end - begin) * tokens_per_block):
                found.append(Run(begin, end, tuple(group)))
                open_groups.append((end, end, group))
            else:
                # Too short by itself, it may be the beginning of longer runs of fewer members.
                open_groups.append((begin, end, group))
    return found


def _common_length(tables: Sequence[tuple[int, ...]], known: int) -> int:
    """How many first blocks are equal in all of `tables`; `known` of them are."""
    # What is common to the least and the greatest is common to all between them.
    least, greatest = min(tables), max(tables)
    length = known
    for one, other in zip(least[known:], greatest[known:], strict=False):
        if one != other:
            break
        length += 1
    return length


def _pays(members: Sequence[Member], num_tokens: int) -> bool:
    def product(num_rows: int) -> float:
        return num_tokens * (_READ_TOKEN + _PRODUCT_ROW_TOKEN * num_rows) + _PRODUCT_CALL

    alone = sum(
        float(num_tokens * member.num_rows) if member.is_short else product(member.num_rows) for member in members
    )
    return product(sum(member.num_rows for member in members)) < alone

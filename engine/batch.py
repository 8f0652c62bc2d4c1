"""Packs the chunks of one step into one row of tokens, and checks every index that a kernel will trust.

Chunks of more than `max_short_tokens` tokens become spans, which are attended one by one; the tokens of shorter ones
(decodes above all) become items for a kernel that reads the pool in place. Which of the two is quicker is for
`engine/attention/` to say; what a step contains is for the scheduler; which beginnings are attended once for several
chunks is for `engine/shared_runs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.plan import Chunk, StepPlan
from engine.shared_runs import Member, Run, shared_runs

Ints = NDArray[np.int64]
SmallInts = NDArray[np.int32]

SEGMENT_TOKENS = 128
"""How much context one item of work covers: enough to forget the cost of starting it, few enough to share out."""
FEW_TOKENS = 2048
"""Below this much context in all, items are half as long, so that threads end together."""


@dataclass(frozen=True, slots=True)
class Span:
    """One chunk that is attended on its own: packed rows `first_row … first_row + num_rows`, positions from `start`.
    What lies before `own_from` (a whole number of blocks) is attended by shared runs."""

    first_row: int
    num_rows: int
    start: int
    blocks: Ints
    own_from: int = 0

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class ShortRows:
    """Single tokens and their contexts, cut into items (see `engine/attention/paged_decode.py`)."""

    item_row: SmallInts
    item_table: SmallInts
    item_first: SmallInts
    item_last: SmallInts
    tables: SmallInts
    row_items: SmallInts

    @property
    def arguments(self) -> tuple[SmallInts, ...]:
        """As the kernel takes them."""
        return self.item_row, self.item_table, self.item_first, self.item_last, self.tables, self.row_items


@dataclass(frozen=True, slots=True)
class SharedSpan:
    """Blocks that all of `rows` see whole, from their first token to their last."""

    blocks: Ints
    rows: Ints


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One step as arrays. `slot_mapping` is each token's place in the device KV memory (block × tokens_per_block +
    offset); `logit_rows` are the rows after which a token is sampled, in the order of the plan's chunks."""

    token_ids: Ints
    positions: Ints
    slot_mapping: Ints
    logit_rows: Ints
    spans: tuple[Span, ...]
    short: ShortRows | None
    shared: tuple[SharedSpan, ...] = ()


def pack(
    plan: StepPlan, tokens_per_block: int, num_blocks: int, max_short_tokens: int, share: bool = False
) -> PackedBatch:
    """The arrays of `plan`. A plan that points outside the pool, or writes one place twice, is our bug.

    With `share`, beginnings that several chunks have in common become shared spans, where that pays.
    """
    assert plan.chunks, "a step without a chunk"
    first_rows = np.cumsum([0, *(len(chunk.tokens) for chunk in plan.chunks)])
    positions, slots, spans = [], [], []
    short: list[tuple[int, Chunk, Ints, int]] = []
    tables = [_checked_table(chunk, tokens_per_block, num_blocks) for chunk in plan.chunks]
    runs = _runs(plan.chunks, tables, tokens_per_block, max_short_tokens) if share else []
    own_from = [0] * len(plan.chunks)
    for run in runs:
        for member in run.members:
            own_from[member] = max(own_from[member], run.end * tokens_per_block)
    for first_row, chunk, table, own in zip(first_rows, plan.chunks, tables, own_from, strict=False):
        at = np.arange(chunk.start, chunk.start + len(chunk.tokens), dtype=np.int64)
        positions.append(at)
        slots.append(table[at // tokens_per_block] * tokens_per_block + at % tokens_per_block)
        if len(chunk.tokens) <= max_short_tokens:
            short.append((int(first_row), chunk, table, own))
        else:
            spans.append(Span(int(first_row), len(chunk.tokens), chunk.start, table, own))

    slot_mapping = np.concatenate(slots)
    assert len(np.unique(slot_mapping)) == len(slot_mapping), "two tokens of a step would be written to one place"
    return PackedBatch(
        token_ids=np.concatenate([np.asarray(chunk.tokens, np.int64) for chunk in plan.chunks]),
        positions=np.concatenate(positions),
        slot_mapping=slot_mapping,
        logit_rows=np.array(
            [end - 1 for end, chunk in zip(first_rows[1:], plan.chunks, strict=True) if chunk.sample is not None],
            np.int64,
        ),
        spans=tuple(spans),
        short=_short_rows(short) if short else None,
        shared=tuple(
            SharedSpan(
                tables[run.members[0]][run.begin : run.end],
                np.concatenate([np.arange(first_rows[i], first_rows[i + 1], dtype=np.int64) for i in run.members]),
            )
            for run in runs
        ),
    )


def _runs(chunks: Sequence[Chunk], tables: Sequence[Ints], tokens_per_block: int, max_short_tokens: int) -> list[Run]:
    if len(chunks) < 2:
        return []
    return shared_runs(
        [
            # Only what every token of the chunk sees whole: the blocks that end before it begins.
            Member(
                tuple(table[: chunk.start // tokens_per_block].tolist()),
                len(chunk.tokens),
                len(chunk.tokens) <= max_short_tokens,
            )
            for chunk, table in zip(chunks, tables, strict=True)
        ],
        tokens_per_block,
    )


def _checked_table(chunk: Chunk, tokens_per_block: int, num_blocks: int) -> Ints:
    assert chunk.tokens, f"sequence {chunk.sequence_id} has an empty chunk"
    assert chunk.start >= 0
    needed = -(-(chunk.start + len(chunk.tokens)) // tokens_per_block)
    assert len(chunk.block_table) >= needed, f"sequence {chunk.sequence_id}: block table too short"
    table = np.asarray(chunk.block_table[:needed], np.int64)
    assert table.min() >= 0, f"sequence {chunk.sequence_id}: negative block id"
    assert table.max() < num_blocks, f"sequence {chunk.sequence_id}: block id outside the pool"
    return table


def _short_rows(chunks: Sequence[tuple[int, Chunk, Ints, int]]) -> ShortRows:
    rows, tables, firsts, lasts, row_items = [], [], [], [], [0]
    table_begin = 0
    seen = sum(len(chunk.tokens) * (chunk.start + len(chunk.tokens) - own_from) for _, chunk, _, own_from in chunks)
    segment = SEGMENT_TOKENS if seen >= FEW_TOKENS else SEGMENT_TOKENS // 2
    for first_row, chunk, table, own_from in chunks:
        for index in range(len(chunk.tokens)):
            context = chunk.start + index + 1
            first = np.arange(own_from, context, segment, dtype=np.int32)
            firsts.append(first)
            lasts.append(np.minimum(first + segment, context).astype(np.int32))
            rows.append(np.full(len(first), first_row + index, np.int32))
            tables.append(np.full(len(first), table_begin, np.int32))
            row_items.append(row_items[-1] + len(first))
        table_begin += len(table)
    return ShortRows(
        item_row=np.concatenate(rows),
        item_table=np.concatenate(tables),
        item_first=np.concatenate(firsts),
        item_last=np.concatenate(lasts),
        tables=np.concatenate([table for _, _, table, _ in chunks]).astype(np.int32),
        row_items=np.array(row_items, np.int32),
    )

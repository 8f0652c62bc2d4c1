"""Packs the chunks of one step into one row of tokens, and checks every index that a kernel will trust.

Chunks of more than `max_short_tokens` tokens become spans, which are attended one by one; the tokens of shorter ones
(decodes above all) become items for a kernel that reads the pool in place. Which of the two is quicker is for
`engine/attention/` to say; what a step contains is for the scheduler; which beginnings are attended once for several
chunks is for `engine/shared_runs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

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
    chunks = plan.chunks
    assert chunks, "a step without a chunk"
    counts = [len(chunk.tokens) for chunk in chunks]
    first_rows = [0, *accumulate(counts)]
    # All tables end to end, and where each begins: numpy is asked a few times for a step, and not for each chunk.
    needed = [-(-(chunk.start + count) // tokens_per_block) for chunk, count in zip(chunks, counts, strict=True)]
    begins = [0, *accumulate(needed)]
    table = np.fromiter(
        chain.from_iterable(chunk.block_table[:count] for chunk, count in zip(chunks, needed, strict=True)), np.int64
    )
    _check(chunks, needed, table, num_blocks)
    tables = [table[begin:end] for begin, end in pairwise(begins)]

    if first_rows[-1] == len(chunks):
        positions, table_of_row = np.array([chunk.start for chunk in chunks]), np.array(begins[:-1])
    else:
        positions = np.concatenate([np.arange(chunk.start, chunk.start + len(chunk.tokens)) for chunk in chunks])
        table_of_row = np.repeat(begins[:-1], counts)
    slot_mapping = table[table_of_row + positions // tokens_per_block] * tokens_per_block + positions % tokens_per_block
    assert len(set(slot_mapping.tolist())) == len(slot_mapping), "two tokens of a step would be written to one place"

    runs = _runs(chunks, tokens_per_block, max_short_tokens) if share else []
    own_from = [0] * len(chunks)
    for run in runs:
        for member in run.members:
            own_from[member] = max(own_from[member], run.end * tokens_per_block)
    short = [index for index, count in enumerate(counts) if count <= max_short_tokens]
    return PackedBatch(
        token_ids=np.fromiter(chain.from_iterable(chunk.tokens for chunk in chunks), np.int64, len(positions)),
        positions=positions,
        slot_mapping=slot_mapping,
        logit_rows=np.array(
            [end - 1 for end, chunk in zip(first_rows[1:], chunks, strict=True) if chunk.sample is not None], np.int64
        ),
        spans=tuple(
            Span(first_rows[index], counts[index], chunk.start, tables[index], own_from[index])
            for index, chunk in enumerate(chunks)
            if counts[index] > max_short_tokens
        ),
        short=_short_rows(chunks, short, first_rows, begins, table, own_from) if short else None,
        shared=tuple(
            SharedSpan(
                tables[run.members[0]][run.begin : run.end],
                np.concatenate([np.arange(first_rows[i], first_rows[i + 1]) for i in run.members]),
            )
            for run in runs
        ),
    )


def _check(chunks: Sequence[Chunk], needed: Sequence[int], table: Ints, num_blocks: int) -> None:
    """Everything that a kernel will trust; `table` is what is needed of all chunks' tables."""
    for chunk, count in zip(chunks, needed, strict=True):
        assert chunk.tokens, f"sequence {chunk.sequence_id} has an empty chunk"
        assert chunk.start >= 0
        assert len(chunk.block_table) >= count, f"sequence {chunk.sequence_id}: block table too short"
    if table.min() < 0 or table.max() >= num_blocks:
        wrong = next(
            chunk
            for chunk, count in zip(chunks, needed, strict=True)
            if not all(0 <= block < num_blocks for block in chunk.block_table[:count])
        )
        raise AssertionError(f"sequence {wrong.sequence_id}: block id outside the pool")


def _runs(chunks: Sequence[Chunk], tokens_per_block: int, max_short_tokens: int) -> list[Run]:
    if len(chunks) < 2:
        return []
    return shared_runs(
        [
            # Only what every token of the chunk sees whole: the blocks that end before it begins.
            Member(
                chunk.block_table[: chunk.start // tokens_per_block],
                len(chunk.tokens),
                len(chunk.tokens) <= max_short_tokens,
            )
            for chunk in chunks
        ],
        tokens_per_block,
    )


def _short_rows(
    chunks: Sequence[Chunk],
    short: Sequence[int],
    first_rows: Sequence[int],
    begins: Sequence[int],
    table: Ints,
    own_from: Sequence[int],
) -> ShortRows:
    """The items of the chunks that `short` names. `first_rows` and `begins` are where each chunk's rows, and its blocks in
    `table`, begin."""
    rows, tables, row_items = [], [], [0]
    firsts: list[int] = []
    lasts: list[int] = []
    seen = sum(
        len(chunks[index].tokens) * (chunks[index].start + len(chunks[index].tokens) - own_from[index])
        for index in short
    )
    segment = SEGMENT_TOKENS if seen >= FEW_TOKENS else SEGMENT_TOKENS // 2
    for index in short:
        chunk = chunks[index]
        for place in range(len(chunk.tokens)):
            context = chunk.start + place + 1
            first = range(own_from[index], context, segment)
            firsts += first
            lasts += [min(begin + segment, context) for begin in first]
            rows += [first_rows[index] + place] * len(first)
            tables += [begins[index]] * len(first)
            row_items.append(len(rows))
    return ShortRows(
        item_row=np.array(rows, np.int32),
        item_table=np.array(tables, np.int32),
        item_first=np.array(firsts, np.int32),
        item_last=np.array(lasts, np.int32),
        tables=table.astype(np.int32),
        row_items=np.array(row_items, np.int32),
    )

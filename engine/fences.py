"""What a copy or a step has to wait for, by device block: which steps wrote or read it, which copies are under way.

Steps and copies run on streams of their own, each in the order in which it was told, and know nothing of one another. Who
must wait for whom follows from who writes what the other reads or writes:

    a store reads a block    after the steps and loads that wrote it
    a load writes a block    after the steps that wrote or read it, and the stores that read it
    a step                   after the loads that wrote what it reads or writes, and the stores that read what it writes

Only blocks in common make a wait: a store of what an earlier step wrote runs beside a step that goes on reading it. Events
are a device's; here they are only handed on. Waiting is for `copy_streams.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.plan import StepPlan

Event = TypeVar("Event")


@dataclass(frozen=True, slots=True)
class StepBlocks:
    """The device blocks that one step touches; a table is kept as it came, since most are never looked at."""

    writes: frozenset[int]
    reads: tuple[tuple[int, ...], ...]

    def is_writing(self, blocks: frozenset[int]) -> bool:
        """Whether it writes one of these."""
        return not self.writes.isdisjoint(blocks)

    def is_touching(self, blocks: frozenset[int]) -> bool:
        """Whether it writes or reads one of these."""
        return self.is_writing(blocks) or any(not blocks.isdisjoint(table) for table in self.reads)


def blocks_of(plan: StepPlan, tokens_per_block: int) -> StepBlocks:
    """What a plan touches: its copies' sources and targets, its chunks' contexts and the blocks their tokens go into."""
    writes = {copy.target for copy in plan.copies}
    for chunk in plan.chunks:
        first, last = chunk.start // tokens_per_block, (chunk.start + len(chunk.tokens) - 1) // tokens_per_block
        writes.update(chunk.block_table[first : last + 1])
    sources = tuple(copy.source for copy in plan.copies)
    return StepBlocks(frozenset(writes), (sources, *(chunk.block_table for chunk in plan.chunks)))


@dataclass(slots=True)
class _Step(Generic[Event]):
    blocks: StepBlocks
    end: Event | None = None


@dataclass(frozen=True, slots=True)
class _Copy(Generic[Event]):
    blocks: frozenset[int]
    end: Event


class Fences(Generic[Event]):
    """Steps and copies whose end nobody has seen yet. Not for two threads at once."""

    def __init__(self) -> None:
        self._steps: list[_Step[Event]] = []
        self._stores: list[_Copy[Event]] = []
        self._loads: list[_Copy[Event]] = []

    def begin_step(self, blocks: StepBlocks) -> list[Event]:
        """A step is about to be told to the device; what its stream has to wait for."""
        assert not any(step.end is None for step in self._steps), "a step began before the one before it had ended"
        self._steps.append(_Step(blocks))
        loads = [load.end for load in self._loads if blocks.is_touching(load.blocks)]
        return loads + [store.end for store in self._stores if blocks.is_writing(store.blocks)]

    def end_step(self, end: Event) -> None:
        """All of the step has been told to the device: its kernels are over when `end` is."""
        assert self._steps, "a step ended that had not begun"
        assert self._steps[-1].end is None, "a step ended twice"
        self._steps[-1].end = end

    def seen_step(self, end: Event) -> None:
        """The step that ends with `end` was seen to be over, and so were those before it."""
        places = [place for place, step in enumerate(self._steps) if step.end is end]
        if places:
            del self._steps[: places[0] + 1]

    def store_waits(self, blocks: Sequence[int]) -> list[Event]:
        """What the stream of stores has to wait for before it reads these blocks."""
        wanted = frozenset(blocks)
        steps = [_ended(step) for step in self._steps if step.blocks.is_writing(wanted)]
        return steps + [load.end for load in self._loads if not load.blocks.isdisjoint(wanted)]

    def load_waits(self, blocks: Sequence[int]) -> list[Event]:
        """What the stream of loads has to wait for before it writes these blocks."""
        wanted = frozenset(blocks)
        steps = [_ended(step) for step in self._steps if step.blocks.is_touching(wanted)]
        return steps + [store.end for store in self._stores if not store.blocks.isdisjoint(wanted)]

    def add_store(self, blocks: Iterable[int], end: Event) -> None:
        """A store of these blocks is under way until `end`."""
        self._stores.append(_Copy(frozenset(blocks), end))

    def add_load(self, blocks: Iterable[int], end: Event) -> None:
        """A load into these blocks is under way until `end`."""
        self._loads.append(_Copy(frozenset(blocks), end))

    def seen_copy(self, end: Event) -> None:
        """The copy that ends with `end` was seen to be over."""
        self._stores = [store for store in self._stores if store.end is not end]
        self._loads = [load for load in self._loads if load.end is not end]

    def seen_copies(self) -> None:
        """Every copy so far was seen to be over."""
        self._stores.clear()
        self._loads.clear()


def _ended(step: _Step[Event]) -> Event:
    assert step.end is not None, "a block that the running step still writes, or may write, was given to a copy"
    return step.end

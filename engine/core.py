"""The engine's core: who computes what in the next step, over which blocks.

Being filled in; the public signatures below are final.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed

from engine.events import Event
from engine.plan import StepPlan, StepResult
from engine.tier_work import Load, LoadedBlock, Lookup, Offer, OfferedDeviceBlock, TierWork, Touch, TouchedBlock
from engine.values import CoreSettings, CoreStatistics, NewRequest, Queued, Refused, SequenceOutput

__all__ = [
    "CoreSettings",
    "CoreStatistics",
    "EngineCore",
    "Event",
    "Load",
    "LoadedBlock",
    "Lookup",
    "NewRequest",
    "Offer",
    "OfferedDeviceBlock",
    "Queued",
    "Refused",
    "SequenceOutput",
    "TierWork",
    "Touch",
    "TouchedBlock",
]


class EngineCore:
    """One thread owns it; nothing in it blocks, sleeps or reads a clock."""

    def __init__(self, settings: CoreSettings, layout_fingerprint: bytes) -> None:
        raise NotImplementedError

    def submit(self, request: NewRequest, now: float) -> Queued | Refused:
        """Queue a request, or refuse it and change nothing."""
        raise NotImplementedError

    def cancel(self, sequence_id: int, now: float) -> None:
        """Drop a sequence and all it holds; at `complete` if the outstanding plan names it. No output follows."""
        raise NotImplementedError

    def confirm(self, sequence_id: int, tokens_kept: int) -> None:
        """The first `tokens_kept` generated tokens are kept: blocks that hold them may be published (3.6)."""
        raise NotImplementedError

    def stop(self, sequence_id: int, tokens_kept: int, now: float) -> None:
        """End a sequence of which only `tokens_kept` generated tokens count. No output follows."""
        raise NotImplementedError

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run now. Its result has to come before the next plan."""
        raise NotImplementedError

    def complete(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceOutput]:
        """Take a step's result: publish what was written, append what was sampled, end what is finished."""
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        """When the next block expires: `plan` wants to be called by then, even if it would return None."""
        raise NotImplementedError

    def has_work(self) -> bool:
        """Whether any sequence is inside."""
        raise NotImplementedError

    def set_tier_ready(self, is_ready: bool, now: float) -> None:
        """The host tier came or went. Tickets that are outstanding are still to be answered."""
        raise NotImplementedError

    def take_tier_work(self) -> list[TierWork]:
        """What the tier is asked for since the last call. Call it after every call that changes anything."""
        raise NotImplementedError

    def looked_up(self, ticket: int, num_blocks: int, now: float) -> None:
        """The tier holds this many leading blocks of a `Lookup`."""
        raise NotImplementedError

    def loaded(self, ticket: int, num_blocks: int, now: float, travelled: Listed[LoadedBlock] = ()) -> None:
        """This many leading blocks of a `Load` are good; `travelled` is the retention that came with each of them."""
        raise NotImplementedError

    def offered(self, ticket: int, now: float, in_tier: Listed[bool] = ()) -> None:
        """An `Offer` was copied or given up. `in_tier` says block by block what the tier holds now (stored or
        present); what is left out counts as not held and will be offered again at its next release."""
        raise NotImplementedError

    def take_events(self) -> list[Event]:
        """What happened to the index since the last call, oldest first (kv-semantics 6.1)."""
        raise NotImplementedError

    def statistics(self) -> CoreStatistics:
        """A frozen picture of all gauges and counters."""
        raise NotImplementedError

    def check_invariants(self) -> None:
        """Compare every structure with every other; slow and complete, for tests and idle moments."""
        raise NotImplementedError

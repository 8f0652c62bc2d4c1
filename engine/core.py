"""The engine's core: who computes what in the next step, over which blocks; what the host tier is asked for.

It owns the pool, the roster of sequences, the planner and both directions of the host tier, and says what a step's
result means. It leaves computing to the runner, copying to the tier's shell, and talking to the server. Everything is a call with `now`; nothing blocks.

Between `plan` and `complete` only queues and flags change: what would touch a block that the plan names waits in
`_late` until the step is over.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listed

from cached.keys import OwnerId, namespace, token_bytes
from engine.block_pool import BlockPool
from engine.errors import EngineError
from engine.events import Event, SnapshotBlock
from engine.fair_places import Verdict
from engine.index_columns import IndexColumns
from engine.offload import Offloader, Outbox
from engine.onboarding import Onboarding
from engine.pace import Outlook
from engine.plan import Sampled, StepPlan, StepResult
from engine.planner import Planner
from engine.protocol import FinishReason, FirstToken
from engine.roster import Roster
from engine.sequence import Sequence, Served, State
from engine.stopping import finish_reason
from engine.tally import Tally
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
        self.settings = settings
        self._layout_fingerprint = layout_fingerprint
        self._pool = BlockPool(
            settings.num_blocks, settings.tokens_per_block, settings.record_events, settings.event_token_ids
        )
        self._tally = Tally()
        self._outbox = Outbox()
        self._offloader = Offloader(settings, self._pool, self._outbox)
        self._roster = Roster(settings, self._pool, self._offloader, self._tally)
        self._cache = self._roster.cache
        self._onboarding = Onboarding(settings, self._pool, self._roster, self._offloader, self._outbox, self._tally)
        self._planner = Planner(settings, self._pool, self._roster, self._onboarding, self._offloader)
        self._plan: StepPlan | None = None
        self._late: list[Callable[[], None]] = []
        self._confirmed: set[Sequence] = set()
        self._arrivals = 0
        self._steps = 0

    # Requests.

    def submit(self, request: NewRequest, now: float) -> Queued | Refused:
        """Queue a request, or refuse it and change nothing."""
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        root = namespace(self._layout_fingerprint, request.cache_salt)
        owner_index, namespace_index = self._pool.enter(request.owner, root)
        self._arrivals += 1
        sequence = Sequence(
            request=request,
            arrival=self._arrivals,
            namespace=root,
            owner_index=owner_index,
            namespace_index=namespace_index,
            tokens_per_block=self.settings.tokens_per_block,
            submitted_at=now,
        )
        self._roster.sequences[request.sequence_id] = sequence
        self._roster.waiting.push(sequence)
        if self._offloader.is_on:
            # The tier is asked at once, so that its answer is there when the request's turn comes.
            walk = self._cache.walk(sequence)
            if not self._planner.is_awaited(walk) and self._onboarding.wants_lookup(sequence, walk):
                self._onboarding.look_up(sequence, walk)
        return Queued()

    def cancel(self, sequence_id: int, now: float) -> None:
        """Drop a sequence and all it holds; at `complete` if the outstanding plan names it. No output follows."""
        sequence = self._roster.find(sequence_id)
        if sequence is None or sequence.is_cancelled:
            return
        sequence.is_cancelled = True
        if sequence.state is not State.UNCONFIRMED:
            self._tally.requests_cancelled += 1
        self._end_or_wait(sequence, now)

    def confirm(self, sequence_id: int, tokens_kept: int) -> None:
        """The first `tokens_kept` generated tokens are kept: blocks that hold them may be published (3.6)."""
        sequence = self._roster.find(sequence_id)
        if sequence is not None and tokens_kept > sequence.confirmed:
            sequence.confirmed = tokens_kept
            self._confirmed.add(sequence)

    def stop(self, sequence_id: int, tokens_kept: int, now: float) -> None:
        """End a sequence of which only `tokens_kept` generated tokens count. No output follows. For one that has finished
        by itself this is the last word on its tokens."""
        sequence = self._roster.find(sequence_id)
        if sequence is None or sequence.is_cancelled:
            return
        sequence.is_cancelled = True
        sequence.tokens_kept = max(0, tokens_kept)
        if sequence.state is not State.UNCONFIRMED:
            self._tally.requests_finished += 1
        self._end_or_wait(sequence, now)

    def let_go_unconfirmed(self, now: float) -> None:
        """Wait for no more confirmations of finished sequences; not while a plan is outstanding."""
        while self._roster.let_go(now):
            pass

    def set_weights(self, weights: dict[OwnerId, float]) -> None:
        """Weights of owners on the device (kv-semantics 4.3); an owner that is not named has 1."""
        self._pool.set_weights(weights)

    # Steps.

    def outlook(self, now: float) -> Outlook:
        """What the next step could hold: from this its size is chosen (`engine/pace.py`)."""
        return self._planner.outlook(now)

    def plan(self, now: float, budget: int | None = None, sits_out: bool = False) -> StepPlan | None:
        """The next step of at most `budget` tokens (none given: `max_num_tokens`, its upper bound), or None when nothing
        can run now. New answers have no part in one that they sit out, unless nothing else can run. Its result has to come
        before the next plan."""
        if self._plan is not None:
            raise EngineError(f"step {self._plan.step_id} is not complete; plan() was called too early (a bug)")
        self._pool.expire(now)
        self._publish_confirmed(now)
        self._roster.let_go_overdue(now)
        self._steps += 1
        most = self.settings.max_num_tokens
        budget = most if budget is None else max(1, min(budget, most))
        self._plan = self._planner.make(self._steps, now, budget, sits_out)
        return self._plan

    def complete(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceOutput]:
        """Take a step's result: publish what was written, append what was sampled, end what is finished."""
        if self._plan is None or plan.step_id != self._plan.step_id or result.step_id != plan.step_id:
            raise EngineError(f"step {plan.step_id} was completed with the result of {result.step_id} (a bug)")
        self._plan = None
        failed = dict(result.failed)
        sampled = {each.sequence_id: each for each in result.sampled}
        for chunk in plan.chunks:
            if chunk.sample is not None and chunk.sequence_id not in sampled and not result.aborted:
                failed.setdefault(chunk.sequence_id, "the step gave no token for this request; try again")
        bad = self._unusable(plan, failed, result.aborted)
        for sequence in reversed(bad):
            self._cache.roll_back(sequence)
        outputs: list[SequenceOutput] = []
        good = [chunk for chunk in plan.chunks if self._roster.running[chunk.sequence_id] not in bad]
        for chunk in good:
            self._cache.commit(self._roster.running[chunk.sequence_id], chunk.start + len(chunk.tokens))
            self._tally.count_chunk(chunk)
        self._pool.release([copy.source for copy in plan.copies], now)
        for sequence in bad:
            outputs.extend(self._end_bad(sequence, failed, now))
        for chunk in good:
            sequence = self._roster.running[chunk.sequence_id]
            if sequence.is_cancelled:
                self._roster.end(sequence, now)
            elif chunk.sample is not None:
                outputs.append(self._take_token(sequence, sampled[chunk.sequence_id], now))
        late, self._late = self._late, []
        for act in late:
            act()
        return outputs

    def next_deadline(self) -> float | None:
        """When time does something by itself: `plan` wants to be called by then, even if it would return None."""
        deadlines = (self._pool.next_deadline(), self._roster.next_let_go())
        return min((each for each in deadlines if each is not None), default=None)

    def has_work(self) -> bool:
        """Whether any sequence has tokens to come."""
        return bool(self._roster.sequences)

    # The host tier.

    def set_tier_ready(self, is_ready: bool, now: float) -> None:
        """The host tier came or went. Tickets that are outstanding are still to be answered."""
        self._offloader.set_ready(is_ready, now)

    def take_tier_work(self) -> list[TierWork]:
        """What the tier is asked for since the last call. Call it after every call that changes anything."""
        return self._outbox.take()

    def looked_up(self, ticket: int, num_blocks: int, now: float) -> None:
        """The tier holds this many leading blocks of a `Lookup`."""
        self._onboarding.looked_up(ticket, num_blocks)

    def loaded(self, ticket: int, num_blocks: int, now: float, travelled: Listed[LoadedBlock] = ()) -> None:
        """This many leading blocks of a `Load` are good; `travelled` is the retention that came with each of them."""
        if self._plan is not None:
            self._late.append(lambda: self._onboarding.loaded(ticket, num_blocks, travelled, now))
        else:
            self._onboarding.loaded(ticket, num_blocks, travelled, now)

    def offered(self, ticket: int, now: float, in_tier: Listed[bool] = ()) -> None:
        """An `Offer` was copied or given up. `in_tier` says block by block what the tier holds now (stored or
        present); what is left out counts as not held and will be offered again at its next release."""
        self._offloader.offered(ticket, now, in_tier)

    # What can be seen.

    def take_events(self) -> list[Event]:
        """What happened to the index since the last call, oldest first (kv-semantics 6.1)."""
        return self._pool.take_events()

    def snapshot(self) -> tuple[SnapshotBlock, ...]:
        """The index as it is after all events so far, parents before children (kv-semantics 6.3): take the events first,
        and it is the index before the next event."""
        return self._pool.snapshot_columns()[:]

    def snapshot_columns(self) -> IndexColumns:
        """`snapshot` in the time that copying takes; whoever reads it pays for the rows."""
        return self._pool.snapshot_columns()

    def statistics(self) -> CoreStatistics:
        """A frozen picture of all gauges and counters."""
        tickets = self._onboarding.num_tickets + self._offloader.num_tickets
        return self._tally.statistics(
            self._pool, self._offloader, len(self._roster.waiting), len(self._roster.running), tickets
        )

    def check_invariants(self) -> None:
        """Compare every structure with every other; slow and complete, for tests and idle moments."""
        self._pool.check_invariants()
        self._roster.check_invariants()
        self._offloader.check_invariants()
        self._onboarding.check_invariants()
        expected = [0] * self.settings.num_blocks
        for sequence in (*self._roster.running.values(), *self._roster.unconfirmed.values()):
            for block in (*sequence.table, *sequence.twins.values()):
                expected[block] += 1
            assert self._plan is not None or not sequence.unwritten
        for copy in self._plan.copies if self._plan else ():
            expected[copy.source] += 1
        for block, count in enumerate(expected):
            assert self._pool.ref_count(block) == count, f"block {block}: {self._pool.ref_count(block)}, not {count}"

    # Before a step.

    def _publish_confirmed(self, now: float) -> None:
        for sequence in sorted(self._confirmed, key=lambda each: each.arrival):
            if sequence.state is State.RUNNING:
                self._cache.publish(sequence, sequence.num_computed, is_written=True)
            elif sequence.state is State.UNCONFIRMED and not sequence.is_unconfirmed:
                self._roster.end(sequence, now)
        self._confirmed.clear()

    def _refusal(self, request: NewRequest) -> Refused | None:
        settings = self.settings
        if self._roster.find(request.sequence_id) is not None:
            raise EngineError(f"sequence {request.sequence_id} lives already; ids must be unique (a bug)")
        count = len(request.prompt)
        if not count:
            return Refused("invalid_value", "the prompt is empty; it needs at least one token", "messages", False)
        if count > settings.max_prompt_tokens:
            pool = settings.num_blocks * settings.tokens_per_block
            message = (
                f"the prompt has {count} tokens; at most {settings.max_prompt_tokens} fit here "
                f"(context {settings.max_context_tokens} tokens, KV cache {pool} tokens)"
            )
            return Refused("context_length_exceeded", message, "messages", False)
        if not _are_token_ids(request.prompt, settings.vocab_size):
            message = f"the prompt has a token id outside 0 to {settings.vocab_size - 1}"
            return Refused("invalid_value", message, "messages", False)
        if request.max_tokens < 1:
            message = f"max_tokens is {request.max_tokens}; it must be at least 1"
            return Refused("invalid_value", message, "max_tokens", False)
        if request.cache_salt == "":
            message = "cache_salt is empty; leave it out or give at least one character"
            return Refused("invalid_value", message, "cache_salt", False)
        return self._no_place(request.owner)

    def _no_place(self, owner: OwnerId) -> Refused | None:
        places = self._roster.waiting.places
        match places.judge(owner, self.settings.max_queue):
            case Verdict.MAY_TAKE:
                return None
            case Verdict.OWN_SHARE_TAKEN:
                # Not how many places are free: that would tell one tenant how busy the others are.
                message = f"{places.count_of(owner)} of your own requests are waiting, which is your share of the queue"
            case Verdict.ALL_TAKEN:
                message = f"{len(places)} requests are waiting already"
        return Refused("engine_overloaded", f"{message}; try again shortly", None, True)

    # After a step.

    def _unusable(self, plan: StepPlan, failed: dict[int, str], is_aborted: bool) -> list[Sequence]:
        """Sequences that failed, and those that attended over what a failed one was to write, in plan order."""
        bad: list[Sequence] = []
        unwritten: set[int] = set()
        for chunk in plan.chunks:
            sequence = self._roster.running[chunk.sequence_id]
            leans_on = unwritten and not (
                unwritten.isdisjoint(sequence.table) and unwritten.isdisjoint(sequence.twins.values())
            )
            if is_aborted or chunk.sequence_id in failed or leans_on:
                bad.append(sequence)
                unwritten.update(sequence.table[place] for place in sequence.unwritten)
        return bad

    def _end_bad(self, sequence: Sequence, failed: dict[int, str], now: float) -> list[SequenceOutput]:
        error = failed.get(sequence.sequence_id)
        if sequence.is_cancelled:
            self._roster.end(sequence, now, is_good=False)
            return []
        if error is None:
            if sequence.admitted_in_step == self._steps:
                sequence.admitted_at = sequence.served = None  # What it was served with was not there.
            self._roster.preempt(sequence, now, is_good=False)
            return []
        # It computed something unusable; whoever used it to the end may have left a copy of it in the tier.
        unusable = self._cache.own_blocks(sequence)
        self._offloader.withdraw(unusable, now)
        self._pool.forget(unusable)
        self._roster.end(sequence, now, is_good=False)
        return [SequenceOutput(sequence.sequence_id, (), finish="error", error=error)]

    def _take_token(self, sequence: Sequence, sampled: Sampled, now: float) -> SequenceOutput:
        sequence.append(sampled.token)
        first = self._first_token(sequence, now) if sequence.is_new else None
        finish: FinishReason | None = finish_reason(
            self.settings,
            sequence.request.sampling,
            sequence.request.max_tokens,
            sequence.num_prompt,
            sequence.num_output,
            sampled.token,
        )
        logprobs = () if sampled.logprob is None else (sampled.logprob,)
        if finish is not None:
            self._tally.requests_finished += 1
            self._roster.finish(sequence, now)
        return SequenceOutput(sequence.sequence_id, (sampled.token,), logprobs, first, finish)

    def _first_token(self, sequence: Sequence, now: float) -> FirstToken:
        sequence.first_token_at = now
        served = sequence.served or Served(0, 0, 0, False)
        missed = -(-sequence.num_prompt // self.settings.tokens_per_block) - served.full_blocks - served.is_partial
        self._tally.count_first(sequence.num_prompt, served, missed)
        admitted_at = sequence.submitted_at if sequence.admitted_at is None else sequence.admitted_at
        return FirstToken(
            prompt_tokens=sequence.num_prompt,
            device_tokens=served.device_tokens,
            host_tokens=served.host_tokens,
            computed_tokens=sequence.num_prompt - served.device_tokens - served.host_tokens,
            queue_ms=1000 * (admitted_at - sequence.submitted_at),
            ttft_ms=1000 * (now - sequence.submitted_at),
            blocks_full=served.full_blocks,
            blocks_partial=int(served.is_partial),
            blocks_missed=missed,
        )

    # Endings.

    def _end_or_wait(self, sequence: Sequence, now: float) -> None:
        """End a sequence nobody listens to, unless a load or a step still writes its blocks."""
        if sequence.state is State.LOADING:
            return
        if self._plan is not None and sequence.state is State.UNCONFIRMED:
            self._late.append(lambda: self._roster.end(sequence, now))
            return
        if self._plan is not None and sequence.sequence_id in self._roster.running:
            if not any(chunk.sequence_id == sequence.sequence_id for chunk in self._plan.chunks):
                self._late.append(lambda: self._roster.end(sequence, now))
            return
        self._roster.end(sequence, now)


def _are_token_ids(tokens: tuple[int, ...], vocab_size: int) -> bool:
    try:
        token_bytes(tokens)  # Refuses what is negative, in a third of the time that `min` takes.
    except (OverflowError, ValueError):
        return False
    return max(tokens) < vocab_size

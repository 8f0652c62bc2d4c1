"""The engine's core: who computes what in the next step, over which blocks; what the host tier is asked for.

It joins the waiting queue, the prefix cache and the offloader, and owns all of them. It leaves computing to the
runner, copying to the transfer shell, and talking to the server. Everything is a call with `now`; nothing blocks.

Between `plan` and `complete` only queues and flags change: what would touch a block that the plan names waits in
`_late` until the step is over.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listed

from cached.keys import BlockHash, OwnerId, namespace
from engine.block_pool import BlockPool
from engine.errors import EngineError
from engine.events import Event
from engine.offload import Offloader
from engine.plan import BlockCopy, Chunk, Sampled, SampleRequest, StepPlan, StepResult
from engine.prefix_cache import PrefixCache, Walk
from engine.protocol import FinishReason, FirstToken
from engine.scheduler import Producers, WaitingQueue
from engine.sequence import Sequence, Served, State
from engine.stopping import finish_reason, is_eos_allowed
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

_MAX_LOOKUPS = 3
"""Lookups for one admission: the device may lose what a lookup built upon, but not for ever."""


class _Step:
    """A plan being made."""

    def __init__(self, step_id: int, budget: int) -> None:
        self.step_id = step_id
        self.budget = budget
        self.chunks: list[Chunk] = []
        self.copies: list[BlockCopy] = []
        self.is_stalled = False  # somebody waits for blocks that are on their way


class EngineCore:
    """One thread owns it; nothing in it blocks, sleeps or reads a clock."""

    def __init__(self, settings: CoreSettings, layout_fingerprint: bytes) -> None:
        self.settings = settings
        self._layout_fingerprint = layout_fingerprint
        self._pool = BlockPool(
            settings.num_blocks, settings.tokens_per_block, settings.record_events, settings.event_token_ids
        )
        self._cache = PrefixCache(settings, self._pool, self._on_indexed)
        self._offloader = Offloader(settings, self._pool, self._next_ticket, self._send)
        self._waiting = WaitingQueue()
        self._producers = Producers()
        self._sequences: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}  # in order of admission, loading ones included
        self._lookups: dict[int, Sequence] = {}
        self._loads: dict[int, tuple[Sequence, int]] = {}  # ticket → sequence, blocks asked for
        self._work: list[TierWork] = []
        self._plan: StepPlan | None = None
        self._late: list[Callable[[], None]] = []
        self._confirmed: set[Sequence] = set()
        self._tally = Tally()
        self._arrivals = 0
        self._steps = 0
        self._tickets = 0

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
        self._sequences[request.sequence_id] = sequence
        # The tier is asked at once, so that its answer is there when the request's turn comes.
        walk = self._cache.walk(sequence)
        if not self._is_awaited(walk) and self._wants_lookup(sequence, walk):
            self._look_up(sequence, walk)
        else:
            self._waiting.push(sequence)
        return Queued()

    def cancel(self, sequence_id: int, now: float) -> None:
        """Drop a sequence and all it holds; at `complete` if the outstanding plan names it. No output follows."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.is_cancelled:
            return
        sequence.is_cancelled = True
        self._tally.requests_cancelled += 1
        self._end_or_wait(sequence, now)

    def confirm(self, sequence_id: int, tokens_kept: int) -> None:
        """The first `tokens_kept` generated tokens are kept: blocks that hold them may be published (3.6)."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None and tokens_kept > sequence.confirmed:
            sequence.confirmed = tokens_kept
            self._confirmed.add(sequence)

    def stop(self, sequence_id: int, tokens_kept: int, now: float) -> None:
        """End a sequence of which only `tokens_kept` generated tokens count. No output follows."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.is_cancelled:
            return
        sequence.is_cancelled = True
        sequence.tokens_kept = max(0, tokens_kept)
        self._tally.requests_finished += 1
        self._end_or_wait(sequence, now)

    def set_weights(self, weights: dict[OwnerId, float]) -> None:
        """Weights of owners on the device (kv-semantics 4.3); an owner that is not named has 1."""
        self._pool.set_weights(weights)

    # Steps.

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run now. Its result has to come before the next plan."""
        if self._plan is not None:
            raise EngineError(f"step {self._plan.step_id} is not complete; plan() was called too early (a bug)")
        self._pool.expire(now)
        self._publish_confirmed()
        self._steps += 1
        step = _Step(self._steps, self.settings.max_num_tokens)
        self._schedule_decodes(step, now)
        self._schedule_prefills(step)
        if not step.is_stalled:
            self._admit(step, now)
        self._waiting.restore_aside()
        if not step.chunks:
            return None
        self._plan = StepPlan(step.step_id, tuple(step.copies), tuple(step.chunks))
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
        good = [chunk for chunk in plan.chunks if self._running[chunk.sequence_id] not in bad]
        for chunk in good:
            self._cache.commit(self._running[chunk.sequence_id], chunk.start + len(chunk.tokens))
            self._tally.count_chunk(chunk)
        self._pool.release([copy.source for copy in plan.copies], now)
        for sequence in bad:
            outputs.extend(self._end_bad(sequence, failed, now))
        for chunk in good:
            sequence = self._running[chunk.sequence_id]
            if sequence.is_cancelled:
                self._end(sequence, now)
            elif chunk.sample is not None:
                outputs.append(self._take_token(sequence, sampled[chunk.sequence_id], now))
        late, self._late = self._late, []
        for act in late:
            act()
        return outputs

    def next_deadline(self) -> float | None:
        """When the next block expires: `plan` wants to be called by then, even if it would return None."""
        return self._pool.next_deadline()

    def has_work(self) -> bool:
        """Whether any sequence is inside."""
        return bool(self._sequences)

    # The host tier.

    def set_tier_ready(self, is_ready: bool, now: float) -> None:
        """The host tier came or went. Tickets that are outstanding are still to be answered."""
        self._offloader.set_ready(is_ready, now)

    def take_tier_work(self) -> list[TierWork]:
        """What the tier is asked for since the last call. Call it after every call that changes anything."""
        work, self._work = self._work, []
        return work

    def looked_up(self, ticket: int, num_blocks: int, now: float) -> None:
        """The tier holds this many leading blocks of a `Lookup`."""
        sequence = self._lookups.pop(ticket, None)
        if sequence is None or sequence not in self._waiting:
            return
        start = sequence.tier_run[0] if sequence.tier_run else 0
        sequence.tier_run = (start, num_blocks)
        self._waiting.push(sequence)

    def loaded(self, ticket: int, num_blocks: int, now: float, travelled: Listed[LoadedBlock] = ()) -> None:
        """This many leading blocks of a `Load` are good; `travelled` is the retention that came with each of them."""
        if self._plan is not None:
            self._late.append(lambda: self.loaded(ticket, num_blocks, now, travelled))
            return
        entry = self._loads.pop(ticket, None)
        if entry is None:
            return
        sequence, num_asked = entry
        num_good = min(num_blocks, num_asked)
        self._tally.blocks_loaded += num_good
        self._tally.blocks_load_failed += num_asked - num_good
        came = [travelled[place] if place < len(travelled) else None for place in range(num_good)]
        first = sequence.num_matched
        self._cache.publish_loaded(sequence, came)
        for block in sequence.table[first : first + num_good]:
            self._pool.note_in_tier(block, now)
        sequence.state = State.RUNNING
        if sequence.served is None:
            size = self.settings.tokens_per_block
            sequence.served = Served(first * size, num_good * size, first + num_good, False)
        if sequence.is_cancelled:
            self._end(sequence, now)

    def offered(self, ticket: int, now: float, in_tier: Listed[bool] = ()) -> None:
        """An `Offer` was copied or given up. `in_tier` says block by block what the tier holds now (stored or
        present); what is left out counts as not held and will be offered again at its next release."""
        self._offloader.offered(ticket, now, in_tier)

    # What can be seen.

    def take_events(self) -> list[Event]:
        """What happened to the index since the last call, oldest first (kv-semantics 6.1)."""
        return self._pool.take_events()

    def statistics(self) -> CoreStatistics:
        """A frozen picture of all gauges and counters."""
        tickets = len(self._lookups) + len(self._loads) + self._offloader.num_tickets
        return self._tally.statistics(self._pool, self._offloader, len(self._waiting), len(self._running), tickets)

    def check_invariants(self) -> None:
        """Compare every structure with every other; slow and complete, for tests and idle moments."""
        self._pool.check_invariants()
        self._waiting.check_invariants()
        self._producers.check_invariants()
        self._offloader.check_invariants()
        expected = [0] * self.settings.num_blocks
        for sequence in self._running.values():
            for block in (*sequence.table, *sequence.twins.values()):
                expected[block] += 1
            assert self._plan is not None or not sequence.unwritten
        for copy in self._plan.copies if self._plan else ():
            expected[copy.source] += 1
        for block, count in enumerate(expected):
            assert self._pool.ref_count(block) == count, f"block {block}: {self._pool.ref_count(block)}, not {count}"
        waiting = {each for each in self._sequences.values() if each.sequence_id not in self._running}
        assert len(waiting) == len(self._waiting)
        for sequence in waiting:
            assert sequence in self._waiting
            assert not sequence.table
        assert self._running.keys() <= self._sequences.keys()

    # Planning.

    def _schedule_decodes(self, step: _Step, now: float) -> None:
        for sequence in list(self._running.values()):
            if sequence.state is not State.RUNNING or not sequence.is_decoding or not step.budget:
                continue
            if sequence.sequence_id in self._running and self._grow(sequence, step, now):
                self._schedule(sequence, step)

    def _grow(self, sequence: Sequence, step: _Step, now: float) -> bool:
        """A block for the next token, if need be by preempting the youngest; False: not in this step."""
        while not self._cache.grow(sequence, self._depart(now)):
            if self._pool.num_delayed or self._loads:
                step.is_stalled = True  # Copies and loads end, so waiting is cheaper than computing again.
                return False
            youngest = next(each for each in reversed(self._running.values()) if each.state is State.RUNNING)
            # Alone it always fits: what is longer than the pool has ended before (`finish_reason`).
            assert youngest is not sequence or len(self._running) > 1
            self._preempt(youngest, now)
            if youngest is sequence:
                return False
        return True

    def _schedule_prefills(self, step: _Step) -> None:
        for sequence in self._running.values():
            if not step.budget:
                return
            if sequence.state is State.RUNNING and not sequence.is_decoding:
                self._schedule(sequence, step)

    def _schedule(self, sequence: Sequence, step: _Step) -> None:
        start = sequence.num_computed
        end = min(sequence.num_tokens, start + step.budget)
        step.budget -= end - start
        self._cache.publish(sequence, end, is_written=False)
        sample = None
        if end == sequence.num_tokens:
            request = sequence.request
            sample = SampleRequest(
                sampling=request.sampling,
                seed=request.seed,
                output_index=sequence.num_output,
                prompt=request.prompt,
                output=tuple(sequence.tokens[sequence.num_prompt :]),
                eos_allowed=is_eos_allowed(request.sampling, sequence.num_output),
            )
        table = tuple(sequence.table[: -(-end // self.settings.tokens_per_block)])
        step.chunks.append(Chunk(sequence.sequence_id, start, tuple(sequence.tokens[start:end]), table, sample))

    def _admit(self, step: _Step, now: float) -> None:
        while step.budget and len(self._running) < self.settings.max_batch_size:
            sequence = self._waiting.candidate()
            if sequence is None or not self._try_admit(sequence, step, now):
                return

    def _try_admit(self, sequence: Sequence, step: _Step, now: float) -> bool:
        """Admit the candidate or let it wait elsewhere; False when it needs blocks: then nobody passes it."""
        walk = self._cache.walk(sequence)
        if self._is_awaited(walk):
            hashes = sequence.block_hashes(0)
            last = self._producers.last_awaited(hashes, len(walk.blocks), self._cache.num_servable(sequence))
            self._waiting.park(sequence, last)
            return True
        if self._wants_lookup(sequence, walk):
            self._look_up(sequence, walk)
            return True
        num_load = self._num_to_load(sequence, walk)
        if num_load and not walk.is_written:
            self._waiting.set_aside(sequence)  # What is loaded must not stand on what this step may fail to write.
            return True
        if not self._has_headroom(sequence, walk):
            return False
        partial = None if num_load else self._cache.partial_child(sequence, walk)
        taken = self._cache.take(sequence, walk, partial, self._depart(now))
        if taken is False and partial is not None:
            partial = None  # Its source may be what has to go (kv-semantics 3.5).
            taken = self._cache.take(sequence, walk, None, self._depart(now))
        if taken is False:
            return False
        if isinstance(taken, BlockCopy):
            step.copies.append(taken)
        self._start_running(sequence, step, now)
        self._account(sequence, len(walk.blocks), partial.num_tokens if partial else 0, is_loading=num_load > 0)
        if num_load:
            self._load(sequence, num_load)
        else:
            self._schedule(sequence, step)
        return True

    def _start_running(self, sequence: Sequence, step: _Step, now: float) -> None:
        self._waiting.take(sequence)
        sequence.admitted_in_step = step.step_id
        sequence.state = State.RUNNING
        self._running[sequence.sequence_id] = sequence
        if sequence.admitted_at is None:
            sequence.admitted_at = now
        self._register(sequence)

    def _register(self, sequence: Sequence) -> None:
        """Tell that the sequence makes what is left of its prompt's full blocks."""
        if self.settings.enable_block_reuse:
            count = sequence.num_prompt // self.settings.tokens_per_block
            self._producers.register(sequence, sequence.block_hashes(count)[sequence.num_published : count])

    def _account(self, sequence: Sequence, num_full: int, num_partial: int, is_loading: bool) -> None:
        # Usage is that of the first admission; that of a loading sequence is known when the load is.
        if sequence.served is None and not is_loading:
            device = min(num_full * self.settings.tokens_per_block + num_partial, sequence.num_prompt)
            sequence.served = Served(device, 0, num_full, num_partial > 0)

    def _has_headroom(self, sequence: Sequence, walk: Walk) -> bool:
        """A preempted sequence comes back only where it would not be preempted again at the next block."""
        if not sequence.was_preempted or not self._running:
            return True
        blocks = -(-sequence.num_tokens // self.settings.tokens_per_block) - len(walk.blocks)
        reusable = sum(map(self._pool.is_evictable, walk.blocks))
        return self._pool.num_available - reusable >= blocks + len(self._running)

    def _publish_confirmed(self) -> None:
        for sequence in self._confirmed:
            if sequence.state is State.RUNNING:
                self._cache.publish(sequence, sequence.num_computed, is_written=True)
        self._confirmed.clear()

    def _refusal(self, request: NewRequest) -> Refused | None:
        settings = self.settings
        if request.sequence_id in self._sequences:
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
        if min(request.prompt) < 0 or max(request.prompt) >= settings.vocab_size:
            message = f"the prompt has a token id outside 0 to {settings.vocab_size - 1}"
            return Refused("invalid_value", message, "messages", False)
        if request.max_tokens < 1:
            message = f"max_tokens is {request.max_tokens}; it must be at least 1"
            return Refused("invalid_value", message, "max_tokens", False)
        if request.cache_salt == "":
            message = "cache_salt is empty; leave it out or give at least one character"
            return Refused("invalid_value", message, "cache_salt", False)
        if len(self._waiting) >= settings.max_queue:
            message = f"{len(self._waiting)} requests are waiting already; try again shortly"
            return Refused("engine_overloaded", message, None, True)
        return None

    # The tier, on the way in.

    def _is_awaited(self, walk: Walk) -> bool:
        return walk.stopped_at is not None and walk.stopped_at in self._producers

    def _is_onboarding(self) -> bool:
        return self._offloader.is_ready and self.settings.tier_enabled and self.settings.onboard_blocks

    def _wants_lookup(self, sequence: Sequence, walk: Walk) -> bool:
        if walk.stopped_at is None or not self._is_onboarding() or sequence.num_lookups >= _MAX_LOOKUPS:
            return False
        return sequence.tier_run is None or len(walk.blocks) < sequence.tier_run[0]

    def _look_up(self, sequence: Sequence, walk: Walk) -> None:
        start = len(walk.blocks)
        count = self._cache.num_servable(sequence)
        sequence.num_lookups += 1
        sequence.tier_run = (start, 0)
        ticket = self._next_ticket()
        self._lookups[ticket] = sequence
        self._tally.lookups += 1
        self._waiting.hold(sequence)
        self._send(Lookup(ticket, tuple(sequence.block_hashes(count)[start:count])))

    def _num_to_load(self, sequence: Sequence, walk: Walk) -> int:
        if walk.stopped_at is None or sequence.tier_run is None or not self._is_onboarding():
            return 0
        start, count = sequence.tier_run
        end = min(start + count, self._cache.num_servable(sequence))
        return max(0, end - len(walk.blocks)) if start <= len(walk.blocks) else 0

    def _load(self, sequence: Sequence, count: int) -> None:
        sequence.state = State.LOADING
        first = sequence.num_matched
        ticket = self._next_ticket()
        self._loads[ticket] = (sequence, count)
        self._tally.loads += 1
        places = range(first, first + count)
        hashes = sequence.block_hashes(first + count)
        self._send(Load(ticket, tuple((hashes[place], sequence.table[place]) for place in places)))

    # The tier, on the way out.

    def _depart(self, now: float) -> Callable[[int], bool] | None:
        if self.settings.offload_policy != "on_evict" or not self._is_onboarding():
            return None
        return lambda block: self._offloader.depart(block, now)

    def _next_ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def _send(self, work: TierWork) -> None:
        self._work.append(work)

    def _on_indexed(self, hashes: list[BlockHash]) -> None:
        self._producers.published(hashes)
        self._waiting.wake(hashes)

    # After a step.

    def _unusable(self, plan: StepPlan, failed: dict[int, str], is_aborted: bool) -> list[Sequence]:
        """Sequences that failed, and those that attended over what a failed one was to write, in plan order."""
        bad: list[Sequence] = []
        unwritten: set[int] = set()
        for chunk in plan.chunks:
            sequence = self._running[chunk.sequence_id]
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
            self._end(sequence, now, is_good=False)
            return []
        if error is None:
            if sequence.admitted_in_step == self._steps:
                sequence.admitted_at = sequence.served = None  # What it was served with was not there.
            self._preempt(sequence, now, is_good=False)
            return []
        self._cache.disown(sequence)
        self._end(sequence, now, is_good=False)
        return [SequenceOutput(sequence.sequence_id, (), finish="error", error=error)]

    def _take_token(self, sequence: Sequence, sampled: Sampled, now: float) -> SequenceOutput:
        sequence.append(sampled.token)
        first = self._first_token(sequence, now) if sequence.num_output == 1 else None
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
            self._end(sequence, now)
        return SequenceOutput(sequence.sequence_id, (sampled.token,), logprobs, first, finish)

    def _first_token(self, sequence: Sequence, now: float) -> FirstToken:
        served = sequence.served or Served(0, 0, 0, False)
        self._tally.count_first(sequence.num_prompt, served, self.settings.tokens_per_block)
        admitted_at = sequence.submitted_at if sequence.admitted_at is None else sequence.admitted_at
        return FirstToken(
            prompt_tokens=sequence.num_prompt,
            device_tokens=served.device_tokens,
            host_tokens=served.host_tokens,
            computed_tokens=sequence.num_prompt - served.device_tokens - served.host_tokens,
            queue_ms=1000 * (admitted_at - sequence.submitted_at),
            ttft_ms=1000 * (now - sequence.submitted_at),
        )

    # Endings.

    def _end_or_wait(self, sequence: Sequence, now: float) -> None:
        """End a sequence nobody listens to, unless a load or a step still writes its blocks."""
        if sequence.state is State.LOADING:
            return
        if self._plan is not None and sequence.sequence_id in self._running:
            if not any(chunk.sequence_id == sequence.sequence_id for chunk in self._plan.chunks):
                self._late.append(lambda: self._end(sequence, now))
            return
        self._end(sequence, now)

    def _end(self, sequence: Sequence, now: float, is_good: bool = True) -> None:
        if sequence.state is State.FINISHED:
            return
        self._give_back(sequence, now, is_good)
        self._waiting.remove(sequence)
        sequence.state = State.FINISHED
        del self._sequences[sequence.sequence_id]
        self._confirmed.discard(sequence)
        self._pool.leave(sequence.owner_index, sequence.namespace_index)

    def _preempt(self, sequence: Sequence, now: float, is_good: bool = True) -> None:
        """Its blocks become idle; it comes back before all others and computes again what is gone by then."""
        self._give_back(sequence, now, is_good)
        self._tally.preemptions += 1
        sequence.was_preempted = True
        sequence.state = State.WAITING
        self._waiting.push(sequence)

    def _give_back(self, sequence: Sequence, now: float, is_good: bool) -> None:
        if self._running.pop(sequence.sequence_id, None) is None:
            return
        left = self._producers.drop(sequence)
        blocks = self._cache.release(sequence, now, is_good)
        if is_good:
            self._offloader.released(blocks, now)
        self._hand_over(left)

    def _hand_over(self, hashes: set[BlockHash]) -> None:
        """Who computes one of these blocks already becomes its producer (3.3); otherwise a waiter does."""
        if not hashes:
            return
        for sequence in self._running.values():
            self._register(sequence)
        self._waiting.wake([block_hash for block_hash in hashes if block_hash not in self._producers])

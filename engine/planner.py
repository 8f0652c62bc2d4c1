"""Makes the plan of one step: decodes first, then prefill chunks and admissions, within a budget of tokens.

Three quarters of what decodes leave go to prefills in order of admission; a quarter goes round among the others and
the next one waiting, so that a short prompt does not wait for the end of a long one; it is not kept for prompts of the
one owner that is there, where the oldest ends within its part. Who is next in the queue is the scheduler's choice; what a
plan's result means is the core's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.block_pool import BlockPool
from engine.offload import Offloader
from engine.onboarding import Onboarding
from engine.pace import SHARE_OF_OTHERS, YOUNG_TOKENS, Outlook
from engine.plan import BlockCopy, Chunk, SampleRequest, StepPlan, has_penalties
from engine.prefix_cache import Walk
from engine.roster import Roster
from engine.sequence import Sequence, Served, State
from engine.stopping import is_eos_allowed
from engine.values import CoreSettings

_RESERVED_SHARE = 8
"""One part in so many of the running places is kept for owners that have nothing running: long answers of one owner
would otherwise hold all places, and another's first token would wait for the end of one of them."""

_FORESIGHT = 32
"""How many waiting prompts are looked at to choose how large a step should be."""


class _Step:
    """A plan being made."""

    def __init__(self, step_id: int, budget: int) -> None:
        self.step_id = step_id
        self.budget = budget
        self.chunks: list[Chunk] = []
        self.copies: list[BlockCopy] = []
        self.scheduled: set[Sequence] = set()
        self.is_stalled = False  # somebody waits for blocks that are on their way
        self.is_full = False  # the next one waiting does not fit
        self.has_prompt = False  # somebody has a part of its prompt in it


class Planner:
    """Stateless between plans but for what it shares with the core."""

    def __init__(
        self, settings: CoreSettings, pool: BlockPool, roster: Roster, onboarding: Onboarding, offloader: Offloader
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._roster = roster
        self._cache = roster.cache
        self._onboarding = onboarding
        self._offloader = offloader

    def make(self, step_id: int, now: float, budget: int, sits_out: bool = False) -> StepPlan | None:
        """The plan of at most `budget` tokens, with everything allocated and published that it needs; None when nothing
        can run. Answers that are new sit it out where that is asked for, and others can run."""
        step = _Step(step_id, budget)
        self._schedule_decodes(step, now, but_new=sits_out)
        prefills = self._prefills()
        self._schedule_share(prefills, step, now)
        for sequence in prefills:
            self._schedule(sequence, step, step.budget)
        self._admit(step, now, step.budget)
        self._roster.waiting.restore_aside()
        if sits_out and not step.has_prompt:
            # Nobody makes use of it: those that wait have no place, or no blocks.
            self._schedule_decodes(step, now)
        return StepPlan(step_id, tuple(step.copies), tuple(step.chunks)) if step.chunks else None

    def outlook(self, now: float) -> Outlook:
        """What the next step could hold, as far as its size depends on it."""
        num_decodes = num_young = context = num_new = new_context = 0
        waited_s = 0.0
        prefills: list[Sequence] = []
        for sequence in self._roster.running.values():
            if sequence.state is not State.RUNNING:
                continue
            if sequence.is_decoding:
                num_decodes += 1
                num_young += sequence.num_output < YOUNG_TOKENS
                context += sequence.num_tokens
                if sequence.is_new:
                    num_new += 1
                    new_context += sequence.num_tokens
                    waited_s = max(waited_s, now - sequence.first_token_at)
            else:
                prefills.append(sequence)
        left = [each.num_tokens - each.num_computed for each in prefills]
        start = prefills[0].num_computed if prefills else 0
        # Beside settled decodes only the next chunk is asked for; a crowd's order does not depend on more than its beginning.
        is_paced = num_young < num_decodes
        for sequence in self._roster.waiting.first(int(not prefills) if is_paced else _FORESIGHT):
            known = self._num_known(sequence)
            if not left:
                start = known
            left.append(sequence.num_tokens - known)
        return Outlook(num_decodes, context, start, left, num_young, num_new, new_context, waited_s)

    def _num_known(self, sequence: Sequence) -> int:
        """Tokens that a waiting sequence will not compute: they are there, or the one it waits for computes them."""
        if self._roster.waiting.parked_on(sequence) is None:
            return self._cache.num_cached_tokens(sequence)
        num_blocks = self._cache.num_cached(sequence)
        # One that has run before knows the hash of its last block as well, of which a token has to be computed.
        hashes = sequence.block_hashes(0)[: self._cache.num_servable(sequence)]
        while num_blocks < len(hashes) and hashes[num_blocks] in self._roster.producers:
            num_blocks += 1
        return num_blocks * self._settings.tokens_per_block

    def is_awaited(self, walk: Walk) -> bool:
        """Whether somebody makes the block at which the walk ends (kv-semantics 3.3)."""
        return walk.stopped_at is not None and walk.stopped_at in self._roster.producers

    # Those that run.

    def _schedule_decodes(self, step: _Step, now: float, but_new: bool = False) -> None:
        for sequence in list(self._roster.running.values()):
            if but_new and sequence.is_new:
                continue
            # One that was preempted for an older one is no longer running when its turn comes.
            if sequence.state is not State.RUNNING or not sequence.is_decoding or not step.budget:
                continue
            if self._grow(sequence, step, now):
                self._schedule(sequence, step, 1)

    def _grow(self, sequence: Sequence, step: _Step, now: float) -> bool:
        """A block for the next token, if need be by preempting the youngest; False: not in this step."""
        while not self._cache.grow(sequence, self._depart(now)):
            if self._roster.let_go(now):
                continue
            if self._pool.num_delayed or self._onboarding.is_loading:
                step.is_stalled = True  # Copies and loads end, so waiting is cheaper than computing again.
                return False
            youngest = self._roster.youngest_running()
            if youngest in step.scheduled:
                return False  # What the step computes of it is in these blocks.
            # Alone it always fits: what is longer than the pool has ended before (`finish_reason`).
            assert youngest is not sequence or len(self._roster.running) > 1
            self._roster.preempt(youngest, now)
            if youngest is sequence:
                return False
        return True

    def _prefills(self) -> list[Sequence]:
        running = self._roster.running.values()
        return [each for each in running if each.state is State.RUNNING and not each.is_decoding]

    def _schedule_share(self, prefills: list[Sequence], step: _Step, now: float) -> None:
        """The part of those who are not the oldest, going round between their owners from step to step, so that many prompts
        of one do not outweigh one of another; the next one waiting counts as an owner. What they leave is the oldest's.

        Where nobody else is there, and the oldest needs no more than its part, all go in their order: a burst of short
        prompts would be cut in pieces, each of which costs as much again."""
        share = step.budget // SHARE_OF_OTHERS
        if not share or not prefills:
            return
        rest = step.budget - share
        if prefills[0].num_tokens - prefills[0].num_computed <= rest and self._are_of_one_owner(prefills):
            return
        for sequence in _round(prefills[1:], step.step_id):
            room = step.budget - rest
            if sequence is None:
                self._admit(step, now, room)
            else:
                self._schedule(sequence, step, room)

    def _are_of_one_owner(self, prefills: list[Sequence]) -> bool:
        owners = {each.owner_index for each in prefills} | self._roster.waiting.ready_owners()
        return len(owners) == 1

    def _schedule(self, sequence: Sequence, step: _Step, room: int) -> None:
        """A chunk of at most `room` tokens, unless it has one in this step."""
        if not room or sequence in step.scheduled:
            return
        if not sequence.is_decoding:
            self._account_more(sequence, self._cache.catch_up(sequence))
        start = sequence.num_computed
        end = min(sequence.num_tokens, start + room)
        step.budget -= end - start
        step.scheduled.add(sequence)
        step.has_prompt |= not sequence.num_output
        self._cache.publish(sequence, end, is_written=False)
        table = tuple(sequence.table[: -(-end // self._settings.tokens_per_block)])
        sample = _sample_request(sequence) if end == sequence.num_tokens else None
        step.chunks.append(Chunk(sequence.sequence_id, start, tuple(sequence.tokens[start:end]), table, sample))

    # Those that wait.

    def _admit(self, step: _Step, now: float, room: int) -> None:
        rest = step.budget - room
        while step.budget > rest and not (step.is_stalled or step.is_full):
            num_places = self._settings.max_batch_size - len(self._roster.running)
            is_reserved = 0 < num_places <= self._settings.max_batch_size // _RESERVED_SHARE
            is_excluded = self._is_served if is_reserved else _nobody
            sequence = self._roster.waiting.candidate(self._cache.num_cached, is_excluded)
            if sequence is None or num_places <= 0:
                return
            step.is_full = not self._try_admit(sequence, step, now, step.budget - rest)

    def _is_served(self, owner_index: int) -> bool:
        return any(each.owner_index == owner_index for each in self._roster.running.values())

    def _try_admit(self, sequence: Sequence, step: _Step, now: float, room: int) -> bool:
        """Admit the candidate or let it wait elsewhere; False when it needs blocks: then nobody passes it."""
        walk = self._cache.walk(sequence)
        if self.is_awaited(walk):
            hashes, count = sequence.block_hashes(0), self._cache.num_servable(sequence)
            last = self._roster.producers.last_awaited(hashes, len(walk.blocks), count)
            self._roster.waiting.park(sequence, hashes[last])
            self._onboarding.look_ahead(sequence, last + 1)
            return True
        if self._onboarding.has_yet_to_hear(sequence, walk):
            self._roster.waiting.hold(sequence)
            return True
        if self._onboarding.wants_lookup(sequence, walk):
            self._onboarding.look_up(sequence, walk)
            return True
        num_load = self._onboarding.num_to_load(sequence, walk)
        if num_load and not walk.is_written:
            # What is loaded must not stand on what this step may fail to write.
            self._roster.waiting.set_aside(sequence)
            return True
        while not self._has_headroom(sequence, walk):
            if not self._roster.let_go(now):
                return False
        while (num_partial := self._take_blocks(sequence, walk, step, now, num_load)) is None:
            if not self._roster.let_go(now):
                return False
        self._roster.start_running(sequence, step.step_id, now)
        if num_load:
            self._onboarding.load(sequence, num_load)
        else:
            self._account(sequence, len(walk.blocks), num_partial)
            self._schedule(sequence, step, room)
        return True

    def _take_blocks(self, sequence: Sequence, walk: Walk, step: _Step, now: float, num_load: int) -> int | None:
        """All blocks for its tokens; how many tokens a partial match gave, None where blocks could not be had."""
        partial = None if num_load else self._cache.partial_child(sequence, walk)
        taken = self._cache.take(sequence, walk, partial, self._depart(now))
        if taken is False and partial is not None:
            partial = None  # Its source may be what has to go (kv-semantics 3.5).
            taken = self._cache.take(sequence, walk, None, self._depart(now))
        if taken is False:
            return None
        if isinstance(taken, BlockCopy):
            step.copies.append(taken)
        return partial.num_tokens if partial else 0

    def _has_headroom(self, sequence: Sequence, walk: Walk) -> bool:
        """A preempted sequence comes back only where it would not be preempted again at the next block."""
        num_running = len(self._roster.running)
        if not sequence.was_preempted or not num_running:
            return True
        blocks = -(-sequence.num_tokens // self._settings.tokens_per_block) - len(walk.blocks)
        reusable = sum(map(self._pool.is_evictable, walk.blocks))
        return self._pool.num_available - reusable >= blocks + num_running

    def _account(self, sequence: Sequence, num_full: int, num_partial: int) -> None:
        # Usage is that of the first admission; that of a loading sequence is known when the load is.
        if sequence.served is None:
            device = min(num_full * self._settings.tokens_per_block + num_partial, sequence.num_prompt)
            sequence.served = Served(device, 0, num_full, num_partial > 0)

    def _account_more(self, sequence: Sequence, num_full: int) -> None:
        served = sequence.served
        if num_full and served is not None and not sequence.was_preempted:
            device = served.device_tokens + num_full * self._settings.tokens_per_block
            sequence.served = replace(served, device_tokens=device, full_blocks=served.full_blocks + num_full)

    def _depart(self, now: float) -> Callable[[int], bool] | None:
        if self._settings.offload_policy != "on_evict" or not self._offloader.is_on:
            return None
        return lambda block: self._offloader.depart(block, now)


def _nobody(owner_index: int) -> bool:
    return False


def _round(others: list[Sequence], step_id: int) -> list[Sequence | None]:
    """Whose turn it is, by owner; None stands for the next one waiting. Inside an owner it goes round likewise."""
    lanes: dict[int, list[Sequence | None]] = {}
    for sequence in others:
        lanes.setdefault(sequence.owner_index, []).append(sequence)
    turns: list[list[Sequence | None]] = [*lanes.values(), [None]]
    lap, first = divmod(step_id, len(turns))
    turns = [*turns[first:], *turns[:first]]
    starts = [lap % len(lane) for lane in turns]
    leading = [lane[start] for lane, start in zip(turns, starts, strict=True)]
    rest = [each for lane, start in zip(turns, starts, strict=True) for each in (*lane[start + 1 :], *lane[:start])]
    return leading + rest


def _sample_request(sequence: Sequence) -> SampleRequest:
    request = sequence.request
    return SampleRequest(
        sampling=request.sampling,
        seed=request.seed,
        output_index=sequence.num_output,
        prompt=request.prompt,
        # A copy for each token would cost an answer of n tokens n² ÷ 2.
        output=tuple(sequence.tokens[sequence.num_prompt :]) if has_penalties(request.sampling) else (),
        eos_allowed=is_eos_allowed(request.sampling, sequence.num_output),
    )

"""A fake device and a fake tier around the real core: every read of wrong KV is noticed.

A token's KV depends on its namespace and on all tokens before it, so a place in a device block holds a digest of just
that. Steps, loads and offers are carried out as a real engine would, in the worst order that is allowed: what a load
or a failed step has not written is garbage.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from cached.keys import NO_OWNER, BlockHash, OwnerId, block_hashes, namespace
from cached.retention import DEFAULT_RETENTION, Retention, RetentionConfig, TokenRange
from engine.core import EngineCore
from engine.plan import Sampled, StepPlan, StepResult, has_penalties
from engine.protocol import FirstToken, Sampling
from engine.tier_work import Load, LoadedBlock, Lookup, Offer, Touch
from engine.values import CoreSettings, NewRequest, Queued, Refused, SequenceOutput

FINGERPRINT = b"a layout"
VOCAB = 50
EOS = 49
GARBAGE = -1


def settings(tokens_per_block: int = 4, num_blocks: int = 8, **changes: object) -> CoreSettings:
    """Settings of a small engine; a test mentions what matters."""
    base = CoreSettings(
        tokens_per_block=tokens_per_block,
        num_blocks=num_blocks,
        max_num_tokens=64,
        max_batch_size=8,
        max_queue=100,
        max_context_tokens=1000,
        vocab_size=100_000,
        eos_token_ids=(EOS,),
        record_events=True,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def ranges(*listed: tuple[int, int | None, int] | tuple[int, int | None, int, float]) -> RetentionConfig:
    """Retention by `(start, end, priority[, duration])`."""
    return RetentionConfig(
        tuple(TokenRange(each[0], each[1], Retention(each[2], each[3] if len(each) > 3 else None)) for each in listed)
    )


def at(priority: int, duration: float | None = None) -> RetentionConfig:
    """The whole prompt, and what is generated, at one priority."""
    retention = Retention(priority, duration)
    return RetentionConfig((TokenRange(0, None, retention),), retention)


def prefix_digests(salt: str | None, tokens: list[int] | tuple[int, ...]) -> list[int]:
    """What the fake KV of every position is."""
    state = hash(("salt", salt))
    digests = []
    for token in tokens:
        state = hash((state, token))
        digests.append(state)
    return digests


def next_token(salt: str | None, tokens: list[int]) -> int:
    """What the fake model says after these tokens."""
    return prefix_digests(salt, tokens)[-1] % VOCAB


def expected_output(request: NewRequest, config: CoreSettings) -> list[int]:
    """What a model without any cache would generate."""
    tokens = list(request.prompt)
    state = prefix_digests(request.cache_salt, tokens)[-1]
    output: list[int] = []
    while True:
        token = state % VOCAB
        if token == EOS and len(output) < request.sampling.min_tokens:
            token = 0
        output.append(token)
        state = hash((state, token))
        total = len(request.prompt) + len(output)
        is_end = token in config.eos_token_ids and not request.sampling.ignore_eos
        if is_end and len(output) >= request.sampling.min_tokens:
            return output
        if len(output) >= request.max_tokens or total >= config.max_context_tokens:
            return output
        if total > config.num_blocks * config.tokens_per_block:
            return output


@dataclass
class Life:
    """What the world knows of one sequence."""

    request: NewRequest
    output: list[int] = field(default_factory=list)
    first: FirstToken | None = None
    finish: str | None = None
    error: str | None = None
    is_dropped: bool = False


class World:
    """One core, its device and its tier, driven by a test."""

    def __init__(self, config: CoreSettings, tier_blocks: int = 0, check: bool = True) -> None:
        self.config = config
        self.core = EngineCore(config, FINGERPRINT)
        self.size = config.tokens_per_block
        self.device = [[GARBAGE] * self.size for _ in range(config.num_blocks)]
        self.tier: dict[BlockHash, list[int]] = {}
        self.tier_parent: dict[BlockHash, BlockHash | None] = {}
        self.tier_retention: dict[BlockHash, LoadedBlock] = {}
        self.tier_blocks = tier_blocks
        self.truth: dict[BlockHash, list[int]] = {}
        self.lives: dict[int, Life] = {}
        self.lookups: list[Lookup] = []
        self.loads: list[Load] = []
        self.offers: list[Offer] = []
        self.touches: list[Touch] = []
        self.refused: list[str] = []
        self.events: list[object] = []
        self.now = 1000.0
        self.next_id = 1
        self.computed: dict[int, int] = {}
        self.chunks: list[tuple[int, int, int]] = []  # step, sequence, tokens
        self.outstanding: StepPlan | None = None
        self.check = check
        if config.tier_enabled:
            self.core.set_tier_ready(True, self.now)

    def submit(
        self,
        prompt: list[int] | tuple[int, ...] | range,
        max_tokens: int = 1,
        salt: str | None = None,
        owner: OwnerId = NO_OWNER,
        retention: RetentionConfig = DEFAULT_RETENTION,
        hold: bool = False,
        sampling: Sampling | None = None,
    ) -> int:
        """Submit a request that has to be taken; returns its id."""
        sequence_id, answer = self.try_submit(prompt, max_tokens, salt, owner, retention, hold, sampling)
        assert isinstance(answer, Queued), answer
        return sequence_id

    def try_submit(
        self,
        prompt: list[int] | tuple[int, ...] | range,
        max_tokens: int = 1,
        salt: str | None = None,
        owner: OwnerId = NO_OWNER,
        retention: RetentionConfig = DEFAULT_RETENTION,
        hold: bool = False,
        sampling: Sampling | None = None,
    ) -> tuple[int, Queued | Refused]:
        """Submit a request that may be refused."""
        sequence_id = self.next_id
        self.next_id += 1
        request = NewRequest(
            sequence_id=sequence_id,
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=sampling or Sampling(ignore_eos=True),
            seed=1,
            cache_salt=salt,
            owner=owner,
            retention=retention,
            hold_generated=hold,
        )
        answer = self.core.submit(request, self.now)
        if isinstance(answer, Queued):
            self.lives[sequence_id] = Life(request)
        self._collect()
        return sequence_id, answer

    def start_step(self, budget: int | None = None, sits_out: bool = False) -> StepPlan | None:
        """Plan, and do what the device does before it has an answer."""
        assert self.outstanding is None
        outlook = self.core.outlook(self.now)
        plan = self.core.plan(self.now, budget, sits_out)
        self._collect()
        if plan is not None:
            assert outlook.num_decodes or outlook.left, "a step that nobody saw coming"
            assert all(left > 0 for left in outlook.left)
            assert budget is None or sum(len(chunk.tokens) for chunk in plan.chunks) <= budget
        self.outstanding = plan
        return plan

    def finish_step(self, aborted: bool = False, fail: tuple[int, ...] = ()) -> list[SequenceOutput]:
        """Carry the plan out, check every read, and complete it."""
        plan = self.outstanding
        assert plan is not None
        self.outstanding = None
        sampled = () if aborted else self._execute(plan, fail)
        if aborted:
            self._scribble(plan)
        result = StepResult(plan.step_id, tuple(sampled), tuple((each, "NaN") for each in fail), aborted)
        outputs = self.core.complete(plan, result, self.now)
        for output in outputs:
            life = self.lives[output.sequence_id]
            assert not life.is_dropped, "an output after the end"
            assert life.finish is None
            life.output.extend(output.tokens)
            life.first = output.first or life.first
            if output.first is not None:
                self._check_blocks(output.first)
            life.finish = output.finish
            life.error = output.error
            if output.finish in ("stop", "length"):
                assert life.output == expected_output(life.request, self.config)
        self._collect()
        return outputs

    def step(self) -> list[SequenceOutput] | None:
        """One whole step; None when nothing could run."""
        return None if self.start_step() is None else self.finish_step()

    def run(self, max_steps: int = 10_000) -> None:
        """Until nothing is left to do; the tier answers whenever it is asked."""
        for _ in range(max_steps):
            self.answer_tier()
            if not self.core.has_work() and not (self.lookups or self.loads or self.offers):
                return
            self.step()
        raise AssertionError(f"no progress: {self.core.statistics()}")

    def ask(self, prompt: list[int] | range, max_tokens: int = 1, **rest: object) -> Life:
        """Submit a request and run until it is finished."""
        sequence_id = self.submit(prompt, max_tokens, **rest)  # type: ignore[arg-type]
        self.run()
        return self.lives[sequence_id]

    def _check_blocks(self, first: FirstToken) -> None:
        """Rule 7.1: every block of the prompt was reused in full, in part, or missed."""
        counts = (first.blocks_full, first.blocks_partial, first.blocks_missed)
        size = self.core.settings.tokens_per_block
        assert min(counts) >= 0
        assert sum(counts) == -(-first.prompt_tokens // size)
        served = first.device_tokens + first.host_tokens
        assert first.blocks_full == served // size
        assert first.blocks_partial == (served % size > 0)

    def pos(self, prompt: list[int] | range, max_tokens: int = 1, **rest: object) -> int:
        """Prompt tokens served from cache."""
        first = self.ask(prompt, max_tokens, **rest).first
        assert first is not None
        return first.device_tokens + first.host_tokens

    def cancel(self, sequence_id: int) -> None:
        self._drop(sequence_id)
        self.core.cancel(sequence_id, self.now)
        self._collect()

    def stop(self, sequence_id: int, tokens_kept: int) -> None:
        self._drop(sequence_id)
        self.core.stop(sequence_id, tokens_kept, self.now)
        self._collect()

    def confirm(self, sequence_id: int, tokens_kept: int) -> None:
        self.core.confirm(sequence_id, tokens_kept)
        self._collect()

    # The tier.

    def answer_tier(self, rng: random.Random | None = None) -> None:
        """Answer everything that is outstanding; with `rng`, some of it badly."""
        while self.lookups:
            self.answer_lookup(0)
        while self.offers:
            self.answer_offer(0)
        while self.loads:
            self.answer_load(0)

    def answer_lookup(self, index: int, lie: int = 0) -> None:
        lookup = self.lookups.pop(index)
        found = 0
        while found < len(lookup.hashes) and lookup.hashes[found] in self.tier:
            found += 1
        self.core.looked_up(lookup.ticket, min(len(lookup.hashes), found + lie), self.now)
        self._collect()

    def answer_load(self, index: int, at_most: int = 1_000_000) -> None:
        load = self.loads.pop(index)
        good = 0
        for block_hash, block in load.blocks:
            if good >= at_most or block_hash not in self.tier:
                break
            self.device[block] = list(self.tier[block_hash])
            good += 1
        travelled = tuple(self.tier_retention[block_hash] for block_hash, _ in load.blocks[:good])
        self.core.loaded(load.ticket, good, self.now, travelled)
        self._collect()

    def answer_offer(self, index: int, take: bool = True) -> None:
        """The bytes are copied as late as possible: now."""
        offer = self.offers.pop(index)
        in_tier = []
        for block in offer.chain:
            content = self.device[block.device_block]
            assert content == self.truth[block.block_hash], "an offered block was changed under the copy"
            is_child = block.parent is None or block.parent in self.tier
            if not is_child:
                self.refused.append("orphan")
            if take and is_child and (block.block_hash in self.tier or len(self.tier) < self.tier_blocks):
                self.tier[block.block_hash] = list(content)
                self.tier_parent[block.block_hash] = block.parent
                self.tier_retention[block.block_hash] = LoadedBlock(block.priority, block.deadline, block.on_expiry)
            in_tier.append(block.block_hash in self.tier)
        self.core.offered(offer.ticket, self.now, tuple(in_tier))
        self._collect()

    def forget_in_tier(self, rng: random.Random) -> None:
        """The tier evicts a leaf."""
        parents = set(self.tier_parent.values())
        leaves = sorted(each for each in self.tier if each not in parents)
        if leaves:
            gone = rng.choice(leaves)
            del self.tier[gone], self.tier_parent[gone]

    # Below: the device.

    def _drop(self, sequence_id: int) -> None:
        if sequence_id in self.lives:
            self.lives[sequence_id].is_dropped = True

    def _collect(self) -> None:
        for work in self.core.take_tier_work():
            match work:
                case Lookup():
                    self.lookups.append(work)
                case Load():
                    self.loads.append(work)
                    for _, block in work.blocks:
                        self.device[block] = [GARBAGE] * self.size
                case Offer():
                    self.offers.append(work)
                case Touch():
                    self.touches.append(work)
        self.events.extend(self.core.take_events())
        if self.check:
            self.core.check_invariants()

    def _tokens(self, sequence_id: int) -> list[int]:
        life = self.lives[sequence_id]
        return [*life.request.prompt, *life.output]

    def _note_truth(self, life: Life, tokens: list[int], digests: list[int]) -> None:
        root = namespace(FINGERPRINT, life.request.cache_salt)
        for place, block_hash in enumerate(block_hashes(root, tokens, self.size)):
            self.truth[block_hash] = digests[place * self.size : (place + 1) * self.size]

    def _execute(self, plan: StepPlan, fail: tuple[int, ...]) -> list[Sampled]:
        busy = {block for load in self.loads for _, block in load.blocks}
        offered = {block.device_block for offer in self.offers for block in offer.chain}
        written: dict[tuple[int, int], int] = {}
        self._check_nothing_is_made_twice(plan)
        sources = {copy.source for copy in plan.copies}
        for copy in plan.copies:
            assert copy.target not in busy | offered | sources
            self.device[copy.target] = self.device[copy.source][: copy.num_tokens] + [GARBAGE] * (
                self.size - copy.num_tokens
            )
        assert sum(len(chunk.tokens) for chunk in plan.chunks) <= self.config.max_num_tokens
        assert len(plan.chunks) <= self.config.max_batch_size
        for chunk in plan.chunks:
            tokens = self._tokens(chunk.sequence_id)
            end = chunk.start + len(chunk.tokens)
            assert list(chunk.tokens) == tokens[chunk.start : end]
            assert (chunk.sample is not None) == (end == len(tokens))
            digests = prefix_digests(self.lives[chunk.sequence_id].request.cache_salt, tokens)
            self._note_truth(self.lives[chunk.sequence_id], tokens, digests)
            for position in range(chunk.start, end):
                place = (chunk.block_table[position // self.size], position % self.size)
                assert place not in written, "two sequences write the same place"
                assert place[0] not in busy | offered, "a block that is being copied was written"
                assert place[0] not in sources, "a block that is being copied from was written"
                written[place] = digests[position]
        for (block, offset), digest in written.items():
            self.device[block][offset] = digest
        sampled = []
        for chunk in plan.chunks:
            life = self.lives[chunk.sequence_id]
            tokens = self._tokens(chunk.sequence_id)
            end = chunk.start + len(chunk.tokens)
            digests = prefix_digests(life.request.cache_salt, tokens)
            assert len(chunk.block_table) == -(-end // self.size)
            for position in range(end):
                block = chunk.block_table[position // self.size]
                assert block not in busy
                assert self.device[block][position % self.size] == digests[position], (
                    f"sequence {chunk.sequence_id} attends over wrong KV at {position}"
                )
            self.chunks.append((plan.step_id, chunk.sequence_id, len(chunk.tokens)))
            self.computed[chunk.sequence_id] = self.computed.get(chunk.sequence_id, 0) + len(chunk.tokens)
            if chunk.sample is not None and chunk.sequence_id not in fail:
                assert chunk.sample.output_index == len(life.output)
                assert list(chunk.sample.output) == (life.output if has_penalties(life.request.sampling) else [])
                token = next_token(life.request.cache_salt, tokens)
                if token == EOS and not chunk.sample.eos_allowed:
                    token = 0
                sampled.append(Sampled(chunk.sequence_id, token, None))
        for chunk in plan.chunks:
            if chunk.sequence_id in fail:
                self._scribble_chunk(chunk.start, len(chunk.tokens), chunk.block_table)
        return sampled

    def _check_nothing_is_made_twice(self, plan: StepPlan) -> None:
        """Rule 3.3, as far as one step shows it: a block of one prompt that another may be served is made once."""
        if not self.config.enable_block_reuse:
            return
        made: dict[BlockHash, int] = {}
        for chunk in plan.chunks:
            request = self.lives[chunk.sequence_id].request
            end = min(chunk.start + len(chunk.tokens), len(request.prompt))
            hashes = block_hashes(namespace(FINGERPRINT, request.cache_salt), request.prompt[:end], self.size)
            for place in range(-(-chunk.start // self.size), len(hashes)):
                is_servable = (place + 1) * self.size < len(request.prompt)
                assert not (is_servable and hashes[place] in made), (
                    f"sequence {chunk.sequence_id} makes block {place} that {made[hashes[place]]} makes"
                )
                made[hashes[place]] = chunk.sequence_id

    def _scribble(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            self.device[copy.target] = [GARBAGE] * self.size
        for chunk in plan.chunks:
            self._scribble_chunk(chunk.start, len(chunk.tokens), chunk.block_table)

    def _scribble_chunk(self, start: int, count: int, table: tuple[int, ...]) -> None:
        for position in range(start, start + count):
            self.device[table[position // self.size]][position % self.size] = GARBAGE

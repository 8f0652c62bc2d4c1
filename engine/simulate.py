"""Replays recorded requests through the engine's own core without a model, and counts what it serves (style §56).

Every run has a whole `EngineCore`: pool, prefix tree, eviction order, offloader, and, if asked for, the host tier's
`BlockStore` behind it. What is simulated is the model, which computes in no time: a request arrives, is served, and is
over before the next one arrives. Generated tokens are not replayed. Where requests come from is `trace_files.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cached.keys import BlockHash, block_hashes, namespace
from cached.protocol import NEVER
from cached.records import Holder, StoredRow
from cached.retention import RetentionConfig
from cached.store import BlockStore, Granted, Present, Retouch
from cached.store import Offer as StoreOffer
from engine.ceiling import Ceiling, check_distinct
from engine.core import EngineCore
from engine.plan import Sampled, StepResult
from engine.policies import CEILING, Policy, policy_named
from engine.tier_work import Load, LoadedBlock, Lookup, Offer, Touch
from engine.traces import TracedRequest, TraceFormat, check_size, default_size, symbols, symbols_per_block
from engine.values import CoreSettings, NewRequest, Queued

_LAYOUT = b"halocline/simulate"
_SESSION = 1
_NO_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """What is compared: every policy at every capacity, in blocks of one size."""

    capacities: tuple[int, ...]
    policies: tuple[str, ...] = ("lru", "priority")
    host_blocks: int = 0
    tokens_per_block: int | None = None
    retention: RetentionConfig | None = None
    partial_reuse: bool = True


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one policy at one capacity served. Tokens are prompt tokens (kv-semantics 7.1)."""

    policy: str
    blocks: int
    host_blocks: int
    requests: int
    refused: int
    """Prompts longer than the pool: none of their tokens was served."""
    tokens_prompt: int
    tokens_device: int
    tokens_host: int
    evicted: int
    expired: int
    dropped_unused: int
    host_stored: int
    host_evicted: int
    host_refused: int

    @property
    def hit_rate(self) -> float:
        return (self.tokens_device + self.tokens_host) / self.tokens_prompt if self.tokens_prompt else 0.0


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """All runs over one trace, and what the trace is."""

    trace_format: TraceFormat
    tokens_per_block: int
    requests: int
    tokens_prompt: int
    blocks_referenced: int
    runs: tuple[RunResult, ...]


class Simulation:
    """Feeds each request to all runs at once, so that a trace is read and tokenized once."""

    def __init__(self, settings: SimulationSettings, trace_format: TraceFormat) -> None:
        size = default_size(trace_format) if settings.tokens_per_block is None else settings.tokens_per_block
        check_size(trace_format, size)
        self.tokens_per_block = size
        self._format = trace_format
        self._row = symbols_per_block(trace_format, size)
        self._policies: list[tuple[Policy, list[Replay]]] = []
        self._ceilings: list[Ceiling] = []
        # Hashes say nothing of what two blocks share in part.
        partial = settings.partial_reuse and trace_format == "text"
        for name in settings.policies:
            if name == CEILING:
                self._ceilings = [Ceiling(each) for each in settings.capacities]
                continue
            policy = policy_named(name, size, self._row, settings.retention)
            runs = [Replay(name, each, settings.host_blocks, size, self._row, partial) for each in settings.capacities]
            self._policies.append((policy, runs))
        self._requests = 0
        self._tokens = 0
        self._referenced = 0
        self._now = 0.0

    def take(self, request: TracedRequest) -> None:
        """The next request. Times that run backwards count as no time passing."""
        prompt = symbols(self._format, request, self.tokens_per_block)
        self._now = max(self._now, request.at_s)
        self._requests += 1
        self._tokens += request.num_tokens
        hashes = block_hashes(namespace(_LAYOUT, request.namespace or None), prompt, self._row)
        self._referenced += len(hashes)
        for policy, runs in self._policies:
            retention = policy.retention_for(hashes, self._now)
            for run in runs:
                run.take(prompt, request, retention, self._now)
        servable = min(len(hashes), (request.num_tokens - 1) // self.tokens_per_block)
        needed = -(-len(prompt) // self._row)
        for ceiling in self._ceilings[:1]:  # They share one trace.
            ceiling.take(hashes, servable, needed)

    def result(self) -> SimulationResult:
        """What was served of all requests so far, by policy, then capacity."""
        runs = [run.result() for _, runs in self._policies for run in runs]
        if self._ceilings:
            runs += [self._result_of(each, self._ceilings[0]) for each in self._ceilings]
        return SimulationResult(
            self._format, self.tokens_per_block, self._requests, self._tokens, self._referenced, tuple(runs)
        )

    def check_invariants(self) -> None:
        """Of every core and store; slow."""
        for _, runs in self._policies:
            for run in runs:
                run.check_invariants()

    def _result_of(self, ceiling: Ceiling, trace: Ceiling) -> RunResult:
        served, refused, evicted = ceiling.serve(trace)
        tokens = served * self.tokens_per_block
        blocks = ceiling.capacity
        return RunResult(CEILING, blocks, 0, self._requests, refused, self._tokens, tokens, 0, evicted, 0, 0, 0, 0, 0)


class DistinctBlocks:
    """Counts the different full blocks of a trace. It keeps the hash of each, so there is a limit to how many."""

    def __init__(self, trace_format: TraceFormat, tokens_per_block: int | None = None) -> None:
        self._size = default_size(trace_format) if tokens_per_block is None else tokens_per_block
        check_size(trace_format, self._size)
        self._format = trace_format
        self._row = symbols_per_block(trace_format, self._size)
        self._hashes: set[BlockHash] = set()

    def take(self, request: TracedRequest) -> None:
        """The next request. Raises TraceError of more different blocks than are kept."""
        prompt = symbols(self._format, request, self._size)
        self._hashes.update(block_hashes(namespace(_LAYOUT, request.namespace or None), prompt, self._row))
        check_distinct(len(self._hashes), "too many to count for a percentage; give --blocks N")

    def __len__(self) -> int:
        return len(self._hashes)


class Replay:
    """One core, with its host tier, under one policy."""

    def __init__(
        self, policy: str, blocks: int, host_blocks: int, tokens_per_block: int, row: int, partial_reuse: bool
    ) -> None:
        self._policy = policy
        self._tokens_per_symbol = tokens_per_block / row
        self._host_blocks = host_blocks
        self._settings = CoreSettings(
            tokens_per_block=row,
            num_blocks=blocks,
            max_num_tokens=_NO_LIMIT,
            max_batch_size=1,
            max_queue=1,
            max_context_tokens=_NO_LIMIT,
            vocab_size=1 << 32,
            enable_partial_reuse=partial_reuse,
            tier_enabled=host_blocks > 0,
        )
        self._core = EngineCore(self._settings, _LAYOUT)
        self._tier = SimulatedTier(host_blocks) if host_blocks else None
        if self._tier is not None:
            self._core.set_tier_ready(True, 0.0)
        self._requests = 0
        self._refused = 0
        self._tokens = 0

    def take(self, prompt: tuple[int, ...], request: TracedRequest, retention: RetentionConfig, now: float) -> None:
        """Serve one request from its arrival to its end."""
        self._requests += 1
        self._tokens += request.num_tokens
        asked = NewRequest(self._requests, prompt, 1, cache_salt=request.namespace or None, retention=retention)
        if not isinstance(self._core.submit(asked, now), Queued):
            self._refused += 1
            return
        self._serve_tier(now)
        while self._core.has_work():
            plan = self._core.plan(now)
            self._serve_tier(now)
            if plan is not None:
                sampled = tuple(Sampled(each.sequence_id, 0, None) for each in plan.chunks if each.sample is not None)
                self._core.complete(plan, StepResult(plan.step_id, sampled), now)
        self._serve_tier(now)

    def result(self) -> RunResult:
        """The figures so far."""
        seen = self._core.statistics()
        host = self._tier.store.counters if self._tier is not None else None
        return RunResult(
            policy=self._policy,
            blocks=self._settings.num_blocks,
            host_blocks=self._host_blocks,
            requests=self._requests,
            refused=self._refused,
            tokens_prompt=self._tokens,
            tokens_device=round(seen.tokens_device * self._tokens_per_symbol),
            tokens_host=round(seen.tokens_host * self._tokens_per_symbol),
            evicted=sum(seen.evictions_by_band.values()),
            expired=seen.expired,
            dropped_unused=seen.dropped_unused,
            host_stored=host.stored if host else 0,
            host_evicted=sum(host.evicted) if host else 0,
            host_refused=sum(host.refused.values()) if host else 0,
        )

    def check_invariants(self) -> None:
        """Of core and store; slow."""
        self._core.check_invariants()
        if self._tier is not None:
            self._tier.store.check_invariants()

    def _serve_tier(self, now: float) -> None:
        if self._tier is not None:
            self._tier.serve(self._core, now)


class SimulatedTier:
    """The host tier's store, doing at once what the core asks of it; every copy succeeds."""

    def __init__(self, num_slots: int) -> None:
        self.store = BlockStore(num_slots, 1, _NoRecords(), lease_ttl_s=3600.0, reservation_ttl_s=3600.0)
        self.store.publish(0, num_slots)
        self.store.open_session(_SESSION, Holder(0, 0, bytes(16)))

    def serve(self, core: EngineCore, now: float) -> None:
        """Answer everything until nothing more is asked."""
        while work := core.take_tier_work():
            for each in work:
                match each:
                    case Lookup(ticket, hashes):
                        core.looked_up(ticket, self.store.lookup(b"".join(hashes), now), now)
                    case Load(ticket, blocks):
                        came = self._load(b"".join(block_hash for block_hash, _ in blocks), now)
                        core.loaded(ticket, len(came), now, came)
                    case Offer():
                        core.offered(each.ticket, now, self._offer(each, now))
                    case Touch(items):
                        self.store.touch(
                            [
                                Retouch(
                                    item.block_hash, item.priority, _or_never(item.deadline), _drops(item.on_expiry)
                                )
                                for item in items
                            ],
                            now,
                        )

    def _load(self, hashes: bytes, now: float) -> list[LoadedBlock]:
        lease = self.store.lease(_SESSION, hashes, now)
        if lease is None:
            return []
        columns = self.store.blocks
        came = [
            LoadedBlock(
                columns.priority[slot],
                None if columns.deadline[slot] == NEVER else columns.deadline[slot],
                "drop" if columns.drops[slot] else "demote",
            )
            for slot in lease.slots
        ]
        return came if self.store.release(_SESSION, lease.lease_id, now) else []

    def _offer(self, offer: Offer, now: float) -> list[bool]:
        chain = [
            StoreOffer(
                each.block_hash,
                each.parent,
                int(each.namespace_fingerprint, 16),
                each.priority,
                _or_never(each.deadline),
                _drops(each.on_expiry),
                each.owner,
            )
            for each in offer.chain
        ]
        decisions = self.store.reserve(_SESSION, chain, now)
        granted = [(each.reservation, 0) for each in decisions if isinstance(each, Granted)]
        if granted:
            self.store.commit(_SESSION, granted, now)
        return [isinstance(each, Granted | Present) for each in decisions]


class _NoRecords:
    """Nothing has to outlive a simulation."""

    def write_stored(self, slots: Sequence[int], rows: Iterable[StoredRow]) -> None:
        pass

    def write_reserved(self, slots: Sequence[int], holder: Holder) -> None:
        pass

    def clear(self, slot: int) -> None:
        pass


def _or_never(deadline: float | None) -> float:
    return NEVER if deadline is None else deadline


def _drops(on_expiry: str) -> bool:
    return on_expiry == "drop"

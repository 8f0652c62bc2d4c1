"""The thread that talks to the cache daemon and copies blocks: answers the core's tickets, each exactly once.

It decides the order (lookups, then loads, then stores and touches as they came; a store gives way after every batch)
and what counts as a miss. Which blocks are wanted is the core's decision; where they lie, and whether they may be read,
the daemon's. Whatever happens to the daemon, to a payload or to the code below, a ticket is at worst answered with 0.

    step loop ──TierWork──▶ queues ──▶ this thread ──verbs──▶ cached
              ◀─TierAnswer─────────────    │
                                           └──copies──▶ arena payload ◀──▶ KV memory
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import structlog

from cached.client import Lease, TierClient
from cached.keys import BlockHash
from cached.protocol import HelloRefused, LeasedBlock, OfferedBlock, OwnerShare, Present, Reserved
from engine.protocol import TierState
from engine.rates import LoadChoice, Onboard
from engine.tier_work import Load, LoadedBlock, Lookup, Offer, OfferedDeviceBlock, TierWork, Touch
from engine.transfer import Arrived, BlockTransfer, Mismatched, Unreadable

POLL_S: Final = 0.25
"""How often an idle worker looks whether the daemon came or went."""
STORE_GROUP_BLOCKS: Final = 64
"""Blocks reserved at once, so that a long chain does not hold reservations while it waits for its copies."""
MAX_TOUCHES_WAITING: Final = 16384
"""Touches are advice; while more than this many wait, new ones are dropped."""
RESTART_PAUSE_S: Final = 0.25

log = structlog.get_logger("engine.tier")

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Answer to a `Lookup`."""

    ticket: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """Answer to a `Load`; `travelled` is as long as `num_blocks`."""

    ticket: int
    num_blocks: int
    travelled: tuple[LoadedBlock, ...]


@dataclass(frozen=True, slots=True)
class Offered:
    """Answer to an `Offer`; `in_tier` says for its first blocks whether the tier holds them now."""

    ticket: int
    in_tier: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class TierIs:
    """The daemon came or went; one that came back as another has gone in between."""

    state: TierState


TierAnswer = LookedUp | Loaded | Offered | TierIs


@dataclass(slots=True)
class TierCounters:
    """What the worker did; written by its thread only, read by anyone, one number at a time."""

    state: str = "absent"
    lookups: int = 0
    lookup_hits: int = 0
    lookup_misses: int = 0
    loads: int = 0
    load_blocks: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    load_misses: int = 0
    leases_lost: int = 0
    checksum_mismatches: int = 0
    recomputed_by_choice: int = 0
    stores: int = 0
    store_blocks: int = 0
    store_bytes: int = 0
    store_seconds: float = 0.0
    store_refused: int = 0
    store_orphans: int = 0
    store_expired: int = 0
    touches: int = 0
    touches_dropped: int = 0
    owners_version: int = 0
    owners_outcome: str | None = None
    owners_refused: int = 0
    sessions: int = 0
    worker_errors: int = 0
    load_bytes_per_s: float | None = None


class TierWorker:
    """Owns the client of the cache daemon. `hand_over` never blocks; answers come from the worker's thread."""

    def __init__(
        self,
        make_client: Callable[[], TierClient],
        transfer: BlockTransfer,
        *,
        block_bytes: int,
        tokens_per_block: int,
        verify_loads: bool,
        num_device_blocks: int = 0,
        answer: Callable[[TierAnswer], None],
        on_stored: Callable[[], None] = lambda: None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """In the worker's thread, `prepare` is called once before it connects, `on_stored` after each commit."""
        self.counters = TierCounters()
        self._on_stored = on_stored
        self._prepare = prepare
        self._make_client = make_client
        self._transfer = transfer
        self._block_bytes = block_bytes
        self._verify_loads = verify_loads
        self._num_device_blocks = num_device_blocks
        self._suspected: BlockHash | None = None
        self._answer = answer
        self._choice = LoadChoice(block_bytes, tokens_per_block)
        self._prefill_tokens_per_s: float | None = None
        self._wake = threading.Condition()
        self._lookups: deque[Lookup] = deque()
        self._loads: deque[Load] = deque()
        self._background: deque[Offer | Touch] = deque()
        self._num_touches_waiting = 0
        self._owners: tuple[int, tuple[OwnerShare, ...]] | None = None
        self._owners_told = 0
        self._stop_by: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine-tier", daemon=True)
        self._client: TierClient | None = None
        self._refusal: HelloRefused | None = None

    # Called by the step loop. ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; the first `TierIs` comes when the daemon answers."""
        self._thread.start()

    def hand_over(self, work: Iterable[TierWork], prefill_tokens_per_s: float | None) -> None:
        """Queue work in its order; the current prefill rate is what loading is compared with."""
        with self._wake:
            self._prefill_tokens_per_s = prefill_tokens_per_s
            for item in work:
                self._enqueue(item)
            self._wake.notify()

    def set_owners(self, version: int, shares: tuple[OwnerShare, ...]) -> None:
        """Forward a table of owners' shares, now and to every daemon that comes later; the newest counts."""
        with self._wake:
            if self._owners is None or version > self._owners[0]:
                self._owners = version, shares
                self._wake.notify()

    def stop(self, drain_s: float) -> None:
        """End the thread; stores that wait have `drain_s` to be made, everything else is answered with 0."""
        with self._wake:
            self._stop_by = time.monotonic() + drain_s
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(drain_s + 5.0)

    def _enqueue(self, item: TierWork) -> None:
        match item:
            case Lookup():
                self._lookups.append(item)
            case Load():
                self._loads.append(item)
            case Offer():
                self._background.append(item)
            case Touch():
                if self._num_touches_waiting >= MAX_TOUCHES_WAITING:
                    self.counters.touches_dropped += 1
                    return
                self._num_touches_waiting += 1
                self._background.append(item)

    # The worker's thread. -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._prepare()
        except Exception:
            log.exception("the tier worker could not prepare its copies; the first one will be slower")
        while not self._is_over():
            try:
                self._client = self._make_client()
                self._serve()
            except Exception:
                # A defect must not take the engine down: what was under way has been answered on the way out.
                self.counters.worker_errors += 1
                log.exception("tier worker failed; the tier is absent until it is back")
                self._tell("absent")
                self._answer_all_with_nothing()
                time.sleep(RESTART_PAUSE_S)
            finally:
                self._drop_client()
        self._answer_all_with_nothing()
        self._transfer.close()

    def _serve(self) -> None:
        while not self._is_over():
            self._serve_urgent()
            self._forward_owners()
            item = self._next_background()
            match item:
                case Offer():
                    self._store(item)
                case Touch():
                    self._touch(item)
                case None:
                    self._require_client().poll()
                    self._look_at_state()

    def _next_background(self) -> Offer | Touch | None:
        with self._wake:
            if self._is_idle():
                self._wake.wait(POLL_S)
            if self._lookups or self._loads or not self._background:
                return None
            item = self._background.popleft()
            if isinstance(item, Touch):
                self._num_touches_waiting -= 1
            return item

    def _is_idle(self) -> bool:
        if self._background or self._lookups or self._loads or self._stop_by is not None:
            return False
        is_told = self._owners is None or self._owners_told == self._owners[0]
        return is_told or self.counters.state != "ready"

    def _is_over(self) -> bool:
        with self._wake:
            if self._stop_by is None:
                return False
            return not self._background or time.monotonic() >= self._stop_by

    def _serve_urgent(self) -> None:
        """Everything that a request waits for."""
        self._serve_lookups()
        while self._loads:
            self._load(self._loads.popleft())
            self._serve_lookups()

    def _serve_lookups(self) -> None:
        while self._lookups:
            self._lookup(self._lookups.popleft())

    # Verbs. ---------------------------------------------------------------------------------------------------------

    def _lookup(self, item: Lookup) -> None:
        num_blocks = 0
        try:
            num_held = self._require_client().lookup(list(item.hashes))
            self.counters.lookups += 1
            if num_held == 0:
                self.counters.lookup_misses += 1
            elif isinstance(self._choice.choose(num_held, self._prefill_tokens_per_s), Onboard):
                self.counters.lookup_hits += 1
                num_blocks = num_held
            else:
                self.counters.recomputed_by_choice += 1
        finally:
            self._answer(LookedUp(item.ticket, num_blocks))
        self._look_at_state()

    def _load(self, item: Load) -> None:
        good: list[LoadedBlock] = []
        try:
            started = time.monotonic()
            good = self._copy_in(item)
            self._count_load(len(item.blocks), len(good), time.monotonic() - started)
        finally:
            self._answer(Loaded(item.ticket, len(good), tuple(good)))
        self._look_at_state()

    def _copy_in(self, item: Load) -> list[LoadedBlock]:
        """Lease, copy, release: good is only what a held lease covered from the first byte to the last."""
        client = self._require_client()
        lease = client.lease([block_hash for block_hash, _ in item.blocks])
        if lease is None:
            return []
        good: list[LoadedBlock] = []
        try:
            good = self._copy_leased(item, lease)
        finally:
            held = client.release(lease)
        self._report_suspect()
        if not held:
            self.counters.leases_lost += 1
            return []
        return good

    def _report_suspect(self) -> None:
        """After the release: a block that proves bad takes its lease along, and with it the good ones before it."""
        if self._suspected is not None:
            self._require_client().suspect([self._suspected])
            self._suspected = None
            self._look_at_state()

    def _copy_leased(self, item: Load, lease: Lease) -> list[LoadedBlock]:
        good: list[LoadedBlock] = []
        blocks = [(device_block, block) for (_, device_block), block in zip(item.blocks, lease.blocks, strict=False)]
        for batch in _batches(blocks, self._transfer.batch_blocks):
            match self._transfer.load(self._require_client(), lease, batch, self._verify_loads):
                case Arrived():
                    num_good = len(batch)
                case Mismatched(num_good):
                    self._note_mismatch(item.blocks[len(good) + num_good][0], batch[num_good][1])
                case Unreadable():
                    num_good = 0
            good += [LoadedBlock(block.priority, block.deadline, block.on_expiry) for _, block in batch[:num_good]]
            if num_good < len(batch):
                break
            self._serve_lookups()
        return good

    def _note_mismatch(self, block_hash: BlockHash, block: LeasedBlock) -> None:
        self.counters.checksum_mismatches += 1
        log.warning("a host block is not what was stored; it is computed again", slot_offset=block.slot_offset)
        self._suspected = block_hash

    def _count_load(self, num_wanted: int, num_good: int, seconds: float) -> None:
        counters = self.counters
        counters.loads += 1
        counters.load_blocks += num_good
        counters.load_misses += num_wanted - num_good
        counters.load_bytes += num_good * self._block_bytes
        counters.load_seconds += seconds
        self._choice.load_bytes.observe(num_good * self._block_bytes, seconds)
        counters.load_bytes_per_s = self._choice.load_bytes.per_s

    def _store(self, item: Offer) -> None:
        in_tier: list[bool] = []
        try:
            self.counters.stores += 1
            for start in range(0, len(item.chain), STORE_GROUP_BLOCKS):
                group = item.chain[start : start + STORE_GROUP_BLOCKS]
                taken = self._store_group(group)
                in_tier += taken
                if not taken or not taken[-1]:
                    break  # What is taken is a prefix (kv-semantics 5.1): the rest would be orphans.
        finally:
            self._answer(Offered(item.ticket, tuple(in_tier)))
        self._look_at_state()

    def _store_group(self, group: tuple[OfferedDeviceBlock, ...]) -> list[bool]:
        """Reserve, copy, commit some blocks of a chain; which of them the tier holds, as far as that is known.

        Every reservation is committed or aborted, even if its session has ended meanwhile: only then does the daemon
        use those slots again.
        """
        client = self._require_client()
        answers = client.reserve([_offered(block) for block in group])
        in_tier = [isinstance(answer, Present) for answer in answers]
        self._touch_present([block for block, is_present in zip(group, in_tier, strict=False) if is_present])
        reserved = [(at, answer) for at, answer in enumerate(answers) if isinstance(answer, Reserved)]
        self.counters.store_refused += len(group) - len(reserved) - sum(in_tier)
        copied: list[tuple[int, int, int]] = []
        try:
            for batch in _batches(reserved, self._transfer.batch_blocks):
                checksums = self._copy_out([(group[at].device_block, slot) for at, slot in batch])
                if checksums is None:
                    break
                copied += [(at, slot.reservation, sum_) for (at, slot), sum_ in zip(batch, checksums, strict=True)]
                self._serve_urgent()
        finally:
            left = [slot.reservation for _, slot in reserved[len(copied) :]]
            if left:
                client.abort(left)
                self._look_at_state()
        if copied:
            outcomes = client.commit([(reservation, checksum) for _, reservation, checksum in copied])
            for (at, _, _), outcome in zip(copied, outcomes, strict=False):
                in_tier[at] = self._count_commit(outcome)
            self._on_stored()
        return in_tier

    def _touch_present(self, blocks: list[OfferedDeviceBlock]) -> None:
        """What was there already keeps what another release said of it, unless it hears of this one (kv-semantics 2.6)."""
        if blocks:
            self.counters.touches += 1
            self._require_client().touch([(b.block_hash, b.priority, b.deadline, b.on_expiry) for b in blocks])

    def _copy_out(self, batch: list[tuple[int, Reserved]]) -> list[int] | None:
        """The checksums to commit; None when the slots cannot be written any more."""
        started = time.monotonic()
        checksums = self._transfer.store(self._require_client(), batch)
        self.counters.store_seconds += time.monotonic() - started
        return checksums

    def _count_commit(self, outcome: str) -> bool:
        if outcome == "stored":
            self.counters.store_blocks += 1
            self.counters.store_bytes += self._block_bytes
            return True
        if outcome == "orphan":
            self.counters.store_orphans += 1
        else:
            self.counters.store_expired += 1
        return False

    def _touch(self, item: Touch) -> None:
        self.counters.touches += 1
        self._require_client().touch(
            [(block.block_hash, block.priority, block.deadline, block.on_expiry) for block in item.items]
        )
        self._look_at_state()

    def _forward_owners(self) -> None:
        """Tell the daemon of this session the newest table, once."""
        with self._wake:
            table = self._owners
        if table is None or self._owners_told == table[0] or self.counters.state != "ready":
            return
        version, shares = table
        outcome = self._require_client().set_owners(version, shares)
        if outcome != "absent":
            self._owners_told = version
            self.counters.owners_version = version
            self.counters.owners_outcome = outcome
        if outcome in ("floors_exceed_capacity", "invalid"):
            self.counters.owners_refused += 1
            log.error("the tier does not take the owners' shares", version=version, reason=outcome)
        self._look_at_state()

    # The daemon's presence. -----------------------------------------------------------------------------------------

    def _look_at_state(self) -> None:
        """Called after every verb, so that no session ends unseen: one that ends within a verb leaves the client
        absent, and only the next verb, or poll, opens another."""
        client = self._require_client()
        self._tell(client.state)
        if client.state == "ready":
            self._transfer.look(client)
        refusal = client.refusal
        if refusal is not None and refusal != self._refusal:
            log.warning("the cache daemon refuses this engine", reason=refusal.reason, error=refusal.message)
        self._refusal = refusal

    def _tell(self, state: TierState) -> None:
        if state == self.counters.state:
            return
        self.counters.state = state
        self._owners_told = 0  # Another session may be with another daemon.
        self.counters.owners_outcome = None
        if state == "ready":
            self.counters.sessions += 1
            self._compare_sizes()
        log.info("host tier", state=state)
        self._answer(TierIs(state))

    def _compare_sizes(self) -> None:
        num_host_blocks = self._require_client().num_slots
        if num_host_blocks < self._num_device_blocks:
            log.warning(
                "the host tier is smaller than the device's pool, so it forgets before the device does; raise host_cache_size",
                host_blocks=num_host_blocks,
                device_blocks=self._num_device_blocks,
            )

    def _require_client(self) -> TierClient:
        assert self._client is not None
        return self._client

    def _drop_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _answer_all_with_nothing(self) -> None:
        with self._wake:
            waiting = [*self._lookups, *self._loads, *self._background]
            self._lookups.clear()
            self._loads.clear()
            self._background.clear()
            self._num_touches_waiting = 0
        for item in waiting:
            match item:
                case Lookup(ticket):
                    self._answer(LookedUp(ticket, 0))
                case Load(ticket):
                    self._answer(Loaded(ticket, 0, ()))
                case Offer(ticket):
                    self._answer(Offered(ticket, ()))

    def statistics(self) -> dict[str, Any]:
        """The counters, for statistics and metrics."""
        counters = replace(self.counters)
        figures = {name: getattr(counters, name) for name in TierCounters.__slots__}  # type: ignore[attr-defined]
        return figures | self._transfer.statistics()


def _batches(items: list[_Item], size: int) -> list[list[_Item]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _offered(block: OfferedDeviceBlock) -> OfferedBlock:
    return OfferedBlock(
        block_hash=block.block_hash,
        parent=block.parent,
        namespace_fingerprint=block.namespace_fingerprint,
        priority=block.priority,
        deadline=block.deadline,
        on_expiry=block.on_expiry,
        owner=block.owner,
    )

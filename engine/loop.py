"""The step thread: owns the core and the runner, and turns an inbox of values into steps and an outbox of values.

It decides when to step, when to sleep, and when a step is given up. Who computes what is the core's choice, how is the
runner's; sockets are the server's. Nothing here waits for a gateway or for the cache daemon.

    server ──Admit, Drop, …──▶ inbox ─▶ core ─▶ plan ─▶ runner ─▶ result ─▶ core ─▶ outputs, events ──▶ server
    tier   ──TierAnswer──────▶   │        └──TierWork──▶ tier
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Protocol

import structlog

from cached.keys import OwnerId
from cached.protocol import OwnerShare as HostShare
from engine.core import EngineCore
from engine.events import Event
from engine.index_columns import IndexColumns
from engine.pace import StepRates, StepSize, step_size, work_of
from engine.plan import Sampled, StepPlan, StepResult
from engine.protocol import TierState
from engine.rates import Rate
from engine.tier import Loaded, LookedUp, Offered, TierAnswer, TierIs, TierWorker
from engine.values import CoreStatistics, NewRequest, Queued, Refused, SequenceOutput

MAX_FAILED_STEPS: Final = 3
"""Steps of which nothing could be computed, in a row, before the engine ends, for its supervisor to start another."""
MIN_SLEEP_S: Final = 0.005
MAX_SLEEP_S: Final = 3600.0
"""No wait of the system takes a thousand years, which a duration may be; waking up once an hour costs nothing."""
IDLE_CHECK_S: Final = 1.0
"""After so long without work or messages the core's invariants are checked once, where that was asked for."""
STEP_FAILED: Final = "The engine could not compute this step; the request may be retried."

log = structlog.get_logger("engine.loop")


def now_s() -> float:
    """Seconds of CLOCK_BOOTTIME, the one clock of deadlines (kv-semantics 2.7)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Runner(Protocol):
    """What a step needs: the forward pass and the sampling of one plan."""

    def execute(self, plan: StepPlan, abandon: Callable[[], bool]) -> StepResult:
        """Run the plan; `abandon` is asked between layers, and a yes gives the step up (`aborted`)."""


@dataclass(frozen=True, slots=True)
class Admit:
    """A request that came at `received_at`; answered by a `Refusal` or by outputs."""

    request: NewRequest
    received_at: float


@dataclass(frozen=True, slots=True)
class Drop:
    """The client of a sequence is gone."""

    sequence_id: int


@dataclass(frozen=True, slots=True)
class Keep:
    """The first `tokens_kept` generated tokens stay whatever comes."""

    sequence_id: int
    tokens_kept: int


@dataclass(frozen=True, slots=True)
class Halt:
    """A stop string was found after `tokens_kept` tokens."""

    sequence_id: int
    tokens_kept: int


@dataclass(frozen=True, slots=True)
class Weigh:
    """What each owner's share of the device weighs from now on (kv-semantics 4.3); who is not named has 1. `host` is the
    same table for the host tier, which keeps it by `version`."""

    weights: tuple[tuple[OwnerId, float], ...]
    version: int
    host: tuple[HostShare, ...]


@dataclass(frozen=True, slots=True)
class AskStatistics:
    """Someone wants figures; `reply` is called in the step thread and must only pass them on."""

    reply: Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """A consumer of events wants to know the index; answered by `SnapshotTaken`."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The core did not take a request."""

    sequence_id: int
    refused: Refused


@dataclass(frozen=True, slots=True)
class Outputs:
    """Everything one step gave."""

    outputs: tuple[SequenceOutput, ...]


@dataclass(frozen=True, slots=True)
class TierNow:
    """The host tier is in this state from now on."""

    state: TierState


@dataclass(frozen=True, slots=True)
class Happened:
    """What happened to the index, in order."""

    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """The index as it is after every event delivered before this."""

    blocks: IndexColumns


@dataclass(frozen=True, slots=True)
class Ended:
    """The step thread is over: as asked (`failure` None), or with what went wrong."""

    failure: str | None


Inbound = Admit | Drop | Keep | Halt | Weigh | AskStatistics | AskSnapshot | TierAnswer
Outbound = Refusal | Outputs | TierNow | Happened | SnapshotTaken | Ended


class Inbox:
    """Where other threads leave values for the step thread. `cancelled` is seen by a step that is running."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._items: deque[Inbound] = deque()
        self._stopping = False
        self.cancelled: set[int] = set()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Inbound) -> None:
        """Leave one value; never blocks."""
        with self._wake:
            self._items.append(item)
            if isinstance(item, Drop):
                self.cancelled.add(item.sequence_id)  # After the append: whoever sees it here will find it there.
            self._wake.notify()

    def put_all(self, items: Iterable[Inbound]) -> None:
        """Leave several values at once, so that the step thread sees all or none."""
        with self._wake:
            for item in items:
                self._items.append(item)
                if isinstance(item, Drop):
                    self.cancelled.add(item.sequence_id)
            self._wake.notify()

    def stop(self) -> None:
        """Ask the step thread to end; a running step is given up."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping

    def take(self, timeout_s: float | None) -> list[Inbound]:
        """All that is there; with nothing there, wait for something, for `stop`, or at most `timeout_s`."""
        with self._wake:
            if not self._items and not self._stopping and timeout_s != 0:
                self._wake.wait(timeout_s)
            items = list(self._items)
            self._items.clear()
            return items


class StepLoop:
    """Runs in a thread of its own from `start` to `Ended`. `deliver` is called there and must not block. Without a
    `decode_pace` every step may have all the tokens that the settings allow."""

    def __init__(
        self,
        core: EngineCore,
        runner: Runner,
        inbox: Inbox,
        deliver: Callable[[Outbound], None],
        *,
        tier: TierWorker | None,
        prefill_rate: Rate | None = None,
        step_rates: StepRates | None = None,
        decode_pace: float | None = None,
        record: Callable[[NewRequest, float], None] | None = None,
        record_path: str | None = None,
        check_when_idle: bool = False,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self._core = core
        self._runner = runner
        self._inbox = inbox
        self._deliver = deliver
        self._tier = tier
        self._record = record
        self._record_path = record_path
        self._check_when_idle = check_when_idle
        self._is_unchecked = check_when_idle
        self._clock = clock
        self._prefill_rate = prefill_rate or Rate()
        self._step_rates = step_rates or StepRates()
        self._decode_pace = decode_pace
        self._size = StepSize(core.settings.max_num_tokens)
        self._waited_s: dict[int, float] = {}
        self._tier_state: TierState = "none" if tier is None else "absent"
        self._num_failed_in_a_row = 0
        self._counters = {"steps": 0, "steps_aborted": 0, "steps_failed": 0, "step_seconds": 0.0, "step_tokens": 0}
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)

    def start(self) -> None:
        """Begin stepping."""
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end after `Inbox.stop`; False when it did not come in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        failure: str | None = None
        try:
            while not self._inbox.is_stopping and failure is None:
                failure = self._turn()
            if failure is None:
                self._wind_down()
        except Exception as error:
            # A defect in the core: its state cannot be trusted, so the process ends and another one starts.
            log.exception("step loop failed")
            failure = f"{type(error).__name__} in the step loop"
        finally:
            self._deliver(Ended(failure))

    def _turn(self) -> str | None:
        """One step, or one sleep; a sentence when the engine should end."""
        if self._decode_pace is not None:
            most = self._core.settings.max_num_tokens
            self._size = step_size(self._step_rates, self._core.outlook(self._clock()), self._decode_pace, most)
        plan = self._core.plan(self._clock(), self._size.num_tokens, self._size.sits_out)
        self._pass_on()
        if plan is None:
            self._sleep()
            return None
        self._is_unchecked = self._check_when_idle
        outputs = self._step(plan)
        if outputs:
            self._deliver(Outputs(tuple(outputs)))
        self._pass_on()
        if self._num_failed_in_a_row >= MAX_FAILED_STEPS:
            return f"{MAX_FAILED_STEPS} steps in a row failed"
        self._take(0)
        return None

    def _sleep(self) -> None:
        timeout_s = self._sleep_s()
        if not self._is_unchecked or (timeout_s is not None and timeout_s < IDLE_CHECK_S):
            self._take(timeout_s)
            return
        if not self._take(IDLE_CHECK_S) and not self._inbox.is_stopping:
            self._core.check_invariants()  # A contradiction is a defect: it ends the loop like any other.
            self._is_unchecked = False

    def _sleep_s(self) -> float | None:
        """Until the next block expires, if any will; messages end the sleep anyway."""
        deadline = self._core.next_deadline()
        return None if deadline is None else min(MAX_SLEEP_S, max(MIN_SLEEP_S, deadline - self._clock()))

    # Steps. ---------------------------------------------------------------------------------------------------------

    def _step(self, plan: StepPlan) -> list[SequenceOutput]:
        started = self._clock()
        failed_before = self._counters["steps_failed"]
        result = self._execute(plan)
        # One done again, chunk by chunk, says nothing of what steps cost.
        is_whole = self._counters["steps_failed"] == failed_before
        self._measure(plan, result, self._clock() - started, is_whole)
        self._take(0)  # First, so that what was cancelled meanwhile gets no output and its blocks are freed now.
        outputs = self._core.complete(plan, result, self._clock())
        return [self._with_waiting(output) for output in outputs]

    def _execute(self, plan: StepPlan) -> StepResult:
        try:
            result = self._runner.execute(plan, lambda: self._is_pointless(plan))
        except Exception as error:
            self._counters["steps_failed"] += 1
            log.exception("step failed", step_id=plan.step_id, sequences=len(plan.chunks), error=type(error).__name__)
            return self._execute_alone(plan)
        self._num_failed_in_a_row = 0
        return result

    def _execute_alone(self, plan: StepPlan) -> StepResult:
        """The chunks of a plan that failed, one by one, so that only those fail that cannot be computed even alone.

        In the plan's order, since a chunk may attend over what one before it writes; the core sees to those that stand on
        one that fails. Doing again what the failed step has done already is harmless: the same bytes go to the same places.
        """
        self._num_failed_in_a_row += 1  # Unless one of them can be computed.
        failed = {chunk.sequence_id: STEP_FAILED for chunk in plan.chunks}
        sampled: list[Sampled] = []
        for part in _parts(plan):
            result = self._execute_part(part)
            if result is None and not part.chunks:
                break  # Without the copies no chunk stands on what it should.
            if result is None or not part.chunks:
                continue
            self._num_failed_in_a_row = 0
            if not result.aborted:  # Nobody waits for one that was given up: it was cancelled, or the engine stops.
                del failed[part.chunks[0].sequence_id]
                failed.update(result.failed)
                sampled.extend(result.sampled)
        return StepResult(plan.step_id, tuple(sampled), failed=tuple(failed.items()))

    def _execute_part(self, part: StepPlan) -> StepResult | None:
        try:
            return self._runner.execute(part, lambda: self._is_pointless(part))
        except Exception as error:
            log.warning("a sequence alone failed", step_id=part.step_id, error=type(error).__name__)
            return None

    def _is_pointless(self, plan: StepPlan) -> bool:
        if self._inbox.is_stopping:
            return True
        cancelled = self._inbox.cancelled
        if not cancelled or not plan.chunks:
            return False
        return all(chunk.sequence_id in cancelled for chunk in plan.chunks)

    def _measure(self, plan: StepPlan, result: StepResult, seconds: float, is_whole: bool) -> None:
        work = work_of(plan)
        self._counters["steps"] += 1
        self._counters["step_seconds"] += seconds
        self._counters["step_tokens"] += work.num_decodes + work.num_prefill
        if result.aborted:
            self._counters["steps_aborted"] += 1
        elif is_whole and not result.failed:
            self._step_rates.note(work, seconds)
            if work.num_prefill > work.num_decodes:
                self._prefill_rate.observe(work.num_prefill, seconds)

    def _with_waiting(self, output: SequenceOutput) -> SequenceOutput:
        """The core counts from when it got a request; a client counts from when the engine did."""
        waited_s = self._waited_s.get(output.sequence_id, 0.0)
        if output.finish is not None:
            self._waited_s.pop(output.sequence_id, None)
        first = output.first
        if first is None or waited_s <= 0:
            return output
        waited_ms = waited_s * 1e3
        first = replace(first, queue_ms=first.queue_ms + waited_ms, ttft_ms=first.ttft_ms + waited_ms)
        return replace(output, first=first)

    # Messages. ------------------------------------------------------------------------------------------------------

    def _take(self, timeout_s: float | None) -> bool:
        """Handle what is in the inbox, after waiting for it at most so long; whether there was anything."""
        items = self._inbox.take(timeout_s)
        for item in items:
            self._handle(item)
        self._pass_on()
        return bool(items)

    def _handle(self, item: Inbound) -> None:
        core, now = self._core, self._clock()
        match item:
            case Admit(request, received_at):
                self._admit(request, received_at, now)
            case Drop(sequence_id):
                core.cancel(sequence_id, now)
                self._inbox.cancelled.discard(sequence_id)
                self._waited_s.pop(sequence_id, None)
            case Keep(sequence_id, tokens_kept):
                core.confirm(sequence_id, tokens_kept)
            case Halt(sequence_id, tokens_kept):
                core.stop(sequence_id, tokens_kept, now)
                self._waited_s.pop(sequence_id, None)
            case Weigh(weights, version, host):
                core.set_weights(dict(weights))
                if self._tier is not None:
                    self._tier.set_owners(version, host)
            case AskStatistics(reply):
                reply(self.statistics())
            case AskSnapshot():
                self._tell_events()  # First, so that what the snapshot holds is not told again after it.
                self._deliver(SnapshotTaken(self._core.snapshot_columns()))
            case LookedUp(ticket, num_blocks):
                core.looked_up(ticket, num_blocks, now)
            case Loaded(ticket, num_blocks, travelled):
                core.loaded(ticket, num_blocks, now, travelled)
            case Offered(ticket, in_tier):
                core.offered(ticket, now, in_tier)
            case TierIs(state):
                self._tier_state = state
                core.set_tier_ready(state == "ready", now)
                self._deliver(TierNow(state))

    def _admit(self, request: NewRequest, received_at: float, now: float) -> None:
        if request.sequence_id in self._inbox.cancelled:
            return  # Its Drop is further down the inbox.
        match self._core.submit(request, now):
            case Queued():
                self._waited_s[request.sequence_id] = now - received_at
                if self._record is not None:
                    self._record(request, time.time())
            case Refused() as refused:
                self._deliver(Refusal(request.sequence_id, refused))

    def _pass_on(self) -> None:
        """Hand what the core wants of others to them."""
        self._tell_events()
        work = self._core.take_tier_work()
        if work and self._tier is not None:
            self._tier.hand_over(work, self._prefill_rate.per_s)

    def _tell_events(self) -> None:
        events = self._core.take_events()
        if events:
            self._deliver(Happened(tuple(events)))

    def _wind_down(self) -> None:
        """Let go of every sequence, so that what they computed can still reach the host tier."""
        for item in self._inbox.take(0):
            self._handle(item)
        for sequence_id in list(self._waited_s):
            self._core.cancel(sequence_id, self._clock())
        self._core.let_go_unconfirmed(self._clock())
        self._pass_on()

    # Figures. -------------------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Gauges and counters of core, steps and tier as one JSON-able object; for the step thread only."""
        core: CoreStatistics = self._core.statistics()
        tier = {"state": "none"} if self._tier is None else self._tier.statistics()
        return {
            "core": asdict(core),
            "steps": dict(self._counters),
            "tier": tier,
            "rates": {
                "prefill_tokens_per_s": self._prefill_rate.per_s,
                "load_bytes_per_s": tier.get("load_bytes_per_s"),
            },
            "pace": self._pace_figures(),
            "inbox": len(self._inbox),
            "settings": {
                **asdict(self._core.settings),
                "decode_pace": self._decode_pace,
                "record": self._record_path,
            },
        }

    def _pace_figures(self) -> dict[str, float | None]:
        rates = self._step_rates
        known = rates.is_known
        return {
            "step_budget": self._size.num_tokens,
            "step_fixed_s": rates.fixed_s if known else None,
            "step_decode_s": rates.decode_s(0) if known else None,
            "step_prefill_s": rates.prefill_s(0) if known else None,
        }


def _parts(plan: StepPlan) -> list[StepPlan]:
    """A plan in pieces that have one chunk each, after one that has the copies; none of a plan that is such a piece."""
    if len(plan.chunks) + bool(plan.copies) < 2:
        return []
    copies = [StepPlan(plan.step_id, plan.copies, ())] if plan.copies else []
    return copies + [StepPlan(plan.step_id, (), (chunk,)) for chunk in plan.chunks]

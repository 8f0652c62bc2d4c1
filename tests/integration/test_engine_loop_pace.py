"""The step loop learns what its steps cost, and gives each the tokens that the pace of running streams allows."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.core import EngineCore
from engine.loop import Admit, AskStatistics, Inbox, Outbound, Outputs, StepLoop
from engine.pace import StepRates, StepWork, work_of
from engine.plan import Sampled, StepPlan, StepResult
from engine.protocol import Sampling
from engine.values import CoreSettings, NewRequest

STREAMS, LONG, LONG_AGO = (1, 2, 3, 4), 9, 99
PREFIX = tuple(range(100, 1092))
GREEDY = Sampling(temperature=0.0, ignore_eos=True)
FIXED_S, TOKEN_S = 0.03, 0.00125
WARM_UP = (
    StepWork(0, 0, 511, 130_816),
    StepWork(1, 512),
    StepWork(0, 0, 16, 24_712, 1536),
    StepWork(0, 0, 64, 100_384, 1536),
)


@dataclass
class TimedRunner:
    """Steps take no time, and the clock says that they took what a real one takes."""

    now: float = 1000.0
    works: list[StepWork] = field(default_factory=list)
    before: Callable[[int], None] = lambda step: None
    failing: tuple[int, ...] = ()
    aborting: tuple[int, ...] = ()

    def execute(self, plan: StepPlan, abandon: Callable[[], bool]) -> StepResult:
        self.works.append(work_of(plan))
        step = len(self.works)
        self.before(step)
        if step in self.failing:
            self.now += 50.0
            raise RuntimeError("the runner was told to fail")
        if step in self.aborting:
            self.now += 50.0
            return StepResult(plan.step_id, (), aborted=True)
        self.now += self.cost(self.works[-1])
        asked = [chunk.sequence_id for chunk in plan.chunks if chunk.sample is not None]
        return StepResult(plan.step_id, tuple(Sampled(each, 5, None) for each in asked))

    @staticmethod
    def cost(work: StepWork) -> float:
        return FIXED_S + TOKEN_S * (work.num_decodes + work.num_prefill)


def request(sequence_id: int, num_tokens: int, max_tokens: int) -> NewRequest:
    prompt = (sequence_id, *[7] * (num_tokens - 1))
    return NewRequest(sequence_id, prompt, max_tokens, GREEDY)


def step(
    runner: TimedRunner, inbox: Inbox, deliver: Callable[[Outbound], None], decode_pace: float | None, most: int = 512
) -> None:
    """Run a step loop with these costs already learnt until the inbox is stopped."""
    rates = StepRates()
    rates.begin_with([(work, runner.cost(work)) for work in WARM_UP])
    core = EngineCore(CoreSettings(16, 1000, most, 32, 100, 8192, 49_152), b"a layout")
    loop = StepLoop(
        core,
        runner,
        inbox,
        deliver,
        tier=None,
        step_rates=rates,
        decode_pace=decode_pace,
        clock=lambda: runner.now,
    )
    loop.start()
    assert loop.join(20.0)


def run(runner: TimedRunner, decode_pace: float | None) -> dict[str, Any]:
    """Four streams; after 30 steps a prompt of 3,000 tokens comes. Figures as they were when it had its first token."""
    inbox = Inbox()
    figures: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def deliver(item: Outbound) -> None:
        if isinstance(item, Outputs) and any(each.sequence_id == LONG for each in item.outputs):
            inbox.put(AskStatistics(figures.put))
            inbox.stop()

    def before(number: int) -> None:
        if number == 30:
            inbox.put(Admit(request(LONG, 3000, 1), runner.now))

    runner.before = before
    inbox.put_all([Admit(request(each, 20, 2000), runner.now) for each in STREAMS])
    step(runner, inbox, deliver, decode_pace)
    return figures.get(timeout=5)


def mean_ttft(decode_pace: float | None, most: int) -> float:
    """Of sixteen requests that come at once, with 20 tokens each behind a prefix that is in the cache."""
    runner, inbox = TimedRunner(), Inbox()
    burst = [NewRequest(each, (*PREFIX, *[each] * 20), 8, GREEDY) for each in range(1, 17)]
    times: list[float] = []
    began = math.inf

    def deliver(item: Outbound) -> None:
        nonlocal began
        for output in item.outputs if isinstance(item, Outputs) else ():
            if output.sequence_id == LONG_AGO:
                began = runner.now
                inbox.put_all([Admit(each, runner.now) for each in burst])
            elif output.first is not None:
                times.append(runner.now - began)
        if len(times) == len(burst):
            inbox.stop()

    inbox.put(Admit(NewRequest(LONG_AGO, (*PREFIX, 5, 5), 1, GREEDY), runner.now))
    step(runner, inbox, deliver, decode_pace, most)
    return sum(times) / len(times)


def pauses(runner: TimedRunner) -> list[float]:
    """How many times as long as a step of the decodes alone the steps with prefill took."""
    mixed = [work for work in runner.works if work.num_decodes and work.num_prefill]
    return [runner.cost(work) / runner.cost(StepWork(work.num_decodes)) for work in mixed]


def test_streams_keep_the_pace_that_was_set_beside_a_long_prompt() -> None:
    runner = TimedRunner()

    figures = run(runner, 2.6)

    found = sorted(pauses(runner))
    assert 2.3 < found[len(found) // 2] < 2.7, found
    assert found[-1] < 3, found
    assert figures["settings"]["decode_pace"] == 2.6
    assert figures["pace"]["step_fixed_s"] > 10 * figures["pace"]["step_prefill_s"] > 0
    assert len(STREAMS) + 8 <= figures["pace"]["step_budget"] < 512


def test_without_a_pace_a_step_may_be_as_large_as_the_settings_allow() -> None:
    runner = TimedRunner()

    run(runner, None)

    assert max(work.num_prefill + work.num_decodes for work in runner.works) == 512


def test_steps_that_failed_or_were_given_up_teach_nothing() -> None:
    untouched, disturbed = TimedRunner(), TimedRunner(failing=(10,), aborting=(17,))
    calm = run(untouched, 2.6)

    rough = run(disturbed, 2.6)

    # Fifty seconds each: had they counted, everything would be believed to cost many times as much.
    assert rough["steps"]["steps_failed"] == 1
    assert rough["steps"]["steps_aborted"] == 1
    for name in ("step_fixed_s", "step_prefill_s"):
        assert 0.8 < rough["pace"][name] / calm["pace"][name] < 1.25


def test_a_burst_on_a_cached_prefix_gets_its_first_tokens_about_as_soon_as_any_fixed_step_would_give_them() -> None:
    fixed = [mean_ttft(None, most) for most in (32, 64, 128, 256, 512)]

    paced, unpaced = mean_ttft(2.75, 512), mean_ttft(1e6, 512)

    assert unpaced < 1.1 * min(fixed)
    assert paced < 1.25 * min(fixed), "what those wait for that have their first token already"
    assert paced < 0.9 * fixed[-1]

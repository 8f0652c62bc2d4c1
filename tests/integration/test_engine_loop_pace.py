"""The step loop learns what its steps cost, and gives each the tokens that the pace of running streams allows."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.core import EngineCore
from engine.loop import Admit, AskStatistics, Ended, Inbox, Outbound, Outputs, StepLoop
from engine.pace import StepRates, StepWork, work_of
from engine.plan import Sampled, StepPlan, StepResult
from engine.protocol import Sampling
from engine.values import CoreSettings, NewRequest

STREAMS, LONG = (1, 2, 3, 4), 9
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
    return NewRequest(sequence_id, prompt, max_tokens, Sampling(temperature=0.0, ignore_eos=True))


def run(runner: TimedRunner, decode_pace: float | None, ends_with: int) -> dict[str, Any]:
    """Four streams; after 30 steps a prompt of 3,000 tokens comes. Figures as they were when it had its first token."""
    settings = CoreSettings(16, 1000, 512, 16, 100, 8192, 49_152)
    inbox = Inbox()
    delivered: queue.SimpleQueue[Outbound] = queue.SimpleQueue()
    figures: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def deliver(item: Outbound) -> None:
        if isinstance(item, Outputs) and any(each.sequence_id == ends_with for each in item.outputs):
            inbox.put(AskStatistics(figures.put))
            inbox.stop()
        delivered.put(item)

    inbox.put_all([Admit(request(each, 20, 2000), runner.now) for each in STREAMS])
    others = runner.before

    def before(step: int) -> None:
        if step == 30:
            inbox.put(Admit(request(LONG, 3000, 1), runner.now))
        others(step)

    runner.before = before
    core = EngineCore(settings, b"a layout")
    rates = StepRates()
    rates.begin_with([(work, runner.cost(work)) for work in WARM_UP])
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
    while not isinstance(delivered.get(timeout=5), Ended):
        pass
    return figures.get(timeout=5)


def pauses(runner: TimedRunner) -> list[float]:
    """How many times as long as a step of the decodes alone the steps with prefill took."""
    mixed = [work for work in runner.works if work.num_decodes and work.num_prefill]
    return [runner.cost(work) / runner.cost(StepWork(work.num_decodes)) for work in mixed]


def test_streams_keep_the_pace_that_was_set_beside_a_long_prompt() -> None:
    runner = TimedRunner()

    figures = run(runner, 2.6, LONG)

    found = sorted(pauses(runner))
    assert 2.3 < found[len(found) // 2] < 2.7, found
    assert found[-1] < 3, found
    assert figures["settings"]["decode_pace"] == 2.6
    assert figures["pace"]["step_fixed_s"] > 10 * figures["pace"]["step_prefill_s"] > 0
    assert 16 < figures["pace"]["step_budget"] < 512


def test_without_a_pace_a_step_may_be_as_large_as_the_settings_allow() -> None:
    runner = TimedRunner()

    run(runner, None, LONG)

    assert max(work.num_prefill + work.num_decodes for work in runner.works) == 512


def test_steps_that_failed_or_were_given_up_teach_nothing() -> None:
    untouched, disturbed = TimedRunner(), TimedRunner(failing=(10,), aborting=(17,))
    calm = run(untouched, 2.6, LONG)

    rough = run(disturbed, 2.6, LONG)

    # Fifty seconds each: had they counted, everything would be believed to cost many times as much.
    assert rough["steps"]["steps_failed"] == 1
    assert rough["steps"]["steps_aborted"] == 1
    for name in ("step_fixed_s", "step_prefill_s"):
        assert 0.8 < rough["pace"][name] / calm["pace"][name] < 1.25

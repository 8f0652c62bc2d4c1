"""When the step thread runs and when it sleeps."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cached.retention import Retention, RetentionConfig, TokenRange
from engine.client import EngineStream
from engine.errors import RequestRejected
from engine.plan import StepPlan, StepResult
from engine.protocol import Sampling, TokenEvent
from engine.request_recorder import RequestRecorder
from tests.support.fake_runner import FakeRunner
from tests.support.shell import WAIT_S, Shell, is_quiet

GREEDY = Sampling(temperature=0.0)


@dataclass(slots=True)
class SteppingRunner(FakeRunner):
    """Makes one step for each release of its semaphore."""

    turns: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def execute(self, plan: StepPlan, abandon: Callable[[], bool]) -> StepResult:
        self.turns.acquire()
        return FakeRunner.execute(self, plan, abandon)


async def read_all(stream: EngineStream) -> list[TokenEvent]:
    return [event async for event in stream]


class CountingPlans:
    """Counts the calls of a core's `plan`."""

    def __init__(self, shell: Shell) -> None:
        self.count = 0
        self._plan = shell.core.plan
        shell.core.plan = self  # type: ignore[method-assign, assignment]

    def __call__(self, now: float) -> StepPlan | None:
        self.count += 1
        return self._plan(now)


async def test_an_idle_engine_sleeps() -> None:
    async with Shell() as shell:
        client = await shell.client()
        async for _ in client.submit([1, 2, 3, 4, 5], 3, GREEDY):
            pass
        await shell.until(is_quiet)
        plans = CountingPlans(shell)

        await asyncio.sleep(0.3)

        assert plans.count <= 1  # One may have been under way.


async def test_an_idle_engine_checks_itself_once_where_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.loop.IDLE_CHECK_S", 0.02)
    checks: list[int] = []
    async with Shell(check_when_idle=True) as shell:
        shell.core.check_invariants = lambda: checks.append(1)  # type: ignore[method-assign]
        async with asyncio.timeout(WAIT_S):
            while not checks:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert len(checks) == 1

        client = await shell.client()
        async for _ in client.submit([1, 2, 3], 2, GREEDY):
            pass

        async with asyncio.timeout(WAIT_S):
            while len(checks) == 1:
                await asyncio.sleep(0.01)


async def test_a_contradiction_found_when_idle_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.loop.IDLE_CHECK_S", 0.02)

    def fail() -> None:
        raise AssertionError("a contradiction")

    async with Shell(check_when_idle=True) as shell:
        shell.core.check_invariants = fail  # type: ignore[method-assign]
        async with asyncio.timeout(WAIT_S):
            while not shell.ended:
                await asyncio.sleep(0.01)

    assert shell.ended == ["AssertionError in the step loop"]


async def test_an_idle_engine_wakes_when_a_block_expires() -> None:
    short = RetentionConfig(ranges=(TokenRange(0, None, Retention(priority=90, duration_s=0.05)),))
    async with Shell() as shell:
        client = await shell.client()
        async for _ in client.submit(list(range(1, 14)), 1, GREEDY, retention=short):
            pass

        async with asyncio.timeout(WAIT_S):
            while shell.core.statistics().expired == 0:  # Read from outside, so that asking does not wake it.
                await asyncio.sleep(0.01)


async def test_a_running_engine_takes_messages_between_steps() -> None:
    runner = SteppingRunner()
    async with Shell(runner) as shell:
        client = await shell.client()
        long = client.submit([1, 2, 3], 200, GREEDY)
        runner.turns.release()
        await anext(long)
        short = asyncio.create_task(read_all(client.submit([4, 5, 6], 2, GREEDY)))
        async with asyncio.timeout(WAIT_S):
            while shell.server.num_live < 2:
                await asyncio.sleep(0.005)

        runner.turns.release(10)  # Many fewer than the long one has tokens to come.
        events = await asyncio.wait_for(short, WAIT_S)

        assert events[-1].finish == "length"
        assert not long.finished
        long.cancel()
        runner.turns.release(1000)
        await shell.until(is_quiet)


async def test_what_is_admitted_is_recorded_once_and_what_is_refused_is_not(tmp_path: Path) -> None:
    recorder = RequestRecorder(tmp_path / "requests.jsonl", tmp_path, b"layout")
    async with Shell(record=recorder.record) as shell:
        client = await shell.client()
        async for _ in client.submit([1, 2, 3], 2, GREEDY):
            pass
        with pytest.raises(RequestRejected):
            await anext(client.submit([], 2, GREEDY))

    recorder.close()
    lines = (tmp_path / "requests.jsonl").read_text().splitlines()
    assert [json.loads(line)["tokens"] for line in lines[1:]] == [3]

"""Steps that raise: who pays for one request that cannot be computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from engine.client import EngineClient
from engine.plan import StepPlan, StepResult
from engine.protocol import Sampling, TokenEvent
from tests.support.fake_runner import FakeRunner, expected_tokens
from tests.support.shell import Shell, is_quiet

POISON_SEED = 666
GREEDY = Sampling(temperature=0.0)
POISON = Sampling(temperature=0.0, seed=POISON_SEED)


@dataclass(slots=True)
class PoisonedRunner(FakeRunner):
    """Raises wherever a request with the seed of poison is sampled; `says_so` makes it a failure of that request."""

    says_so: bool = False
    raised: int = 0

    def execute(self, plan: StepPlan, abandon: Callable[[], bool]) -> StepResult:
        poisoned = [each.sequence_id for each in plan.chunks if each.sample and each.sample.seed == POISON_SEED]
        if poisoned and not self.says_so:
            self.raised += 1
            raise IndexError("index -1 is out of bounds")
        result = FakeRunner.execute(self, plan, abandon)
        if not poisoned:
            return result
        sampled = tuple(each for each in result.sampled if each.sequence_id not in poisoned)
        return StepResult(plan.step_id, sampled, tuple((each, "no token is left") for each in poisoned))


async def read(client: EngineClient, prompt: list[int], max_tokens: int, sampling: Sampling) -> list[TokenEvent]:
    return [event async for event in client.submit(prompt, max_tokens, sampling)]


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.tokens]


async def test_one_request_that_makes_a_step_raise_fails_alone() -> None:
    runner = PoisonedRunner(step_s=0.005)
    async with Shell(runner) as shell:
        client = await shell.client()
        prompts = [list(range(start, start + 9)) for start in (10, 30, 50)]
        others = [asyncio.create_task(read(client, prompt, 20, GREEDY)) for prompt in prompts]
        poisoned = await read(client, [7, 8, 9], 20, POISON)
        answers = [await other for other in others]

        assert (poisoned[-1].finish, tokens_of(poisoned)) == ("error", [])
        assert runner.raised > 0
        for prompt, events in zip(prompts, answers, strict=True):
            assert events[-1].finish == "length"
            assert tokens_of(events) == expected_tokens(prompt, 20)
        await shell.until(is_quiet)
        assert shell.ended == []


async def test_any_number_of_requests_that_make_steps_raise_do_not_end_the_engine_while_others_run() -> None:
    async with Shell(PoisonedRunner()) as shell:
        client = await shell.client()
        long = asyncio.create_task(read(client, [1, 2, 3, 4, 5], 200, GREEDY))
        while not long.done():
            await read(client, [7, 8, 9], 2, POISON)

        assert tokens_of(await long) == expected_tokens([1, 2, 3, 4, 5], 200)
        assert shell.ended == []


async def test_who_stands_on_blocks_of_one_that_fails_in_the_same_step_computes_them_itself() -> None:
    runner = PoisonedRunner(step_s=0.02)
    async with Shell(runner) as shell:
        client = await shell.client()
        busy = asyncio.create_task(read(client, [1, 2, 3], 30, GREEDY))
        await asyncio.to_thread(runner.executing.wait)
        shared = list(range(100, 113))
        first = asyncio.create_task(read(client, shared, 3, POISON))
        second = asyncio.create_task(read(client, [*shared, 5], 3, GREEDY))

        assert (await first)[-1].finish == "error"
        assert tokens_of(await second) == expected_tokens([*shared, 5], 3)
        assert tokens_of(await busy) == expected_tokens([1, 2, 3], 30)
        await shell.until(is_quiet)


async def test_partial_matches_are_copied_again_when_a_step_is_done_again() -> None:
    runner = PoisonedRunner(step_s=0.02)
    async with Shell(runner) as shell:
        client = await shell.client()
        await read(client, list(range(100, 115)), 1, GREEDY)
        busy = asyncio.create_task(read(client, [1, 2, 3], 30, GREEDY))
        await asyncio.to_thread(runner.executing.wait)
        poisoned = asyncio.create_task(read(client, [7, 8, 9], 3, POISON))
        partial = [*range(100, 106), 50, 51, 52]
        copied = await read(client, partial, 3, GREEDY)

        assert (await poisoned)[-1].finish == "error"
        assert tokens_of(copied) == expected_tokens(partial, 3)
        assert copied[0].first is not None
        assert copied[0].first.device_tokens == 6
        await busy


async def test_requests_without_an_answer_do_not_end_the_engine_however_many_come_alone() -> None:
    async with Shell(PoisonedRunner(says_so=True)) as shell:
        client = await shell.client()
        for _ in range(5):
            assert (await read(client, [7, 8, 9], 2, POISON))[-1].finish == "error"

        assert tokens_of(await read(client, [1, 2, 3], 4, GREEDY)) == expected_tokens([1, 2, 3], 4)
        assert shell.ended == []


async def test_three_steps_of_which_nothing_can_be_computed_end_the_engine() -> None:
    async with Shell(FakeRunner(failures=1000)) as shell:
        client = await shell.client()
        for _ in range(3):
            answers = await asyncio.gather(
                *(read(client, [start, 8, 9], 2, GREEDY) for start in range(4)), return_exceptions=True
            )
            assert not any(isinstance(each, list) and each[-1].finish == "length" for each in answers)
            if shell.ended:
                break

        async with asyncio.timeout(10):
            while not shell.ended:
                await asyncio.sleep(0.01)
        assert shell.ended == ["3 steps in a row failed"]

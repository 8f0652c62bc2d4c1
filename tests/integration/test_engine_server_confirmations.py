"""The word on how far tokens count may reach the engine after it has finished by itself (kv-semantics 3.6)."""

from __future__ import annotations

from engine.client import EngineClient
from engine.protocol import Sampling
from tests.support.shell import Shell, is_quiet

GREEDY = Sampling(temperature=0.0)
PROMPT = list(range(100, 108))


async def finish_by_length(client: EngineClient, last_word: int | None) -> list[int]:
    """A request with stop strings of which none was found; `last_word` is what the gateway says then."""
    stream = client.submit(PROMPT, 8, GREEDY, hold_generated=True)
    tokens = [token async for event in stream for token in event.tokens]
    if last_word is not None:
        stream.stop(last_word)
    return [*PROMPT, *tokens]


async def served(client: EngineClient, prompt: list[int]) -> int:
    """How much of a prompt was in the cache."""
    events = [event async for event in client.submit([*prompt, 5, 6], 1, GREEDY)]
    assert events[0].first is not None
    return events[0].first.device_tokens


async def test_a_stop_after_the_end_lets_the_next_turn_find_the_answer() -> None:
    async with Shell() as shell:
        client = await shell.client()
        tokens = await finish_by_length(client, last_word=8)
        await shell.until(is_quiet)

        assert await served(client, tokens) == len(tokens) - 1  # the last one was never computed


async def test_a_stop_after_the_end_cuts_off_what_was_not_kept() -> None:
    async with Shell() as shell:
        client = await shell.client()
        tokens = await finish_by_length(client, last_word=2)
        await shell.until(is_quiet)

        assert await served(client, tokens) == len(PROMPT) + 2


async def test_a_gateway_that_leaves_without_a_word_leaves_no_block_in_use() -> None:
    async with Shell() as shell:
        client = await shell.client()
        tokens = await finish_by_length(client, last_word=None)
        await client.close()
        await shell.until(is_quiet)

        assert await served(await shell.client(), tokens) == len(PROMPT)


async def test_an_engine_that_ends_waits_for_nobody() -> None:
    async with Shell() as shell:
        await finish_by_length(await shell.client(), last_word=None)

    assert shell.core.statistics().blocks_used == 0

"""A duration may be longer than anything the system can wait for (kv-semantics 2.2 knows no upper bound)."""

from __future__ import annotations

import asyncio

import pytest

from cached.retention import Retention, RetentionConfig
from engine.protocol import Sampling
from tests.support.shell import Shell, is_quiet


@pytest.mark.parametrize("duration_s", [1e10, 1e300])
async def test_a_duration_that_no_wait_can_take_does_not_end_the_engine(duration_s: float) -> None:
    retention = RetentionConfig((), Retention(35, duration_s))
    async with Shell() as shell:
        client = await shell.client()
        async for _ in client.submit([1, 2, 3], 12, Sampling(temperature=0.0), retention=retention):
            pass
        await shell.until(is_quiet)
        await asyncio.sleep(0.1)  # The step thread sleeps until the block's deadline now.

        assert shell.ended == []
        assert shell.steps.join(0) is False

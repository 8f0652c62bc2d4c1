"""The smallest and the largest block through real processes: what a killed engine computed, its successor is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.stack import Stack

pytestmark = pytest.mark.timeout(240)
RULES = " ".join(f"Rule {number}: the visitor of room {number} may open door {number}." for number in range(16))


@pytest.mark.parametrize("tokens_per_block", [2, 128])
def test_after_a_kill_the_host_serves_every_full_block_and_the_text_is_the_same(
    demo_model_dir: Path, tokens_per_block: int
) -> None:
    """kv-semantics 3.1, 3.4 and 5.4: whole blocks from the host and at most all tokens but one; then from the device."""
    # On a busy machine the daemon may be slow to answer; here that must not count as its absence.
    settings = {"engine_tokens_per_block": tokens_per_block, "engine_tier_timeout_ms": 10_000}
    with Stack.start(demo_model_dir, **settings) as stack:
        stack.wait_ready(tier="ready")
        cold = ask(stack)
        num_tokens = cold["prompt_tokens"]
        assert num_tokens > 2 * 128
        whole_blocks = (num_tokens - 1) // tokens_per_block
        warm = ask(stack)
        stack.wait_for(lambda: stack.host_blocks() >= num_tokens // tokens_per_block)

        stack.wait_replaced("engine", stack.kill("engine"))
        stack.wait_ready(tier="ready")
        from_host = ask(stack)
        from_device = ask(stack)

    # `halocline up` has asked something itself, so that the beginning of every chat is there: the template's.
    assert cold["halocline"]["computed_tokens"] > 2 * 128
    assert served(warm) == (num_tokens - 1, 0)
    assert served(from_host) == (0, whole_blocks * tokens_per_block)
    assert served(from_device) == (num_tokens - 1, 0)
    assert {each["text"] for each in (cold, warm, from_host, from_device)} == {cold["text"]}


def ask(stack: Stack) -> dict[str, Any]:
    answer = stack.chat(RULES, max_tokens=4)
    return {**answer["usage"], "text": answer["choices"][0]["message"]["content"]}


def served(usage: dict[str, Any]) -> tuple[int, int]:
    """Prompt tokens from the device and from the host."""
    return usage["halocline"]["device_tokens"], usage["halocline"]["host_tokens"]

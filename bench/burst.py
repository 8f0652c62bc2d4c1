"""What does a burst of requests with one system prompt cost, and does anybody wait for the end of another's request?

Sixteen requests at once: one system prompt of 1,000 tokens that nobody has sent before, and 20 tokens of each user's own.
Baseline: the same burst with `enable_block_reuse = false`, in the same run, on the same machine.

Prediction: with reuse 1,000 + 16 × 20 tokens are computed, without 16,320: at one prefill rate the mean first token
comes about eight times sooner.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import openai

from bench.report import finish, median
from bench.serving import Prompts, model_argument, serving

NUM_REQUESTS = 16
SYSTEM_TOKENS = 1000
USER_TOKENS = 20
TOKENS_PER_BLOCK = 16
STEP_BUDGET = 128
ROUNDS, BASELINE_ROUNDS = 3, 2
RATIO_BAR, SPREAD_BAR = 5.0, 1.7


def main() -> NoReturn:
    model = model_argument(__doc__)
    prompts = Prompts(model)
    reuse = _bursts(model, prompts, rounds=ROUNDS, enable_block_reuse=True)
    plain = _bursts(model, prompts, rounds=BASELINE_ROUNDS, enable_block_reuse=False)
    means, plain_means = ([_mean_ttft_s(burst) for burst in bursts] for bursts in (reuse, plain))
    plain_mean = median(plain_means)
    computed = max(sum(one["computed_tokens"] for one in burst) for burst in reuse)
    allowed = SYSTEM_TOKENS + NUM_REQUESTS * (USER_TOKENS + TOKENS_PER_BLOCK)
    spreads = []
    for burst in reuse:
        times = [one["ttft_s"] for one in burst]
        spreads.append(p95(times) / min(times))
    ratio = plain_mean / median(means)
    finish(
        "burst",
        value=median(means),
        baseline=plain_mean,
        ratio=ratio,
        bar=f"mean TTFT off / on >= {RATIO_BAR:g}; computed <= {allowed}; p95 / min <= {SPREAD_BAR}",
        holds=ratio >= RATIO_BAR and computed <= allowed and median(spreads) <= SPREAD_BAR,
        spread=[min(plain_means) / max(means), max(plain_means) / min(means)],
        config={
            "requests": NUM_REQUESTS,
            "system_tokens": SYSTEM_TOKENS,
            "user_tokens": USER_TOKENS,
            "tokens_per_block": TOKENS_PER_BLOCK,
            "max_num_tokens": STEP_BUDGET,
            "rounds": ROUNDS,
            "baseline_rounds": BASELINE_ROUNDS,
            "unit": "s",
            "spread_of": "ratio",
        },
        details={"computed_tokens": computed, "computed_allowed": allowed, "p95_over_min": spreads},
    )


def p95(values: Sequence[float]) -> float:
    """The smallest value that at least 95 % of them do not exceed: of fewer than 20, the greatest."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def _mean_ttft_s(burst: list[dict[str, Any]]) -> float:
    return float(sum(one["ttft_s"] for one in burst)) / len(burst)


def _bursts(model: Path, prompts: Prompts, rounds: int, enable_block_reuse: bool) -> list[list[dict[str, Any]]]:
    settings = {
        "engine_enable_block_reuse": enable_block_reuse,
        "engine_tokens_per_block": TOKENS_PER_BLOCK,
        "engine_max_num_tokens": STEP_BUDGET,
        "engine_host_cache_size": 0,
    }
    with serving(model, **settings) as stack:
        sdk = openai.AsyncOpenAI(base_url=stack.base_url, api_key=stack.key, max_retries=0, timeout=600)
        return asyncio.run(_all(sdk, prompts, rounds))


async def _all(sdk: openai.AsyncOpenAI, prompts: Prompts, rounds: int) -> list[list[dict[str, Any]]]:
    await _one(sdk, prompts.fresh(64))
    found = []
    for _ in range(rounds):
        system = prompts.fresh(SYSTEM_TOKENS)
        burst = [system + prompts.fresh(USER_TOKENS) for _ in range(NUM_REQUESTS)]
        found.append(await asyncio.gather(*(_one(sdk, prompt) for prompt in burst)))
    return found


async def _one(sdk: openai.AsyncOpenAI, prompt: list[int]) -> dict[str, Any]:
    began = time.perf_counter()
    first_s, usage = 0.0, None
    stream = await sdk.completions.create(
        model="demo",
        prompt=prompt,
        max_tokens=4,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].text:
            first_s = first_s or time.perf_counter() - began
        usage = chunk.usage or usage
    assert usage is not None
    return {"ttft_s": first_s, **usage.model_extra["halocline"]}  # type: ignore[index]


if __name__ == "__main__":
    main()

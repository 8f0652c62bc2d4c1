"""Decides which sequences a request becomes: one per prompt and choice, each within the model's context and the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from cached.keys import token_bytes
from engine.protocol import Sampling
from gateway.errors import bad_request, context_length_exceeded
from gateway.values import Options, SequencePlan

_SEED_RANGE: Final = 2**63


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """What the engine can hold: in one prompt, and in one prompt with its answer."""

    max_prompt_tokens: int
    max_total_tokens: int


def plan_sequences(
    prompts: Sequence[Sequence[int]], options: Options, limits: TokenLimits, param: str
) -> tuple[SequencePlan, ...]:
    """Choices are numbered prompt by prompt, as OpenAI does; raises ApiError for a prompt that does not fit."""
    plans: list[SequencePlan] = []
    for prompt_index, tokens in enumerate(prompts):
        max_tokens = _max_tokens(len(tokens), options.max_tokens, limits, param)
        packed = token_bytes(tokens)
        for choice in range(options.n):
            sampling = replace(options.sampling, seed=_seed(options.sampling, choice))
            plans.append(SequencePlan(len(plans), prompt_index, packed, max_tokens, sampling))
    return tuple(plans)


def _max_tokens(num_prompt_tokens: int, wanted: int | None, limits: TokenLimits, param: str) -> int:
    if num_prompt_tokens == 0:
        raise bad_request(f"{param} is empty; it must give at least one token.", param)
    most = min(limits.max_prompt_tokens, limits.max_total_tokens - 1)
    if num_prompt_tokens > most:
        raise context_length_exceeded(
            f"{param} has {num_prompt_tokens} tokens; a prompt may have at most {most} here "
            f"(the maximum context length is {limits.max_total_tokens} tokens).",
            param,
        )
    room = limits.max_total_tokens - num_prompt_tokens
    if wanted is None:
        return room
    if wanted > room:
        raise context_length_exceeded(
            f"The maximum context length is {limits.max_total_tokens} tokens, but {num_prompt_tokens + wanted} were "
            f"asked for: {num_prompt_tokens} in {param} and {wanted} in max_tokens. At most {room} can be generated.",
            param,
        )
    return wanted


def _seed(sampling: Sampling, choice: int) -> int | None:
    """Choices of one request must differ, and be the same again for the same seed."""
    return None if sampling.seed is None else (sampling.seed + choice) % _SEED_RANGE

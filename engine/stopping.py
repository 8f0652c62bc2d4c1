"""When a sequence ends by itself: end-of-sequence token, number of tokens, context, pool.

Stop strings are text and are matched by the gateway, which says `stop`.
"""

from __future__ import annotations

from engine.protocol import FinishReason, Sampling
from engine.values import CoreSettings


def finish_reason(
    settings: CoreSettings, sampling: Sampling, max_tokens: int, num_prompt: int, num_output: int, token: int
) -> FinishReason | None:
    """Why the sequence ends with the token just sampled, or None: it goes on."""
    if token in settings.eos_token_ids and not sampling.ignore_eos and num_output >= sampling.min_tokens:
        return "stop"
    if num_output >= max_tokens:
        return "length"
    num_tokens = num_prompt + num_output
    if num_tokens >= settings.max_context_tokens:
        return "length"
    # The next step would need the KV of the last token, too: one more than the whole pool holds (kv-semantics 5.8).
    if num_tokens > settings.num_blocks * settings.tokens_per_block:
        return "length"
    return None


def is_eos_allowed(sampling: Sampling, num_output: int) -> bool:
    """Whether the token to be sampled after `num_output` others may end the sequence."""
    return num_output >= sampling.min_tokens

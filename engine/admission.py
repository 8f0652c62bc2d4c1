"""Decides whether a `Submit` is one the engine can work on at all, before it reaches the core.

The gateway has checked what its clients may ask; this is the second look that keeps one gateway's mistake from spoiling
a step that other requests share. Room, context length and the queue are the core's to judge.
"""

from __future__ import annotations

import math
import sys
from array import array
from typing import Final

from cached.keys import OWNER_BYTES
from cached.retention import MAX_PRIORITY, MIN_PRIORITY, RetentionConfig
from engine.protocol import Sampling, Submit
from engine.values import Refused

MAX_LOGPROBS: Final = 20
SEED_MASK: Final = 2**64 - 1


def fault_of(submit: Submit, vocab_size: int) -> Refused | None:
    """What is wrong with a request, or None."""
    if len(submit.prompt) % 4:
        return _invalid("The prompt is not a whole number of token ids.", "prompt")
    if submit.max_tokens < 1:
        return _invalid(f"max_tokens is {submit.max_tokens}; it must be at least 1.", "max_tokens")
    if submit.cache_salt == "":
        return _invalid("cache_salt is empty; leave it out or give at least one character.", "cache_salt")
    if len(submit.owner) != OWNER_BYTES:
        return _invalid(f"The owner id has {len(submit.owner)} bytes; it must have {OWNER_BYTES}.", "owner")
    return _retention_fault(submit.retention) or _sampling_fault(submit.sampling, vocab_size)


def _retention_fault(config: RetentionConfig) -> Refused | None:
    """Kept short: the gateway names ranges and rules (kv-semantics 2.2); here it only must not reach the pool."""
    for retention in (config.decode, *(token_range.retention for token_range in config.ranges)):
        duration_s = retention.duration_s
        if not MIN_PRIORITY <= retention.priority <= MAX_PRIORITY:
            return _invalid(
                f"A priority is {retention.priority}; it must be from 0 to 100.", "kv_cache_retention_config"
            )
        if duration_s is not None and not 0 < duration_s < math.inf:
            return _invalid("A duration must be greater than 0 and finite.", "kv_cache_retention_config")
    return None


def _sampling_fault(sampling: Sampling, vocab_size: int) -> Refused | None:
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        value = getattr(sampling, name)
        if not math.isfinite(value):
            return _invalid(f"{name} must be a finite number.", name)
    for name in ("temperature", "top_p", "min_p", "top_k", "min_tokens"):
        if getattr(sampling, name) < 0:
            return _invalid(f"{name} is {getattr(sampling, name)}; it must not be negative.", name)
    if sampling.repetition_penalty <= 0:
        return _invalid("repetition_penalty must be greater than 0.", "repetition_penalty")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        return _invalid(f"logprobs is {sampling.logprobs}; it must be from 0 to {MAX_LOGPROBS}.", "logprobs")
    for bias in sampling.logit_bias:
        if not 0 <= bias.token < vocab_size or math.isnan(bias.bias):
            return _invalid(f"logit_bias names token {bias.token}; the vocabulary has {vocab_size}.", "logit_bias")
    return None


def _invalid(message: str, param: str) -> Refused:
    return Refused("invalid_request", message, param, False)


def unpacked(prompt: bytes) -> tuple[int, ...]:
    """Token ids from little-endian u32 bytes."""
    tokens = array("I")
    tokens.frombytes(prompt)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tuple(tokens)


def chosen_seed(asked: int | None, random_bytes: bytes) -> int:
    """The seed asked for, or one from `random_bytes`; 64 bits, all of which the sampler keeps."""
    seed = int.from_bytes(random_bytes, "little") if asked is None else asked
    return seed & SEED_MASK

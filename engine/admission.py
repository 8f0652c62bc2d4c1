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
from cached.retention import MAX_PRIORITY, MAX_RANGES, MIN_PRIORITY, Retention, RetentionConfig
from engine.protocol import LogitBias, Sampling, Submit
from engine.values import Refused

MAX_LOGPROBS: Final = 20
MAX_LOGIT_BIAS: Final = 1024
LARGEST_BIAS: Final = 100.0
MAX_TOKENS: Final = 2**31 - 1
"""More than any context; beyond it a number might not fit what a kernel counts with."""
MAX_SALT_CHARS: Final = 1024
SEED_MASK: Final = 2**64 - 1

# The ranges in which a client may ask, so that the engine trusts no gateway to have looked: outside them the sampler's
# arithmetic has no answer (with `min_p` above 1 no token is left), and one row without an answer is a step without.
_RANGES: Final[tuple[tuple[str, float, float], ...]] = (
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 10.0),
    ("min_tokens", 0, MAX_TOKENS),
)


def fault_of(submit: Submit, vocab_size: int) -> Refused | None:
    """What is wrong with a request, or None."""
    if len(submit.prompt) % 4:
        return _invalid("The prompt is not a whole number of token ids.", "prompt")
    if not 1 <= submit.max_tokens <= MAX_TOKENS:
        return _invalid(f"max_tokens is {submit.max_tokens}; it must be from 1 to {MAX_TOKENS}.", "max_tokens")
    if submit.cache_salt == "":
        return _invalid("cache_salt is empty; leave it out or give at least one character.", "cache_salt")
    if submit.cache_salt is not None and len(submit.cache_salt) > MAX_SALT_CHARS:
        length = len(submit.cache_salt)  # Only that: a salt is a secret.
        return _invalid(f"cache_salt has {length} characters; it may have at most {MAX_SALT_CHARS}.", "cache_salt")
    if len(submit.owner) != OWNER_BYTES:
        return _invalid(f"The owner id has {len(submit.owner)} bytes; it must have {OWNER_BYTES}.", "owner")
    return _retention_fault(submit.retention) or _sampling_fault(submit.sampling, vocab_size)


def _retention_fault(config: RetentionConfig) -> Refused | None:
    """Kept short: the gateway names ranges and rules (kv-semantics 2.2); here it only must not reach the pool."""
    param = "kv_cache_retention_config"
    if len(config.ranges) > MAX_RANGES:
        return _invalid(f"There are {len(config.ranges)} token ranges; there may be at most {MAX_RANGES}.", param)
    for token_range in config.ranges:
        start, end = token_range.start, token_range.end
        if not 0 <= start <= MAX_TOKENS or (end is not None and not start < end <= MAX_TOKENS):
            return _invalid("A token range must begin at 0 or later and end after it has begun.", param)
    for retention in (config.decode, *(token_range.retention for token_range in config.ranges)):
        if not _is_possible(retention):
            return _invalid("A priority must be from 0 to 100, a duration greater than 0 and finite.", param)
    return None


def _is_possible(retention: Retention) -> bool:
    duration_s = retention.duration_s
    is_in_range = MIN_PRIORITY <= retention.priority <= MAX_PRIORITY
    return is_in_range and (duration_s is None or 0 < duration_s < math.inf)


def _sampling_fault(sampling: Sampling, vocab_size: int) -> Refused | None:
    for name, low, high in _RANGES:
        value = getattr(sampling, name)
        if not low <= value <= high:  # NaN and the infinities are in no range.
            return _invalid(f"{name} is {value}; it must be from {low:g} to {high:g}.", name)
    if sampling.repetition_penalty == 0:
        return _invalid("repetition_penalty must be greater than 0.", "repetition_penalty")
    if not 0 <= sampling.top_k <= vocab_size:
        return _invalid(f"top_k is {sampling.top_k}; it must be from 0 to {vocab_size}.", "top_k")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        return _invalid(f"logprobs is {sampling.logprobs}; it must be from 0 to {MAX_LOGPROBS}.", "logprobs")
    return _bias_fault(sampling.logit_bias, vocab_size)


def _bias_fault(biases: tuple[LogitBias, ...], vocab_size: int) -> Refused | None:
    if len(biases) > MAX_LOGIT_BIAS:
        return _invalid(f"logit_bias has {len(biases)} entries; it may have at most {MAX_LOGIT_BIAS}.", "logit_bias")
    for bias in biases:
        if not 0 <= bias.token < vocab_size:
            return _invalid(f"logit_bias names token {bias.token}; the vocabulary has {vocab_size}.", "logit_bias")
        if not -LARGEST_BIAS <= bias.bias <= LARGEST_BIAS:
            return _invalid(f"logit_bias has {bias.bias}; it must be from -100 to 100.", "logit_bias")
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

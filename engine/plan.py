"""The frozen values between the engine's core, which decides, and its devices, which copy and compute.

A `StepPlan` is executed in order: block copies first, then one packed forward pass over all chunks, every layer
writing K and V of all its tokens before any attends; then sampling. What a plan names may not move before its result
has come back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from engine.protocol import Sampling, TokenLogprob

DeviceBlockId = NewType("DeviceBlockId", int)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `num_tokens` tokens of device block `source` to `target`, all layers (kv-semantics 3.5)."""

    source: int
    target: int
    num_tokens: int


def has_penalties(sampling: Sampling) -> bool:
    """Whether what was generated before weighs on what comes next."""
    return sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Choose one token after a chunk. `seed` is never None here; `output_index` is how many tokens were generated
    before (the counter of the random stream); `prompt` and `output` feed the penalties, and `output` is empty where the
    sampling has none; `eos_allowed` is false below `min_tokens`."""

    sampling: Sampling
    seed: int
    output_index: int
    prompt: tuple[int, ...] | list[int]
    output: tuple[int, ...] | list[int]
    eos_allowed: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens` of one sequence at positions `start … start + len(tokens)`. `block_table` covers all positions from 0
    to the chunk's end; what lies before `start` is already in those blocks, or is written in this very step by
    another chunk (early reuse). `sample` None: no token is wanted (the prompt goes on in a later step)."""

    sequence_id: int
    start: int
    tokens: tuple[int, ...]
    block_table: tuple[int, ...]
    sample: SampleRequest | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: copies, then chunks. Chunks of sequences that decode have one token."""

    step_id: int
    copies: tuple[BlockCopy, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token chosen for one sequence, and its log-probabilities if they were asked for."""

    sequence_id: int
    token: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a plan gave: one `Sampled` for each chunk with a `sample`; `failed` sequences have a sentence instead
    (for instance a NaN logit). `aborted`: the step was given up because all its sequences were cancelled; nothing of
    it may be indexed."""

    step_id: int
    sampled: tuple[Sampled, ...]
    failed: tuple[tuple[int, str], ...] = ()
    aborted: bool = False
    duration_s: float = 0.0

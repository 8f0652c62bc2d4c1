"""The values that the engine's core takes and gives: its settings, requests, answers, outputs and figures.

They carry what was decided elsewhere; nothing here chooses. Time is CLOCK_BOOTTIME seconds (kv-semantics 2.7).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cached.keys import NO_OWNER, OwnerId
from cached.retention import DEFAULT_RETENTION, RetentionConfig
from engine.protocol import FinishReason, FirstToken, Sampling, TokenLogprob

OffloadPolicy = Literal["on_release", "on_evict"]

DEFAULT_SAMPLING = Sampling()


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """What the core is told once. Figures are in tokens or blocks; the relations between them are checked here."""

    tokens_per_block: int
    num_blocks: int
    max_num_tokens: int
    max_batch_size: int
    max_queue: int
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    tier_enabled: bool = False
    onboard_blocks: bool = True
    secondary_offload_min_priority: int = 35
    offload_policy: OffloadPolicy = "on_release"
    record_events: bool = False
    event_token_ids: bool = False

    def __post_init__(self) -> None:
        size = self.tokens_per_block
        if not 2 <= size <= 128 or size & (size - 1):
            raise ValueError(f"tokens_per_block is {size}; legal values: 2, 4, 8, 16, 32, 64, 128")
        for name in ("num_blocks", "max_num_tokens", "max_batch_size", "max_queue", "vocab_size"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.max_context_tokens < 2:
            raise ValueError(f"max_context_tokens is {self.max_context_tokens}; a prompt and a token need at least 2")

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that fits the pool and leaves the model's context one token to generate."""
        return min(self.num_blocks * self.tokens_per_block, self.max_context_tokens - 1)


@dataclass(frozen=True, slots=True)
class NewRequest:
    """One sequence to generate. `seed` is already chosen; `sequence_id` is unique among those that live."""

    sequence_id: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = DEFAULT_SAMPLING
    seed: int = 0
    cache_salt: str | None = field(default=None, repr=False)
    owner: OwnerId = NO_OWNER
    retention: RetentionConfig = DEFAULT_RETENTION
    hold_generated: bool = False


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits its turn."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was not taken, and nothing was changed. `retryable` decides between 503 and 400."""

    code: str
    message: str
    param: str | None
    retryable: bool


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one step gave one sequence. After an output with `finish` the sequence is forgotten."""

    sequence_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    first: FirstToken | None = None
    finish: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class CoreStatistics:
    """Gauges and counters of one engine at one moment (kv-semantics 7)."""

    blocks_total: int
    blocks_used: int
    blocks_idle: int
    blocks_free: int
    blocks_evictable: int
    blocks_offering: int
    blocks_by_priority: Mapping[int, int]
    """Indexed blocks by priority (kv-semantics 9, case 13)."""
    sequences_waiting: int
    sequences_running: int
    requests_finished: int
    requests_cancelled: int
    tokens_prompt: int
    tokens_device: int
    tokens_host: int
    tokens_computed: int
    tokens_prefilled: int
    """Every prompt token that went through the model, recomputation after a preemption included."""
    tokens_generated: int
    blocks_reused_full: int
    blocks_reused_partial: int
    blocks_missed: int
    preemptions: int
    evictions_by_band: Mapping[str, int]
    expired: int
    dropped_unused: int
    """Blocks that left the device before any request matched them."""
    lookups: int
    loads: int
    offers: int
    touches: int
    blocks_offered: int
    blocks_loaded: int
    blocks_load_failed: int
    offers_dropped: int
    """Blocks not offered because too many offers were under way."""
    tickets_outstanding: int

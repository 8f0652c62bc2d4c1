"""Messages between the gateway and one engine: one frame per message, one `Step` per step for all sequences.

The gateway opens with `Hello` and the engine answers `Welcome`; then requests are named by an id that the gateway
chooses, unique on its connection. Retention, salt and owner ride here as trusted fields: a tenant's body never reaches
the engine. A request ends with exactly one `Rejected` or one `TokenEvent` that has a `finish`.

    gateway                           engine
    Submit ─────────────────────────▶ queued
            ◀──────────────────────── Rejected, or
            ◀──────────────────────── Step[TokenEvent(first=…), …] … TokenEvent(finish=…)
    Cancel ─────────────────────────▶ dropped at the end of the running step; no further event
    Confirm(tokens_kept) ───────────▶ publishes generated blocks up to there (kv-semantics 3.6)
    Stop(tokens_kept) ──────────────▶ ends the request; the gateway has matched a stop string

On the same socket consumers of KV events are served, with the messages of `event_messages.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cached.keys import NO_OWNER, OwnerId
from cached.retention import DEFAULT_RETENTION, RetentionConfig
from cached.wire import MessageTable
from engine.event_messages import EventBatch, EventsLost, EventsRefused, SnapshotPage, Subscribe, Subscribed

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 16 * 2**20

FinishReason = Literal["stop", "length", "error", "cancelled"]
TierState = Literal["none", "ready", "absent"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1.0 and `min_p` 0.0 are off.

    `seed` None lets the engine choose one. `logprobs` None: none; 0: the chosen token's; k: also the k most likely.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[LogitBias, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Added to one token's logit before sampling."""

    token: int
    bias: float


@dataclass(frozen=True, slots=True)
class Hello:
    """The gateway's first message."""

    version: int
    client: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the gateway must know of the engine. `incarnation` is new at every engine start; `max_prompt_tokens` is
    the longest prompt that fits the pool and the model; `credits` is how many requests may be inside at once."""

    version: int
    incarnation: str
    model_id: str
    model_dir: str
    vocab_size: int
    max_context_tokens: int
    max_prompt_tokens: int
    eos_token_ids: tuple[int, ...]
    tokens_per_block: int
    num_blocks: int
    layout_fingerprint: bytes
    credits: int
    tier: TierState


@dataclass(frozen=True, slots=True)
class Submit:
    """One sequence to generate. `prompt` is little-endian u32 token ids. `hold_generated`: the request has stop
    strings, so blocks with generated tokens are published only as far as `Confirm` says."""

    request_id: int
    prompt: bytes
    max_tokens: int
    sampling: Sampling = Sampling()
    cache_salt: str | None = field(default=None, repr=False)
    owner: OwnerId = NO_OWNER
    retention: RetentionConfig = DEFAULT_RETENTION
    hold_generated: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client is gone; drop the request and all it holds."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Confirm:
    """The first `tokens_kept` generated tokens are kept whatever comes."""

    request_id: int
    tokens_kept: int


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop string was found; generation ends and only `tokens_kept` generated tokens count."""

    request_id: int
    tokens_kept: int


@dataclass(frozen=True, slots=True)
class OwnerShare:
    """One owner's weight on the device, and floor and ceiling, in bytes, on the host (kv-semantics 5.9)."""

    owner: OwnerId
    weight: float
    host_floor_bytes: int
    host_ceiling_bytes: int | None


@dataclass(frozen=True, slots=True)
class OwnerTable:
    """The newest shares; higher versions replace lower ones."""

    version: int
    shares: tuple[OwnerShare, ...]


@dataclass(frozen=True, slots=True)
class StatsRequest:
    """Ask for `Stats`; `token` comes back with it."""

    token: int


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the most likely tokens."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a chosen token (after penalties, bias and temperature 1), and the most likely ones."""

    logprob: float
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What is known when the first token is out: where the prompt came from, in tokens and in blocks, and the waits.

    Each of the prompt's blocks was reused in full, reused in part, or missed; its last one may not be full."""

    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    computed_tokens: int
    queue_ms: float
    ttft_ms: float
    blocks_full: int
    blocks_partial: int
    blocks_missed: int


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of one request. `logprobs` is parallel to `tokens` or empty. The end-of-sequence token is in
    `tokens` and counted. `error` is a sentence for the client when `finish` is "error"; such a request may be retried."""

    request_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    first: FirstToken | None = None
    finish: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Everything one step has to say to one connection."""

    events: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A request that never started. `code` is the OpenAI error code; `retryable` decides between 400 and 503."""

    request_id: int
    code: str
    message: str
    param: str | None
    retryable: bool


@dataclass(frozen=True, slots=True)
class Stats:
    """Answer to `StatsRequest`: a JSON object of gauges and counters, and the state of the tier."""

    token: int
    tier: TierState
    body: str


@dataclass(frozen=True, slots=True)
class TierChanged:
    """The host tier came or went; said whenever it changes."""

    tier: TierState


TO_ENGINE = MessageTable(
    {1: Hello, 2: Submit, 3: Cancel, 4: Confirm, 5: Stop, 6: OwnerTable, 7: StatsRequest, 8: Subscribe}, MAX_FRAME_BYTES
)
TO_GATEWAY = MessageTable(
    {
        1: Welcome,
        2: Step,
        3: Rejected,
        4: Stats,
        5: TierChanged,
        6: Subscribed,
        7: EventsRefused,
        8: EventBatch,
        9: EventsLost,
        10: SnapshotPage,
    },
    MAX_FRAME_BYTES,
)

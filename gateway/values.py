"""The nouns of one generation, independent of the API that asked for it: what is wanted, and what came of it.

The OpenAI modules turn bodies into these and these into bodies; another API brings its own pair of modules and uses the
same values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cached.retention import ListedRetention
from engine.protocol import Sampling

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Options:
    """How to generate, for every prompt and choice of a request. `max_tokens` None: as far as the context reaches.

    `retention` None: the request says nothing of it, which is not the same as asking for nothing. `subject` is the client's `cache_salt`: it subdivides its own tenant and is never used as a salt itself.
    """

    max_tokens: int | None
    sampling: Sampling
    stops: tuple[str, ...] = ()
    n: int = 1
    retention: ListedRetention | None = None
    subject: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Delivery:
    """How the answer travels."""

    stream: bool = False
    include_usage: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `content` is the client's text, verbatim."""

    role: str
    content: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`POST /v1/chat/completions`, checked."""

    model: str
    messages: tuple[Message, ...]
    options: Options
    delivery: Delivery


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """`POST /v1/completions`, checked; a prompt is text or token ids."""

    model: str
    prompts: tuple[str | tuple[int, ...], ...] = field(repr=False)
    options: Options
    delivery: Delivery
    echo: bool = False


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """One sequence to be generated: choice `index` of the answer, continuing prompt number `prompt_index`."""

    index: int
    prompt_index: int
    prompt: bytes = field(repr=False)
    max_tokens: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token as text and bytes, with its log-probability."""

    text: str = field(repr=False)
    data: bytes = field(repr=False)
    logprob: float


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A generated token with what else was likely; `text_offset` counts characters of the answer before it."""

    chosen: TokenText
    top: tuple[TokenText, ...]
    text_offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one choice. `completion_tokens` is how many of its tokens count so far."""

    index: int
    text: str = field(repr=False)
    scored: tuple[ScoredToken, ...] = ()
    finish: Finish | None = None
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer, whole."""

    index: int
    text: str = field(repr=False)
    scored: tuple[ScoredToken, ...]
    finish: Finish


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost and which tier served its prompts: device + host + computed = prompt tokens.

    `blocks_full`, `blocks_partial` and `blocks_missed` are the blocks of the prompts by how they were reused."""

    prompt_tokens: int
    completion_tokens: int
    device_tokens: int
    host_tokens: int
    computed_tokens: int
    queue_ms: float
    ttft_ms: float
    blocks_full: int = 0
    blocks_partial: int = 0
    blocks_missed: int = 0


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every chunk of one answer repeats."""

    id: str
    created: int
    model: str
    fingerprint: str

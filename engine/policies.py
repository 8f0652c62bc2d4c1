"""Which retention a request asks for, from what an operator can know when it arrives (kv-semantics §2).

A policy sees the hashes of a prompt's full blocks, and remembers what it has seen; never the future, the pool or the
text. What it answers is what a request may carry, `kv_cache_retention_config`; what the pool makes of it is the pool's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cached.keys import BlockHash
from cached.retention import DEFAULT_RETENTION, Retention, RetentionConfig, TokenRange
from engine.errors import TraceError

SEEN_AGAIN = Retention(priority=80, duration_s=240.0)
SEEN_OFTEN = Retention(priority=80, duration_s=480.0)
OFTEN = 3
DEEP_AND_NEW = Retention(priority=20)
DEEP_TOKENS = 16384
MAX_REMEMBERED = 1 << 20
POLICIES = ("lru", "priority", "adaptive", "retention", "belady")
CEILING = "belady"


class Policy(Protocol):
    """Asked once for each request, in order of arrival."""

    def retention_for(self, hashes: Sequence[BlockHash], at_s: float) -> RetentionConfig:
        """The retention of a prompt with these full blocks; ranges count symbols of the trace."""


class Lru:
    """No request says anything, so every block has the default and the least recently used leaf goes first."""

    def retention_for(self, hashes: Sequence[BlockHash], at_s: float) -> RetentionConfig:
        return DEFAULT_RETENTION


class Fixed:
    """Every request carries the same configuration, in tokens, as its client would send it."""

    def __init__(self, config: RetentionConfig, tokens_per_block: int, symbols_per_block: int) -> None:
        self._config = _in_symbols(config, tokens_per_block, symbols_per_block)

    def retention_for(self, hashes: Sequence[BlockHash], at_s: float) -> RetentionConfig:
        return self._config


class SeenAgain:
    """The leading blocks that some request had before are worth 80 for 240 s from their release; the rest says nothing.

    Three quarters of a chat service's blocks are used once. What is used twice is a system prompt or a conversation
    that goes on, and its next turn comes within minutes. It remembers the hashes of the last `max_remembered` blocks.
    """

    def __init__(
        self, symbols_per_block: int, retention: Retention = SEEN_AGAIN, max_remembered: int = MAX_REMEMBERED
    ) -> None:
        self._symbols_per_block = symbols_per_block
        self._retention = retention
        self._remembered = Remembered(max_remembered)

    def retention_for(self, hashes: Sequence[BlockHash], at_s: float) -> RetentionConfig:
        end = self._remembered.leading(hashes) * self._symbols_per_block
        self._remembered.add(hashes)
        if not end:
            return DEFAULT_RETENTION
        return RetentionConfig((TokenRange(0, end, self._retention),))


class Adaptive:
    """`SeenAgain`, with two things more that a trace of a chat service shows.

    What was seen three times or more is kept for 480 s, for its gaps are longer. What is new and lies deep (behind
    16,384 tokens) gets 20: of long documents a fifth is ever asked for again, of short prompts a third. A 20 is below
    the host tier's default threshold, so such a block reaches it only when it is seen again.
    """

    def __init__(self, tokens_per_block: int, symbols_per_block: int, max_remembered: int = MAX_REMEMBERED) -> None:
        self._symbols_per_block = symbols_per_block
        self._deep = max(1, DEEP_TOKENS // tokens_per_block)
        self._remembered = Remembered(max_remembered)

    def retention_for(self, hashes: Sequence[BlockHash], at_s: float) -> RetentionConfig:
        seen = self._remembered.leading(hashes)
        often = self._remembered.leading(hashes, OFTEN)
        self._remembered.add(hashes)
        row = self._symbols_per_block
        ranges = [
            TokenRange(0, often * row, SEEN_OFTEN),
            TokenRange(often * row, seen * row, SEEN_AGAIN),
            TokenRange(max(seen, self._deep) * row, None, DEEP_AND_NEW),
        ]
        return RetentionConfig(tuple(each for each in ranges if each.end is None or each.end > each.start))


class Remembered:
    """How often each of the blocks seen last was seen, of at most so many; the one not seen for longest is forgotten."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._times: dict[BlockHash, int] = {}  # A dict keeps its order: the least recent is first.

    def __len__(self) -> int:
        return len(self._times)

    def leading(self, hashes: Sequence[BlockHash], times: int = 1) -> int:
        """How many of these, from the first on, were seen so often."""
        seen = self._times
        return next((at for at, each in enumerate(hashes) if seen.get(each, 0) < times), len(hashes))

    def add(self, hashes: Sequence[BlockHash]) -> None:
        """These were seen, deepest first: of one prompt, what builds upon the rest is forgotten first."""
        seen = self._times
        for each in reversed(hashes):
            seen[each] = seen.pop(each, 0) + 1
        while len(seen) > self._capacity:
            del seen[next(iter(seen))]


def policy_named(
    name: str, tokens_per_block: int, symbols_per_block: int, retention: RetentionConfig | None = None
) -> Policy:
    """The policy of this name. Raises TraceError naming those there are."""
    match name:
        case "lru":
            return Lru()
        case "priority":
            return SeenAgain(symbols_per_block)
        case "adaptive":
            return Adaptive(tokens_per_block, symbols_per_block)
        case "retention" if retention is not None:
            return Fixed(retention, tokens_per_block, symbols_per_block)
        case "retention":
            raise TraceError("the policy retention needs a configuration; give --retention FILE")
    raise TraceError(f"there is no policy {name!r}; there are {', '.join(POLICIES)}")


def _in_symbols(config: RetentionConfig, tokens_per_block: int, symbols_per_block: int) -> RetentionConfig:
    """A range has the blocks whose first token it covers (2.3), so it is carried over block by block."""

    def symbol(token: int) -> int:
        return -(-token // tokens_per_block) * symbols_per_block

    ranges = [
        TokenRange(symbol(each.start), None if each.end is None else symbol(each.end), each.retention)
        for each in config.ranges
    ]
    return RetentionConfig(tuple(each for each in ranges if each.end is None or each.end > each.start), config.decode)

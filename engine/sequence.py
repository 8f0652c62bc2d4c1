"""One sequence from its submission to its last token: what it has, where it stands, never what happens next.

    waiting ──▶ running ──▶ finished
       ▲  ╲        │  ▲  ╲      ▲ confirmed, or let go
       │   ╲ load  │  │   ╲     │
       │    ▼      │  │    ▼    │
       │   loading ┼──╯   unconfirmed
       └── preempt ╯

Tokens are one run, prompt then output; after a preemption what was generated is prefilled again like a prompt.
Positions `[0, num_computed)` have K and V on the device, in the blocks of `table`.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field

from cached.keys import BlockHash, Namespace, token_bytes
from cached.retention import Retention
from engine.prefix_tree import TOKEN_BYTES, root_of
from engine.values import NewRequest

_DEFAULT = Retention()


class State(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    UNCONFIRMED = "unconfirmed"  # it has its last token; how far its tokens count is not known yet (kv-semantics 3.6)
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Served:
    """Where the prompt came from, in tokens, and by blocks (kv-semantics 7.1)."""

    device_tokens: int
    host_tokens: int
    full_blocks: int
    is_partial: bool


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable, owned by the core. `arrival` orders sequences, a preempted one before those that came later."""

    request: NewRequest
    arrival: int
    namespace: Namespace
    owner_index: int
    namespace_index: int
    tokens_per_block: int
    submitted_at: float
    state: State = State.WAITING
    tokens: list[int] = field(default_factory=list)
    key: bytearray = field(default_factory=bytearray)  # the tokens as bytes: what is hashed, and what the tree compares
    hashes: list[BlockHash] = field(default_factory=list)  # of full blocks, as far as somebody has asked
    confirmed: int = 0

    # On the device.
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0  # leading blocks that are in the index, as this sequence's or as their twins
    num_matched: int = 0  # leading blocks that others had computed
    parent_node: int = 0  # the index node of the last published block
    unwritten: list[int] = field(default_factory=list)  # places in `table` published by the step under way
    twins: dict[int, int] = field(default_factory=dict)  # place → indexed block with the same content (1.6)
    admitted_in_step: int = 0

    # The host tier.
    tier_run: tuple[int, int] | None = None  # first block and number of blocks that the tier was found to hold
    num_lookups: int = 0
    lookup: int | None = None  # The ticket of the one that the tier has yet to answer.

    # What the request asked for, block by block, once somebody has asked.
    _explicit: list[Retention | None] | None = None

    # The end.
    is_cancelled: bool = False  # nobody listens any more
    tokens_kept: int | None = None  # told by `stop`
    let_go_at: float | None = None  # when an unconfirmed one is waited for no longer

    # In the queue.
    num_passed: int = 0  # how often a later one of the same owner was admitted before it

    first_token_at: float = 0.0  # when the first token was sampled, once it was

    # Accounting, of the first admission.
    admitted_at: float | None = None
    served: Served | None = None
    was_preempted: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.key = bytearray(token_bytes(self.request.prompt))
        self.reset_device()

    @property
    def sequence_id(self) -> int:
        return self.request.sequence_id

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def is_decoding(self) -> bool:
        """One token is left to compute: the one sampled last (or the last of a prompt)."""
        return len(self.tokens) - self.num_computed == 1

    @property
    def is_new(self) -> bool:
        """Whether it has its first token and no other."""
        return self.num_output == 1

    @property
    def num_publishable(self) -> int:
        """Tokens that may be indexed once they are written (kv-semantics 3.6)."""
        if self.tokens_kept is not None:
            return self.num_prompt + min(self.tokens_kept, self.num_output)
        if self.request.hold_generated:
            return self.num_prompt + min(self.confirmed, self.num_output)
        return len(self.tokens)

    @property
    def is_unconfirmed(self) -> bool:
        """Whether a word is to come on how far what was generated, and written, counts."""
        return self.request.hold_generated and self.num_publishable < self.num_computed

    def append(self, token: int) -> None:
        """A token was sampled; its K and V are not computed yet."""
        self.tokens.append(token)
        self.key += token.to_bytes(TOKEN_BYTES, "little")

    def block_key(self, place: int) -> bytes:
        """The tokens of the full block at `place`, as the tree compares them."""
        row = self.tokens_per_block * TOKEN_BYTES
        return bytes(self.key[place * row : (place + 1) * row])

    def block_keys(self, start: int, end: int) -> list[bytes]:
        """`block_key` of the full blocks at places [start, end)."""
        row = self.tokens_per_block * TOKEN_BYTES
        packed = bytes(self.key[start * row : end * row])
        return [packed[at : at + row] for at in range(0, len(packed), row)]

    def tokens_key(self, start: int, end: int) -> bytes:
        return bytes(self.key[start * TOKEN_BYTES : end * TOKEN_BYTES])

    def block_hashes(self, count: int) -> list[BlockHash]:
        """The hashes of at least the first `count` full blocks; computed once each."""
        done = len(self.hashes)
        if done < count:
            parent: bytes = self.hashes[-1] if done else self.namespace
            fresh = hashlib.sha256().copy  # A copy of an empty hasher costs half of a new one.
            for key in self.block_keys(done, count):
                hasher = fresh()
                hasher.update(parent + key)
                parent = hasher.digest()
                self.hashes.append(BlockHash(parent))
        return self.hashes

    def explicit_retention(self, place: int) -> Retention | None:
        """The range that covers the first token of the block at `place`, if one does (kv-semantics 2.3)."""
        ranges = self.request.retention.ranges
        if not ranges:
            return None
        if self._explicit is None:
            firsts = range(0, self.num_prompt, self.tokens_per_block)
            self._explicit = [self.request.retention.for_prompt_block(first) for first in firsts]
        return self._explicit[place] if place < len(self._explicit) else None

    @property
    def has_retention(self) -> bool:
        """Whether any new block would get something else than the default."""
        return bool(self.request.retention.ranges) or self.request.retention.decode != _DEFAULT

    def new_block_retention(self, place: int) -> Retention:
        """What a new block at `place` gets (kv-semantics 2.3)."""
        return self.new_block_retentions(place, place + 1)[0]

    def new_block_retentions(self, start: int, end: int) -> list[Retention]:
        """What new blocks at places [start, end) get."""
        num_of_prompt = -(-self.num_prompt // self.tokens_per_block)
        of_prompt = [self.explicit_retention(place) or _DEFAULT for place in range(start, min(end, num_of_prompt))]
        return of_prompt + [self.request.retention.decode] * (end - start - len(of_prompt))

    def reset_device(self) -> None:
        """Nothing of it is on the device."""
        self.table = []
        self.num_computed = 0
        self.num_published = 0
        self.num_matched = 0
        self.parent_node = root_of(self.namespace_index)
        self.unwritten = []
        self.twins = {}
        self.tier_run = None
        self.num_lookups = 0

"""A runner without a model: its KV memory holds tokens, and each answer is a digest of what that memory says.

Whoever reuses a wrong block, loads wrong bytes, or attends before writing gets another text. `expected_tokens` says
what a request must give, computed from its prompt alone.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from cached.client import Lease
from cached.protocol import LeasedBlock, Reserved
from engine.copy_streams import CopyStreams
from engine.fences import blocks_of
from engine.pinning import PayloadPins, StagingBuffer
from engine.plan import Chunk, Sampled, StepPlan, StepResult
from engine.protocol import TokenLogprob, TopLogprob
from engine.stream_transfer import StreamTransfer
from engine.transfer import HostTransfer, LoadOutcome, Payload
from tests.support.async_device import AsyncDevice
from tests.support.fake_cudart import FakeCudart

VOCAB_SIZE = 1000
EOS = 0


@dataclass(frozen=True, slots=True)
class FakeInfo:
    """What an engine must know of this runner; the shape of `engine.runner.ModelInfo`."""

    num_blocks: int = 64
    tokens_per_block: int = 4
    block_bytes: int = 4096
    model_id: str = "fake"
    architecture: str = "Fake"
    vocab_size: int = VOCAB_SIZE
    max_context_tokens: int = 2048
    eos_token_ids: tuple[int, ...] = (EOS,)
    layout_fingerprint: bytes = b"halocline/fake-layout/1".ljust(32, b".")
    device: str = "cpu"
    dtype: str = "none"
    attended_at_once: float = 1.0


class FakeKv:
    """One row of bytes per block: token ids plus one (0: never written), the rest a pattern that depends on them."""

    def __init__(self, info: FakeInfo) -> None:
        self.info = info
        self.rows = np.zeros((info.num_blocks, info.block_bytes), np.uint8)
        self.tokens = self.rows.view(np.uint32)[:, : info.tokens_per_block]

    def write_token(self, block: int, offset: int, token: int) -> None:
        """The K and V of one token."""
        self.tokens[block, offset] = token + 1
        self.rows[block, 4 * self.info.tokens_per_block + offset :: self.info.tokens_per_block] = (token * 37) & 0xFF

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        """The first tokens of one block into another."""
        for offset in range(num_tokens):
            self.write_token(target, offset, int(self.tokens[source, offset]) - 1)

    def block_view(self, block_id: int) -> memoryview:
        return memoryview(self.rows[block_id])


class SlowTransfer(HostTransfer):
    """Copies half of a block, waits, and copies the rest: a step that uses the block meanwhile would show."""

    def store(self, payload: Payload, blocks: Sequence[tuple[int, Reserved]]) -> list[int] | None:
        copies = [bytearray(self._memory.block_view(block)) for block, _ in blocks]
        time.sleep(0.001)
        for (block, _), copy in zip(blocks, copies, strict=True):
            half = len(copy) // 2
            copy[half:] = self._memory.block_view(block)[half:]
        sums = [xxhash.xxh3_64_intdigest(copy) for copy in copies]
        return sums if payload.write_many([slot for _, slot in blocks], [memoryview(copy) for copy in copies]) else None

    def load(
        self, payload: Payload, lease: Lease, blocks: Sequence[tuple[int, LeasedBlock]], verify: bool
    ) -> LoadOutcome:
        before = [bytes(self._memory.block_view(block)) for block, _ in blocks]
        outcome = super().load(payload, lease, blocks, verify)
        views = [self._memory.block_view(block) for block, _ in blocks]
        after = [bytes(view) for view in views]
        for view, old, new in zip(views, before, after, strict=True):
            view[: len(view) // 2] = old[: len(view) // 2]
            time.sleep(0.001)
            view[:] = new
        return outcome


class StreamedRunner:
    """A `FakeRunner` whose memory is a device's with streams: a step is a kernel, and copies are the device's too."""

    def __init__(self, inner: FakeRunner, device: AsyncDevice, cudart: FakeCudart | None) -> None:
        self._inner = inner
        self._device = device
        self._streams = CopyStreams(device, inner.info.block_bytes)
        inner.kv.rows = device.memory
        inner.kv.tokens = device.memory.view(np.uint32)[:, : inner.info.tokens_per_block]
        staging = StagingBuffer(cudart, 2 * inner.info.block_bytes)
        pins = PayloadPins(cudart, 5 * inner.info.block_bytes)
        self.transfer = StreamTransfer(self._streams, pins, staging, inner.info.block_bytes)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def execute(self, plan: StepPlan, abandon: Callable[[], bool]) -> StepResult:
        results: list[StepResult] = []
        self._streams.begin_step(blocks_of(plan, self._inner.info.tokens_per_block))
        self._device.launch(lambda memory: results.append(self._inner.execute(plan, abandon)))
        self._streams.finish_step(self._streams.end_step())
        return results[0]


@dataclass(slots=True)
class FakeRunner:
    """Executes plans; can be told to be slow (`step_s`), to wait (`gate`), or to fail (`failures`)."""

    info: FakeInfo = field(default_factory=FakeInfo)
    step_s: float = 0.0
    gate: threading.Event | None = None
    failures: int = 0
    steps: int = 0
    aborted: int = 0
    computed: list[int] = field(default_factory=list)
    executing: threading.Event = field(default_factory=threading.Event)
    kv: FakeKv = field(init=False)
    transfer: HostTransfer = field(init=False)

    def __post_init__(self) -> None:
        self.kv = FakeKv(self.info)
        self.transfer = HostTransfer(self.kv, self.info.block_bytes)
        self.transfer.batch_blocks = 1  # Where other things may happen in between, they do.

    def execute(self, plan: StepPlan, abandon: Callable[[], bool]) -> StepResult:
        """Copies, then writes of all chunks, then answers, in the order a real step has."""
        self.steps += 1
        self.executing.set()
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the fake runner was told to fail")
        for copy in plan.copies:
            self.kv.copy_tokens(copy.source, copy.target, copy.num_tokens)
        if self._is_abandoned(abandon):
            self.aborted += 1
            return StepResult(plan.step_id, (), aborted=True)
        for chunk in plan.chunks:
            self._write(chunk)
        return StepResult(plan.step_id, tuple(self._sample(chunk) for chunk in plan.chunks if chunk.sample is not None))

    def _is_abandoned(self, abandon: Callable[[], bool]) -> bool:
        ends = time.monotonic() + self.step_s
        while True:
            if abandon():
                return True
            if time.monotonic() >= ends and (self.gate is None or self.gate.is_set()):
                return False
            time.sleep(0.002)

    def _write(self, chunk: Chunk) -> None:
        size = self.info.tokens_per_block
        for at, token in enumerate(chunk.tokens, chunk.start):
            self.kv.write_token(chunk.block_table[at // size], at % size, token)
        self.computed.append(len(chunk.tokens))

    def _sample(self, chunk: Chunk) -> Sampled:
        assert chunk.sample is not None
        length = chunk.start + len(chunk.tokens)
        stored = np.concatenate([self.kv.tokens[block] for block in chunk.block_table])[:length].astype(np.int64) - 1
        token = next_token(stored.tolist(), chunk.sample.seed, chunk.sample.sampling.temperature)
        logprob = None
        if chunk.sample.sampling.logprobs is not None:
            logprob = TokenLogprob(-0.5, (TopLogprob(token, -0.5),) * min(1, chunk.sample.sampling.logprobs))
        return Sampled(chunk.sequence_id, token, logprob)


def next_token(context: Sequence[int], seed: int = 0, temperature: float = 0.0) -> int:
    """The token after a context; never the end of the sequence. The seed counts only above temperature 0."""
    text = ",".join(map(str, context)) + (f"|{seed}" if temperature > 0 else "")
    return 1 + int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % (VOCAB_SIZE - 1)


def expected_tokens(prompt: Sequence[int], num_tokens: int, seed: int = 0, temperature: float = 0.0) -> list[int]:
    """What a request must answer, computed without blocks."""
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(next_token(context, seed, temperature))
    return context[len(prompt) :]

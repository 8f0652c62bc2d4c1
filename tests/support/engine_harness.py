"""The real core and the real runner in one thread, with a host tier in memory: an engine without its shells.

For questions about what is computed: which tokens, and from which logits. Sockets, threads and the daemon are asked
elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import engine.runner
from engine.core import EngineCore
from engine.protocol import FirstToken, Sampling
from engine.runner import ModelRunner
from engine.tier_work import Load, LoadedBlock, Lookup, Offer, Touch
from engine.values import CoreSettings, NewRequest, Queued

GREEDY = Sampling(temperature=0.0)


@dataclass
class Generated:
    """What one request gave: tokens, the logits that each was chosen from, where its prompt came from."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    first: FirstToken | None = None
    finish: str | None = None


class EngineHarness:
    """`generate` submits all prompts at once and steps until every one is finished."""

    def __init__(self, runner: ModelRunner, host: dict[bytes, bytes] | None = None, **settings: Any) -> None:
        info = runner.info
        self.runner = runner
        self.host = host
        self.now = 1000.0
        defaults = CoreSettings(
            tokens_per_block=info.tokens_per_block,
            num_blocks=info.num_blocks,
            max_num_tokens=256,
            max_batch_size=64,
            max_queue=1000,
            max_context_tokens=info.max_context_tokens,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            tier_enabled=host is not None,
        )
        self.core = EngineCore(replace(defaults, **settings), info.layout_fingerprint)
        if host is not None:
            self.core.set_tier_ready(True, self.now)
        self._last_id = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling = GREEDY,
        cache_salt: str | None = None,
    ) -> list[Generated]:
        """The answers, in the order of the prompts."""
        asked = {}
        for prompt in prompts:
            self._last_id += 1
            asked[self._last_id] = Generated(tuple(prompt))
            request = NewRequest(
                self._last_id, tuple(prompt), max_tokens, sampling, seed=self._last_id, cache_salt=cache_salt
            )
            assert self.core.submit(request, self.now) == Queued()
        while any(each.finish is None for each in asked.values()):
            self.step(asked)
        return list(asked.values())

    def settle(self) -> None:
        """Let the tier have what is left to store, and look at every structure."""
        self.serve_tier()
        self.core.check_invariants()

    def step(self, asked: dict[int, Generated]) -> None:
        """One plan, executed and completed."""
        self.now += 0.01
        self.serve_tier()
        plan = self.core.plan(self.now)
        self.serve_tier()
        if plan is None:
            return
        result, logits = self._execute(plan)
        for sequence_id, row in logits:
            asked[sequence_id].logits.append(row)
        for output in self.core.complete(plan, result, self.now):
            one = asked[output.sequence_id]
            assert output.error is None, output.error
            one.tokens.extend(output.tokens)
            one.first = output.first or one.first
            one.finish = output.finish or one.finish

    def serve_tier(self) -> None:
        """Do what the core asks of the tier until it asks nothing more."""
        while work := self.core.take_tier_work():
            for each in work:
                assert self.host is not None
                match each:
                    case Lookup(ticket, hashes):
                        count = next((at for at, name in enumerate(hashes) if name not in self.host), len(hashes))
                        self.core.looked_up(ticket, count, self.now)
                    case Load(ticket, blocks):
                        for name, block in blocks:
                            self.runner.kv.write_block(block, memoryview(self.host[name]))
                        travelled = [LoadedBlock(35, None, "demote")] * len(blocks)
                        self.core.loaded(ticket, len(blocks), self.now, travelled)
                    case Offer(ticket, chain):
                        for each_block in chain:
                            content = bytearray(self.runner.info.block_bytes)
                            self.runner.kv.read_block(each_block.device_block, memoryview(content))
                            self.host[each_block.block_hash] = bytes(content)
                        self.core.offered(ticket, self.now, [True] * len(chain))
                    case Touch():
                        pass

    def _execute(self, plan):  # type: ignore[no-untyped-def]
        seen: list[tuple[int, torch.Tensor]] = []
        sample = engine.runner.sample

        def watched(logits, requests, *others):  # type: ignore[no-untyped-def]
            seen.extend((request.seed, row.clone()) for request, row in zip(requests, logits, strict=True))
            return sample(logits, requests, *others)

        engine.runner.sample = watched
        try:
            return self.runner.execute(plan, lambda: False), seen
        finally:
            engine.runner.sample = sample


def poison(runner: ModelRunner) -> None:
    """Fill the pool with NaN, so that whatever is read without having been written shows."""
    runner.kv.pool.fill_(float("nan"))

"""The core's counters, and the picture of them that metrics, logs and tests read (kv-semantics 7)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.offload import Offloader
from engine.plan import Chunk
from engine.sequence import Served
from engine.values import CoreStatistics


@dataclass(slots=True)
class Tally:
    """What has happened so far; counters only rise."""

    requests_finished: int = 0
    requests_cancelled: int = 0
    tokens_prompt: int = 0
    tokens_device: int = 0
    tokens_host: int = 0
    tokens_prefilled: int = 0
    tokens_generated: int = 0
    blocks_reused_full: int = 0
    blocks_reused_partial: int = 0
    blocks_missed: int = 0
    blocks_loaded: int = 0
    blocks_load_failed: int = 0
    preemptions: int = 0
    lookups: int = 0
    loads: int = 0

    def count_chunk(self, chunk: Chunk) -> None:
        """One chunk was computed."""
        is_decode = chunk.sample is not None and chunk.sample.output_index > 0 and len(chunk.tokens) == 1
        if not is_decode:
            self.tokens_prefilled += len(chunk.tokens)
        if chunk.sample is not None:
            self.tokens_generated += 1

    def count_first(self, num_prompt: int, served: Served, blocks_missed: int) -> None:
        """A request has its first token: where its prompt came from is settled."""
        self.tokens_prompt += num_prompt
        self.tokens_device += served.device_tokens
        self.tokens_host += served.host_tokens
        self.blocks_reused_full += served.full_blocks
        self.blocks_reused_partial += served.is_partial
        self.blocks_missed += blocks_missed

    def statistics(
        self, pool: BlockPool, offloader: Offloader, num_waiting: int, num_running: int, num_tickets: int
    ) -> CoreStatistics:
        """A frozen picture of everything."""
        return CoreStatistics(
            blocks_total=pool.num_blocks,
            blocks_used=pool.num_used,
            blocks_idle=pool.num_idle,
            blocks_free=pool.num_free,
            blocks_evictable=pool.num_evictable,
            blocks_offering=offloader.num_blocks_under_way,
            blocks_by_priority={priority: count for priority, count in enumerate(pool.indexed_by_priority) if count},
            sequences_waiting=num_waiting,
            sequences_running=num_running,
            requests_finished=self.requests_finished,
            requests_cancelled=self.requests_cancelled,
            tokens_prompt=self.tokens_prompt,
            tokens_device=self.tokens_device,
            tokens_host=self.tokens_host,
            tokens_computed=self.tokens_prompt - self.tokens_device - self.tokens_host,
            tokens_prefilled=self.tokens_prefilled,
            tokens_generated=self.tokens_generated,
            blocks_reused_full=self.blocks_reused_full,
            blocks_reused_partial=self.blocks_reused_partial,
            blocks_missed=self.blocks_missed,
            preemptions=self.preemptions,
            evictions_by_band=pool.evictions_of_bands(),
            expired=pool.num_expired,
            dropped_unused=pool.num_dropped_unused,
            lookups=self.lookups,
            loads=self.loads,
            offers=offloader.num_offers,
            touches=offloader.num_touches,
            blocks_offered=offloader.num_blocks_offered,
            blocks_loaded=self.blocks_loaded,
            blocks_load_failed=self.blocks_load_failed,
            offers_dropped=offloader.num_dropped,
            tickets_outstanding=num_tickets,
        )

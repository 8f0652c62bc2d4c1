"""Attends by gathering a sequence's blocks and calling torch: the plain path, for every device and data type.

It is the reference that the quicker paths are compared with, and what serves where no kernel can be compiled.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.batch import PackedBatch, Span
from engine.kv_memory import KvMemory


class GatherAttention:
    """Every chunk is a span of its own."""

    name = "gather"
    max_short_tokens = 0
    queries_at_once = 1
    shares_prefixes = False

    def __init__(self, kv: KvMemory) -> None:
        self._kv = kv

    def begin(self, batch: PackedBatch) -> GatherStep:
        """Makes ready what all layers of one step need."""
        return GatherStep(self._kv, batch)


class GatherStep:
    """One step: `attend` is called once for each layer, in order."""

    def __init__(self, kv: KvMemory, batch: PackedBatch) -> None:
        self._kv = kv
        self._token_rows = kv.token_rows(torch.from_numpy(batch.slot_mapping).to(kv.device))
        self._spans = [
            (span, torch.from_numpy(span.blocks).to(kv.device), _mask(span, kv.device)) for span in batch.spans
        ]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Writes K and V of all tokens of the step, and only then reads any: a chunk may point at blocks that another
        chunk of this step fills (kv-semantics 3.2). All tensors are `[token, head, head_dim]`."""
        self._kv.write(layer, self._token_rows, key, value)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        self.attend_spans(layer, query, scale, out)
        return out

    def attend_spans(self, layer: int, query: torch.Tensor, scale: float, out: torch.Tensor) -> None:
        """Fills the rows of `out` that belong to spans."""
        for span, blocks, mask in self._spans:
            keys, values = self._kv.gather(layer, blocks, span.end)
            rows = slice(span.first_row, span.first_row + span.num_rows)
            attended = F.scaled_dot_product_attention(
                query[rows].transpose(0, 1).unsqueeze(0),
                keys.transpose(0, 1).unsqueeze(0),
                values.transpose(0, 1).unsqueeze(0),
                attn_mask=mask,
                is_causal=span.start == 0,
                scale=scale,
                enable_gqa=query.shape[1] != keys.shape[1],
            )
            out[rows] = attended[0].transpose(0, 1)


def _mask(span: Span, device: torch.device) -> torch.Tensor | None:
    """Made once for all layers of a step; none where the whole context is the chunk, or the chunk is one token.

    torch aligns `is_causal` to the upper left, which is right only for a chunk that starts at 0.
    """
    if span.start == 0 or span.num_rows == 1:
        return None
    return torch.ones((span.num_rows, span.end), dtype=torch.bool, device=device).tril(span.start)

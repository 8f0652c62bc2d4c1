"""Says how one block's bytes are arranged, and names that arrangement and the model they belong to.

The fingerprint covers everything that changes the bytes of K and V or their meaning (kv-semantics 1.2); two engines
share host blocks only where it is equal. Reading the weights is for `engine/weights_digest.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from cached.keys import length_prefixed

_TAG = b"halocline/layout/1"
_ARRANGEMENT = "block,layer,kv,token,kv_head,head_dim"
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# What a configuration file says that cannot change a single byte of K and V. Everything else counts, known or not:
# a needless miss is cheap, a wrong hit is not.
_IRRELEVANT = frozenset(
    {
        "_name_or_path", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype",
        "transformers_version", "unk_token_id", "use_cache",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The shape of one block: `[layer, K or V, token, kv_head, head_dim]` of one data type, without padding."""

    num_layers: int
    tokens_per_block: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.tokens_per_block, self.num_kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        layers, kinds, tokens, heads, dim = self.shape
        return layers * kinds * tokens * heads * dim * _ITEM_BYTES[self.dtype]


def layout_fingerprint(
    architecture: Mapping[str, object], weights_digest: bytes, layout: BlockLayout, rounding: str = ""
) -> bytes:
    """32 bytes that differ whenever architecture (RoPE included), weights, data type or block layout differ.

    `weights_digest` is that of the files; `rounding` names what was done to their weights before they were used.
    """
    relevant = {name: value for name, value in architecture.items() if name not in _IRRELEVANT}
    parts = (
        json.dumps(relevant, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str).encode(),
        weights_digest,
        layout.dtype.encode(),
        _ARRANGEMENT.encode(),
        json.dumps(layout.shape).encode(),
        str(layout.tokens_per_block).encode(),
        # Nothing for weights as they are, so that blocks stored before there was a choice are still found.
        *([rounding.encode()] if rounding else []),
    )
    return hashlib.sha256(_TAG + b"".join(length_prefixed(part) for part in parts)).digest()

"""Joins transformers' layers to the paged attention of one step, and picks the attention of a machine at start.

Every model's attention layer calls `_attend` with its projected, rotated Q, K and V; which step it belongs to rides
along as a keyword argument, so that nothing global says what is being computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface

from engine.attention.gather import GatherAttention
from engine.batch import PackedBatch
from engine.kernel_cache import can_compile
from engine.kv_memory import KvMemory

IMPLEMENTATION = "halocline_paged"
"""Registered for attention only, not for masks: transformers then builds no mask at all."""

_log = logging.getLogger(__name__)


Floats = NDArray[np.float32]
Rotation = tuple[Floats, Floats]
"""RoPE's cosines and sines of a step, `[row, head_dim]`."""


class AttentionStep(Protocol):
    """What transformers' forward pass needs of the attention."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor: ...


class ProjectedStep(AttentionStep, Protocol):
    """What fused layers need of it, in addition."""

    def attend_projected(
        self, layer: int, projected: Floats, rotation: Rotation, scale: float, out: Floats | None
    ) -> None: ...


class Attention(Protocol):
    """One way to attend. Chunks of up to `max_short_tokens` tokens arrive as `PackedBatch.short`, others as spans;
    prefixes that chunks share, where `shares_prefixes`, as `PackedBatch.shared`. Queries of a KV head are taken
    `queries_at_once`: some of them take as long as all."""

    name: str
    max_short_tokens: int
    queries_at_once: int
    shares_prefixes: bool

    def begin(self, batch: PackedBatch) -> AttentionStep: ...


class StepAbandoned(Exception):
    """Nobody wants this step's result any more."""


class StepContext:
    """One step on its way through the layers; between layers it asks whether to go on."""

    __slots__ = ("_abandon", "_step")

    def __init__(self, step: AttentionStep, abandon: Callable[[], bool]) -> None:
        self._step = step
        self._abandon = abandon

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Tensors as transformers has them: `[1, head, token, head_dim]` in, `[1, token, head, head_dim]` out."""
        if self._abandon():
            raise StepAbandoned
        asks, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return self._step.attend(layer, asks, keys, values, scale).unsqueeze(0)

    def attend_projected(
        self, layer: int, projected: Floats, rotation: Rotation, scale: float, out: Floats | None
    ) -> None:
        """For fused layers: see `CpuStep.attend_projected`. They are used only beside the attention that has it."""
        if self._abandon():
            raise StepAbandoned
        cast(ProjectedStep, self._step).attend_projected(layer, projected, rotation, scale, out)


def register() -> None:
    """Makes `attn_implementation=IMPLEMENTATION` known to transformers; may be called again."""
    AttentionInterface.register(IMPLEMENTATION, _attend)


def choose_attention(kv: KvMemory, kernel_cache_dir: Path | None) -> Attention:
    """The quickest path that this machine can run; the plain one where there is no kernel for it.

    Compiled kernels are kept in `kernel_cache_dir`, because the package's own directory may not be writable.
    """
    if kv.device.type != "cpu" or kv.pool.dtype is not torch.float32:
        return GatherAttention(kv)
    if not can_compile(kernel_cache_dir):
        return GatherAttention(kv)
    try:
        import numba

        from engine.attention.cpu import CpuAttention
        from engine.register_tiles import is_available
    except Exception as error:
        _log.warning("the decode kernel cannot be used here, attention is slower without it: %s", error)
        return GatherAttention(kv)
    if not is_available():
        _log.warning("this processor has neither AVX-512 nor AVX2 with FMA; the engine is slower without them")
        return GatherAttention(kv)
    most_threads: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    return CpuAttention(kv, num_threads=max(1, min(torch.get_num_threads(), most_threads)))


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    halocline_step: StepContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The signature that transformers calls. What would change the result and is not supported is refused at load;
    here it is our bug."""
    assert halocline_step is not None, "the model was called outside a step"
    assert attention_mask is None
    assert kwargs.get("sliding_window") is None
    assert kwargs.get("softcap") is None
    assert kwargs.get("s_aux") is None
    layer = module.layer_idx
    assert isinstance(layer, int)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return halocline_step.attend(layer, query, key, value, scale), None

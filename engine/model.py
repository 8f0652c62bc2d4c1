"""Loads a model through transformers and runs its layers over one packed step.

transformers is loader, reference and model code; its cache machinery is not used (`use_cache=False`): K and V go to
the pool through the registered attention. Whether a directory may be loaded is for `engine/model_files.py`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from engine.attention.interface import IMPLEMENTATION, StepContext, register
from engine.batch import PackedBatch
from engine.errors import ModelRefused
from engine.layout import BlockLayout
from engine.model_files import ModelFiles, refuse_features

# Buffers that old checkpoints carry and that are computed from the configuration.
_HARMLESS_KEYS = re.compile(r"rotary_emb\.inv_freq$|masked_bias$|attn\.bias$")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the engine must know of a loaded model. `config` is complete: what is not written has its default."""

    architecture: str
    config: Mapping[str, Any]
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def block_layout(self, tokens_per_block: int, dtype: str) -> BlockLayout:
        """One block of this model's KV."""
        return BlockLayout(self.num_layers, tokens_per_block, self.num_kv_heads, self.head_dim, dtype)


class LoadedModel:
    """The weights and the forward pass. On the CPU the weights stay mapped from their file where its data type is
    the one wanted."""

    def __init__(self, files: ModelFiles, model: torch.nn.Module, shape: ModelShape, device: torch.device) -> None:
        self.files = files
        self.shape = shape
        self.dtype: torch.dtype = model.get_input_embeddings().weight.dtype  # type: ignore[operator]
        self.module = model
        self._device = device

    def forward(self, batch: PackedBatch, context: StepContext) -> torch.Tensor:
        """The float32 logits after each of `batch.logit_rows`. Raises StepAbandoned between layers."""
        output = self.module(
            input_ids=torch.from_numpy(batch.token_ids).to(self._device).unsqueeze(0),
            position_ids=torch.from_numpy(batch.positions).to(self._device).unsqueeze(0),
            attention_mask=None,
            use_cache=False,
            logits_to_keep=torch.from_numpy(batch.logit_rows).to(self._device),
            halocline_step=context,
        )
        logits: torch.Tensor = output.logits[0]
        return logits.float()


def load_model(files: ModelFiles, dtype: torch.dtype | None, device: torch.device) -> LoadedModel:
    """Reads the weights. `dtype` None takes what they are in. Raises ModelRefused where the directory and the
    architecture's code do not agree on the weights."""
    register()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(files.directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # Foreign errors of every kind come from a configuration that its own class does not accept.
        raise ModelRefused(f"{files.architecture}: its config.json is not accepted ({_first_line(error)})") from error
    # A field that is not written takes its class's default, which may be a sliding window.
    refuse_features(files.architecture, config.to_dict())

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                files.directory,
                config=config,
                dtype=dtype or "auto",
                attn_implementation=IMPLEMENTATION,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:
        raise ModelRefused(
            f"{files.architecture} in {files.directory} cannot be loaded: {_first_line(error)}"
        ) from error
    model, loading = loaded
    _refuse_other_weights(files.architecture, loading)
    model = model.to(device).eval().requires_grad_(False)
    return LoadedModel(files, model, _shape(files, model), device)


def _refuse_other_weights(architecture: str, loading: Mapping[str, Any]) -> None:
    """A weight that is missing would be random, one that is not expected would be left out: both talk nonsense."""
    for kind, what in (
        ("missing_keys", "lacks"),
        ("mismatched_keys", "has the wrong shape for"),
        ("unexpected_keys", "also holds"),
    ):
        names = sorted(str(key) for key in loading.get(kind, ()) if not _HARMLESS_KEYS.search(str(key)))
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelRefused(f"{architecture} cannot be served: its checkpoint {what} {names[0]}{more}")


def _shape(files: ModelFiles, model: Any) -> ModelShape:
    config = model.config
    heads = config.num_attention_heads
    return ModelShape(
        architecture=files.architecture,
        config=config.to_dict(),
        vocab_size=model.get_output_embeddings().weight.shape[0],
        max_context_tokens=config.max_position_embeddings,
        eos_token_ids=_eos_token_ids(model),
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """The generation configuration's, which knows the ends of turns of chat models; else the model's."""
    for config in (getattr(model, "generation_config", None), model.config):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)
    return ()


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]

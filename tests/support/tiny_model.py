"""Writes small random models in Hugging Face layout, so that what holds for any model is tested in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 128
EOS_TOKEN_ID = 2
FAMILIES = (
    "llama",
    "llama_mha",
    "llama_bias",
    "llama_rope3",
    "llama_linear",
    "llama_yarn",
    "mistral",
    "qwen2",
    "qwen3",
)


def write_tiny_model(
    directory: Path, family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """A random model of two layers, about 100 kB, written as `dtype`; two seeds give other weights of one architecture.
    Returns `directory`."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Fresh initialisation is so even that argmax would hang on rounding, and leaves biases and norms trivial.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1 if "norm" in name or "bias" in name else 0.25)
    model.to(dtype).save_pretrained(directory)
    return directory


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """The configuration of one of `FAMILIES`: grouped-query except `llama_mha`; Qwen3 has norms on Q and K, Qwen2 has
    biases, `llama_bias` has them everywhere, and the head size is not hidden ÷ heads in two of them."""
    shared: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": None,
    }
    match family:
        case "llama":
            return LlamaConfig(**shared | overrides)
        case "llama_mha":
            return LlamaConfig(**shared | {"num_key_value_heads": 6, "tie_word_embeddings": True} | overrides)
        case "llama_bias":
            return LlamaConfig(**shared | {"attention_bias": True, "mlp_bias": True} | overrides)
        case "llama_rope3":
            rope = {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }  # fmt: skip
            return LlamaConfig(**shared | {"rope_parameters": rope} | overrides)
        case "llama_linear":
            rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
            return LlamaConfig(**shared | {"rope_parameters": rope} | overrides)
        case "llama_yarn":
            rope = {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 64
            }  # fmt: skip
            return LlamaConfig(**shared | {"rope_parameters": rope} | overrides)
        case "mistral":
            return MistralConfig(**shared | {"sliding_window": None, "head_dim": 16} | overrides)
        case "qwen2":
            return Qwen2Config(**shared | overrides)
        case "qwen3":
            return Qwen3Config(**shared | {"head_dim": 16} | overrides)
    raise ValueError(f"no tiny model of family {family!r}; there are {', '.join(FAMILIES)}")

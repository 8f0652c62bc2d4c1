"""Decides whether a model's directory can be served correctly, before any weight is read.

A block that misses part of what a layer keeps gives fluent wrong text, so what has not been tested is refused by
name: architectures by an allow-list, and within them every feature that keeps more than plain K and V or that makes K
and V depend on more than the tokens before. Loading is for `engine/model.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelRefused

TESTED_ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# `dynamic` and `longrope` choose frequencies by the longest sequence of a batch: the same tokens would have different
# K in different company.
TESTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

MAX_HEADER_BYTES = 100 * 2**20
_MAX_CONFIG_BYTES = 4 * 2**20

# Fields that say what a layer keeps or does beyond plain attention, and how to call that.
_FEATURES: tuple[tuple[str, str], ...] = (
    ("kv_lora_rank", "multi-head latent attention (MLA), whose cache is not plain K and V"),
    ("ssm_cfg", "state-space (Mamba) layers, which keep a running state"),
    ("ssm_state_size", "state-space (Mamba) layers, which keep a running state"),
    ("mamba_d_state", "state-space (Mamba) layers, which keep a running state"),
    ("linear_num_key_heads", "linear attention layers, which keep a running state"),
    ("num_local_experts", "mixture-of-experts layers, which have not been tested"),
    ("num_experts", "mixture-of-experts layers, which have not been tested"),
    ("n_routed_experts", "mixture-of-experts layers, which have not been tested"),
    ("attn_logit_softcapping", "attention logit soft-capping"),
    ("attention_sink", "attention sinks"),
    ("attention_chunk_size", "chunked local attention"),
    ("vision_config", "a vision tower; only text models are served"),
    ("audio_config", "an audio tower; only text models are served"),
)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A directory that may be loaded: its configuration as written, and its weights in order of name."""

    directory: Path
    architecture: str
    config: Mapping[str, Any]
    weights: tuple[Path, ...]


def inspect_model(directory: Path) -> ModelFiles:
    """What is in `directory`. Raises ModelRefused naming the architecture and the layer or feature, or the file."""
    if not directory.is_dir():
        raise ModelRefused(f"{directory} is not a directory; give the directory of a model in Hugging Face layout")
    if (directory / "adapter_config.json").exists():
        raise ModelRefused(f"{directory} holds a LoRA or other adapter; merge it into its base model and serve that")
    config = _read_config(directory)
    architecture = _architecture(directory, config)
    refuse_features(architecture, config)
    weights = _weight_files(directory, architecture)
    for path in weights:
        _check_safetensors(path, architecture)
    return ModelFiles(directory, architecture, config, weights)


def refuse_features(architecture: str, config: Mapping[str, Any]) -> None:
    """Raises ModelRefused for what is not plain K and V per layer; `config` is as written, or as completed by
    transformers' defaults (both are asked)."""

    def refuse(what: str) -> None:
        raise ModelRefused(f"{architecture} cannot be served: it has {what}")

    if config.get("is_encoder_decoder"):
        refuse("an encoder and cross-attention (encoder-decoder)")
    if config.get("quantization_config"):
        refuse("quantized weights (quantization_config); serve the model in float32, bfloat16 or float16")
    for field, what in _FEATURES:
        if config.get(field):
            refuse(f"{what} ({field} = {config[field]!r})"[:300])
    for layer, kind in enumerate(config.get("layer_types") or ()):
        if kind != "full_attention":
            refuse(f"{kind} in layer {layer}; only full_attention layers are supported")
    if config.get("use_sliding_window"):
        window, first = config.get("sliding_window"), config.get("max_window_layers", 0)
        refuse(f"a sliding window of {window} tokens (use_sliding_window) from layer {first} on")
    if architecture.startswith("Mistral") and config.get("sliding_window") is not None:
        refuse(f"a sliding window of {config['sliding_window']} tokens in every layer from layer 0 on")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        refuse("RoPE settings of its own for each kind of layer")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in TESTED_ROPE_TYPES:
        refuse(f"RoPE of type {kind!r} in every layer; supported are {', '.join(TESTED_ROPE_TYPES)}")


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ModelRefused(f"{path} has more than {_MAX_CONFIG_BYTES} bytes; it is no model configuration")
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelRefused(
            f"{path} cannot be read ({error.strerror}); is this a model in Hugging Face layout?"
        ) from None
    except ValueError as error:
        raise ModelRefused(f"{path} is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise ModelRefused(f"{path} is not a JSON object")
    return config


def _architecture(directory: Path, config: Mapping[str, Any]) -> str:
    names, model_type = config.get("architectures"), config.get("model_type")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    if name is None:
        raise ModelRefused(f"{directory / 'config.json'} names no architecture")
    if name in TESTED_ARCHITECTURES:
        if model_type != TESTED_ARCHITECTURES[name]:
            raise ModelRefused(f"{name} with model_type {model_type!r}: expected {TESTED_ARCHITECTURES[name]!r}")
        return name
    refuse_features(name, config)  # Gives the better reason, where there is one.
    raise ModelRefused(
        f"{name} (model_type {model_type!r}) has not been tested; served are {', '.join(TESTED_ARCHITECTURES)}"
    )


def _weight_files(directory: Path, architecture: str) -> tuple[Path, ...]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return (single,)
    if index.exists():
        return _shards(directory, index)
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")) or any(directory.glob("*.pth")):
        raise ModelRefused(
            f"{architecture} in {directory} has pickled weights only, which could run code; convert it to safetensors"
        )
    raise ModelRefused(f"{directory} has no weights: neither {single.name} nor {index.name}")


def _shards(directory: Path, index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelRefused(f"{index} cannot be read ({error})") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelRefused(f"{index} names a file outside its directory: {name!r}")
        if not (directory / name).exists():
            raise ModelRefused(f"{directory / name} is missing, and {index.name} names it; fetch the model again")
    if not names:
        raise ModelRefused(f"{index} names no file")
    return tuple(directory / name for name in names)


def _check_safetensors(path: Path, architecture: str) -> None:
    """Compares the length of the file with what its header promises: a download that was cut off must not be mapped."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise ModelRefused(f"{path} ({size} bytes) is truncated or no safetensors file; fetch the model again")
        try:
            header = json.loads(file.read(header_bytes))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
            expected = 8 + header_bytes + int(end)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ModelRefused(f"{path} has a damaged header ({error}); fetch the model again") from None
    if size != expected:
        raise ModelRefused(f"{path} has {size} bytes and should have {expected}: truncated; fetch the model again")
    for name in tensors:
        if "lora_" in name:
            raise ModelRefused(f"{architecture} cannot be served: {path.name} holds LoRA weights ({name}); merge them")

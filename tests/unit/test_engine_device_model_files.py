"""Which directories are refused, and that the refusal names what a person must know."""

from __future__ import annotations

import engine.environment  # noqa: F401  isort: skip

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelRefused
from engine.model import load_model
from engine.model_files import inspect_model
from tests.support.tiny_model import FAMILIES, write_tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_decoders_are_accepted(family: str, tmp_path: Path) -> None:
    files = inspect_model(write_tiny_model(tmp_path, family))

    assert [path.name for path in files.weights] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("mistral", {"sliding_window": 4096}, ["MistralForCausalLM", "sliding window of 4096", "layer 0"]),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, ["Qwen2ForCausalLM", "sliding window", "layer 1"]),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, ["Qwen3", "sliding_attention", "layer 1"]),
        ("llama", {"layer_types": ["linear_attention"] * 2}, ["linear_attention", "layer 0"]),
        ("llama", {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, ["DeepseekV3", "MLA"]),
        ("llama", {"architectures": ["MambaForCausalLM"], "ssm_cfg": {"layer": "Mamba2"}}, ["Mamba", "state"]),
        ("llama", {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}, ["Mixtral", "mixture-of-experts"]),
        ("llama", {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, ["T5", "encoder"]),
        ("llama", {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0}, ["Gemma2", "soft-capping"]),
        ("llama", {"architectures": ["PhiForCausalLM"], "model_type": "phi"}, ["PhiForCausalLM", "not been tested"]),
        ("llama", {"architectures": ["LlamaForCausalLM"], "model_type": "phi"}, ["LlamaForCausalLM", "'phi'"]),
        ("llama", {"architectures": None}, ["no architecture"]),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, ["quantized"]),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["RoPE", "'dynamic'"]),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, ["RoPE", "'longrope'"]),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["RoPE"]),
    ],
)  # fmt: skip
def test_what_a_block_could_not_hold_is_refused_by_name(
    family: str, changes: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    _change_config(write_tiny_model(tmp_path, family), changes)

    with pytest.raises(ModelRefused) as refused:
        inspect_model(tmp_path)

    for words in named:
        assert words in str(refused.value)


def test_a_sliding_window_that_is_only_a_default_is_refused_too(tmp_path: Path) -> None:
    """Mistral's class has a window of 4,096 tokens unless the configuration says there is none."""
    _change_config(write_tiny_model(tmp_path, "mistral"), {"sliding_window": ...})

    with pytest.raises(ModelRefused, match="sliding window of 4096"):
        load_model(inspect_model(tmp_path), torch.float32, torch.device("cpu"))


def test_a_missing_directory_file_or_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="nowhere is not a directory"):
        inspect_model(tmp_path / "nowhere")
    with pytest.raises(ModelRefused, match=r"config\.json cannot be read"):
        inspect_model(tmp_path)
    write_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match="has no weights"):
        inspect_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1-of-2.safetensors"}})
    )
    with pytest.raises(ModelRefused, match=r"model-1-of-2\.safetensors is missing"):
        inspect_model(tmp_path)


def test_shards_may_not_lie_elsewhere(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))

    with pytest.raises(ModelRefused, match="outside its directory"):
        inspect_model(tmp_path)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")

    with pytest.raises(ModelRefused, match="pickled weights only"):
        inspect_model(tmp_path)


def test_adapters_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")

    with pytest.raises(ModelRefused, match="LoRA"):
        inspect_model(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_weights_are_noticed_before_they_are_mapped(kept: int, tmp_path: Path) -> None:
    weights = write_tiny_model(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])

    with pytest.raises(ModelRefused, match="truncated"):
        inspect_model(tmp_path)


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"a": 3}', b'{"a": {"data_offsets": []}}', b"\xff\xfe"])
def test_a_damaged_header_is_refused(header: bytes, tmp_path: Path) -> None:
    weights = write_tiny_model(tmp_path) / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header)

    with pytest.raises(ModelRefused, match="damaged header"):
        inspect_model(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00"])
def test_a_configuration_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (write_tiny_model(tmp_path) / "config.json").write_text(text)

    with pytest.raises(ModelRefused, match=r"config\.json"):
        inspect_model(tmp_path)


def test_weights_that_are_missing_left_over_or_of_another_shape_are_refused(tmp_path: Path) -> None:
    weights = write_tiny_model(tmp_path) / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.1.self_attn.k_proj.weight"

    def load(changed: dict[str, torch.Tensor]) -> None:
        save_file(changed, weights, metadata={"format": "pt"})
        load_model(inspect_model(tmp_path), torch.float32, torch.device("cpu"))

    with pytest.raises(ModelRefused, match=f"lacks {name}"):
        load({key: value for key, value in tensors.items() if key != name})
    with pytest.raises(ModelRefused, match=r"also holds model\.layers\.0\.self_attn\.sinks"):
        load(tensors | {"model.layers.0.self_attn.sinks": torch.zeros(6)})
    with pytest.raises(ModelRefused, match="LlamaForCausalLM"):
        load(tensors | {name: torch.zeros(3, 3)})
    load(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})


def _change_config(directory: Path, changes: dict[str, Any]) -> None:
    config = json.loads((directory / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(kept))

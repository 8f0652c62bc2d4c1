"""int8 weights: the products are those of the rounded weights, nothing else is kept, and no cache mixes the two."""

from __future__ import annotations

import engine.environment  # noqa: F401  isort: skip

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from engine import int8_linear
from engine.config import EngineConfig
from engine.errors import EngineConfigError
from engine.fused import fuse
from engine.int8_linear import Int8Linear
from engine.model import load_model
from engine.model_files import inspect_model
from engine.runner import ModelRunner, load_runner
from tests.support.engine_harness import EngineHarness
from tests.support.tiny_model import write_tiny_model

PROMPT = [5, 9, 77, 3, 120, 64, 8, 8, 21, 100, 17, 4, 33]


@settings(max_examples=60, deadline=None)  # The first example compiles.
@given(
    rows=st.sampled_from((1, 2, 5, 23, 24, 61)),
    inputs=st.sampled_from((1, 6, 33, 64, 577, 1536)),
    outputs=st.lists(st.sampled_from((1, 7, 32, 65)), min_size=1, max_size=3),
    biased=st.booleans(),
    outlier=st.sampled_from((1.0, 40.0)),
    seed=st.integers(0, 2**31),
)
def test_products_are_those_of_the_rounded_weights(
    rows: int, inputs: int, outputs: list[int], biased: bool, outlier: float, seed: int
) -> None:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(inputs, width, bias=biased) for width in outputs]
    given_ = torch.randn(rows, inputs)
    given_[:, 0] *= outlier

    found = Int8Linear(layers)(given_)

    weight = torch.cat([_rounded(layer.weight) for layer in layers])
    wanted = given_.double() @ weight.T
    if biased:
        wanted += torch.cat([layer.bias for layer in layers]).double()
    # An input is at most half a fine step away: 63 coarse ones of 126 each reach the highest.
    allowed = (given_.abs().amax(1, keepdim=True).double() / (63 * 126 * 2)) @ weight.abs().sum(1, keepdim=True).T
    assert found.shape == wanted.shape
    assert ((found.double() - wanted).abs() <= allowed + 1e-5 * wanted.abs() + 1e-6).all()


@pytest.mark.parametrize("rows", [3, 61])
def test_the_highest_numbers_do_not_saturate(rows: int) -> None:
    """Pairs of products are added up in 16 bits on a processor without VNNI; ours fit."""
    layer = torch.nn.Linear(512, 32, bias=False)
    layer.weight.data.fill_(-1.0)

    found = Int8Linear([layer])(torch.full((rows, 512), 3.0))

    assert torch.allclose(found, torch.full((rows, 32), -1536.0), rtol=1e-6)


def test_what_a_row_becomes_depends_on_no_other() -> None:
    """Else a request's answer, and the K and V that others find, would depend on who else was served at the time."""
    torch.manual_seed(1)
    layer = Int8Linear([torch.nn.Linear(576, 96)])
    given_ = torch.randn(40, 576) * torch.logspace(-3, 3, 40)[:, None]

    together = layer(given_)

    for row in (0, 13, 39):
        assert torch.equal(layer(given_[row : row + 1])[0], together[row])


def test_a_row_that_is_not_finite_stays_so_and_stays_alone() -> None:
    torch.manual_seed(1)
    layer = Int8Linear([torch.nn.Linear(64, 8)])
    given_ = torch.randn(5, 64)
    clean = layer(given_)
    given_[1, 3], given_[3, 60] = float("nan"), float("-inf")

    found = layer(given_)

    assert not found[[1, 3]].isfinite().any()
    assert torch.equal(found[[0, 2, 4]], clean[[0, 2, 4]])


def test_rows_and_weights_of_zeros_give_the_bias() -> None:
    layer, empty = torch.nn.Linear(16, 4), torch.nn.Linear(16, 4)
    empty.weight.data.zero_()

    assert torch.equal(Int8Linear([layer])(torch.zeros(2, 16)), layer.bias.expand(2, 4))
    assert torch.equal(Int8Linear([empty])(torch.ones(2, 16)), empty.bias.expand(2, 4))


def test_packing_leaves_the_engine_of_other_quantised_code_as_it_was() -> None:
    before = torch.backends.quantized.engine

    Int8Linear([torch.nn.Linear(8, 8)])

    assert torch.backends.quantized.engine == before


@pytest.mark.parametrize("family", ["llama_mha", "qwen2"])  # Tied embeddings; biases.
def test_a_model_answers_as_transformers_does_with_the_rounded_weights(family: str, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", family)
    reference = load_model(inspect_model(directory), torch.float32, torch.device("cpu")).module
    # Tied embeddings stay as they are; only what multiplies by them is rounded.
    reference.lm_head.weight = torch.nn.Parameter(reference.lm_head.weight.clone())
    for module in reference.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = _rounded(module.weight).float()
    reference.set_attn_implementation("eager")

    one = EngineHarness(_runner(tmp_path, directory)).generate([PROMPT], 4)[0]

    with torch.inference_mode():
        wanted = reference(torch.tensor([[*PROMPT, *one.tokens]])).logits[0, len(PROMPT) - 1 : -1]
    assert (torch.stack(one.logits) - wanted).abs().max() < 0.02 * wanted.abs().max()


@pytest.mark.parametrize("linear", [None, Int8Linear])
def test_weights_are_held_once(linear: type | None, tmp_path: Path) -> None:
    loaded = load_model(inspect_model(write_tiny_model(tmp_path)), torch.float32, torch.device("cpu"))
    weights = [weakref.ref(module.weight) for module in loaded.module.modules() if isinstance(module, torch.nn.Linear)]

    fused = fuse(loaded, linear)

    gc.collect()
    assert fused is not None
    assert len(weights) == 2 * 7 + 1
    assert [weight() for weight in weights] == [None] * len(weights)


def test_no_cache_mixes_int8_with_float32(tmp_path: Path) -> None:
    """kv-semantics 1: K and V of other weights are another model's, under whatever name they are served."""
    directory = write_tiny_model(tmp_path / "model")

    rounded, plain = _runner(tmp_path, directory), _runner(tmp_path, directory, quantization="none")

    assert rounded.info.layout_fingerprint != plain.info.layout_fingerprint
    assert (rounded.info.quantization, plain.info.quantization) == ("int8", "none")
    assert rounded.info.dtype == plain.info.dtype == "float32", "K and V themselves are not rounded"


@pytest.mark.parametrize("settings_", [{"device": "cuda"}, {"device": "cpu", "dtype": "bfloat16"}])
def test_a_device_or_data_type_without_int8_is_refused(settings_: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="quantization int8 is for the CPU and float32"):
        EngineConfig(socket=Path("/s"), model_dir=Path("/m"), state_dir=Path("/d"), quantization="int8", **settings_)


def test_a_gpu_that_auto_would_take_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    with pytest.raises(EngineConfigError, match="device auto has found a GPU; set device to cpu"):
        _runner(tmp_path, device="auto")


def test_a_model_outside_the_fused_family_is_refused(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", hidden_act="gelu")

    with pytest.raises(EngineConfigError, match="quantization int8 is not there for LlamaForCausalLM as it is"):
        _runner(tmp_path, directory)


def test_a_machine_without_fbgemm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_linear, "_ENGINE", "an engine that no build has")

    with pytest.raises(EngineConfigError, match="needs FBGEMM, which this build of torch does not have"):
        _runner(tmp_path)


def test_the_demo_model_still_knows_its_capitals(demo_model_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir)
    harness = EngineHarness(_runner(tmp_path, demo_model_dir, device_cache_size="64MB"))

    one = harness.generate([tokenizer.encode("The capital of France is")], 6)[0]

    assert "Paris" in tokenizer.decode(one.tokens)


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    """Each output's weights in 127 steps of its own, in float64."""
    exact = weight.detach().double().numpy()
    steps = np.maximum(np.abs(exact).max(axis=1, keepdims=True), 1e-30) / 127
    return torch.from_numpy(np.rint(exact / steps) * steps)


def _runner(tmp_path: Path, directory: Path | None = None, **chosen: object) -> ModelRunner:
    directory = directory or write_tiny_model(tmp_path / "model")
    given_ = {"quantization": "int8", "device": "cpu", "tokens_per_block": 4, "device_cache_size": "200kB"} | chosen
    return load_runner(
        EngineConfig(socket=tmp_path / "e.sock", model_dir=directory, state_dir=tmp_path / "state", **given_)
    )

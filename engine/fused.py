"""Runs the layers of the Llama family by hand on the CPU: products over packed weights, everything else in one pass.

The transformers module stays the reference and what serves every other device, data type and architecture; whether
this path can take a model's place is decided here, once, at start. Each weight is held once, in the order in which
its linear layer reads it (panels in float32, FBGEMM's in int8); embeddings stay mapped from their file, norms are
float32. Attention is `engine/attention/cpu.py`'s, which rotates and stores as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numba
import numpy as np
import torch
from safetensors import safe_open

from engine import register_tiles
from engine.attention.interface import StepContext
from engine.batch import PackedBatch
from engine.layer_kernels import add_normalise, gate, normalise, normalise_heads
from engine.linears import Linear, LinearFactory, pieces_of
from engine.model import LoadedModel
from engine.model_files import ModelFiles
from engine.panel_block import between_attentions
from engine.panel_linear import Held, PanelLinear, WeightMemory, can_gate, paired
from engine.rotary_tables import RotaryTables

FAMILY: Final = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_EMBEDDING: Final = "model.embed_tokens.weight"
_MOST_KEPT_ROWS: Final = 32


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one layer. `norms_on_heads` are those of Q and K, where the family has them."""

    input_norm: np.ndarray
    qkv: Linear
    norms_on_heads: tuple[np.ndarray, np.ndarray] | None
    attention_out: Linear
    mlp_norm: np.ndarray
    gate_up: Linear
    mlp_down: Linear
    held: tuple[Held, Held, Held] | None
    """Of the last three, where all products are panels and `gate_up` is `paired`."""


def fuse(model: LoadedModel, linear: LinearFactory | None = None) -> FusedModel | None:
    """The same model with fused layers, or None where it, or the processor, is not of the kind that they are for.
    `linear` makes its linear layers; None makes those of float32.

    The given model's weights move over: it must not be used afterwards.
    """
    module: Any = model.module
    config = module.config
    rotary = module.model.rotary_emb
    fits = (
        model.shape.architecture in FAMILY
        and model.dtype is torch.float32
        and next(module.parameters()).device.type == "cpu"
        and register_tiles.is_available()
        and config.hidden_act == "silu"
        and 2 * rotary.inv_freq.shape[0] == model.shape.head_dim
    )
    return FusedModel(model, linear or partial(PanelLinear, WeightMemory())) if fits else None


class FusedModel:
    """As `LoadedModel`, for the families and the machine that `fuse` accepts."""

    def __init__(self, model: LoadedModel, linear: LinearFactory) -> None:
        module: Any = model.module
        self.files = model.files
        self.shape = model.shape
        self.dtype = model.dtype
        self._heads: int = module.config.num_attention_heads
        self._kv_heads = model.shape.num_kv_heads
        self._epsilon: float = module.config.rms_norm_eps
        self._rotation = RotaryTables(module.model.rotary_emb)
        self._scale: float = module.model.layers[0].self_attn.scaling
        self._final_norm = _owned(module.model.norm.weight)
        # The largest comes first, so that no moment holds more than one weight twice.
        self._head = linear([module.lm_head])
        self._embedding = _mapped(model.files, _EMBEDDING, module.model.embed_tokens.weight)
        module.lm_head = module.model.embed_tokens = None
        self._kept: dict[int, _Hidden] = {}
        self._layers = []
        for index, layer in enumerate(module.model.layers):
            self._layers.append(_pack_layer(layer, linear, isinstance(self._head, PanelLinear)))
            module.model.layers[index] = torch.nn.Identity()

    def forward(self, batch: PackedBatch, context: StepContext) -> torch.Tensor:
        """As `LoadedModel.forward`."""
        rows = len(batch.token_ids)
        hidden = self._arrays(rows)
        self._embed(batch.token_ids, hidden.residual)
        rotation = self._rotation.at(batch.positions)
        normalise(hidden.residual_array, self._layers[0].input_norm, self._epsilon, hidden.normed_array)

        projected = self._layers[0].qkv(hidden.normed).numpy()
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            heads = projected.reshape(-1, self._heads + 2 * self._kv_heads, self.shape.head_dim)
            if layer.norms_on_heads is not None:
                of_query, of_key = layer.norms_on_heads
                normalise_heads(heads, of_query, self._epsilon, 0, self._heads)
                normalise_heads(heads, of_key, self._epsilon, self._heads, self._kv_heads)
            if index < last:
                context.attend_projected(index, heads, rotation, self._scale, hidden.attended_array)
                following = self._layers[index + 1]
                projected = self._go_on(layer, hidden, following.input_norm, following.qkv, projected)
                continue
            # Nothing reads what the last layer makes of tokens after which none is sampled.
            wanted = torch.from_numpy(batch.logit_rows)
            is_read = len(wanted) > 0
            context.attend_projected(index, heads, rotation, self._scale, hidden.attended_array if is_read else None)
            if not is_read:
                return torch.empty((0, self.shape.vocab_size))
            if len(wanted) < rows:
                of_all, hidden = hidden, self._arrays(len(wanted))
                torch.index_select(of_all.residual, 0, wanted, out=hidden.residual)
                torch.index_select(of_all.attended, 0, wanted, out=hidden.attended)
        logits = np.empty((len(hidden.residual), self.shape.vocab_size), np.float32)
        return torch.from_numpy(self._go_on(layer, hidden, self._final_norm, self._head, logits))

    def _go_on(
        self, layer: _Layer, hidden: _Hidden, next_norm: np.ndarray, following: Linear, out: np.ndarray
    ) -> np.ndarray:
        """All of a layer behind its attention, the norm before whatever comes next, and the first product of that, for
        which `out` has room."""
        if layer.held is not None:
            assert isinstance(following, PanelLinear), "one product in panels, and the next is not"
            weights = (*layer.held, following.held, layer.mlp_norm, next_norm)
            between_attentions(*hidden.of_kernel, out[np.newaxis], *weights, *hidden.constants)
            return out
        delta = layer.attention_out(hidden.attended_rows)
        add_normalise(hidden.residual_array, delta.numpy(), layer.mlp_norm, self._epsilon, hidden.normed_array)
        gate(layer.gate_up(hidden.normed).numpy(), hidden.gated_array)
        delta = layer.mlp_down(hidden.gated)
        add_normalise(hidden.residual_array, delta.numpy(), next_norm, self._epsilon, hidden.normed_array)
        return following(hidden.normed).numpy()

    def _embed(self, token_ids: np.ndarray, out: torch.Tensor) -> None:
        """The rows of the embedding; torch raises for a token outside the vocabulary."""
        ids = torch.from_numpy(token_ids)
        if self._embedding.dtype is out.dtype:
            torch.index_select(self._embedding, 0, ids, out=out)
        else:
            out.copy_(torch.index_select(self._embedding, 0, ids))

    def _arrays(self, rows: int) -> _Hidden:
        """What goes from layer to layer, of any content. Those of small steps are kept, with the number of threads: the next
        step has as many rows, most often, and making them costs as much as some of the layers do. (Made in torch's inference
        mode, they are for that mode alone.)"""
        kept = self._kept.get(rows)
        if kept is not None:
            return kept
        down = self._layers[0].mlp_down
        residual = torch.empty((rows, self._layers[0].qkv.num_inputs))
        attended = torch.empty((rows, self._heads, self.shape.head_dim))
        normed = torch.empty_like(residual)
        gated = torch.empty((down.pieces, rows, down.num_inputs // down.pieces))
        attended_rows = attended.view(rows, -1)
        gated_array = gated.numpy()
        made = _Hidden(
            residual,
            normed,
            attended,
            attended_rows,
            gated,
            residual.numpy(),
            normed.numpy(),
            attended.numpy(),
            gated_array,
            (*(one.numpy()[np.newaxis] for one in (attended_rows, residual, normed)), gated_array),
            (np.float32(self._epsilon), numba.get_num_threads()),
        )
        if rows <= _MOST_KEPT_ROWS:
            self._kept[rows] = made
        return made


@dataclass(frozen=True, slots=True)
class _Hidden:
    """The arrays of one step that every layer reads and writes, as tensors and as numpy's views of them: made once,
    because between two products of one row a view costs as much as the work on it."""

    residual: torch.Tensor
    normed: torch.Tensor
    attended: torch.Tensor
    attended_rows: torch.Tensor
    gated: torch.Tensor
    residual_array: np.ndarray
    normed_array: np.ndarray
    attended_array: np.ndarray
    gated_array: np.ndarray
    of_kernel: tuple[Any, ...]  # What `between_attentions` is given first,
    constants: tuple[Any, ...]  # and at the end.


def _pack_layer(layer: Any, linear: LinearFactory, head_is_panels: bool) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = None
    if hasattr(attention, "q_norm"):
        norms = (_owned(attention.q_norm.weight), _owned(attention.k_norm.weight))
    qkv = linear([attention.q_proj, attention.k_proj, attention.v_proj])
    attention_out = linear([attention.o_proj])
    mlp_down = linear([mlp.down_proj], pieces_of(mlp.down_proj.in_features))
    held = None
    if (
        head_is_panels
        and isinstance(qkv, PanelLinear)
        and isinstance(attention_out, PanelLinear)
        and isinstance(mlp_down, PanelLinear)
        and can_gate(mlp.gate_proj, mlp.up_proj, mlp_down.pieces)
    ):
        gate_up = linear([paired(mlp.gate_proj, mlp.up_proj)])
        assert isinstance(gate_up, PanelLinear), "a factory that makes panels of some layers"
        held = (attention_out.held, gate_up.held, mlp_down.held)
    else:
        gate_up = linear([mlp.gate_proj, mlp.up_proj])
    return _Layer(
        input_norm=_owned(layer.input_layernorm.weight),
        qkv=qkv,
        norms_on_heads=norms,
        attention_out=attention_out,
        mlp_norm=_owned(layer.post_attention_layernorm.weight),
        gate_up=gate_up,
        mlp_down=mlp_down,
        held=held,
    )


def _owned(weight: torch.Tensor) -> np.ndarray:
    """A copy, so that no small tensor keeps a whole file mapped."""
    return weight.detach().numpy().copy()


def _mapped(files: ModelFiles, name: str, loaded: torch.Tensor) -> torch.Tensor:
    """The tensor once more from its file: of the mapping that packing has read whole, nothing stays resident, and of
    this one only the rows that are looked up."""
    for path in files.weights:
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118 - not a mapping
                return file.get_tensor(name)  # type: ignore[no-any-return]
    return loaded.detach().clone()

"""Models with two kinds of layers: gated delta rule with a recurrent state (Gated Delta Networks, Yang et al., 2024, arXiv:2412.06464), and
attention whose values a gate multiplies.

A layer with a state has no keys and values: its cache is a `StateCache`, in which each sequence has a slot.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from tinygrad import Tensor, nn

from tinyvllm.batch import Batch, LayerCache
from tinyvllm.bridge import uninitialized
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import ModelConfig
from tinyvllm.models.llama import Llama, LlamaBlock, Rotations, rms
from tinyvllm.models.projections import DraftWeights, GatedWeights, LayerWeights, Product
from tinyvllm.ops.attention import PagedAttention
from tinyvllm.ops.delta import DeltaShape, DeltaWeights, gated_delta
from tinyvllm.ops.head import norm_products
from tinyvllm.ops.linear import linear


@dataclass(eq=False)
class Vector:
    """Numbers of a layer that are no matrix, float32."""

    weight: Tensor


class HybridBlock(LlamaBlock):
    """One layer of either kind."""

    def _normed_products(self, field: str, x: Tensor, batch: Batch) -> Tensor:
        """The normed x [T, E] times a product, plus what rows' adapters add: float32 [T, O]. Rows without an adapter add -0."""
        product: Product = getattr(self.weights, field)
        x, norm = product.in_order(x), rms(self.attn_norm)
        y, bias = norm_products(x, norm, product.weight, batch.rows), self._bias(field, x, norm, batch)
        return y if bias is None else (y + bias).contiguous()


class DeltaBlock(HybridBlock):
    """One layer with a recurrent state; names are GGUF's."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.delta = s = shape_of(config)
        E = config.dim
        del self.attn_q, self.attn_k, self.attn_v, self.attn_q_norm, self.attn_k_norm
        self.attn_qkv, self.attn_gate = nn.Linear(E, s.channels, bias=False), nn.Linear(E, s.values, bias=False)
        self.ssm_beta, self.ssm_alpha = (nn.Linear(E, s.value_heads, bias=False) for _ in range(2))
        self.ssm_conv1d, self.ssm_a, self.ssm_dt = (Vector(Tensor.empty(n)) for n in (s.taps * s.channels, s.value_heads, s.value_heads))
        self.ssm_norm = nn.RMSNorm(s.value_dim, config.norm_eps)
        self.attn_output = nn.Linear(s.values, E, bias=False)

    def _attend(self, x: Tensor, batch: Batch, attention: PagedAttention, cache: Any, rotations: Rotations) -> Tensor:
        """As in LLaMA, float32 [T, VH * DV], with a `StateCache`."""
        y = self._normed_products("qkv", x, batch)
        norm = rms(self.ssm_norm)
        weights = DeltaWeights(self.delta, self.ssm_conv1d.weight, self.ssm_a.weight, self.ssm_dt.weight, norm.weight, norm.eps)
        return gated_delta(y, weights, cache, batch)

    def take_heads(self, config: ModelConfig) -> None:
        self.delta = shape_of(config)

    def products(self) -> dict[str, tuple[str, ...]]:
        return super().products() | {"qkv": ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")}

    def input_order(self, field: str) -> np.ndarray | None:
        whole = shape_of(self.config)
        return value_order(whole, whole.value_dim) if field == "attn_output" and whole.tiled else None


class GatedBlock(HybridBlock):
    """One layer with attention whose values are multiplied by the sigmoids of a product of their own."""

    weights_type: ClassVar[type[LayerWeights]] = GatedWeights
    weights: GatedWeights

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.attn_gate = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)

    def _attend(self, x: Tensor, batch: Batch, attention: PagedAttention, cache: LayerCache, rotations: Rotations) -> Tensor:
        gates = self._normed_products("gate", x, batch)
        return (super()._attend(x, batch, attention, cache, rotations) * gates.sigmoid()).contiguous()

    def products(self) -> dict[str, tuple[str, ...]]:
        return super().products() | {"gate": ("attn_gate",)}

    def input_norms(self) -> dict[str, nn.RMSNorm]:
        """None in front of attention: two products read that."""
        return {field: norm for field, norm in super().input_norms().items() if field != "qkv"}


class DraftBlock(GatedBlock):
    """The layer for drafts, alone: gated attention and MLP over a product of a token's embedding and the state of the token before it."""

    weights: DraftWeights

    def __init__(self, config: ModelConfig):
        """`config` is of a model with this one layer."""
        with uninitialized():
            super().__init__(config, 0)
            self.fc = nn.Linear(2 * config.dim, config.dim, bias=False)
            self.embedding_norm, self.state_norm, self.norm = (nn.RMSNorm(config.dim, config.norm_eps) for _ in range(3))

    def forward_drafts(self, x: Tensor, states: Tensor, batch: Batch, cache: LayerCache, angles: Tensor) -> Tensor:
        """The residual stream after the layer, float32 [T, E], of embeddings x [T, E] and states [T, E]; angles [T, R]. Keys and values are
        written at the batch's slots.
        """
        read = rms(self.embedding_norm)(x).cat(rms(self.state_norm)(states), dim=1).contiguous()
        fc = self.weights.fc
        x = linear(fc.in_order(read), fc.weight, batch.rows).contiguous()
        return self.forward_batch(x, batch, PagedAttention(batch, cache.S), cache, Rotations((angles,), None))

    def products(self) -> dict[str, tuple[str, ...]]:
        return super().products() | {"fc": ("fc",)}


class HybridModel(Llama):
    """A model of layers with states, and of layers with attention."""

    def _block(self, config: ModelConfig, layer: int) -> LlamaBlock:
        return DeltaBlock(config, layer) if layer in config.delta_layers else GatedBlock(config, layer)


def shape_of(config: ModelConfig) -> DeltaShape:
    """The heads of the layers with states."""
    assert config.delta is not None, "a family with such layers sets it"
    return config.delta


def value_order(shape: DeltaShape, width: int) -> np.ndarray:
    """Of rows of tiled value heads, `width` of each, their numbers where value heads of a key head are neighbours; int [VH width]."""
    rows = np.arange(shape.value_heads * width).reshape(shape.key_heads, -1, width)
    return np.ascontiguousarray(rows.swapaxes(0, 1)).reshape(-1)

"""The weights that a model's products read: one typed field per product, filled by the loader (runner/weights.py).

The projections of one product have the same input, so a loader may pack them into one matrix; the model reads a `Product` either way.
"""

from __future__ import annotations

from tinygrad import Tensor

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.ops.head import Table
from tinyvllm.ops.linear import Weight


@dataclass(frozen=True, eq=False)
class Product:
    """Projections that are multiplied at once: their weights [O_i, I] and biases [O_i] with the outputs concatenated.

    Columns of quantized checkpoints may be sorted by their groups: column j of the weight then belongs to number order[j] of a row of x.
    A norm in front of the product has its own weight in that order.
    """

    weight: Weight
    bias: Tensor | None
    order: Tensor | None = None  # int32 [I]

    def in_order(self, x: Tensor) -> Tensor:
        """x [T, I] as the weight takes it."""
        return x if self.order is None else x[:, self.order].contiguous()


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """The products of one layer. In a layer of experts, which has a router, the matrices of the last two hold those of all experts, one
    expert's rows after the other's: gate of all, then up of all; a shared expert has gate and up, and down, of its own.
    """

    qkv: Product
    attn_output: Product
    ffn_in: Product  # gate and up of SwiGLU, or the one matrix that GELU follows
    ffn_down: Product
    router: Product | None = None
    shared_in: Product | None = None
    shared_down: Product | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class LatentWeights(LayerWeights):
    """Of a layer with latent attention. `qkv` makes q, or its latent, and the latent and rotated key that all heads share. k_b and v_b hold
    a matrix a head, one head's rows after the other's: from a query to what is multiplied with the latent, and from it to values.
    """

    q_b: Product | None = None  # from q's latent
    k_b: Product
    v_b: Product


@dataclass(frozen=True, eq=False, kw_only=True)
class GatedWeights(LayerWeights):
    """Of a layer whose attention has a gate."""

    gate: Product


@dataclass(frozen=True, eq=False, kw_only=True)
class DraftWeights(GatedWeights):
    """Of the layer for drafts of such a model: in front of it the product of an embedding and a state, side by side."""

    fc: Product


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerInputWeights(LayerWeights):
    """Of a layer with an input of its own: from the residual stream to a gate of it, and from the gated input back. None without one."""

    input_gate: Product | None = None
    input_proj: Product | None = None


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """The two ends of a model, each None in a stage of a pipeline that lacks it. With tied embeddings both read the same matrix.

    Where layers have inputs of their own, `input_table` has those of a token in all layers, and `input_proj` makes as many numbers from
    its embedding.
    """

    table: Table | None
    head: Weight | None
    input_table: Table | None = None
    input_proj: Product | None = None

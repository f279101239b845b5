"""Matrix products of activations with weights, accumulated in float32.

A weight is a tensor [O, I], several of them whose outputs are concatenated, panels, tiles or rows of a file (quant/layouts). In whatever
layout, a product with bfloat16 weights in panels or tiles rounds x to bfloat16 first, and one with Q8_0 or Q4_0 weights rounds it to int8
in blocks of 32, each with a scale of its own (`Activations` in quant/formats.py): that is what processors multiply, and therefore what a
product means here. Products with rows of a file multiply float32.
"""

from __future__ import annotations

from tinygrad import Tensor, dtypes

from tinyvllm.backends.operands import TensorWeight, Weight
from tinyvllm.backends.registry import select
from tinyvllm.ops.facts import product_facts
from tinyvllm.ops.norm import Norm
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import FORMATS, Activations
from tinyvllm.quant.layouts import BLOCK, MixedWeight, PackedWeight, StoredWeight

__all__ = ["TensorWeight", "Weight", "gate_up_silu", "linear", "product", "rounded"]


def linear(
    x: Tensor, weight: Weight, rows: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, gelu: bool = False
) -> Tensor:
    """x [T, I] float32 times weight [O, I] transposed, plus bias [O], through gelu if `gelu`, plus residual [T, O]; float32 [T, O].

    rows [1] int32 is how many rows of x count; the result's other rows are undefined.
    """
    if not isinstance(weight, TensorWeight):
        placement = Placement.of(x.device)
        kernel = select("matmul", placement, f"{weight.O}x{weight.I} {weight.format}", product_facts(placement, weight))
        if kernel is not None:
            return kernel.backend.matmul(kernel.variant, x, weight, rows, bias, residual, gelu)
    y = product(x, weight)
    y = y if bias is None else y + bias.float()
    y = y.gelu() if gelu else y
    return y if residual is None else y + residual


def product(x: Tensor, weight: Weight) -> Tensor:
    """The reference: x [T, I] float32 times weight transposed, float32 [T, O]."""
    if isinstance(weight, PackedWeight):
        return rounded(x.float(), FORMATS[weight.format].activations) @ weight.dense().contiguous().transpose()
    if isinstance(weight, MixedWeight):
        first, *rest = (product(x, part) for part in weight.parts)
        return first.cat(*rest, dim=1)
    if isinstance(weight, StoredWeight):
        return x.float() @ weight.dense().contiguous().transpose()
    kinds = {dtypes.bfloat16: Activations.BFLOAT16}
    products = [rounded(x.float(), kinds.get(part.dtype, Activations.FLOAT32)) @ part.float().transpose() for part in weight.parts]
    return products[0] if len(products) == 1 else products[0].cat(*products[1:], dim=1)


def rounded(x: Tensor, activations: Activations) -> Tensor:
    """x [T, I] float32, rounded as products multiply it; float32."""
    if activations is Activations.BFLOAT16:
        return x.cast(dtypes.bfloat16).float()
    if activations is Activations.FLOAT32:
        return x
    blocks = x.reshape(int(x.shape[0]), -1, BLOCK)
    largest = blocks.abs().max(2, keepdim=True)
    quants = (blocks * (largest > 1e-36).where(127.0 / largest, 0.0)).round()
    return (quants * (largest / 127.0)).reshape(*x.shape)


def gate_up_silu(x: Tensor, norm: Norm, weight: Weight, rows: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(g) * u of the normalised x, the SwiGLU of Shazeer (2020, arXiv:2002.05202).

    x [T, E] float32; weight [2F, E], the rows of gate and then those of up; bias [2F]; result [T, F] float32. `rows` as for `linear`.
    """
    F = weight.O // 2
    if not isinstance(weight, TensorWeight):
        placement = Placement.of(x.device)
        shape, facts = f"{weight.I}->{F} {weight.format}", product_facts(placement, weight, norm, outputs=F)
        kernel = select("norm_gate_up_silu", placement, shape, facts)
        if kernel is not None:
            return kernel.backend.gate_up_silu(kernel.variant, x, norm, weight, rows, bias)
    y = product(norm(x).contiguous(), weight)
    y = (y if bias is None else y + bias.float()).contiguous()
    return y[:, :F].silu() * y[:, F:]
